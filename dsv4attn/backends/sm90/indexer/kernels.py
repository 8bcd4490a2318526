"""Hopper's kernel of the indexer's scores: how programs share the entries that blocks of two tokens see."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends.sm90.indexer.kernels_tile import (
    FLAT_S,
    ROWS_S,
    STAGES,
    TOKENS,
    Args,
    Keys,
    Memory,
    Rows,
    fill,
    place_of,
    score_tiles,
    uniform,
)

AT_ONCE = gl.constexpr(128)
"""Blocks whose lengths are loaded together."""
EACH = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""AT_ONCE numbers, all of which each warp has: sums need no barrier."""


@gluon.jit
def plus(a, b):
    """A scan's step."""
    return a + b


@gluon.jit
def fill_unseen(args, blocks, number):
    """Fill what no tile of a token's request reaches with -inf: each program a part of some blocks."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    slices = gl.maximum(programs // blocks, 1)
    if program // blocks < slices:
        for block in range(program % blocks, blocks, programs):
            token = block * TOKENS + number
            live = token < args.tokens
            lens = gl.minimum(gl.maximum(gl.load(args.lens + token, mask=live, other=0), 0), args.limit)
            unseen = gl.where(live, (lens + 63) // 64 * 64, args.limit)
            least = gl.min(unseen, 0)
            width = (gl.maximum(args.limit - least, 0) + slices - 1) // slices
            low = least.to(gl.int64) + width.to(gl.int64) * (program // blocks)
            low = gl.minimum(low, args.limit.to(gl.int64)).to(gl.int32)
            high = low + gl.minimum(args.limit - low, width)
            fill(args, token.to(gl.int64) * args.out_stride, live, unseen, low, high)


@gluon.jit
def score_rows(args, memory, block, split, FILL: gl.constexpr):
    """Score `span` gathered keys for a block of tokens, and fill what a token does not see."""
    entry, number = place_of()
    token = block * TOKENS + number
    live = token < args.tokens
    lens = gl.minimum(gl.load(args.lens + token, mask=live, other=0), args.limit)
    first = gl.load(args.first + token, mask=live, other=0)
    row = token.to(gl.int64) * args.out_stride
    begin = split * args.span
    stop = gl.minimum(begin + args.span, args.limit)
    end = gl.minimum(stop, gl.max(gl.where(live, lens, 0), 0))
    from_here = gl.min(gl.where(live, gl.maximum(first, begin), end), 0)
    skipped = (gl.maximum(from_here, begin) - begin) // 64 * 64
    fill(args, row, live, lens * 0, begin, gl.minimum(begin + skipped, stop))
    begin += skipped
    fill(args, row, live, lens * 0, begin + (gl.maximum(end - begin, 0) + 63) // 64 * 64, stop)
    rows = Rows(live, lens, first, row, block)
    score_tiles(args, Keys(None, args.limit), rows, memory, begin, end, stop, entry, FILL)


@gluon.jit
def score_pages(args, memory, block, low, high, shift, again, FILL: gl.constexpr):
    """Score the units low .. high - 1 of what a block of tokens sees, by one of its requests: the second, if `again`.

    Returns how many units the block has, and whether a second request is left.
    """
    entry, number = place_of()
    token = block * TOKENS + number
    live = token < args.tokens
    lens = gl.minimum(gl.load(args.lens + token, mask=live, other=0), args.limit)
    request = token // args.each if args.requests is None else gl.load(args.requests + token, mask=live, other=-1)
    row = token.to(gl.int64) * args.out_stride
    units = (gl.max(gl.where(live, gl.maximum(lens, 0), 0), 0) + ((1 << shift) - 1)) >> shift
    # of a request that does not exist, no entry has a block
    request = gl.where((request >= 0) & (request < args.num_requests), request, -1)
    known = live & (lens > 0)
    lowest = uniform(gl.min(gl.where(known, request, 0x7FFFFFFF), 0))
    highest = uniform(gl.max(gl.where(known, request, -1), 0))
    r = gl.where(again == 0, lowest, highest)
    mine = known & (request == r)
    keys = Keys(args.table + gl.maximum(r, 0) * args.table_stride, gl.where(r < 0, 0, args.held))
    end = gl.minimum(gl.minimum(high, units) << shift, gl.max(gl.where(mine, lens, 0), 0))
    rows = Rows(mine, lens, None, row, block)
    score_tiles(args, keys, rows, memory, uniform(low << shift), uniform(end), args.limit, entry, FILL)
    return units, gl.where((again == 0) & (lowest < highest), 1, 0)


@gluon.jit
def units_of(args, block, shift):
    """How many units the tokens of each block see."""
    most = block * 0
    for i in gl.static_range(TOKENS):
        token = block * TOKENS + i
        most = gl.maximum(most, gl.load(args.lens + token, mask=token < args.tokens, other=0))
    return (gl.minimum(most, args.limit) + ((1 << shift) - 1)) >> shift


@gluon.jit
def score_shares(args, memory, FILL: gl.constexpr):
    """Score this program's share of all blocks.

    If blocks see about as many entries, each has the same number of programs, and a program has one block. Otherwise
    all programs have the same number of units, of one block or of several that follow each other.
    """
    program, programs = gl.program_id(0), gl.num_programs(0)
    blocks = (args.tokens + TOKENS - 1) // TOKENS
    # log2 of the entries of a unit, which is a tile where there are no maxima
    shift = 6 if args.maxima is None else args.run
    lane = gl.arange(0, AT_ONCE, layout=EACH)
    units = units_of(args, lane, shift)
    if FILL:
        _, number = place_of()
        fill_unseen(args, blocks, number)
    total, longest = gl.sum(units, 0), gl.max(units, 0)
    for at in range(AT_ONCE, blocks, AT_ONCE):
        more = units_of(args, at + lane, shift)
        total += gl.sum(more, 0)
        longest = gl.maximum(longest, gl.max(more, 0))
    splits = programs // blocks
    share = (longest + splits - 1) // gl.maximum(splits, 1)
    # a program of two blocks takes the time of one or two tiles longer
    spare = 8 if args.maxima is None else 0
    apart = (splits == 0) | (share * 8 > (total + programs - 1) // programs * 9 + spare)
    # the first unit's block, how many units are before that block, and this program's units, counted in the same way
    block = program % blocks
    before = gl.to_tensor(0)
    begin = program // blocks * share
    end = gl.minimum(begin + share, units_of(args, block, shift))
    if apart:
        mean, rest = total // programs, total % programs
        begin = program * mean + gl.minimum(program, rest)
        end = begin + mean + gl.where(program < rest, 1, 0)
        block = gl.to_tensor(0)
        counted = gl.to_tensor(0)
        at = gl.to_tensor(0)
        while at < blocks:
            ends = counted + gl.associative_scan(units, 0, plus)
            passed = (ends <= begin) & (at + lane < blocks)
            block += gl.sum(gl.where(passed, 1, 0), 0)
            before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
            counted = gl.max(ends, 0)
            at += AT_ONCE
            units = units_of(args, at + lane, shift)
    begin, end, block, before = uniform(begin), uniform(end), uniform(block), uniform(before)
    again = gl.to_tensor(0)
    while begin < end:
        passed, again = score_pages(args, memory, block, begin - before, end - before, shift, again, FILL)
        if again == 0:
            before = uniform(before + passed)
            begin = gl.minimum(before, end)
            block += 1


@stable_gluon
def score_index(
    Q,  # [T, 64, 128] codes
    W,  # [T, 64] fp32
    KEYS,  # pages, `page_stride` bytes apart, or rows [N, 128], if there is no TABLE
    SCALES,  # [N] fp32 of rows, or None
    TABLE,  # [R, columns] int32, or None
    REQUESTS,  # [T] int32 of each token, or None: `each` tokens after another
    LENS,  # [T] int32 entries that each token sees; or the end of its rows
    FIRST,  # [T] int32 first of a token's rows, or None
    OUT,  # [T, limit] fp32
    MAXIMA,  # [T, groups] fp32, or None
    tokens: tl.int32, requests: tl.int32, each: tl.int32, limit: tl.int32, span: tl.int32, run: tl.int32,
    held: tl.int32, q_stride: tl.int64, q_head_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64,
    last_column: tl.int32, num_blocks: tl.int32, page_size: tl.int32, factor: tl.int32, log: tl.int32,
    page_stride: tl.int64, scale_offset: tl.int32, out_stride: tl.int64, maxima_stride: tl.int64, FILL: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid: with a TABLE any; without, (splits * blocks of two tokens,), where neighbours share `span` entries.

    limit: most entries. held: entries that the table's columns have, at most `limit`. run: log2 of the entries of a run
    of MAXIMA. FILL: whether entries that a token does not see, or that have no page, are written too, as -inf;
    otherwise those without a page are NaN. q and keys begin at multiples of 16 bytes.
    """
    memory = Memory(
        gl.allocate_shared_memory(gl.float8e4nv, [TOKENS * 64, 128], ROWS_S),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], ROWS_S),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], ROWS_S),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT_S),
        gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT_S),
    )
    args = Args(
        Q, W, KEYS.to(gl.pointer_type(gl.float8e4nv)), SCALES, TABLE, REQUESTS, LENS, FIRST, OUT, MAXIMA, tokens,
        requests, each, limit, span, run, held, q_stride, q_head_stride, w_stride, table_stride, last_column,
        num_blocks, page_size, factor, log, page_stride, scale_offset, out_stride, maxima_stride,
    )  # fmt: skip
    wait_prior_grid(PDL)
    if TABLE is None:
        blocks = (tokens + TOKENS - 1) // TOKENS
        score_rows(args, memory, gl.program_id(0) % blocks, gl.program_id(0) // blocks, FILL)
    else:
        score_shares(args, memory, FILL)
    launch_dependents(PDL)
