"""The window's keys and the indexer's selection by TokenSpeed's own ops, which choose this plugin's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import V4, keys_of
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout

PAGE = 64


def random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("has_q_out", [False, True])
def test_insert_writes_what_tokenspeeds_own_kernel_writes(has_q_out: bool, backend: str, ops: Any) -> None:
    tokens, size, eps = 7, 4, 1e-6
    angles = torch.rand(40, 32) * 6
    table = torch.cat([angles.cos(), angles.sin()], 1)
    kv, positions = random(tokens, 512), torch.tensor([0, 7, 39, 3, 3, 21, 1])
    # fewer slots than tokens; one is none, and two are after the end, of which the lower 32 bits of one are a slot
    slots = torch.tensor([5, -1, 12, 0, 11, 2**32 + 1])
    results = []
    for kernel in (None, "triton_dsv4_swa_cache_insert"):
        torch.manual_seed(1)
        q, cache = random(tokens, 3, 512), torch.zeros(3, size * 584 + 8, dtype=torch.uint8)
        q_out, before = (torch.empty_like(q), q.clone()) if has_q_out else (None, None)
        ops.dsv4_swa_cache_insert(
            q, kv, cache, slots, positions, table, eps, size, q_out, override=kernel, validate_positions=True
        )  # fmt: skip
        if before is not None:
            assert torch.equal(q, before)
        results.append((q if q_out is None else q_out, cache))
    (q, cache), (their_q, their_cache) = results

    # both round fp32 once; the last bit may differ
    assert torch.allclose(q.float(), their_q.float(), rtol=2**-7, atol=1e-6)
    for slot in (5, 0, 11):
        (mine,), (theirs,) = (keys_of(memory[:, : size * 584], V4, size, [slot]) for memory in (cache, their_cache))
        assert (mine == theirs).all()
    written = cache.view(3, -1)[:, : size * 576].view(3, size, 576).any(2).flatten().nonzero().flatten().tolist()
    assert written == [0, 5, 11]


def index_keys(layout: KVCacheLayout, count: int) -> Tensor:
    """[count, bytes] pages of index keys: codes of all 64, then their scales."""
    if layout.name == "index_mxfp4":
        codes, scales = torch.randint(0, 256, (count, PAGE * 64)), torch.randint(125, 129, (count, PAGE * 4))
        return torch.cat([codes, scales], 1).to(torch.uint8)
    codes = torch.randn(count, PAGE * 128).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([codes, (torch.rand(count, PAGE) + 0.5).view(torch.uint8)], 1)


def decoded(codes: Tensor, exponents: Tensor) -> Tensor:
    """float64 values of e2m1 codes, the even one low, under exponents of groups of 32."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    grid = torch.cat([grid, -grid])
    values = torch.stack([grid[codes.long() % 16], grid[codes.long() // 16]], -1).flatten(-2)
    return (values.unflatten(-1, (-1, 32)) * torch.exp2(exponents.double() - 127)[..., None]).flatten(-2)


def problem(name: str, tokens: int, table: Tensor) -> dict[str, Any]:
    """Queries, weights and keys of a format, and `keys`: those of each row of the table, as float64 reads them."""
    heads, pages = 32, int(table.max()) + 1
    if name == "mxfp4":
        cache = index_keys(KVCacheLayout.index_mxfp4(128), pages)
        codes, exponents = cache[:, : PAGE * 64].view(pages, PAGE, 64), cache[:, PAGE * 64 :].view(pages, PAGE, 4)
        keys = decoded(codes, exponents)
        values = torch.randint(0, 256, (tokens, heads, 64)).to(torch.uint8)
        scales = torch.randint(125, 129, (tokens, heads, 4)).to(torch.uint8)
        q, index_q = decoded(values, scales), (values, scales.view(torch.int32).squeeze(-1))
    else:
        cache = index_keys(KVCacheLayout.index_fp8(128), pages)
        codes = cache[:, : PAGE * 128].view(torch.float8_e4m3fn).view(pages, PAGE, 128)
        keys = codes.double() * cache[:, PAGE * 128 :].view(torch.float32).double()[..., None]
        values = torch.randn(tokens, heads, 128).to(torch.float8_e4m3fn)
        q, index_q = values.double(), (values, torch.ones(tokens, heads))
    weights = torch.randn(tokens, heads)
    return {"index_q": index_q, "q": q, "weights": weights, "cache": cache, "keys": keys[table.long()].flatten(1, 2)}


def hold(selected: Tensor, given: dict[str, Any], row: int, token: int, visible: int, first: int = 0) -> None:
    """Selected numbers are the best of the visible entries by float64, but for near ties at the boundary."""
    topk = selected.shape[0]
    numbers = selected[selected >= 0].long() - first
    assert len(numbers) == len(numbers.unique()) == min(topk, visible)
    assert (selected[len(numbers) :] == -1).all()
    logits = torch.relu(given["keys"][row, :visible] @ given["q"][token].T)
    scores = (logits * given["weights"][token].double()).sum(1)
    best = scores.topk(min(topk, visible)).values
    found = scores[numbers].sort(descending=True).values
    assert torch.allclose(found, best, rtol=1e-4, atol=1e-5 * max(scores.abs().tolist(), default=0.0))


@pytest.mark.parametrize("name", ["mxfp4", "fp8_scaled"])
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_decode_selects_the_best_entries_and_counts_from_the_base_of_a_compact_table(
    compact: bool, name: str, backend: str, ops: Any
) -> None:
    table = torch.randperm(3 * 10)[: 3 * 10].view(3, 10).int()
    given, visible = problem(name, 3, table), [640, 0, 13]
    bases = torch.tensor([4, 0, 7]) if compact else None
    out = torch.full((5, 512), 7, dtype=torch.int32)
    lens = torch.tensor(visible, dtype=torch.int32)[:, None]
    plan = ops.dsv4_plan(page_size=PAGE, seq_lens_2d=lens, override="triton_dsv4_plan")
    selected = ops.dsv4_decode_topk(
        given["index_q"], given["weights"], given["cache"], lens, table, page_size=PAGE, topk=512, max_context_len=640,
        plan=plan, index_k_format=name, block_table_base_offsets=bases, out=out,
    )  # fmt: skip

    assert selected.data_ptr() == out.data_ptr()
    assert (out[3:] == 7).all()
    for token, count in enumerate(visible):
        hold(selected[token], given, token, token, count, PAGE * int(bases[token]) if compact else 0)


@pytest.mark.parametrize("name", ["mxfp4", "fp8_scaled"])
@pytest.mark.parametrize("compact", [False, True], ids=["whole", "compact"])
def test_prefill_selects_among_the_entries_of_the_request_of_a_query(
    compact: bool, name: str, backend: str, ops: Any
) -> None:
    table, entries = torch.randperm(2 * 10).view(2, 10).int(), [600, 70]
    requests, visible = [0, 0, 1, 1], [590, 0, 5, 70]
    given = problem(name, 4, table)
    bounds = torch.tensor([0, 600, 670], dtype=torch.int32)
    starts = bounds[torch.tensor(requests)]
    counts = torch.tensor(visible, dtype=torch.int32)
    bases = torch.tensor([2, 9], dtype=torch.int32) if compact else None
    selected, gathered = ops.dsv4_prefill_topk(
        given["index_q"], given["weights"], given["cache"], table, bounds, starts, starts + counts, counts,
        page_size=PAGE, topk=512, max_seqlen_k=max(entries), index_k_format=name, block_table_base_offsets=bases,
    )  # fmt: skip

    assert gathered is None
    for token, (request, count) in enumerate(zip(requests, visible, strict=True)):
        hold(selected[token], given, request, token, count, PAGE * int(bases[request]) if compact else 0)


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
def test_lengths_and_blocks_that_int32_lacks_are_no_others(is_prefill: bool, backend: str, ops: Any) -> None:
    table = torch.randperm(10).view(1, 10)
    given, options = problem("mxfp4", 1, table), {"page_size": PAGE, "topk": 512, "index_k_format": "mxfp4"}

    def selected(table: Tensor, length: int) -> Tensor:
        lens, queries = torch.tensor([length]), (given["index_q"], given["weights"], given["cache"])
        if is_prefill:
            bounds = torch.tensor([0, length])
            result: Tensor = ops.dsv4_prefill_topk(
                *queries, table, bounds, bounds[:1], bounds[1:], lens, max_seqlen_k=640, **options
            )[0]
            return result
        plan = ops.dsv4_plan(page_size=PAGE, seq_lens_2d=lens[:, None].int(), override="triton_dsv4_plan")
        return ops.dsv4_decode_topk(*queries, lens[:, None], table, max_context_len=640, plan=plan, **options)

    # the lower 32 bits of the last block are those of a block, and those of the length are 13
    holed = table.clone()
    holed[0, 9] += 2**32
    assert torch.equal(selected(holed, 2**32 + 13), selected(table, 576))


def test_candidates_that_do_not_begin_with_a_request_are_refused(ops: Any) -> None:
    table = torch.arange(4).view(2, 2).int()
    given, bounds = problem("mxfp4", 1, table), torch.tensor([0, 100, 200], dtype=torch.int32)
    start = torch.tensor([30], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="must begin with the first entry of its request"):
        ops.dsv4_prefill_topk(
            given["index_q"], given["weights"], given["cache"], table, bounds, start, start + 20, start - 10,
            page_size=PAGE, topk=512, max_seqlen_k=100, index_k_format="mxfp4",
        )  # fmt: skip
