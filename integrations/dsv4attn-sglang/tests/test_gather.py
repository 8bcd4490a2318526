"""Keys of prompts that dsv4attn gathers are the bits of SGLang's own kernel, which Triton's interpreter runs here."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces
from __future__ import annotations

from typing import Any

import pytest
import torch
from dsv4attn_sglang import gather, parts, serving
from kit import case, runner_of
from test_plugin import run
from torch import Tensor

PAGES = 5


@pytest.fixture
def pages(kit: Any, backend: str, request: pytest.FixtureRequest) -> tuple[Tensor, int]:
    """Pages of a pool of SGLang with every byte set, and how many records a page has; gathered by a backend."""
    runner = runner_of(case("prompt", "EXTEND", (5,), (3,)), (0, 4, 128))
    said = serving.check(runner, {parts.GATHER})
    assert said[-1] == f"gather: keys of prompts by {backend} (DSV4ATTN_SGLANG_PARTS)"
    pool, ratio = runner.token_to_kv_pool, request.param
    buffer = pool.get_extra_key_buffer({4: 1, 128: 2}[ratio]) if ratio else pool.get_swa_key_buffer_radix(0)
    size = 256 // max(ratio, 1)
    cache = torch.randint(0, 256, (PAGES, buffer.view(torch.uint8).shape[1]), dtype=torch.uint8)
    data, scales = cache[:, : size * 576].view(PAGES, size, 576), cache[:, size * 576 : size * 584]
    # codes without NaN, whose bits differ; scales within the range of bf16
    data[..., :448] &= 0xFE
    scales.clamp_(100, 140)
    data[..., 448:] = torch.randn(PAGES, size, 64).bfloat16().view(torch.uint8)
    return cache.view(buffer.dtype), size


@pytest.mark.parametrize("pages", [0, 4, 128], indirect=True)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", [True, False], ids=["into a workspace", "new"])
def test_rows_are_those_of_sglangs_kernel(pages: tuple[Tensor, int], dtype: torch.dtype, given: bool) -> None:
    from sglang.kernels.ops.attention.dsv4 import dequant_k_cache
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    cache, size = pages
    slots = torch.cat([torch.tensor([0, PAGES * size - 1, size - 1, size]), torch.randint(PAGES * size, (9,))]).to(
        dtype
    )
    original = dequant_k_cache.dequantize_k_cache_paged_dsv4
    expected = original(cache, slots, size)
    workspace = torch.full((20, 1, 512), 7.0, dtype=torch.bfloat16)
    out = workspace[3 : 3 + len(slots)] if given else None

    rows = gather.dequantize_k_cache_paged_dsv4(original, cache, slots, page_size=size, out=out, layout=KVLayout.V4)

    assert (rows is out) is given
    assert torch.equal(rows.view(torch.int16), expected.view(torch.int16))
    if given:
        assert (workspace[:3] == 7).all()
        assert (workspace[3 + len(slots) :] == 7).all()


@pytest.mark.parametrize("pages", [0], indirect=True)
def test_nothing_to_gather_and_records_of_another_kind(pages: tuple[Tensor, int]) -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    cache, size = pages
    slots = torch.empty(0, dtype=torch.int32)
    assert gather.dequantize_k_cache_paged_dsv4(pytest.fail, cache, slots, size).shape == (0, 1, 512)

    theirs = gather.dequantize_k_cache_paged_dsv4(
        lambda *arguments, **named: named["layout"], cache, slots, size, layout=KVLayout.V41
    )
    assert theirs is KVLayout.V41


def test_sglangs_kernel_does_not_compile_before_sm_89() -> None:
    """The reason of the step. If this fails, SGLang or Triton has changed, and the step may no longer be needed."""
    said = run("compiled_gather(80, 86, 89)")

    assert "type fp8e4nv not supported in this architecture" in said["80"]
    assert "type fp8e4nv not supported in this architecture" in said["86"]
    assert said["89"] == ""


def test_every_kernel_compiles_in_a_process_of_sglang() -> None:
    """SGLang puts a plain function in the place of one of Triton's, which the compiler refuses inside a kernel."""
    told = run("compiled_kernels('sm_80', 'sm_90')")

    assert told["replaced"]
    assert told["keeps"]
    assert len({*told["otherwise"]}) == 1
    for target, names in (("sm_80", {"attention", "gather_kernel", "score_kernel"}), ("sm_90", {"attention"})):
        said = told["said"][target]
        assert {name: error for name, error in said.items() if error} == {}
        assert {name.rpartition(".")[2] for name in said} >= names
