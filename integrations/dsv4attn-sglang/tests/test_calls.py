"""FlashMLA's functions in SGLang, called one by one: when they are replaced, and which calls are ours."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

import functools
import importlib
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import fakes
import pytest
import torch
from dsv4attn_sglang import attention, functions, hooks, serving
from dsv4attn_sglang.guard import RefusedError
from kit import case
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.compat import flash_mla
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache

H, PAGES, PAGE = 4, 3, 256
INT = torch.int32


@functools.cache
def pool(page: int = PAGE) -> Tensor:
    """Pages as SGLang keeps them: 2-D, each page rounded up to 576 bytes, of which a view is a cache."""
    size = -(-page * 584 // 576) * 576
    whole = torch.full((PAGES, size), 0xFF, dtype=torch.uint8)
    cache = PagedKVCache(whole[:, : page * 584].view(PAGES, page, 584), KVCacheLayout.fp8_ds_mla())
    ReferenceBackend().quantize_and_insert_k_cache(
        torch.randn(PAGES * page, 512).bfloat16(), cache, torch.arange(PAGES * page)
    )
    return whole


def cache(page: int = PAGE) -> Tensor:
    """[pages, page, 1, 584], as SGLang passes it."""
    return pool(page)[:, : page * 584].view(PAGES, page, 1, 584)


def decode_args(tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """Arguments of `DeepseekV4AttnBackend._forward_attention`, by name, on a c4a layer."""
    meta = importlib.import_module(fakes.FLASH_MLA).get_mla_metadata()[0]
    indices, extra = (torch.full((tokens, 1, n), -1, dtype=INT) for n in (128, 512))
    indices[:, 0, :20] = torch.arange(tokens * 20, dtype=INT).view(tokens, 20) * 11 % (PAGES * PAGE)
    extra[:, 0, :7] = torch.arange(tokens * 7, dtype=INT).view(tokens, 7) * 5 % (PAGES * 64)
    return {
        "q": torch.randn(tokens, 1, H, 512).bfloat16(),
        "k_cache": cache(),
        "head_dim_v": 512,
        "block_table": None,
        "cache_seqlens": None,
        "tile_scheduler_metadata": meta,
        "softmax_scale": 512**-0.5,
        "is_fp8_kvcache": True,
        "indices": indices,
        "topk_length": torch.full((tokens,), 20, dtype=INT),
        "attn_sink": torch.randn(H),
        "extra_k_cache": cache(64),
        "extra_indices_in_kvcache": extra,
        "extra_topk_length": torch.full((tokens,), 7, dtype=INT),
        **changes,
    }


def expected(arguments: dict[str, Any]) -> Tensor:
    """The result of our function under FlashMLA's own name, with a metadata object of ours."""
    meta = flash_mla.get_mla_metadata()[0]
    return flash_mla.flash_mla_with_kvcache(**{**arguments, "tile_scheduler_metadata": meta})[0]


def test_a_partial_made_afterwards_calls_dsv4attn_and_one_made_before_calls_flash_mla(
    interface: Any, backend: str
) -> None:
    arguments = decode_args()
    # SGLang makes one in the constructor of its attention, which is why the hook comes before
    after = functools.partial(interface.flash_mla_with_kvcache, use_legacy=True)
    wrapped = functools.partial(interface.flash_mla_with_kvcache.__wrapped__, use_legacy=True)

    assert torch.equal(after(**arguments)[0], expected(arguments))
    assert not fakes.flash_mla_calls()
    with pytest.raises(fakes.FlashMLACalled):
        wrapped(**decode_args())


def test_sglangs_metadata_object_is_shared_by_the_layers_of_a_step(interface: Any, backend: str) -> None:
    arguments = decode_args()
    first = interface.flash_mla_with_kvcache(**arguments)[0]
    again = interface.flash_mla_with_kvcache(**{**arguments, "q": arguments["q"] * 2})[0]

    assert type(arguments["tile_scheduler_metadata"]).__module__ == "flash_mla.flash_mla_interface"
    assert arguments["tile_scheduler_metadata"].config.topk == 128
    assert not torch.equal(first, again)


@pytest.mark.parametrize("name", ["k_cache", "extra_k_cache"])
def test_one_cache_alone_that_is_another_tensor_is_read(interface: Any, backend: str, name: str) -> None:
    """In the same step, with SGLang's metadata object of that step; the bytes of the old one are NaN."""
    arguments = decode_args()
    shape, stride = arguments[name].shape, arguments[name].stride()
    old, new = (torch.empty_strided(shape, stride, dtype=torch.uint8).copy_(arguments[name]) for _ in range(2))
    arguments[name] = old
    expected_out = interface.flash_mla_with_kvcache(**arguments)[0]
    old.fill_(0xFF)

    assert torch.equal(interface.flash_mla_with_kvcache(**{**arguments, name: new})[0], expected_out)


def test_rows_of_padding_name_slot_0_and_change_nothing_else(interface: Any, backend: str) -> None:
    arguments = decode_args()
    real = interface.flash_mla_with_kvcache(**arguments)[0]
    padded = {**arguments, "tile_scheduler_metadata": interface.get_mla_metadata()[0]}
    for name, value in {"indices": 0, "topk_length": 1, "extra_indices_in_kvcache": -1, "extra_topk_length": 1}.items():
        tail = arguments[name].new_full((2, *arguments[name].shape[1:]), value)
        padded[name] = torch.cat([arguments[name], tail])
    # SGLang does not clear them
    padded["q"] = torch.cat([arguments["q"], torch.full_like(arguments["q"][:2], torch.nan)])
    out = interface.flash_mla_with_kvcache(**padded)[0]

    assert torch.equal(out[:3], real)


def test_heads_of_padding_change_nothing_else(interface: Any, backend: str) -> None:
    arguments = decode_args()
    real = interface.flash_mla_with_kvcache(**arguments)[0]
    wide = {**arguments, "tile_scheduler_metadata": interface.get_mla_metadata()[0]}
    # SGLang leaves heads after its own uninitialised, with a sink of 0
    wide["q"] = torch.cat([arguments["q"], torch.full((3, 1, 64 - H, 512), torch.nan).bfloat16()], 2)
    wide["attn_sink"] = torch.cat([arguments["attn_sink"], torch.zeros(64 - H)])

    torch.testing.assert_close(interface.flash_mla_with_kvcache(**wide)[0][:, :, :H], real, rtol=0.01, atol=1e-3)


def test_arguments_may_come_in_sglangs_own_order(interface: Any) -> None:
    arguments = decode_args()
    first = ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata")
    rest = {name: value for name, value in arguments.items() if name not in first}
    args = [arguments[name] for name in first]

    assert torch.equal(interface.flash_mla_with_kvcache(*args, **rest)[0], expected(arguments))
    # FlashMLA has is_fp8_kvcache where SGLang has descale_q
    scale, kept = rest.pop("softmax_scale"), {n: v for n, v in rest.items() if n not in ("is_fp8_kvcache", "indices")}
    by_place = [None, scale, False, None, None, True, arguments["indices"]]
    meta = interface.get_mla_metadata()[0]
    assert torch.equal(interface.flash_mla_with_kvcache(*args[:5], meta, *by_place, **kept)[0], expected(arguments))


def test_prefill_over_gathered_rows_leaves_statistics_out(interface: Any, backend: str) -> None:
    arguments = {
        "q": torch.randn(5, H, 512).bfloat16(),
        "kv": torch.randn(40, 1, 512).bfloat16(),
        "indices": torch.arange(5 * 192, dtype=INT).view(5, 1, 192) % 40,
        "sm_scale": 512**-0.5,
        "d_v": 512,
        "attn_sink": torch.randn(H),
        "topk_length": torch.tensor([0, 1, 30, 64, 192], dtype=INT),
    }
    out, *statistics = interface.flash_mla_sparse_fwd(**arguments)

    assert statistics == [None, None]
    assert torch.equal(out, flash_mla.flash_mla_sparse_fwd(**arguments)[0])
    assert torch.equal(
        out, interface.flash_mla_sparse_fwd(*list(arguments.values())[:4], **dict(list(arguments.items())[4:]))[0]
    )


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("records of V3.2", {"q": torch.zeros(3, 1, 64, 576), "k_cache": torch.zeros(2, 64, 1, 656, dtype=torch.uint8)}),
    ("records of V4.1", {"k_cache": torch.zeros(2, 64, 1, 528, dtype=torch.uint8)}),
    ("dense attention", {"indices": None, "is_fp8_kvcache": False}),
]


@pytest.mark.parametrize(("name", "changes"), OTHERS)
def test_calls_of_other_models_go_on_to_flash_mla(interface: Any, name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(fakes.FlashMLACalled):
        interface.flash_mla_with_kvcache(**decode_args(**changes))
    wide = torch.zeros(3, 64, 576).bfloat16()
    with pytest.raises(fakes.FlashMLACalled, match="sparse_prefill_fwd"):
        interface.flash_mla_sparse_fwd(wide, wide[:, :1], torch.zeros(3, 1, 64, dtype=INT), 0.1)


def test_a_function_that_is_not_there_is_refused_by_name() -> None:
    for target in ("nothing.f", "math.nothing"):
        with pytest.raises(RefusedError, match=rf"^dsv4attn-sglang: {target}: expected a function of SGLang, got "):
            hooks._replace({target: "flash_mla_with_kvcache"}, attention, "AROUND")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., types.ModuleType]]:
    """Makes modules, whose hooks are forgotten afterwards."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    targets: list[str] = []

    def make(name: str, **functions: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        targets.extend(f"{name}.{function}" for function in functions)
        return module

    yield make
    for target in targets:
        hooks._registered.discard(target)
        HookRegistry._patched.discard(target)
        HookRegistry._hooks.pop(target, None)


def test_a_function_that_another_plugin_has_hooked_is_refused(kit: Any, module: Callable[..., Any]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    module("taken", f=lambda: 1)
    HookRegistry.register("taken.f", lambda original: 2, HookType.AROUND)
    HookRegistry.apply_hooks()

    with pytest.raises(RefusedError, match=r"taken\.f: .* got the same one -> .* remove the plugin that hooks it"):
        hooks._replace({"taken.f": "flash_mla_with_kvcache"}, attention, "AROUND")


def test_on_intels_gpus_the_functions_of_sgl_kernel_are_replaced(
    kit: Any, module: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not run on such a GPU: its module and its device are faked, SGLang's own code path to it is real."""
    import sglang.srt.utils
    from sglang.srt.layers.attention import deepseek_v4_backend

    def theirs(**arguments: Any) -> None:
        raise AssertionError

    module("sgl_kernel", flash_mla_with_kvcache=theirs, flash_mla_sparse_fwd=lambda **arguments: theirs())
    monkeypatch.setattr(sglang.srt.utils, "is_xpu", lambda: True)
    monkeypatch.setattr(deepseek_v4_backend, "_is_xpu", True)
    assert serving.targets("xpu") == functions.XPU

    for mode, extends in (("DECODE", ()), ("EXTEND", (7,))):
        kit.run_dsv4_attention_case(unittest.TestCase(), case("xpu", mode, (140,), extends), device="cpu")


def test_on_sm_120_sglangs_function_of_its_own_is_replaced_too(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not run on such a GPU: SGLang takes this machine for one, and its own code path to it is real."""
    from sglang.srt.runtime_context import override_platform

    served: list[Any] = []
    decode = flash_mla.flash_mla_with_kvcache

    @functools.wraps(decode)
    def counting(**arguments: Any) -> Any:
        served.append(arguments["k_cache"].shape[1])
        return decode(**arguments)

    monkeypatch.setattr(flash_mla, "flash_mla_with_kvcache", counting)
    with override_platform(is_sm120=True):
        assert serving.targets("cuda") == functions.SM120
        for mode, extends in (("DECODE", ()), ("EXTEND", (7,))):
            kit.run_dsv4_attention_case(unittest.TestCase(), case("sm120", mode, (140,), extends), device="cpu")

    assert served == [256, 256]
