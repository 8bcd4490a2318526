"""Hopper's kernel that scores index keys and selects in one launch, without a matrix of scores.

A program has two tokens and scores all entries that these see, in tiles. Scores of BATCH entries are kept in shared
memory; then those that may be selected are added to a list of the token, in ascending order of their entries. A list
that a batch may overflow is compacted: the K-th largest key of the list, or one that few more reach, becomes the
token's bound, and only what reaches the bound stays. K listed entries reach the bound, and later entries have higher
numbers, so a later entry is listed only if it is above the bound. At the end a token's K entries are chosen from its
list, as `_triton.layer.kernels_select` chooses among scores.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends._triton.layer.kernels_lists import choose_listed, make_space
from dsv4attn.backends._triton.layer.kernels_select import ABSENT, keys_of
from dsv4attn.backends.sm90.compat import barrier, reinterpret
from dsv4attn.backends.sm90.kernels_index_logits import plus
from dsv4attn.backends.sm90.kernels_index_tile import (
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
    queries_of,
    scores_of_tile,
    uniform,
    weights_of,
)

BATCH = gl.constexpr(512)
"""Entries that are listed together; two tiles divide it."""
PART = gl.constexpr(1024)
"""Places of a list that are read together."""
TILES = gl.constexpr(8)
"""Tiles of a batch."""
LINES_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
"""Scores of a batch: [TILES, 64, TOKENS], or [BATCH, TOKENS]."""
BATCHED = gl.constexpr(gl.BlockedLayout([4, 2], [32, 1], [4, 1], [1, 0]))
"""Four entries of both tokens in each thread."""
LISTED = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""Members of a list, and entries of a batch."""
Memory = namedtuple("Memory", "q k_even k_odd s_even s_odd scores")
"""Shared memory: that of `kernels_index_tile.Memory`, and scores of a batch."""
Lists = namedtuple("Lists", "first count bound")
"""Lists of the tokens of a block, CAPACITY places apart. count, bound: [TOKENS] members, and a key that all later
members are above."""
Wanted = namedtuple("Wanted", "wanted slack")
"""Entries to select, and how many more may reach a bound, which is then found sooner."""


@gluon.jit
def add_batch(memory, lists, lens, number, base, topk, CAPACITY: gl.constexpr):
    """List what may be selected of the batch from entry `base` on. lens: [TOKENS] entries of each token."""
    x = reinterpret(memory.scores, gl.float32, [BATCH, TOKENS], LINES_S).load(BATCHED)
    entry = gl.expand_dims(base + gl.arange(0, BATCH, layout=gl.SliceLayout(1, BATCHED)), 1)
    keys = keys_of(x, entry < gl.expand_dims(lens, 0))
    above = keys > gl.expand_dims(lists.bound, 0)
    # the counts of both tokens in one running sum
    one = gl.sum(gl.where(above, gl.expand_dims(1 << (number * 16), 0), 0), 1)
    both = gl.associative_scan(gl.convert_layout(one, LISTED), 0, plus)
    both = gl.expand_dims(gl.convert_layout(both, gl.SliceLayout(1, BATCHED)), 1)
    seen = (both >> gl.expand_dims(number * 16, 0)) & 0xFFFF
    place = gl.expand_dims(lists.count + number * CAPACITY - 1, 0) + seen
    gl.store(lists.first + place, (keys.to(gl.int64) << 32) | entry.to(gl.int64), mask=above)
    count, bound = lists.count + gl.max(seen, 0), lists.bound
    if gl.max(count, 0) > CAPACITY - BATCH:
        at = gl.arange(0, CAPACITY, layout=LISTED)
        part = gl.arange(0, PART, layout=LISTED)
        count, bound = make_space(
            lists.first, count, bound, number, topk.wanted, topk.slack, at, part, CAPACITY, PART, TOKENS
        )  # fmt: skip
    return Lists(lists.first, count, bound)


@gluon.jit
def keep_scores(args, keys, end, q, w, acc, memory, k_s, s_s, k_to, s_to, start, copied, COPY: gl.constexpr):
    """Score a tile, and keep its scores for the batch."""
    score, gone, copied = scores_of_tile(args, keys, end, q, w, acc, k_s, s_s, k_to, s_to, start, copied, COPY)
    memory.scores.index((start >> 6) & (TILES - 1)).store(gl.where(gone != 0, float("nan"), score))
    return copied


@gluon.jit
def list_tiles(args, keys, memory, block, lists, lens, number, end, topk, CAPACITY: gl.constexpr):
    """List what may be selected of the entries 0 .. end - 1 of a request. lens: [TOKENS] entries of each token."""
    queries_of(args, memory, block)
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
        base = start
        # not held while a batch is listed, which takes all registers
        w = weights_of(args, block)
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
        lists = add_batch(memory, lists, lens, number, base, topk, CAPACITY)
    async_copy.wait_group(0)
    return lists


@gluon.jit
def select_block(args, memory, block, lists, topk, CAPACITY: gl.constexpr):
    """Select for a block of tokens, which may be of two requests."""
    number = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, BATCHED))
    token = block * TOKENS + number
    live = token < args.tokens
    lens = gl.minimum(gl.load(args.lens + token, mask=live, other=0), args.limit)
    request = token // args.each if args.requests is None else gl.load(args.requests + token, mask=live, other=-1)
    known = live & (lens > 0) & (request >= 0) & (request < args.num_requests)
    lowest = uniform(gl.min(gl.where(known, request, 0x7FFFFFFF), 0))
    highest = uniform(gl.max(gl.where(known, request, -1), 0))
    kept = Lists(lists, number * 0, number * 0 + ABSENT)
    r = lowest
    while r <= highest:
        seen = gl.where(known & (request == r), lens, 0)
        keys = Keys(args.table + r * args.table_stride, args.held)
        kept = list_tiles(args, keys, memory, block, kept, seen, number, uniform(gl.max(seen, 0)), topk, CAPACITY)
        r = gl.where(r < highest, highest, highest + 1)
    # members were written by all threads
    barrier()
    at, part = gl.arange(0, CAPACITY, layout=LISTED), gl.arange(0, PART, layout=LISTED)
    for i in range(TOKENS):
        own = block * TOKENS + i
        if own < args.tokens:
            held = uniform(gl.sum(gl.where(number == i, kept.count, 0), 0))
            out = args.out + own.to(gl.int64) * args.out_stride
            choose_listed(lists + i * CAPACITY, held, out, topk.wanted, at, part, CAPACITY, PART)
    barrier()


@stable_gluon
def select_index(
    Q,  # [T, 64, 128] codes
    W,  # [T, 64] fp32
    KEYS,  # pages, `page_stride` bytes apart
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    LISTS,  # [programs, TOKENS, CAPACITY] int64, memory: a member has its key in the high half, its entry in the low
    OUT,  # [T, wanted] int32
    tokens: tl.int32, requests: tl.int32, limit: tl.int32, held: tl.int32, wanted: tl.int32, slack: tl.int32,
    q_stride: tl.int64, q_head_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64, last_column: tl.int32,
    num_blocks: tl.int32, page_size: tl.int32, factor: tl.int32, log: tl.int32, page_stride: tl.int64,
    scale_offset: tl.int32, out_stride: tl.int64, CAPACITY: gl.constexpr,
):  # fmt: skip
    """Grid: any. Arguments: see `kernels_index_logits.score_index`.

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
    lists = LISTS + program.to(gl.int64) * (TOKENS * CAPACITY)
    topk = Wanted(wanted, slack)
    for first in range(0, blocks, programs):
        # the longest first, and then the shortest for whom had it
        place = gl.where((first // programs) % 2 == 0, program, programs - 1 - program) + first
        if place < blocks:
            select_block(args, memory, blocks - 1 - place, lists, topk, CAPACITY)
