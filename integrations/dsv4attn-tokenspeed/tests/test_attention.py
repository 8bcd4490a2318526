"""Attention by TokenSpeed's own ops, which choose this plugin's kernels, against float64."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from caches import BUDGET, SCALE, V4, judge, pages, selection

from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout

FP8, FP4 = (layout(arrangement=Arrangement.SPLIT) for layout in (KVCacheLayout.v41_fp8, KVCacheLayout.v41_fp4))
TOKENS, HEADS = 4, 6


def holes(slots: torch.Tensor, dtype: torch.dtype, wrapped: int) -> torch.Tensor:
    """Slots of this dtype. Where there is none, int64 has a number whose lower 32 bits are a slot."""
    return slots.int() if dtype == torch.int32 else slots.masked_fill(slots == -1, wrapped)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("extra", [False, True], ids=["swa", "extra"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_takes_slots_of_any_shape_and_more_sinks_than_heads(
    dtype: torch.dtype, extra: bool, backend: str, ops: Any
) -> None:
    # rows of the cache are longer than a page, and the slots have a dim for queries
    swa, sink = pages(V4, 3, 4, pad=4 * 2), torch.randn(64)
    slots, lens = selection(TOKENS, 10, 12)
    segments: list[tuple[Any, ...]] = [(swa, V4, 4, slots, lens)]
    arguments: dict[str, Any] = {}
    if extra:
        cache = pages(V4, 5, 2)
        more, more_lens = selection(TOKENS, 6, 10)
        segments.append((cache, V4, 2, more, more_lens))
        arguments = {"extra_kv_cache": cache, "extra_page_size": 2, "extra_lens": more_lens.to(dtype)}
        arguments["extra_slots"] = holes(more, dtype, 1 - 2**32)
    q, out = random(TOKENS, HEADS, 512), torch.full((TOKENS, HEADS, 512), torch.nan).bfloat16()
    given_slots, given_lens = holes(slots, dtype, 2**32 + 1).view(TOKENS, 1, 2, 5), lens.view(TOKENS, 1).to(dtype)
    result = ops.dsv4_decode(q, swa, given_slots, given_lens, 4, sink, SCALE, out=out, **arguments)

    assert result is out
    assert judge(q, sink, segments).errors(out, None).max() <= BUDGET
    assert not out[0].any()


def test_decode_returns_the_lse_without_a_sink_as_partial_results_need_it(backend: str, ops: Any) -> None:
    swa, (slots, lens) = pages(V4, 3, 4), selection(TOKENS, 10, 12)
    q = random(TOKENS, HEADS, 512)
    result, lse = ops.dsv4_decode(q, swa, slots, lens, 4, None, SCALE, return_lse=True)

    assert lse.shape == (TOKENS, HEADS, 1)
    assert (lse[0] == -inf).all()
    expected = judge(q, None, [(swa, V4, 4, slots, lens)])
    assert expected.errors(result, lse.squeeze(2)).max() <= BUDGET


def test_partial_results_are_to_be_had_where_tokenspeed_has_no_kernel_for_them(ops: Any) -> None:
    from tokenspeed_kernel.platform import current_platform
    from tokenspeed_kernel.registry import KernelRegistry

    assert ops.dsv4_decode_supports_partials(current_platform())
    registry = KernelRegistry.get()
    registry._unregister("dsv4attn_dsv4_decode")
    assert not ops.dsv4_decode_supports_partials(current_platform())
    # the fixture looks at what was chosen
    ops.dsv4_prefill(*prefill(random(1, HEADS, 512)))


def prefill(q: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of a prefill over 20 rows."""
    indices, lens = selection(q.shape[0], 12, 20)
    return q, random(20, 512), indices, lens, torch.randn(q.shape[1]), SCALE


def test_prefill_attends_to_the_rows_that_are_named(backend: str, ops: Any) -> None:
    q, kv, indices, lens, sink, scale = prefill(random(TOKENS, HEADS, 512))
    out = ops.dsv4_prefill(q, kv.view(4, 5, 512), indices, lens, sink, scale)

    expected = judge_rows(q, kv, indices, lens, sink)
    assert expected.errors(out, None).max() <= BUDGET


def judge_rows(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, sink: torch.Tensor) -> Any:
    """The answer of float64 over rows of bf16."""
    from dsv4attn.testing.kit.tolerances import Expected

    answer = Expected.empty(*q.shape)
    for token, row in enumerate(q.double().numpy()):
        chosen = [i for i in indices[token, : int(lens[token])].tolist() if i >= 0]
        answer.judge(token, row, [kv[i].double().numpy() for i in chosen], sink.double().numpy(), SCALE)
    return answer


@pytest.mark.parametrize("layouts", [(FP8, None), (FP8, FP8), (FP8, FP4), (V4, V4)], ids=["swa", "fp8", "fp4", "v4"])
def test_selected_attention_of_v41_reads_planar_pages(layouts: tuple[Any, Any], backend: str, ops: Any) -> None:
    from tokenspeed_kernel.ops.attention.dsv41 import selected_attention

    size, sink = 64, torch.randn(64)
    (first, second), q = layouts, random(2, HEADS, 512)
    swa, (slots, lens) = pages(first, 1, size), selection(2, 16, size)
    segments, extra = [(swa, first, size, slots, lens)], (None, None, None)
    if second is not None:
        cache, (more, more_lens) = pages(second, 1, size), selection(2, 9, size)
        segments.append((cache, second, size, more, more_lens))
        extra = cache.view(1, size, -1), more, more_lens
    planar = swa.view(1, size, -1)
    out = selected_attention(q, planar, slots, lens, *extra, sink, SCALE, None, 8, None, None, None)

    assert judge(q, sink, segments).errors(out, None).max() <= BUDGET


def test_selected_attention_of_v41_takes_gathered_rows(backend: str, ops: Any) -> None:
    from tokenspeed_kernel.ops.attention.dsv41 import selected_attention

    q, kv, indices, _, sink, scale = prefill(random(TOKENS, HEADS, 512))
    arguments = (None,) * 5, (sink, scale, None, 8, None, kv.view(20, 1, 512), indices.int())
    out = selected_attention(q, torch.empty(0, 64, 528, dtype=torch.uint8), *arguments[0], *arguments[1])

    every = torch.full((TOKENS,), indices.shape[1])
    assert judge_rows(q, kv, indices, every, sink).errors(out, None).max() <= BUDGET
