"""Scores of index keys and selection in one kernel, without a matrix of scores.

A program has a few tokens, and scores all entries that these see, tile by tile in ascending order. Each token has a
list of what may be selected. A list that a tile may overflow is compacted, see `kernels_lists.compact`: what stays
includes K members that reach a bound, and entries of later tiles have higher numbers, so they are listed only if they
are above the bound. At the end K are chosen from the list, as `selection.kernels` chooses among scores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.forms import TableNumbers
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.indexer.forms import KeyNumbers, QueryStrides
from dsv4attn.backends._triton.layer.indexer.kernels import load_query, scores_of_tile, uniform
from dsv4attn.backends._triton.layer.selection.kernels_lists import choose_listed, make_space, member_of


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
    query, lens, KEYS, table, columns, pages, LIST, count, least, number, end, wanted, slack, limit,
    FORM: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """List what may be selected of the entries 0 .. end - 1 of a request; (counts, least) [TOKENS] after that.

    lens: [TOKENS] entries of the request that each token sees.
    """
    BLOCK: tl.constexpr = FORM.block
    TOKENS: tl.constexpr = FORM.tokens
    lane = tl.arange(0, BLOCK)
    for tile in tl.range(uniform(tl.cdiv(end, BLOCK), FORM.assembly), num_stages=FORM.stages):
        if tl.max(count, 0) > SIZE - BLOCK:
            count, least = make_space(
                LIST, count, least, number, wanted, slack, tl.arange(0, SIZE), tl.arange(0, PART), SIZE, PART, TOKENS
            )  # fmt: skip
        start = tile * BLOCK
        entry = start + lane
        # NaN without a block
        score, _ = scores_of_tile(query, KEYS, None, table, columns, pages, start, entry, lane, limit, FORM)
        sees = entry[:, None] < lens[None, :]
        count = list_tile(score, sees, entry, LIST, count, least, number, SIZE)
    return count, least


@stable_kernel
def select_kernel(
    Q,  # [T, heads, dim] codes or values
    Q_SCALES,  # [T, heads, dim / 32] uint8 of e2m1 codes, or None
    W,  # [T, heads] fp32
    KEYS,  # pages
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    LISTS,  # [programs, TOKENS, SIZE] int64, memory: see `kernels_lists`
    OUT,  # [T, wanted] int32
    tokens: tl.int32, limit: tl.int32, wanted: tl.int32, slack: tl.int32, strides: QueryStrides, table: TableNumbers,
    pages: KeyNumbers, out_stride: tl.int64, FORM: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Grid: any. limit: most entries. SIZE: places of a list, at least 4 * wanted and 2 * FORM.block.

    PART: places of a list that are read together.
    slack: entries more than `wanted`, at most as many, that may reach a bound, which is then found sooner.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    ASM: tl.constexpr = FORM.assembly
    TOKENS: tl.constexpr = FORM.tokens
    member = tl.arange(0, TOKENS * FORM.padded)
    head, number = member % FORM.padded, tl.arange(0, TOKENS)
    LIST = LISTS + program.to(tl.int64) * (TOKENS * SIZE)
    blocks = tl.cdiv(tokens, TOKENS)
    for turn in range(program, blocks, programs):
        # later tokens of a prompt see more entries
        first = (blocks - 1 - turn) * TOKENS
        own = first + member // FORM.padded
        query = load_query(Q, Q_SCALES, W, strides, own, head, (own < tokens) & (head < FORM.heads), FORM)
        token = first + number
        live = token < tokens
        lens = tl.minimum(tl.load(LENS + token, mask=live, other=0), limit)
        request = tl.load(REQUESTS + token, mask=live, other=-1)
        known = live & (lens > 0) & (request >= 0) & (request < table.requests)
        lowest = tl.min(tl.where(known, request, 0x7FFFFFFF), 0)
        highest = tl.max(tl.where(known, request, -1), 0)
        count, least = number * 0, tl.full([TOKENS], float("-inf"), tl.float32)
        for r in range(uniform(lowest, ASM), uniform(highest + 1, ASM)):
            seen = tl.where(known & (request == r), lens, 0)
            end = tl.max(seen, 0)
            if end > 0:
                row = TABLE + r * table.stride
                count, least = list_keys(
                    query, seen, KEYS, row, table.columns, pages, LIST, count, least, number, end, wanted, slack,
                    limit, FORM, SIZE, PART,
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
