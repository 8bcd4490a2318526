"""Tiles of the indexer's scores on Hopper: 64 keys by the 128 queries of two tokens.

A tile is one product in one accumulator, of few enough registers that four programs run on a multiprocessor: products
of one program run while others sum theirs. Queries stay in shared memory. Keys and their scales are copied some tiles
ahead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4attn.backends.sm90.attention.kernels_schedule import umulhi
from dsv4attn.backends.sm90.compat import copy_async

TOKENS = gl.constexpr(2)
"""Tokens of a block."""
STAGES = gl.constexpr(2)
"""Places in shared memory for even tiles, and as many for odd ones."""
AHEAD = gl.constexpr(3)
"""How many tiles before its product a tile is copied: an odd number, so that what is read and what is written since the
last barrier are different memory. The place that a copy takes is of the tile before this one."""
ROWS_S = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
"""Rows of 128 codes."""
FLAT_S = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
"""Products of a tile."""
WIDE = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
"""Sixteen codes in each thread."""
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FILLED = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
"""Rows of results that are filled."""
Args = namedtuple("Args", (
    "q w keys scales table requests lens first out maxima tokens num_requests each limit span run held q_stride "
    "q_head_stride w_stride table_stride last_column num_blocks page_size factor log page_stride scale_offset "
    "out_stride maxima_stride"
))  # fmt: skip
"""Parameters of `score_index`."""
Memory = namedtuple("Memory", "q k_even k_odd s_even s_odd")
"""Shared memory: queries of a block; keys, and their scales, of even and of odd tiles."""
Keys = namedtuple("Keys", "table held")
"""Where keys are: the row of a request in the table of pages, or None, and entries that it has."""
Rows = namedtuple("Rows", "mine lens first row block")
"""[TOKENS] of each token: whether it has these keys; entries that it sees; first of them, or None; place of its row in
OUT. block: number of the tokens' block."""
Part = namedtuple("Part", "end stop whole_from whole_end")
"""End of the entries to score, end of those to store, and where tiles that all tokens see as a whole may begin."""
Copied = namedtuple("Copied", "block of lost")
"""What the table says of the next tile to copy, the tile's place in the page, and a bit for each tile that was copied,
the last one lowest: whether it has no page."""


@gluon.jit
def uniform(x):
    """A scalar that is equal in all threads. After this instruction the assembler keeps it in a uniform register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def later(x):
    """The same number. What is computed from it is computed here, not before a loop, where it would hold a register."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def find(args, keys, start):
    """What the table says of the page of an entry, and the entry's number in the page."""
    block = start
    of = start
    if keys.table is not None:
        twice = start.to(gl.uint32, bitcast=True) << 1
        shift = args.log.to(gl.uint32)
        column = (umulhi(twice, args.factor.to(gl.uint32, bitcast=True)) >> shift).to(gl.int32)
        of = start - column * args.page_size
        block = gl.load(keys.table + gl.maximum(gl.minimum(column, args.last_column), 0))
    return block, of


@gluon.jit
def rows_at(keys):
    """Pointers [64, 128] to rows from `keys` on: of a thread, those of later rows differ by constants."""
    REPEATED: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [1, 4, 1], [2, 1, 0])
    SQUARE: gl.constexpr = gl.SliceLayout(0, REPEATED)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, SQUARE))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, SQUARE))
    within = gl.expand_dims(gl.expand_dims(row * 128, 1) + gl.expand_dims(column, 0), 0)
    again = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, REPEATED)))
    further = gl.expand_dims(gl.expand_dims(again * (16 * 128), 1), 2)
    source = gl.convert_layout(gl.reshape((keys + within) + further, [64, 128]), WIDE)
    return gl.max_contiguous(gl.multiple_of(source, [1, 16]), [1, 16])


@gluon.jit
def copy_tile(args, keys, start, end, copied, k_s, s_s):
    """Start to copy 64 keys and their scales, if start < end. Keys without a page are those of page 0.

    Without branches: the assembler starts no product past a branch.
    """
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)), 0)
    lane = gl.arange(0, 64, layout=LINE)
    lost = copied.lost
    if keys.table is None:
        left = gl.where(start < end, args.limit - start, 0)
        copy_async(k_s, rows_at(args.keys + start.to(gl.int64) * 128), mask=gl.expand_dims(row, 1) + column * 0 < left)
        copy_async(s_s, args.scales + (start + lane), mask=lane < left)
    else:
        block, of = copied.block, copied.of
        ok = (block >= 0) & (block < args.num_blocks) & (start < keys.held)
        page = args.keys + gl.where(ok, block, 0).to(gl.uint32, bitcast=True).to(gl.int64) * args.page_stride
        copy_async(k_s, rows_at(page + of * 128), mask=start < end)
        scales = gl.multiple_of(page + (args.scale_offset + of * 4), 4).to(gl.pointer_type(gl.float32))
        copy_async(s_s, scales + lane, mask=start < end)
        lost = (lost << 1) | gl.where(ok, 0, 1)
    async_copy.commit_group()
    block, of = find(args, keys, start + 64)
    return Copied(block, of, lost)


@gluon.jit
def place_of():
    """Numbers [64] of the entries of a tile, and [TOKENS] of the tokens, as their scores are held."""
    sums = gl.sum(gl.reshape(gl.zeros([64, TOKENS * 64], gl.float32, layout=ACC), [64, TOKENS, 64]), 2)
    layout: gl.constexpr = sums.type.layout
    return gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))


@gluon.jit
def store_best(args, rows, best, start, entry):
    """Store the largest scores of the groups of the run that has the entry `start`."""
    token = later(rows.block) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, best.type.layout))
    group = gl.expand_dims(token.to(gl.int64) * args.maxima_stride, 0)
    run = later(start) >> args.run
    gl.store(args.maxima + (group + gl.expand_dims(run * 64 + entry, 1)), best, mask=gl.expand_dims(rows.mine, 0))


@gluon.jit
def scores_of_tile(args, keys, end, q, w, acc, k_s, s_s, k_to, s_to, start, copied, COPY: gl.constexpr):
    """Scores [64, TOKENS] of a tile, and whether it has no page; starts to copy the one AHEAD tiles later.

    w: half of the weights.
    """
    async_copy.wait_group(AHEAD - 1)
    acc = warpgroup_mma(k_s, q, acc, use_acc=False, is_async=True)
    scale = s_s.load(gl.SliceLayout(1, ACC))
    gone = gl.to_tensor(0)
    if keys.table is not None:
        gone = (copied.lost >> (AHEAD - 1)) & 1
    if COPY:
        copied = copy_tile(args, keys, start + AHEAD * 64, end, copied, k_to, s_to)
    acc = warpgroup_mma_wait(0, deps=[acc])
    # twice what is positive, and a NaN: an addition takes half the time of a maximum. Products of codes are finite
    acc = (acc + gl.abs(acc)) * gl.expand_dims(w, 0)
    score = gl.sum(gl.reshape(acc, [64, TOKENS, 64]), 2)
    score *= gl.expand_dims(gl.convert_layout(scale, gl.SliceLayout(1, score.type.layout)), 1)
    return score, gone, copied


@gluon.jit
def score_tile(
    args, keys, rows, part, q, w, acc, k_s, s_s, k_to, s_to, start, copied, best, entry, COPY: gl.constexpr,
    FILL: gl.constexpr,
):  # fmt: skip
    """Score a tile, and start to copy the one AHEAD tiles later. w: half of the weights."""
    score, gone, copied = scores_of_tile(args, keys, part.end, q, w, acc, k_s, s_s, k_to, s_to, start, copied, COPY)
    at = gl.expand_dims(start + entry, 1)
    place = args.out + (gl.expand_dims(rows.row, 0) + at)
    sees = gl.expand_dims(rows.mine, 0) & (at < gl.expand_dims(rows.lens, 0))
    if rows.first is not None:
        sees = sees & (at >= gl.expand_dims(rows.first, 0))
    if (start >= part.whole_from) & (start < part.whole_end) & (gone == 0):
        gl.store(place, score)
    elif FILL:
        known = gl.where(sees & (gone == 0), score, -float("inf"))
        gl.store(place, known, mask=gl.expand_dims(rows.mine, 0) & (at < part.stop))
    else:
        gl.store(place, gl.where(gone != 0, float("nan"), score), mask=sees)
    if args.maxima is not None:
        # of a NaN and a number, the number
        best = gl.maximum(best, gl.where(sees & (gone == 0), score, -float("inf")))
        if (start + 64) & ((1 << args.run) - 1) == 0:
            store_best(args, rows, best, start, entry)
            best = gl.full([64, TOKENS], -float("inf"), gl.float32, layout=best.type.layout)
    return copied, best


@gluon.jit
def weights_of(args, block):
    """Half of the weights of a block of tokens, as products are doubled."""
    member = gl.arange(0, TOKENS * 64, layout=gl.SliceLayout(0, ACC))
    own = block * TOKENS + member // 64
    place = args.w + (own.to(gl.int64) * args.w_stride + member % 64)
    return gl.load(place, mask=own < args.tokens, other=0.0) * 0.5


@gluon.jit
def queries_of(args, memory, block):
    """Start to copy the queries of a block of tokens. Returns their `weights_of`."""
    member = gl.arange(0, TOKENS * 64, layout=gl.SliceLayout(1, WIDE))
    column = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE)), 0)
    own = block * TOKENS + member // 64
    query = args.q + (own.to(gl.int64) * args.q_stride + (member % 64).to(gl.int64) * args.q_head_stride)
    query = gl.expand_dims(query.to(gl.pointer_type(gl.float8e4nv)), 1) + column
    # rows of another program's token may follow
    there = gl.expand_dims(own < args.tokens, 1) & (column < 128)
    copy_async(memory.q, gl.multiple_of(query, [1, 16]), mask=there)
    return weights_of(args, block)


@gluon.jit
def score_tiles(args, keys, rows, memory, begin, end, stop, entry, FILL: gl.constexpr):
    """Score the entries begin .. end - 1 and store them up to `stop`, one tile after the other."""
    if begin < end:
        w = queries_of(args, memory, rows.block)
        k_even, k_odd, s_even, s_odd = memory.k_even, memory.k_odd, memory.s_even, memory.s_odd
        q = memory.q.permute((1, 0))
        block, of = find(args, keys, begin)
        copied = Copied(block, of, gl.to_tensor(0))
        for i in gl.static_range(AHEAD):
            k_s, s_s = (k_even, s_even) if i % 2 == 0 else (k_odd, s_odd)
            copied = copy_tile(args, keys, begin + i * 64, end, copied, k_s.index(i // 2), s_s.index(i // 2))
        # the largest scores of the run until now
        best = gl.full([64, TOKENS], -float("inf"), gl.float32, layout=entry.type.layout.parent)
        whole_from = gl.to_tensor(0)
        if rows.first is not None:
            whole_from = gl.max(rows.first, 0)
        whole = gl.min(gl.where(rows.mine, rows.lens, 0), 0)
        part = Part(end, stop, whole_from, gl.minimum(whole, stop) - 63)
        acc = gl.zeros([64, TOKENS * 64], gl.float32, layout=ACC)
        fence_async_shared()
        now = gl.to_tensor(0)
        last = gl.to_tensor(STAGES - 1)
        start = begin
        while start + 64 < end:
            copied, best = score_tile(
                args, keys, rows, part, q, w, acc, k_even.index(now), s_even.index(now), k_odd.index(last),
                s_odd.index(last), start, copied, best, entry, True, FILL,
            )  # fmt: skip
            copied, best = score_tile(
                args, keys, rows, part, q, w, acc, k_odd.index(now), s_odd.index(now), k_even.index(now),
                s_even.index(now), start + 64, copied, best, entry, True, FILL,
            )  # fmt: skip
            last = now
            now = gl.where(now == STAGES - 1, 0, now + 1)
            start += 128
        if start < end:
            copied, best = score_tile(
                args, keys, rows, part, q, w, acc, k_even.index(now), s_even.index(now), k_odd.index(last),
                s_odd.index(last), start, copied, best, entry, False, FILL,
            )  # fmt: skip
        async_copy.wait_group(0)
        if args.maxima is not None:  # noqa: SIM102 - one is a constant
            if ((end + 63) & -64) & ((1 << args.run) - 1) != 0:
                store_best(args, rows, best, end - 1, entry)


@gluon.jit
def fill(args, row, live, first, begin, end):
    """Fill columns begin .. end - 1 of the rows that are `live` with -inf, from column `first` of each on."""
    lane = gl.arange(0, 256, layout=gl.SliceLayout(0, FILLED))
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, FILLED)), 1)
    live = gl.expand_dims(gl.convert_layout(live, gl.SliceLayout(1, FILLED)), 1)
    first = gl.expand_dims(gl.convert_layout(first, gl.SliceLayout(1, FILLED)), 1)
    for start in range(begin, end, 256):
        at = gl.expand_dims(start + lane, 0)
        gl.store(args.out + (row + at), gl.full([TOKENS, 256], -float("inf"), gl.float32, layout=FILLED),
                 mask=live & (at >= first) & (at < end))  # fmt: skip
