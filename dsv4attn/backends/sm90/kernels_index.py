"""Hopper's kernel of the indexer's scores: products of one tile of keys run while the tile before it is summed.

A tile is 64 keys by TOKENS * 64 queries; each warp group multiplies it with the queries of two tokens, and has two
accumulators in turn. Queries stay in shared memory. Keys and their scales are copied some tiles ahead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends.sm90.compat import copy_async
from dsv4attn.backends.sm90.kernels_schedule import umulhi

ROWS_S = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
"""Rows of 128 codes."""
FLAT_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ACC_1 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_ACC = [gl.NVMMADistributedLayout([3, 0], [4, n], [16, 128, 32]) for n in (1, 2)]
ACC_2, ACC_4 = gl.constexpr(_ACC[0]), gl.constexpr(_ACC[1])
"""Products of a tile, for one or two tokens and four warps, and for four tokens and eight warps."""
_WIDE = [gl.BlockedLayout([1, 16], [4, 8], [n, 1], [1, 0]) for n in (4, 8)]
WIDE_2, WIDE_4 = gl.constexpr(_WIDE[0]), gl.constexpr(_WIDE[1])
"""Sixteen codes in each thread."""
_LINE = [gl.BlockedLayout([1], [32], [n], [0]) for n in (4, 8)]
LINE_2, LINE_4 = gl.constexpr(_LINE[0]), gl.constexpr(_LINE[1])
_FILL = [gl.BlockedLayout([1, 1], [1, 32], [1, n], [1, 0]) for n in (4, 8)]
FILL_2, FILL_4 = gl.constexpr(_FILL[0]), gl.constexpr(_FILL[1])
"""Rows of results that are filled."""

Pages = namedtuple("Pages", "keys scales table columns blocks size factor log stride scale_offset held limit")
"""Where keys are: on pages of a request, or `limit` rows, if there is no table. held: entries that the table has."""
Rows = namedtuple("Rows", "mine lens first row group out maxima")
"""[TOKENS] of each token: whether it has these keys; entries that it sees; first of them, or None; its rows' places."""


@gluon.jit
def uniform(x):
    """A scalar that is equal in all threads. After this instruction the assembler keeps it in a uniform register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def find(pages, start):
    """What the table says of the page of an entry, and the entry's number in the page."""
    block = start
    of = start
    if pages.table is not None:
        twice = start.to(gl.uint32, bitcast=True) << 1
        shift = pages.log.to(gl.uint32)
        column = (umulhi(twice, pages.factor.to(gl.uint32, bitcast=True)) >> shift).to(gl.int32)
        of = start - column * pages.size
        block = gl.load(pages.table + gl.maximum(gl.minimum(column, pages.columns - 1), 0))
    return block, of


@gluon.jit
def copy_tile(pages, start, end, block, of, lost, k_s, s_s, WIDE: gl.constexpr, LINE: gl.constexpr):
    """Start to copy 64 keys and their scales, if start < end. Keys without a page are those of page 0.

    Returns `lost`, moved by a bit, with a bit for this tile: whether it has no page. Without branches: the assembler
    lets products run behind none.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)), 0)
    lane = gl.arange(0, 64, layout=LINE)
    if pages.table is None:
        left = gl.where(start < end, pages.limit - start, 0)
        keys = pages.keys + start.to(gl.int64) * 128
        source = gl.multiple_of(keys + (gl.expand_dims(row * 128, 1) + column), [1, 16])
        copy_async(k_s, source, mask=gl.expand_dims(row, 1) + column * 0 < left)
        copy_async(s_s, pages.scales + (start + lane), mask=lane < left)
    else:
        ok = (block >= 0) & (block < pages.blocks) & (start < pages.held)
        page = pages.keys + gl.where(ok, block, 0).to(gl.int64) * pages.stride
        source = gl.multiple_of((page + of * 128) + (gl.expand_dims(row * 128, 1) + column), [1, 16])
        copy_async(k_s, source, mask=start < end)
        scales = gl.multiple_of(page + (pages.scale_offset + of * 4), 4).to(gl.pointer_type(gl.float32))
        copy_async(s_s, scales + lane, mask=start < end)
        lost = (lost << 1) | gl.where(ok, 0, 1)
    async_copy.commit_group()
    return lost


@gluon.jit
def load_scales(pages, lost, s_s, AHEAD: gl.constexpr, FILL: gl.constexpr, ACC: gl.constexpr):
    """[64] scales of a tile, and whether it has no page. The last copy was of the tile AHEAD tiles later.

    Without a page, scales are NaN, unless entries that are not there are filled.
    """
    scale = s_s.load(gl.SliceLayout(1, ACC))
    gone = gl.to_tensor(0)
    if pages.table is not None:
        gone = (lost >> AHEAD) & 1
        if not FILL:
            scale = gl.where(gone != 0, float("nan"), scale)
    return scale, gone


@gluon.jit
def place_of(ACC: gl.constexpr, TOKENS: gl.constexpr):
    """Numbers [64] of the entries of a tile, and [TOKENS] of the tokens, as their scores are held."""
    sums = gl.sum(gl.reshape(gl.zeros([64, TOKENS * 64], gl.float32, layout=ACC), [64, TOKENS, 64]), 2)
    layout: gl.constexpr = sums.type.layout
    return gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))


@gluon.jit
def store_tile(acc, w, scale, gone, best, rows, start, entry, stop, TOKENS: gl.constexpr, FILL: gl.constexpr):
    """Store the scores of a tile, whose products are `acc`. Returns the largest of each entry's group until now."""
    # a NaN must stay
    acc = gl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * gl.expand_dims(w, 0)
    score = gl.sum(gl.reshape(acc, [64, TOKENS, 64]), 2)
    layout: gl.constexpr = score.type.layout
    unit = gl.convert_layout(scale, gl.SliceLayout(1, layout))
    score *= gl.expand_dims(unit, 1)
    at = gl.expand_dims(start + entry, 1)
    mine = gl.expand_dims(rows.mine, 0)
    sees = mine & (at < gl.expand_dims(rows.lens, 0))
    if rows.first is not None:
        sees = sees & (at >= gl.expand_dims(rows.first, 0))
    place = rows.out + (gl.expand_dims(rows.row, 0) + at)
    if FILL:
        sees = sees & (gone == 0)
        gl.store(place, gl.where(sees, score, -float("inf")), mask=mine & (at < stop))
    else:
        gl.store(place, score, mask=sees)
    if rows.maxima is not None:
        best = gl.maximum(best, gl.where(sees, score, -float("inf")))
    return best


@gluon.jit
def store_group(best, rows, number, entry):
    """Store the largest scores of the groups of a run."""
    place = gl.expand_dims(rows.group, 0) + gl.expand_dims(number * 64 + entry, 1)
    gl.store(rows.maxima + place, best, mask=gl.expand_dims(rows.mine, 0))


@gluon.jit
def after_tile(best, left, number, rows, run, entry, TOKENS: gl.constexpr):
    """Count a tile of a run; behind the last, store the maxima and begin anew."""
    if rows.maxima is not None:
        left -= 1
        if left == 0:
            store_group(best, rows, number, entry)
            best = gl.full([64, TOKENS], -float("inf"), gl.float32, layout=best.type.layout)
            number += 1
            left = run
    return best, left, number


@gluon.jit
def score_tiles(
    pages, rows, q_s, k_even, k_odd, s_even, s_odd, w, begin, end, stop, run, entry, STAGES: gl.constexpr,
    TOKENS: gl.constexpr, FILL: gl.constexpr, ACC: gl.constexpr, WIDE: gl.constexpr,
    LINE: gl.constexpr,
):  # fmt: skip
    """Score the entries begin .. end - 1. While a tile is summed, the products of the next one run.

    k_even, k_odd, s_even, s_odd: keys and scales of even and odd tiles, STAGES of each. A tile is copied an odd number
    of tiles ahead, so that what is read and what is written since the last barrier are different memory. The place that
    it takes is of a tile whose products every warp has waited for, before that barrier.
    """
    if begin < end:
        AHEAD: gl.constexpr = 2 * STAGES - 3
        q = q_s.permute((1, 0))
        lost = gl.to_tensor(0)
        block, of = find(pages, begin)
        for i in gl.static_range(AHEAD):
            k_s, s_s = (k_even, s_even) if i % 2 == 0 else (k_odd, s_odd)
            lost = copy_tile(
                pages, begin + i * 64, end, block, of, lost, k_s.index(i // 2), s_s.index(i // 2), WIDE, LINE
            )
            block, of = find(pages, begin + (i + 1) * 64)
        best = gl.full([64, TOKENS], -float("inf"), gl.float32, layout=entry.type.layout.parent)
        number = begin // (64 * run)
        left = run
        a = gl.zeros([64, TOKENS * 64], gl.float32, layout=ACC)
        b = gl.zeros([64, TOKENS * 64], gl.float32, layout=ACC)
        # the first tile
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()
        a = warpgroup_mma(k_even.index(0), q, a, use_acc=False, is_async=True)
        scale_a, gone_a = load_scales(pages, lost, s_even.index(0), AHEAD - 1, FILL, ACC)
        ahead = begin + AHEAD * 64
        lost = copy_tile(
            pages, ahead, end, block, of, lost, k_odd.index(STAGES - 2), s_odd.index(STAGES - 2), WIDE, LINE
        )
        block, of = find(pages, ahead + 64)
        # places of the next tiles that are multiplied and copied
        odd = gl.to_tensor(0)
        even = gl.to_tensor(1)
        to = gl.to_tensor(STAGES - 1)
        start = begin
        for _ in range(uniform((end - begin + 63) // 128)):
            async_copy.wait_group(AHEAD - 1)
            a = warpgroup_mma_wait(0, deps=[a])
            b = warpgroup_mma(k_odd.index(odd), q, b, use_acc=False, is_async=True)
            scale_b, gone_b = load_scales(pages, lost, s_odd.index(odd), AHEAD - 1, FILL, ACC)
            lost = copy_tile(pages, ahead + 64, end, block, of, lost, k_even.index(to), s_even.index(to), WIDE, LINE)
            block, of = find(pages, ahead + 128)
            best = store_tile(a, w, scale_a, gone_a, best, rows, start, entry, stop, TOKENS, FILL)
            best, left, number = after_tile(best, left, number, rows, run, entry, TOKENS)
            async_copy.wait_group(AHEAD - 1)
            b = warpgroup_mma_wait(0, deps=[b])
            a = warpgroup_mma(k_even.index(even), q, a, use_acc=False, is_async=True)
            scale_a, gone_a = load_scales(pages, lost, s_even.index(even), AHEAD - 1, FILL, ACC)
            lost = copy_tile(pages, ahead + 128, end, block, of, lost, k_odd.index(to), s_odd.index(to), WIDE, LINE)
            block, of = find(pages, ahead + 192)
            best = store_tile(b, w, scale_b, gone_b, best, rows, start + 64, entry, stop, TOKENS, FILL)
            best, left, number = after_tile(best, left, number, rows, run, entry, TOKENS)
            odd = even
            even = gl.where(even == STAGES - 1, 0, even + 1)
            to = gl.where(to == STAGES - 1, 0, to + 1)
            start += 128
            ahead += 128
        a = warpgroup_mma_wait(0, deps=[a])
        async_copy.wait_group(0)
        if start < end:
            best = store_tile(a, w, scale_a, gone_a, best, rows, start, entry, stop, TOKENS, FILL)
            best, left, number = after_tile(best, left, number, rows, run, entry, TOKENS)
        if rows.maxima is not None:  # noqa: SIM102 - one is a constant
            if left < run:
                store_group(best, rows, number, entry)


@gluon.jit
def fill_rows(rows, begin, end, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Fill columns begin .. end - 1 with -inf."""
    lane = gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.expand_dims(gl.convert_layout(rows.row, gl.SliceLayout(1, LAYOUT)), 1)
    live = gl.expand_dims(gl.convert_layout(rows.mine, gl.SliceLayout(1, LAYOUT)), 1)
    for start in range(begin, end, 256):
        at = gl.expand_dims(start + lane, 0)
        gl.store(rows.out + (row + at), gl.full([TOKENS, 256], -float("inf"), gl.float32, layout=LAYOUT),
                 mask=live & (at < end))  # fmt: skip


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
    q_stride: tl.int64, q_head_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64, columns: tl.int32,
    num_blocks: tl.int32, page_size: tl.int32, factor: tl.int32, log: tl.int32, page_stride: tl.int64,
    scale_offset: tl.int32, out_stride: tl.int64, maxima_stride: tl.int64,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, FILL: gl.constexpr,
):  # fmt: skip
    """Grid: (splits * token blocks,): TOKENS tokens against a part of the entries. Neighbours share entries.

    limit: most entries. span: entries of a part of rows; with a table, parts of the entries that a block's tokens see
    are alike, so that all programs have work where `limit` is far. run: tiles of a group of MAXIMA, which parts hold
    whole. FILL: whether entries that a token does not see, or that have no block, are written too, as -inf; otherwise
    those without a block are NaN. q and keys begin at multiples of 16 bytes.
    """
    ACC: gl.constexpr = ACC_4 if TOKENS == 4 else ACC_2 if TOKENS == 2 else ACC_1
    WIDE: gl.constexpr = WIDE_4 if TOKENS == 4 else WIDE_2
    LINE: gl.constexpr = LINE_4 if TOKENS == 4 else LINE_2
    FILLED: gl.constexpr = FILL_4 if TOKENS == 4 else FILL_2
    q_s = gl.allocate_shared_memory(gl.float8e4nv, [TOKENS * 64, 128], ROWS_S)
    k_even = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], ROWS_S)
    k_odd = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], ROWS_S)
    s_even = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT_S)
    s_odd = gl.allocate_shared_memory(gl.float32, [STAGES, 64], FLAT_S)
    blocks = (tokens + TOKENS - 1) // TOKENS
    split = gl.program_id(0) // blocks
    first_token = (gl.program_id(0) % blocks) * TOKENS
    entry, number = place_of(ACC, TOKENS)
    token = first_token + number
    live = token < tokens
    lens = gl.minimum(gl.load(LENS + token, mask=live, other=0), limit)
    first = None
    if FIRST is not None:
        first = gl.load(FIRST + token, mask=live, other=0)
    request = token
    if TABLE is not None:
        # loaded before it is known whether it is needed
        request = token // each if REQUESTS is None else gl.load(REQUESTS + token, mask=live, other=-1)
    row = token.to(gl.int64) * out_stride
    group = token.to(gl.int64) * maxima_stride
    # queries, which rows of another program's token may follow
    member = gl.arange(0, TOKENS * 64, layout=gl.SliceLayout(1, WIDE))
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)), 0)
    own = first_token + member // 64
    query = Q + (own.to(gl.int64) * q_stride + (member % 64).to(gl.int64) * q_head_stride)
    query = query.to(gl.pointer_type(gl.float8e4nv))
    copy_async(
        q_s,
        gl.multiple_of(gl.expand_dims(query, 1) + column, [1, 16]),
        mask=gl.expand_dims(own < tokens, 1) & (column < 128),
    )
    member = gl.arange(0, TOKENS * 64, layout=gl.SliceLayout(0, ACC))
    own = first_token + member // 64
    w = gl.load(W + (own.to(gl.int64) * w_stride + member % 64), mask=own < tokens, other=0.0)
    keys = KEYS.to(gl.pointer_type(gl.float8e4nv))
    most = gl.maximum(gl.max(gl.where(live, lens, 0), 0), 0)
    if TABLE is None:
        rows = Rows(live, lens, first, row, group, OUT, MAXIMA)
        begin = split * span
        stop = gl.minimum(begin + span, limit)
        end = gl.minimum(stop, most)
        if FIRST is not None:
            from_here = gl.min(gl.where(live, gl.maximum(first, begin), end), 0)
            skipped = (gl.maximum(from_here, begin) - begin) // 64 * 64
            fill_rows(rows, begin, gl.minimum(begin + skipped, stop), TOKENS, FILLED)
            begin += skipped
        done = begin + (gl.maximum(end - begin, 0) + 63) // 64 * 64
        fill_rows(rows, done, stop, TOKENS, FILLED)
        pages = Pages(
            keys, SCALES, None, columns, num_blocks, page_size, factor, log, page_stride, scale_offset, limit, limit
        )
        score_tiles(
            pages, rows, q_s, k_even, k_odd, s_even, s_odd, w, begin, end, stop, run, entry, STAGES, TOKENS, FILL,
            ACC, WIDE, LINE,
        )  # fmt: skip
    else:
        splits = gl.num_programs(0) // blocks
        part = 64 * run
        span = ((most + part - 1) // part + splits - 1) // splits * part
        begin = split * span
        # of a request that does not exist, no entry has a block
        request = gl.where((request >= 0) & (request < requests), request, -1)
        known = live if FILL else live & (lens > 0)
        lowest = gl.min(gl.where(known, request, 0x7FFFFFFF), 0)
        highest = gl.max(gl.where(known, request, -1), 0)
        for r in range(uniform(lowest), uniform(highest + 1)):
            mine = known & (request == r)
            seen = gl.maximum(gl.max(gl.where(mine, lens, 0), 0), 0)
            end = gl.minimum(begin + span, seen)
            held = gl.where(r < 0, 0, gl.minimum(columns.to(gl.int64) * page_size, limit.to(gl.int64))).to(gl.int32)
            rows = Rows(mine, lens, first, row, group, OUT, MAXIMA)
            table = TABLE + gl.maximum(r, 0) * table_stride
            pages = Pages(
                keys, SCALES, table, columns, num_blocks, page_size, factor, log, page_stride, scale_offset, held, limit
            )
            if FILL:
                scored = gl.minimum((seen + 63) // 64 * 64, limit)
                share = ((limit - scored + splits - 1) // splits + 31) // 32 * 32
                unseen = gl.minimum(scored.to(gl.int64) + split.to(gl.int64) * share, limit.to(gl.int64)).to(gl.int32)
                fill_rows(rows, unseen, gl.minimum(unseen + share, limit), TOKENS, FILLED)
            score_tiles(
                pages, rows, q_s, k_even, k_odd, s_even, s_odd, w, begin, end, limit, run, entry, STAGES, TOKENS, FILL,
                ACC, WIDE, LINE,
            )  # fmt: skip
