"""Hopper's kernel that scores index keys and selects in one launch, without a matrix of scores.

A program has two tokens and scores all entries that these see, in tiles. Scores of BATCH entries are kept in shared
memory; then those that may be selected are added to a list of the token, in ascending order of their entries. A list
that a batch may overflow is compacted: the K-th largest key of the list, or one that few more reach, becomes the
token's bound, and only what reaches the bound stays. K listed entries reach the bound, and later entries have higher
numbers, so a later entry is listed only if it is above the bound. At the end a token's K entries are chosen from its
list, as `_triton.layer.selection.kernels` chooses among scores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends._triton.layer.selection.kernels_lists import choose_listed, make_space, member_of
from dsv4attn.backends.sm90.compat import barrier, reinterpret
from dsv4attn.backends.sm90.indexer.kernels import plus
from dsv4attn.backends.sm90.indexer.kernels_tile import (
    ACC,
    AHEAD,
    FLAT_S,
    ROWS_S,
    STAGES,
    TOKENS,
    Args,
    Copied,
    Keys,
    copy_tile,
    find,
    later,
    queries_of,
    scores_of_tile,
    uniform,
    weights_of,
)

WARPS = gl.constexpr(4)
"""Warps of a program."""
EACH = gl.constexpr(128)
"""Entries of a batch that a warp lists."""
BATCH = gl.constexpr(512)
"""Entries that are listed together; two tiles divide it."""
PART = gl.constexpr(1024)
"""Places of a list that are read together."""
TILES = gl.constexpr(8)
"""Tiles of a batch."""
LINES_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Scores of the tiles of a batch, each [64, TOKENS]."""
BATCHED_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
"""The same as [WARPS, EACH, TOKENS]."""
BATCHED = gl.constexpr(gl.BlockedLayout([1, 4, 2], [1, 32, 1], [4, 1, 1], [2, 1, 0]))
"""Four entries of both tokens in each thread."""
NUMBER = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(0, BATCHED)))
"""Numbers of both tokens in each thread."""
PLACES = gl.constexpr(gl.SliceLayout(2, BATCHED))
"""[WARPS, EACH] numbers of both tokens' entries."""
ENTRIES = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
"""Four entries in each thread."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
"""[WARPS, WARPS]: in each warp, a number for each warp."""
LISTED = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""Members of a list."""
Memory = namedtuple("Memory", "q k_even k_odd s_even s_odd scores")
"""Shared memory: that of `indexer.kernels_tile.Memory`, and scores of a batch."""
Lists = namedtuple("Lists", "first count least")
"""Lists of the tokens of a block, CAPACITY places apart. count, least: [TOKENS] members, and a score that all later
members reach."""
Seen = namedtuple("Seen", "lens number")
"""[TOKENS] of each token: entries of a request that it sees, and its number in the block."""
Wanted = namedtuple("Wanted", "wanted slack")
"""Entries to select, and how many more may reach a bound, which is then found sooner."""


@gluon.jit
def sum_before(totals):
    """Of each warp's number: the sum of those of earlier warps [WARPS], and the sum of all."""
    totals = gl.convert_layout(totals, gl.SliceLayout(0, PAIRS))
    of = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(0, PAIRS)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, PAIRS)), 1)
    before = gl.sum(gl.where(of < warp, gl.expand_dims(totals, 0), 0), 1)
    return before, gl.sum(totals, 0)


@gluon.jit
def add_batch(memory, lists, seen, start, CAPACITY: gl.constexpr):
    """List what may be selected of the batch before entry `start`."""
    base = (start - 1) & -BATCH
    x = reinterpret(memory.scores, gl.float32, [WARPS, EACH, TOKENS], BATCHED_S).load(BATCHED)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, PLACES)), 1)
    lane = gl.expand_dims(gl.arange(0, EACH, layout=gl.SliceLayout(0, PLACES)), 0)
    entry = gl.expand_dims(base + (warp * EACH + lane), 2)
    # a NaN reaches nothing
    reaches = (x >= gl.expand_dims(gl.expand_dims(lists.least, 0), 0)) & (
        entry < gl.expand_dims(gl.expand_dims(seen.lens, 0), 0)
    )
    # the counts of both tokens in one number
    shift = gl.expand_dims(gl.expand_dims(seen.number * 16, 0), 0)
    one = gl.convert_layout(gl.sum(gl.where(reaches, 1 << shift, 0), 2), ENTRIES)
    before, both = sum_before(gl.sum(one, 1))
    before = gl.expand_dims(gl.convert_layout(before, gl.SliceLayout(1, ENTRIES)), 1)
    until = gl.convert_layout(gl.associative_scan(one, 1, plus) + before, PLACES)
    first = lists.first + (lists.count + (seen.number * CAPACITY - 1))
    place = (gl.expand_dims(until, 2) >> shift) & 0xFFFF
    gl.store(gl.expand_dims(gl.expand_dims(first, 0), 0) + place, member_of(x, entry), mask=reaches)
    return Lists(lists.first, lists.count + ((both >> (seen.number * 16)) & 0xFFFF), lists.least)


@gluon.jit
def space_for_batch(args, block, lists, seen, w, topk, CAPACITY: gl.constexpr):
    """Make space for a batch in each list, if there is not. Returns the lists, and w, which may be read anew."""
    count, least = lists.count, lists.least
    if gl.max(count, 0) > CAPACITY - BATCH:
        at = gl.arange(0, CAPACITY, layout=LISTED)
        part = gl.arange(0, PART, layout=LISTED)
        count, least = make_space(
            lists.first, count, least, seen.number, topk.wanted, topk.slack, at, part, CAPACITY, PART, TOKENS
        )  # fmt: skip
        # not held meanwhile, which takes all registers
        w = weights_of(args, later(block))
    return Lists(lists.first, count, least), w


@gluon.jit
def keep_scores(args, keys, end, q, w, acc, memory, k_s, s_s, k_to, s_to, start, copied, COPY: gl.constexpr):
    """Score a tile, and keep its scores for the batch."""
    score, gone, copied = scores_of_tile(args, keys, end, q, w, acc, k_s, s_s, k_to, s_to, start, copied, COPY)
    memory.scores.index((start >> 6) & (TILES - 1)).store(gl.where(gone != 0, float("nan"), score))
    return copied


@gluon.jit
def list_tiles(args, keys, memory, block, lists, seen, end, topk, CAPACITY: gl.constexpr):
    """List what may be selected of the entries 0 .. end - 1 of a request."""
    # addresses are computed here, not before the loop over requests, where they would hold registers
    w = queries_of(args, memory, later(block))
    k_even, k_odd, s_even, s_odd = memory.k_even, memory.k_odd, memory.s_even, memory.s_odd
    q = memory.q.permute((1, 0))
    start = gl.to_tensor(0)
    found, of = find(args, keys, start)
    copied = Copied(found, of, gl.to_tensor(0))
    for i in gl.static_range(AHEAD):
        k_s, s_s = (k_even, s_even) if i % 2 == 0 else (k_odd, s_odd)
        copied = copy_tile(args, keys, start + i * 64, end, copied, k_s.index(i // 2), s_s.index(i // 2))
    acc = gl.zeros([64, TOKENS * 64], gl.float32, layout=ACC)
    fence_async_shared()
    now = gl.to_tensor(0)
    last = gl.to_tensor(STAGES - 1)
    # a tile past the end is scored with what is in shared memory, and no token sees it
    while start < end:
        lists, w = space_for_batch(args, block, lists, seen, w, topk, CAPACITY)
        for _ in range(gl.minimum((end - start + 127) >> 7, TILES // 2)):
            copied = keep_scores(
                args, keys, end, q, w, acc, memory, k_even.index(now), s_even.index(now), k_odd.index(last),
                s_odd.index(last), start, copied, True,
            )  # fmt: skip
            copied = keep_scores(
                args, keys, end, q, w, acc, memory, k_odd.index(now), s_odd.index(now), k_even.index(now),
                s_even.index(now), start + 64, copied, True,
            )  # fmt: skip
            last = now
            now = gl.where(now == STAGES - 1, 0, now + 1)
            start += 128
        lists = add_batch(memory, lists, seen, start, CAPACITY)
    async_copy.wait_group(0)
    return lists


@gluon.jit
def requests_of(args, block, number):
    """[TOKENS] of each token: its request, and entries that it sees, none if the request does not exist."""
    token = block * TOKENS + number
    live = token < args.tokens
    lens = gl.minimum(gl.load(args.lens + token, mask=live, other=0), args.limit)
    request = gl.load(args.requests + token, mask=live, other=-1)
    return request, gl.where((request >= 0) & (request < args.num_requests), gl.maximum(lens, 0), 0)


@gluon.jit
def select_block(args, memory, block, lists, topk, CAPACITY: gl.constexpr):
    """Select for a block of tokens, which may be of two requests."""
    number = gl.arange(0, TOKENS, layout=NUMBER)
    request, lens = requests_of(args, block, number)
    lowest = uniform(gl.min(gl.where(lens > 0, request, 0x7FFFFFFF), 0))
    highest = uniform(gl.max(gl.where(lens > 0, request, -1), 0))
    kept = Lists(lists, number * 0, gl.full([TOKENS], -float("inf"), gl.float32, layout=NUMBER))
    r = lowest
    while r <= highest:
        # read anew, as they would hold registers
        request, lens = requests_of(args, later(block), number)
        seen = Seen(gl.where(request == r, lens, 0), number)
        keys = Keys(args.table + r * args.table_stride, args.held)
        kept = list_tiles(args, keys, memory, block, kept, seen, uniform(gl.max(seen.lens, 0)), topk, CAPACITY)
        r = gl.where(r < highest, highest, highest + 1)
    # members were written by all threads
    barrier()
    at, half = gl.arange(0, CAPACITY, layout=LISTED), gl.arange(0, CAPACITY // 2, layout=LISTED)
    part = gl.arange(0, PART, layout=LISTED)
    for i in range(TOKENS):
        own = block * TOKENS + i
        if own < args.tokens:
            held = uniform(gl.sum(gl.where(number == i, kept.count, 0), 0))
            out = args.out + own.to(gl.int64) * args.out_stride
            choose_listed(lists + i * CAPACITY, held, out, topk.wanted, at, half, part, CAPACITY, PART)
    barrier()


@stable_gluon
def select_index(
    Q,  # [T, 64, 128] codes
    W,  # [T, 64] fp32
    KEYS,  # pages, `page_stride` bytes apart
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    LISTS,  # [programs, TOKENS, CAPACITY] int64, memory: see `kernels_lists`
    OUT,  # [T, wanted] int32
    tokens: tl.int32, requests: tl.int32, limit: tl.int32, held: tl.int32, wanted: tl.int32, slack: tl.int32,
    q_stride: tl.int64, q_head_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64, last_column: tl.int32,
    num_blocks: tl.int32, page_size: tl.int32, factor: tl.int32, log: tl.int32, page_stride: tl.int64,
    scale_offset: tl.int32, out_stride: tl.int64, CAPACITY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: any. Arguments: see `indexer.kernels.score_index`.

    slack: entries more than `wanted` that may reach a bound; both together at most half of CAPACITY, which a batch and
    half of CAPACITY do not exceed. In later rounds programs take blocks in the opposite order, since tokens of a prompt
    see the more entries the later they are.
    """
    memory = Memory(
        gl.allocate_shared_memory(gl.float8e4nv, [TOKENS * 64, 128], ROWS_S),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], ROWS_S),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], ROWS_S),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT_S),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT_S),
        gl.allocate_shared_memory(gl.float32, [TILES, 64, TOKENS], LINES_S),
    )
    args = Args(
        Q, W, KEYS.to(gl.pointer_type(gl.float8e4nv)), None, TABLE, REQUESTS, LENS, None, OUT, None, tokens, requests,
        1, limit, 0, 0, held, q_stride, q_head_stride, w_stride, table_stride, last_column, num_blocks, page_size,
        factor, log, page_stride, scale_offset, out_stride, 0,
    )  # fmt: skip
    program, programs = gl.program_id(0), gl.num_programs(0)
    blocks = (tokens + TOKENS - 1) // TOKENS
    wait_prior_grid(PDL)
    lists = LISTS + program.to(gl.int64) * (TOKENS * CAPACITY)
    topk = Wanted(wanted, slack)
    for first in range(0, blocks, programs):
        # the longest first, and then the shortest for whom had it
        place = gl.where((first // programs) % 2 == 0, program, programs - 1 - program) + first
        if place < blocks:
            select_block(args, memory, blocks - 1 - place, lists, topk, CAPACITY)
    launch_dependents(PDL)
