"""Scores of index keys and selection in one kernel, without a matrix of scores.

A program has a few tokens, and scores all entries that these see, tile by tile in ascending order. Each token has a
list of what may be selected. A list that a tile may overflow is compacted, see `kernels_lists.compact`: what stays
includes K members that reach a bound, and entries of later tiles have higher numbers, so they are listed only if they
are above the bound. At the end K are chosen from the list, as `kernels_select` chooses among scores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.kernels_index_logits import NIBBLES, load_rows, scores_of_tile, uniform
from dsv4attn.backends._triton.layer.kernels_lists import choose_listed, make_space, member_of
from dsv4attn.backends._triton.sizes import next_power_of_2


@triton.jit
def list_tile(score, sees, entry, LIST, count, least, number, SIZE: tl.constexpr):
    """List the visible entries of a tile whose scores [N, TOKENS] reach each token's least; members then."""
    # a NaN reaches nothing
    reaches = sees & (score >= least[None, :])
    one = reaches.to(tl.int32)
    place = (number * SIZE + count - 1)[None, :] + tl.cumsum(one, 0)
    tl.store(LIST + place, member_of(score, entry[:, None]), mask=reaches)
    return count + tl.sum(one, 0)


@triton.jit
def list_keys(
    q, q_high, w, lens, keys, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset,
    scale_stride, LIST, count, least, number, end, wanted, slack, limit,
    ALIGNED: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    KIND: tl.constexpr, FNUZ: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DT: tl.constexpr,
    ASM: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """List what may be selected of the entries 0 .. end - 1 of a request; (counts, least) [TOKENS] after that.

    lens: [TOKENS] entries of the request that each token sees.
    """
    lane = tl.arange(0, BLOCK)
    for tile in tl.range(uniform(tl.cdiv(end, BLOCK), ASM), num_stages=STAGES):
        if tl.max(count, 0) > SIZE - BLOCK:
            count, least = make_space(
                LIST, count, least, number, wanted, slack, tl.arange(0, SIZE), tl.arange(0, PART), SIZE, PART, TOKENS
            )  # fmt: skip
        start = tile * BLOCK
        entry = start + lane
        # NaN without a block
        score, _ = scores_of_tile(
            q, q_high, w, keys, None, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset,
            scale_stride, start, entry, lane, limit, ALIGNED, STRIDE, TOKENS, HEADS, DIM, KIND, FNUZ, BLOCK, DT,
        )  # fmt: skip
        sees = entry[:, None] < lens[None, :]
        count = list_tile(score, sees, entry, LIST, count, least, number, SIZE)
    return count, least


@stable_kernel
def select_kernel(
    Q,  # [T, HEADS, DIM] codes or values
    Q_SCALES,  # [T, HEADS, DIM / 32] uint8 of e2m1 codes, or None
    W,  # [T, HEADS] fp32
    KEYS,  # pages, `page_stride` elements apart
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    LISTS,  # [programs, TOKENS, SIZE] int64, memory: see `kernels_lists`
    OUT,  # [T, wanted] int32
    tokens: tl.int32, requests: tl.int32, limit: tl.int32, wanted: tl.int32, slack: tl.int32, q_stride: tl.int64,
    q_head_stride: tl.int64, qs_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64, columns: tl.int32,
    num_blocks: tl.int32, page_size: tl.int32, factor: tl.int32, log: tl.int32, page_stride: tl.int64,
    data_stride: tl.int64, scale_offset: tl.int64, scale_stride: tl.int64, out_stride: tl.int64,
    ALIGNED: tl.constexpr, STRIDE: tl.constexpr, Q_ALIGNED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, KIND: tl.constexpr, FNUZ: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DT: tl.constexpr, ASM: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Grid: any. limit: most entries. SIZE: places of a list, at least 4 * wanted and 2 * BLOCK.

    PART: places of a list that are read together.
    slack: entries more than `wanted`, at most as many, that may reach a bound, which is then found sooner.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    padded: tl.constexpr = next_power_of_2(HEADS) if HEADS > 16 else 16
    member = tl.arange(0, TOKENS * padded)
    head, number = member % padded, tl.arange(0, TOKENS)
    LIST = LISTS + program.to(tl.int64) * (TOKENS * SIZE)
    blocks = tl.cdiv(tokens, TOKENS)
    for turn in range(program, blocks, programs):
        # later tokens of a prompt see more entries
        first = (blocks - 1 - turn) * TOKENS
        own = first + member // padded
        there = (own < tokens) & (head < HEADS)
        at = own.to(tl.int64)
        query = Q + at * q_stride + head * q_head_stride
        q_scale = query
        if KIND == NIBBLES:
            q_scale = Q_SCALES + at * qs_stride + head * (DIM // 32)
        q = load_rows(query, q_scale, there, Q_ALIGNED, DIM, 0, KIND, FNUZ, DT)
        q_high = q
        if KIND == NIBBLES:
            q_high = load_rows(query, q_scale, there, Q_ALIGNED, DIM, 1, KIND, FNUZ, DT)
        w = tl.load(W + at * w_stride + head, mask=there, other=0.0)
        token = first + number
        live = token < tokens
        lens = tl.minimum(tl.load(LENS + token, mask=live, other=0), limit)
        request = tl.load(REQUESTS + token, mask=live, other=-1)
        known = live & (lens > 0) & (request >= 0) & (request < requests)
        lowest = tl.min(tl.where(known, request, 0x7FFFFFFF), 0)
        highest = tl.max(tl.where(known, request, -1), 0)
        count, least = number * 0, tl.full([TOKENS], float("-inf"), tl.float32)
        for r in range(uniform(lowest, ASM), uniform(highest + 1, ASM)):
            seen = tl.where(known & (request == r), lens, 0)
            end = tl.max(seen, 0)
            if end > 0:
                count, least = list_keys(
                    q, q_high, w, seen, KEYS, TABLE + r * table_stride, columns, num_blocks,
                    (page_size, factor, log), page_stride, data_stride, scale_offset, scale_stride, LIST, count,
                    least, number, end, wanted, slack, limit, ALIGNED, STRIDE, TOKENS, padded, DIM, KIND, FNUZ, BLOCK,
                    STAGES, DT, ASM, SIZE, PART,
                )  # fmt: skip
        # members were written by all threads
        tl.debug_barrier()
        for i in range(TOKENS):
            if first + i < tokens:
                listed = tl.sum(tl.where(number == i, count, 0), 0)
                out = OUT + (first + i).to(tl.int64) * out_stride
                choose_listed(
                    LIST + i * SIZE, listed, out, wanted, tl.arange(0, SIZE), tl.arange(0, SIZE // 2),
                    tl.arange(0, PART), SIZE, PART,
                )  # fmt: skip
        tl.debug_barrier()
