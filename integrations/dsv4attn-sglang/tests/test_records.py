"""DeepSeek-V4.1's own records on Hopper: `SGLANG_DSV4_KV_LAYOUT=v41_new`, in SGLang's own cases and pools.

Faked, next to what `fakes` says: keys are written in SGLang's formats by the quantisers of SGLang's tests, in torch, as
its compiled writers need a GPU.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import fakes
import numpy as np
import pytest
import test_attention
import torch
from dsv4attn_sglang import attention, gather, hooks, parts, records, serving
from dsv4attn_sglang.guard import RefusedError
from kit import case, runner_of
from test_attention import COMPRESSED_STEPS, TEST, Calls, run_compressed, run_window
from test_attention import calls as calls  # noqa: PLC0414 - a fixture
from torch import Tensor

from dsv4attn.compat.direct import CallKind
from dsv4attn.config import Settings
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.selection import resolve
from dsv4attn.testing.oracle.attention import read_fp4, read_fp8


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", "v41_new")


@pytest.fixture
def kit(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's kit, over pools of the records that SGLang chooses, with its function hooked as a scheduler does."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools

    hooks._scheduler_is_made()
    monkeypatch.setattr(attention, "_records", {584})

    def pool(**options: Any) -> Any:
        layout, option = pools.select_dsv4_kv_layout()
        return pools.DeepSeekV4TokenToKVPool(**options, kv_layout=layout, compressed_kv_layout=option)

    monkeypatch.setattr(kit, "DeepSeekV4TokenToKVPool", pool)
    # what the kit writes are keys in bf16; its reference reads them before they are rounded
    monkeypatch.setattr(kit, "quant_to_nope_fp8_rope_bf16_pack_triton", lambda keys: keys)
    write_as(monkeypatch, pools.DeepSeekV4TokenToKVPool)
    monkeypatch.setattr(kit, "DSV4_ATOL", 0.25)
    monkeypatch.setattr(test_attention, "records", keys_of)
    return kit


@pytest.fixture
def interface(kit: Any) -> Any:
    """SGLang's module with FlashMLA's functions, in which ours are."""
    fakes.flash_mla_calls().clear()
    hooks._serve(model())
    return import_module(fakes.FLASH_MLA)


def model(**options: Any) -> Any:
    """SGLang's runner with layers of DeepSeek-V4.1."""
    return runner_of(case("decode", "DECODE", (5,)), (0, 1, 2), **options)


def quantised(keys: Tensor, *, is_fp4: bool) -> Tensor:
    """Records [n, 528 or 288] of keys [n, 512], by SGLang's own quantisers, each with its scales."""
    from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as reference

    quantise = reference.quantize_k_cache_v41_fp4 if is_fp4 else reference.quantize_k_cache_v41
    # in a page of one token its scales follow its codes
    return quantise(keys[:, None])[:, : 288 if is_fp4 else 528]


def write_as(monkeypatch: pytest.MonkeyPatch, pool_class: Any) -> None:
    """Let pools of SGLang take keys [n, 512] bf16 for packed ones."""

    def store(buffer: Tensor, layout: Any, slots: Tensor, keys: Tensor, page: int) -> None:
        rows = quantised(keys, is_fp4=layout.is_fp4)
        buffer.view(torch.uint8).view(-1, page, rows.shape[1])[slots // page, slots % page] = rows

    def set_window(self: Any, layer_id: int, swa_loc: Tensor, cache_nope_fp8_rope_bf16_pack: Tensor) -> None:
        keys, buffer = cache_nope_fp8_rope_bf16_pack, self.get_swa_raw_buffer(layer_id)
        store(buffer, self.get_swa_key_layout(), swa_loc, keys, self.swa_page_size)

    def set_extra(self: Any, layer_id: int, loc: Tensor, cache_nope_fp8_rope_bf16_pack: Tensor) -> None:
        keys, buffer = cache_nope_fp8_rope_bf16_pack, self.get_extra_key_buffer(layer_id)
        store(buffer, self.get_extra_key_layout(layer_id), loc, keys, self.get_extra_key_page_size(layer_id))

    monkeypatch.setattr(pool_class, "set_swa_key_buffer_radix", set_window)
    monkeypatch.setattr(pool_class, "set_extra_key_buffer", set_extra)


def keys_of(cache: Tensor, indices: Tensor, length: int) -> np.ndarray[Any, Any]:
    """Keys [K, 512] of the records that one row of indices names, by dsv4attn's oracle."""
    size, read = cache.shape[1], read_fp4 if cache.shape[-1] == 288 else read_fp8
    slots = [slot for slot in indices[:length].tolist() if 0 <= slot < cache.shape[:2].numel()]
    raw = cache.view(torch.uint8)
    rows = [read(raw[slot // size, slot % size, 0].numpy(), 512) for slot in slots]
    return np.stack(rows) if rows else np.zeros((0, 512))


@pytest.mark.parametrize("step", ["decode within and past the window", "first prompts and a second chunk"])
def test_layers_with_a_window_alone(kit: Any, backend: str, calls: Calls, step: str) -> None:
    run_window(kit, calls, step)

    assert {arguments["k_cache"].shape[1:] for arguments, _ in calls.decode} <= {(256, 1, 528)}


@pytest.mark.parametrize("ratio", [2, 1])
@pytest.mark.parametrize("step", COMPRESSED_STEPS)
def test_layers_with_a_compressed_cache(kit: Any, backend: str, calls: Calls, ratio: int, step: str) -> None:
    run_compressed(kit, calls, step, ratio)

    for arguments, _ in calls.decode:
        shapes = arguments["k_cache"].shape[1:], arguments["extra_k_cache"].shape[1:]
        assert shapes == ((256, 1, 528), (256 // ratio, 1, 288))
        assert arguments["use_legacy"] is False


def test_the_oracle_sees_keys_of_other_records(kit: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: the scales of entries are shifted by one group."""
    kit_case = case("records", "DECODE", (60,), compress_ratio=2)
    kit.run_dsv4_compress_attention_case(TEST, kit_case, sparse_prefill=False, device="cpu")
    [(arguments, out)] = calls.decode
    shifted = arguments["extra_k_cache"].view(torch.uint8).clone()
    shifted[..., 256:] = shifted[..., 256:].roll(1, -1)

    with pytest.raises(AssertionError):
        test_attention.check_decode({**arguments, "extra_k_cache": shifted}, out)


# ---------------------------------------------------------------- what is asked for


def test_a_model_says_who_reads_which_records(kit: Any, backend: str) -> None:
    lines = serving.check(model(), parts.chosen(parts.Device.here()))

    said = f"heads: {backend}: asked for by name (environment variable DSV4ATTN_BACKEND)"
    assert lines == [
        f"decode, 64 {said}; swa, c1a, c2a",
        f"prefill, 64 {said}; up to 640 of the gathered rows",
        f"gather: keys of prompts by {backend} (DSV4ATTN_SGLANG_PARTS)",
    ]


def test_a_backend_native_to_hopper_reads_them_by_itself(kit: Any) -> None:
    """Decodes of all kinds of layers, with the pages that SGLang has."""
    calls = serving._calls(model())
    facts = (64, torch.bfloat16, 512**-0.5, True, 1)
    problems = [CallKind(phase, *facts, sizes, layouts).problem for phase, _, sizes, layouts in calls]

    assert [tuple(layout.record_bytes for layout in layouts) for *_, layouts in calls] == [
        (528,),
        (528, 288),
        (528, 288),
        (),
    ]
    chosen = resolve(problems[:-1], device=DeviceFacts.named("sm_90"), settings=Settings())
    assert "native to sm_90" in chosen.verdict


def test_sglang_gets_its_own_answer_without_the_variable_and_on_other_gpus(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own refusal of these records where it cannot read them is one; every module that calls it is hooked."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool, kv_cache_configurator

    model()
    select = kv_cache_configurator.select_dsv4_kv_layout
    assert select is deepseek_v4_memory_pool.select_dsv4_kv_layout
    assert [select()[0].value, select()[1]] == ["v41_new", "auto"]
    for sm in (80, 100, 120):
        fakes.on_cuda(monkeypatch.setattr, sm)
        with pytest.raises(AssertionError, match=r"the V4\.1 KV cache layouts need an SM100 / SM103 GPU"):
            select()
    fakes.on_cuda(monkeypatch.setattr, 90)
    for value in ("auto", "v4"):
        monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", value)
        assert select()[0].value == "v4"


def test_a_scheduler_without_the_variable_hooks_nothing_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked: list[str] = []
    monkeypatch.setattr(hooks, "_hook", lambda target, *_: hooked.append(target))
    monkeypatch.setattr(hooks, "_find", lambda _: None)
    monkeypatch.setattr(hooks, "_apply", lambda: None)
    for value in ("v41_new", "v41", "auto", ""):
        monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", value)
        hooks._scheduler_is_made()

    assert hooked == [hooks.ATTENTION, hooks.RECORDS, *[hooks.ATTENTION] * 3]


@pytest.mark.parametrize("option", ["auto", "fp4", "fp8"])
def test_bytes_of_a_token_in_sglangs_plan(kit: Any, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """What SGLang divides memory by: the compressed caches of the released model, and their index keys of 68 bytes."""
    from sglang.srt.model_executor.pool_configurator import DSV4PoolConfigurator as Configurator

    model()
    monkeypatch.setenv("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", option)
    facts = SimpleNamespace(_unified=False, page_size=256, low_ratio_index_bytes=68)
    facts._get_paged_kv_bytes_per_token = lambda ratio=0: Configurator._get_paged_kv_bytes_per_token(facts, ratio)
    totals = {}
    for value in ("v41_new", "v4"):
        monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", value)
        if value == "v4":
            monkeypatch.setenv("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "auto")
        of_ratio = {ratio: Configurator._compressed_bytes_per_full_token(facts, ratio) for ratio in (1, 2)}
        totals[value] = 3 * of_ratio[2] + of_ratio[1], facts._get_paged_kv_bytes_per_token()

    assert totals["v4"] == (2.5 * (585 + 68), 585)
    assert totals["v41_new"] == (2.5 * ((528 if option == "fp8" else 288) + 68), 528)


# ---------------------------------------------------------------- keys of prompts


@pytest.mark.parametrize("ratio", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gathered_rows_are_those_of_sglangs_reference(kit: Any, backend: str, ratio: int, dtype: torch.dtype) -> None:
    from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as reference

    runner, pages = model(), 5
    serving.check(runner, {parts.GATHER})
    pool, size = runner.token_to_kv_pool, 256 // max(ratio, 1)
    layout = pool.get_extra_key_layout(ratio) if ratio else pool.get_swa_key_layout()
    buffer = pool.get_extra_key_buffer(ratio) if ratio else pool.get_swa_key_buffer_radix(0)
    rows = quantised(torch.randn(pages * size, 512).bfloat16(), is_fp4=layout.is_fp4)
    cache = rows.reshape(pages, -1).view(buffer.dtype)
    assert cache.shape[1] == buffer.shape[1]
    slots = torch.cat([torch.tensor([0, pages * size - 1, size - 1, size]), torch.randint(pages * size, (9,))]).to(
        dtype
    )

    gathered = gather.dequantize_k_cache_paged_dsv4(pytest.fail, cache, slots, size, layout=layout)

    read = reference.dequantize_k_cache_v41_fp4 if layout.is_fp4 else reference.dequantize_k_cache_v41
    assert torch.equal(gathered, read(rows[slots.long()], 1))


def test_sglangs_kernel_reads_them_on_sm_100_alone(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of step `gather`. If this fails, SGLang has changed, and the step may no longer be needed."""
    from sglang.kernels.ops.attention.dsv4 import dequant_k_cache

    monkeypatch.setattr(dequant_k_cache, "get_jit_cuda_arch", lambda: SimpleNamespace(major=9))
    with pytest.raises(RuntimeError, match="requires CUDA SM100 or newer"):
        dequant_k_cache.dequantize_k_cache_paged_v41(torch.zeros(1, 528), torch.zeros(1), 1, layout="v41_new")


# ---------------------------------------------------------------- refusals


def test_other_layers_steps_and_arrangements_are_refused(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match=r"v41_new: expected layers of DeepSeek-V4.1, .* got ratios \[4, 128\] ->"):
        serving.check(runner_of(case("decode", "DECODE", (5,))))
    monkeypatch.setenv(parts.VARIABLE, "none")
    model()
    with pytest.raises(RefusedError, match="expected gather, which SGLang's own kernels cannot do on this GPU, got no"):
        parts.chosen(parts.Device.here())


def test_on_sm_100_they_stay_sglangs_own(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There SGLang has kernels that are not FlashMLA's functions."""
    runner = model()
    fakes.on_cuda(monkeypatch.setattr, 100)

    assert not records.are_asked_for()
    with pytest.raises(RefusedError, match="expected v4, 584-byte records, got window v41_new, c1 v41_fp4_new, c2 v41"):
        serving.check(runner)
