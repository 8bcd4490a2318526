"""Kernels of a selection over ranks: what a rank holds of the best candidates, and their order by number."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.selection.kernels import ABSENT, INFINITE, LOWEST, keys_of, kth_largest

LAST = tl.constexpr(2**31 - 1)
"""Where -1 stands among numbers in ascending order."""


@triton.jit
def write_local(number, mine, out, topk, ranks, interleave, BLOCK: tl.constexpr):
    """Write the numbers that a rank gives entries [BLOCK] of its own, those of `mine` one after the other, then -1."""
    local = number // (interleave * ranks) * interleave + number % interleave
    before = tl.cumsum(mine.to(tl.int32), 0)
    count = tl.sum(mine.to(tl.int32), 0)
    j = tl.arange(0, BLOCK)
    tl.store(out + before - 1, local, mask=mine)
    tl.store(out + j, tl.zeros([BLOCK], tl.int32) - 1, mask=(j >= count) & (j < topk))


@stable_kernel
def place_kernel(
    NUMBERS,  # [R, n, K] int32: of each rank ascending, then -1
    SCORES,  # [R, n, K] fp32
    PLACED,  # [n, >= R x K] int32
    PLACED_SCORES,  # [n, >= R x K] fp32
    COUNTS,  # [n] int32
    rank_stride: tl.int64, row_stride: tl.int64, placed_stride: tl.int64,
    topk: tl.int32, ranks: tl.int32, steps: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (n * ranks,). Puts the candidates of a rank where they stand in the order of all ranks' numbers.

    A score of -inf, which is none, becomes NaN. steps: of a search among K numbers. rank_stride, row_stride: of NUMBERS
    and SCORES. BLOCK: at least K.
    """
    token, rank = (tl.program_id(0) // ranks).to(tl.int64), tl.program_id(0) % ranks
    j = tl.arange(0, BLOCK)
    rows = token * row_stride
    number = tl.load(NUMBERS + rank * rank_stride + rows + j, mask=j < topk, other=-1)
    score = tl.load(SCORES + rank * rank_stride + rows + j, mask=j < topk, other=0.0)
    key = tl.where(number < 0, LAST, number)
    place = j
    for other in range(ranks):
        # equal ones, which are all -1, stand in the order of ranks: how many of the other rank's come before
        bound = key.to(tl.int64) + tl.where(other < rank, 1, 0)
        low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + topk
        for _ in range(steps):
            middle = (low + high) // 2
            seen = tl.load(NUMBERS + other * rank_stride + rows + middle, mask=middle < topk, other=-1)
            before = (tl.where(seen < 0, LAST, seen).to(tl.int64) < bound) & (low < high)
            high = tl.where(before, high, tl.minimum(high, middle))
            low = tl.where(before, middle + 1, low)
        place += tl.where(other == rank, 0, low)
    none = (number < 0) | (score == float("-inf"))
    at = token * placed_stride + place
    tl.store(PLACED + at, number, mask=j < topk)
    tl.store(PLACED_SCORES + at, tl.where(none, float("nan"), score), mask=j < topk)
    if rank == 0:
        tl.store(COUNTS + token, ranks * topk)


@stable_kernel
def own_kernel(
    CHOSEN,  # [n, K] int32: columns of PLACED, ascending, then -1
    PLACED,  # [n, >= R x K] int32: entry numbers, ascending
    OUT,  # [n, K] int32
    chosen_stride: tl.int64, placed_stride: tl.int64, out_stride: tl.int64,
    topk: tl.int32, rank: tl.int32, ranks: tl.int32, interleave: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (n,). Writes the numbers that a rank gives those of the chosen entries that it holds, then -1."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    column = tl.load(CHOSEN + token * chosen_stride + j, mask=j < topk, other=-1)
    number = tl.load(PLACED + token * placed_stride + column, mask=column >= 0, other=-1)
    mine = (number >= 0) & (number // interleave % ranks == rank)
    write_local(number, mine, OUT + token * out_stride, topk, ranks, interleave, BLOCK)


@stable_kernel
def keep_kernel(
    NUMBERS,  # [R, n, K] int32: entry numbers of each rank's own, ascending, then -1
    SCORES,  # [R, n, K] fp32, -inf for none
    OUT,  # [n, K] int32
    rank_stride: tl.int64, row_stride: tl.int64, out_stride: tl.int64,
    topk: tl.int32, rank: tl.int32, ranks: tl.int32, interleave: tl.int32,
    BLOCK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Grid: (n,). Writes the numbers that a rank gives those of its candidates that are among the K best, then -1.

    The K-th largest score is found among all candidates, and the highest number of those with that score that are among
    the best. Numbers are below -LOWEST. rank_stride, row_stride: of NUMBERS and SCORES. BLOCK: at least K. RANKS: at
    least R.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token * row_stride
    at = tl.arange(0, RANKS * BLOCK)
    holder, column = at // BLOCK, at % BLOCK
    live = (holder < ranks) & (column < topk)
    place = row + holder.to(tl.int64) * rank_stride + column
    number = tl.load(NUMBERS + place, mask=live, other=-1)
    score = tl.load(SCORES + place, mask=live, other=float("-inf"))
    own = row + rank * rank_stride + tl.arange(0, BLOCK)
    own_number = tl.load(NUMBERS + own, mask=tl.arange(0, BLOCK) < topk, other=-1)
    own_score = tl.load(SCORES + own, mask=tl.arange(0, BLOCK) < topk, other=float("-inf"))

    keys = keys_of(score, (number >= 0) & (score != float("-inf")))
    lowest, behind = tl.full((), LOWEST, tl.int32), tl.full((), INFINITE + 1, tl.int32)
    some = tl.sum((keys > ABSENT).to(tl.int32), 0)
    key, reached, above = kth_largest(keys, lowest, some, behind, some * 0, topk, 0)
    # lower numbers are larger keys; where all with this score are among the best, nothing is searched for
    tied = reached - above
    wanted = tl.where(reached > topk, topk - above, tied)
    order = tl.where(keys == key, -number, ABSENT)
    last, _, _ = kth_largest(order, lowest, tied, tl.full((), 1, tl.int32), some * 0, wanted, 0)

    own_key = keys_of(own_score, (own_number >= 0) & (own_score != float("-inf")))
    mine = (own_key > key) | ((own_key == key) & (-own_number >= last))
    write_local(own_number, mine, OUT + token * out_stride, topk, ranks, interleave, BLOCK)
