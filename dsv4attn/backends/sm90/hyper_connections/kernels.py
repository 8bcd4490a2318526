"""Hopper's kernel of hyper-connections: new streams, and their products, while later tiles are copied and multiplied.

A program takes tiles of 64 tokens by COLUMNS columns of four streams, one after another, and keeps its columns of fn in
shared memory. Tiles are copied some steps ahead. The products of a tile run while the next one is mixed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment,unreachable,var-annotated"
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends.sm90.attention.kernels_common import barriers
from dsv4attn.backends.sm90.compat import barrier, copy_async

TILE_S = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""Operands of products."""
FLAT_S = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 16, 16]))
REST = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""A tile: eight columns in a thread, eight threads to a row."""
FACTORS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPIED_WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0]))
"""Four weights of a row: as they are copied, and in each of the eight threads that have a row of a tile."""
WEIGHTS_S = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))

COPY_REGS = gl.constexpr(56)
"""Registers of the role that copies."""

Inputs = namedtuple("Inputs", "x streams post comb fn first count hidden x_stride token_stride stream_stride fn_stride")
Outputs = namedtuple("Outputs", "streams products")
Work = namedtuple("Work", "begin stop tiles groups")
"""Tiles of a program, which are in order of groups first; of a group; groups."""
Smem = namedtuple("Smem", "x old weights full empty new high rest")
"""Of each stage: x, four old streams, comb's four rows and post, and barriers. New streams of a tile. Factors, of which
`rest` has the two smaller parts."""


@gluon.jit
def upper_half(x):
    """Upper half of the bits of fp32 x: the bf16 number next to it, towards zero."""
    return (x.to(gl.int32, bitcast=True) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def rounded(x):
    """Fp32 as bf16, two numbers in an instruction."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def hold_factors(FN, fn_stride, hidden, k, high_s, rest_s, SLICES: gl.constexpr):
    """Factors of SLICES times 64 columns of each stream, from k on, as sums of three bf16 numbers."""
    mix = gl.arange(0, 32, layout=gl.SliceLayout(1, FACTORS))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, FACTORS))
    for i in gl.static_range(SLICES * 4):
        at = FN + (i % 4) * hidden.to(gl.int64) + (k + i // 4 * 64)
        source = gl.multiple_of(
            at + (gl.expand_dims(mix.to(gl.int64) * fn_stride, 1) + gl.expand_dims(column, 0)), [1, 16]
        )
        rest = gl.load(source, mask=gl.expand_dims(mix, 1) + gl.expand_dims(column, 0) * 0 < 24, other=0.0)
        high = upper_half(rest)
        rest -= high.to(gl.float32)
        middle = upper_half(rest)
        low = upper_half(rest - middle.to(gl.float32))
        high_s.index(i).store(high)
        both = gl.join(gl.reshape(low, [4, 8, 64]), gl.reshape(middle, [4, 8, 64]))
        both = gl.reshape(gl.permute(both, (0, 3, 1, 2)), [64, 64])
        rest_s.index(i).store(both)


@gluon.jit
def copy_tile(given, tile, k, stage, smem):
    """Start to copy 64 columns from k on of x and of the streams of a tile, and its weights."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, COPIED))
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED)), 0)
    # tokens past the end are the last one again
    token = (given.first + gl.minimum(tile * 64 + row, given.count - 1)).to(gl.int64)
    place = gl.expand_dims(token * given.x_stride, 1) + column
    copy_async(smem.x.index(stage), gl.multiple_of(given.x + k + place, [1, 16]), eviction_policy="evict_first")
    place = gl.expand_dims(token * given.token_stride, 1) + column
    for i in gl.static_range(4):
        source = gl.multiple_of(given.streams + (k + i * given.stream_stride) + place, [1, 16])
        copy_async(smem.old[i].index(stage), source, eviction_policy="evict_first")
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, COPIED_WEIGHTS))
    column = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, COPIED_WEIGHTS)), 0)
    token = gl.expand_dims((given.first + gl.minimum(tile * 64 + row, given.count - 1)).to(gl.int64), 1)
    for i in gl.static_range(5):
        source = given.comb + i * 4 + (token * 16 + column) if i < 4 else given.post + (token * 4 + column)
        copy_async(smem.weights[i].index(stage), gl.multiple_of(source, [1, 16]))


@gluon.jit
def steps_of(work, group, SLICES: gl.constexpr):
    """First tile of a program in a group, and its steps."""
    tile = gl.maximum(work.begin - group * work.tiles, 0)
    return tile, (gl.minimum(work.stop - group * work.tiles, work.tiles) - tile) * SLICES


@gluon.jit
def copy_tiles(given, out, work, smem, SLICES: gl.constexpr, STAGES: gl.constexpr):
    """The role that copies, as far ahead as there are stages.

    The fence before a product waits for copies that the same warps have in flight; so other warps start them.
    """
    i = 0
    for group in range(work.begin // work.tiles, (work.stop + work.tiles - 1) // work.tiles):
        tile, steps = steps_of(work, group, SLICES)
        for step in range(steps):
            stage = i % STAGES
            mbarrier.wait(smem.empty.index(stage), (i // STAGES & 1) ^ 1)
            k = group * (64 * SLICES) + step % SLICES * 64
            copy_tile(given, tile + step // SLICES, k, stage, smem)
            async_copy.mbarrier_arrive(smem.full.index(stage), increment_count=True)
            mbarrier.arrive(smem.full.index(stage), count=1)
            i += 1


@gluon.jit
def in_rows(x):
    """[64] as a column of a tile."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, TILE)), 1)


@gluon.jit
def load_weights(weights_s):
    """Four weights of each row, as columns of a tile."""
    even, odd = gl.split(gl.reshape(weights_s.load(WEIGHTS), [64, 2, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return in_rows(a), in_rows(b), in_rows(c), in_rows(d)


@gluon.jit
def mix_tile(stage, smem):
    """Four new streams of a tile: fp32 [64, 64] each."""
    x = smem.x.index(stage).load(TILE).to(gl.float32)
    w = load_weights(smem.weights[4].index(stage))
    n0, n1, n2, n3 = w[0] * x, w[1] * x, w[2] * x, w[3] * x
    for i in gl.static_range(4):
        w = load_weights(smem.weights[i].index(stage))
        old = smem.old[i].index(stage).load(TILE).to(gl.float32)
        n0 += w[0] * old
        n1 += w[1] * old
        n2 += w[2] * old
        n3 += w[3] * old
    return n0, n1, n2, n3


@gluon.jit
def store_products(PRODUCTS, acc, rest, squares, tile, group, groups, count):
    """Products and sums of squares of a tile: products of pre, squares, other products."""
    low, middle = gl.split(gl.permute(gl.reshape(rest, [64, 4, 2, 8]), (0, 1, 3, 2)))
    acc += gl.convert_layout(gl.reshape(low + middle, [64, 32]), ACC)
    mix = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC))
    row = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    at = (row.to(gl.int64) * groups + group) * 32
    place = gl.expand_dims(at, 1) + gl.expand_dims(gl.where(mix < 4, mix, mix + 1), 0)
    # whole rows, with zeros after the products: memory is slow to take parts of its words
    gl.store(PRODUCTS + place, acc, mask=gl.expand_dims(row < count, 1) & gl.expand_dims(mix < 31, 0))
    row = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    at = (row.to(gl.int64) * groups + group) * 32 + 4
    gl.store(PRODUCTS + at, gl.sum(squares, 1), mask=row < count)


@gluon.jit
def mix_tiles(given, out, work, smem, SLICES: gl.constexpr, STAGES: gl.constexpr):
    """The role that mixes, multiplies and stores."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, TILE))
    hidden = given.hidden
    i = 0
    for group in range(work.begin // work.tiles, (work.stop + work.tiles - 1) // work.tiles):
        tile, steps = steps_of(work, group, SLICES)
        first_column = group * (64 * SLICES)
        hold_factors(given.fn, given.fn_stride, hidden, first_column, smem.high, smem.rest, SLICES)
        acc = warpgroup_mma_init(gl.zeros([64, 32], gl.float32, layout=ACC))
        rest = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout=REST))
        squares = gl.zeros([64, 64], gl.float32, layout=TILE)
        for step in range(steps):
            s = step % SLICES
            now = tile + step // SLICES
            stage = i % STAGES
            mbarrier.wait(smem.full.index(stage), i // STAGES & 1)
            news = mix_tile(stage, smem)
            mbarrier.arrive(smem.empty.index(stage), count=1)
            i += 1
            sums, rests = warpgroup_mma_wait(0, deps=[acc, rest])
            if s == 0:
                if step != 0:
                    store_products(out.products, sums, rests, squares, now - 1, group, work.groups, given.count)
                squares = gl.zeros([64, 64], gl.float32, layout=TILE)
            acc = warpgroup_mma_init(sums)
            rest = warpgroup_mma_init(rests)
            # every warp has multiplied what the new tile takes the place of
            barrier()
            halves = ()
            for j in gl.static_range(4):
                halves += (rounded(news[j]),)
                smem.new[j].store(halves[j])
            fence_async_shared()
            for j in gl.static_range(4):
                use = s > 0 if j == 0 else True
                factors = smem.rest.index(s * 4 + j).permute((1, 0))
                rest = warpgroup_mma(smem.new[j], factors, rest, use_acc=use, is_async=True)
                factors = smem.high.index(s * 4 + j).permute((1, 0))
                acc = warpgroup_mma(smem.new[j], factors, acc, use_acc=use, is_async=True)
            # after the fence, which waits for what is written before it
            token = given.first + now * 64 + row
            place = gl.expand_dims(token.to(gl.int64) * 4 * hidden, 1) + gl.expand_dims(column, 0)
            live = gl.expand_dims(now * 64 + row, 1) + gl.expand_dims(column, 0) * 0 < given.count
            for j in gl.static_range(4):
                at = gl.multiple_of(out.streams + (first_column + s * 64 + j * hidden) + place, [1, 16])
                gl.store(at, halves[j], mask=live)
                wide = halves[j].to(gl.float32)
                squares += wide * wide
        sums, rests = warpgroup_mma_wait(0, deps=[acc, rest])
        if steps > 0:
            last = tile + steps // SLICES - 1
            store_products(out.products, sums, rests, squares, last, group, work.groups, given.count)
        # every warp has multiplied with the factors that the next ones take the place of
        barrier()


@stable_gluon
def post_products_tiles(
    X,  # [tokens, hidden] bf16
    STREAMS,  # [tokens, 4, hidden] bf16
    POST,  # [tokens, 4] fp32, dense
    COMB,  # [tokens, 4, 4] fp32, dense
    FN,  # [24, 4 * hidden] fp32
    OUT,  # [tokens, 4, hidden] bf16, dense
    PRODUCTS,  # [end - first, groups, 32] fp32
    first: tl.int32, end: tl.int32, hidden: tl.int32, per: tl.int32,
    x_stride: tl.int64, token_stride: tl.int64, stream_stride: tl.int64, fn_stride: tl.int64,
    SLICES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Grid: (programs,): new streams of tokens first .. end, their products with fn, and their sums of squares.

    A group is 64 * SLICES columns of each stream; groups cover hidden. A program takes `per` tiles, which are in order
    of groups first. All rows begin at multiples of 16 bytes.
    """
    count = end - first
    tiles = (count + 63) // 64
    groups = hidden // (64 * SLICES)
    begin = gl.program_id(0) * per
    work = Work(begin, gl.minimum(begin + per, tiles * groups), tiles, groups)
    given = Inputs(X, STREAMS, POST, COMB, FN, first, count, hidden, x_stride, token_stride, stream_stride, fn_stride)
    old = ()
    new = ()
    weights = ()
    for i in gl.static_range(5):
        if i < 4:
            old += (gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], FLAT_S),)
            new += (gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE_S),)
        weights += (gl.allocate_shared_memory(gl.float32, [STAGES, 64, 4], WEIGHTS_S),)
    smem = Smem(
        x=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], FLAT_S), old=old, weights=weights,
        full=barriers(STAGES, 1), empty=barriers(STAGES, 1), new=new,
        high=gl.allocate_shared_memory(gl.bfloat16, [SLICES * 4, 32, 64], TILE_S),
        rest=gl.allocate_shared_memory(gl.bfloat16, [SLICES * 4, 64, 64], TILE_S),
    )  # fmt: skip
    out = Outputs(OUT, PRODUCTS)
    fence_async_shared()
    gl.warp_specialize(
        [(mix_tiles, (given, out, work, smem, SLICES, STAGES)), (copy_tiles, (given, out, work, smem, SLICES, STAGES))],
        worker_num_warps=[4],
        worker_num_regs=[COPY_REGS],
    )
