"""The kernel for ranks of few heads: 8, 16 or 32 columns are multiplied by tiles of 64 keys in V4's fp8 records.

Ranks of few heads would leave most of a tile of 64 heads empty. Here both products are transposed: logits are keys by
columns, and outputs are dims by columns. A column is a head. All four warps do the same work. Two programs share a
multiprocessor, and the next tile is copied while a tile is attended.

Codes are copied to shared memory as they are, and read twice, straight into the registers of the matrix instruction
(`mma.sync`): for the logits four neighbouring codes of a key to a thread, for the outputs one code of two keys next to
each other. e4m3 codes are exact in fp16, and to convert two of them takes one instruction, where bf16 would take four.
So the products of codes are of fp16, and scales stay outside:

- q is divided by a power of two for each head and group of 64 columns. The logits of a group are multiplied by that
  power, and by the scale of the key.
- weights are multiplied by the scales of their keys, divided by the largest scale of that group so far. Whenever that
  grows, the sums of the group shrink, as they do when the largest logit of a head grows.

The 64 values of a record that are bf16 are multiplied as bf16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import allocate_shared_memory as allocate
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_common import FLAT_S, KEYS_S, ONE_L
from dsv4attn.backends.sm90.attention.kernels_load_v4 import KEY_WORDS_S, LINES_L, RAW_S, without_scale
from dsv4attn.backends.sm90.attention.kernels_schedule import Keys, Segment, lengths, page_of, powers_of
from dsv4attn.backends.sm90.compat import barrier, copy_async, reinterpret

PRODUCT_L = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
"""Keys, or dims, by columns: a warp has 16 rows of 64."""
PAIR_L = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8]))
"""Two of those, each in two warps."""
LEFT_L = gl.constexpr(gl.DotOperandLayout(0, PRODUCT_L.value, 2))
RIGHT_L = gl.constexpr(gl.DotOperandLayout(1, PRODUCT_L.value, 2))
LEFT_PAIR_L = gl.constexpr(gl.DotOperandLayout(0, PAIR_L.value, 2))
RIGHT_PAIR_L = gl.constexpr(gl.DotOperandLayout(1, PAIR_L.value, 2))
KEY_L = gl.constexpr(gl.SliceLayout(1, PRODUCT_L.value))
"""A number for each key."""
COLUMN_L = gl.constexpr(gl.SliceLayout(0, PRODUCT_L.value))
"""A number for each column."""

PAIR_S = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]], alignment=128
    )
)
"""128 codes of each key, as words. All banks are read both by BY_KEY_L and by BY_DIM_L."""
PAIR_CODES_S = gl.constexpr(
    gl.SharedLinearLayout(
        [
            [0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [0, 64],
            [1, 64], [2, 32], [4, 64], [8, 0], [16, 0], [32, 0],
        ],
        alignment=128,
    )
)  # fmt: skip
"""The same bytes, as codes."""
LAST_S = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 8], [5, 0], [8, 0], [16, 0], [32, 0]], alignment=128
    )
)
"""The last 64 codes of each key, as words; and as codes."""
LAST_CODES_S = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 0], [2, 32], [5, 0], [8, 0], [16, 0], [32, 0]],
        alignment=128,
    )
)
BY_KEY_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
"""128 codes of each key, of which a thread reads sixteen in a row."""
BY_KEY_LAST_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
BY_DIM_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 64],
    )
)
"""Words of 128 codes by keys, of which a thread reads those of two keys next to each other."""
BY_DIM_LAST_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [0, 32]],
        block_bases=[],
        shape=[16, 64],
    )
)
"""Words of the last 64 codes: two warps have the first 32 keys, and two the others."""
ALL_L = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0]],
        lane_bases=[[0, 0]] * 5,
        warp_bases=[[0, 0]] * 2,
        block_bases=[],
        shape=[4, 4],
    )
)
"""Four words of each of four warps, all of them in every thread."""


def _of_queries(columns: int) -> gl.DistributedLinearLayout:
    """64 columns of q by heads, of which a thread has sixteen in a row, as BY_KEY_L has those of keys."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], *([n, 0] for n in (8, 16) if n < columns)],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * 2,
        block_bases=[],
        shape=[columns, 64],
    )


Q_8_L, Q_16_L, Q_32_L = (gl.constexpr(_of_queries(columns)) for columns in (8, 16, 32))


def _of_warps(columns: int) -> gl.DistributedLinearLayout:
    """A number of each of four warps for each column, of which a thread has those of its columns in PRODUCT_L."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [1, 0], [2, 0], *([0, n] for n in (8, 16) if n < columns)],
        lane_bases=[[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0]] * 2,
        block_bases=[],
        shape=[4, columns],
    )


def _dims_in_a_row(dims: int, columns: int) -> gl.DistributedLinearLayout:
    """Dims by columns, of which a thread has four dims in a row; 64 are in two warps, and in the other two again."""
    return gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], *([0, n] for n in (1, 8, 16) if n < columns)],
        lane_bases=[[0, 2], [0, 4], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[32, 0], [64 % dims, 0]],
        block_bases=[],
        shape=[dims, columns],
    )


PAIR_8_L, LAST_8_L = (gl.constexpr(_dims_in_a_row(dims, 8)) for dims in (128, 64))
PAIR_16_L, LAST_16_L = (gl.constexpr(_dims_in_a_row(dims, 16)) for dims in (128, 64))
PAIR_32_L, LAST_32_L = (gl.constexpr(_dims_in_a_row(dims, 32)) for dims in (128, 64))
LARGEST_8_L = gl.constexpr(_of_warps(8))
LARGEST_16_L = gl.constexpr(_of_warps(16))
LARGEST_32_L = gl.constexpr(_of_warps(32))
Q_L = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
Q_S = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

BY_DIM = gl.constexpr("""{
.reg .b32 s, t;
.reg .b16 low, high;
prmt.b32 s, $4, $5, 0x5140;
prmt.b32 t, $4, $5, 0x7362;
mov.b32 {low, high}, s;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
mov.b32 {low, high}, t;
cvt.rn.f16x2.e4m3x2 $2, low;
cvt.rn.f16x2.e4m3x2 $3, high;
}""")
"""PTX that makes fp16 of the four codes in a word $4 of a key, each next to that of the next key's word $5."""

Tiles = namedtuple("Tiles", "t n0 n1 edge begin0 begin1 count")
"""Tiles of 64 keys that a program attends, of row t: count of them, of which the first `edge` are of the window.

n0, n1: columns of both segments that count. begin0, begin1: column of the program's first tile in either.
"""
Shared = namedtuple(
    "Shared",
    "c0 c1 c2 last rope scales seen addresses of_scales q q_rope q_powers largest scale p0 p1 p2 p_last p_rope",
)
"""Shared memory of a program, with places for two tiles.

c0, c1, c2: [2, 64, 32] words, 128 codes of each key; last: [2, 64, 16], another 64. rope: [2, 64, 64] bf16. scales: [2,
64] int64. seen: [2, 64] int32, which keys are there. addresses, of_scales: [64] int64, see `locate`. q: [BH, 512] fp16;
q_rope: [BH, 64] bf16; q_powers: [8 BH] fp32. largest: [4, BH] fp32 and scale: [4, 4] int32, what each warp has found.
p0, p1, p2: [2, 64, BH] fp16, weights for two groups of columns; p_last: [2, 32, BH] fp16, for the last codes, of both
halves of the keys; p_rope: [64, BH] bf16.
"""


@gluon.jit
def larger(a, b):
    """The larger of each half of two words."""
    return gl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def power(exponent):
    """2^(exponent - 127) as fp32, of int32; 0 if that is too small. exponent: at most 254."""
    return (gl.maximum(exponent, 0) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def scale_of(low, high, G: gl.constexpr):
    """The power of two that byte G of two words means; of byte 0 the subnormal 2^-127."""
    word = low if G < 4 else high
    bits = (word << 23) if G % 4 == 0 else (word << 15) if G % 4 == 1 else (word << 7) if G % 4 == 2 else (word >> 1)
    return gl.maximum(bits & 0x7F800000, 0x400000).to(gl.float32, bitcast=True)


@gluon.jit
def words_of_scales(low, high):
    """[64] words of scale bytes as [64, 4]: groups 0 and 2, 1 and 3, 4 and 6, and 5, each in half a word."""
    low_words = gl.join(low & 0xFF00FF, (low >> 8) & 0xFF00FF)
    high_words = gl.join(high & 0xFF00FF, (high >> 8) & 0xFF)
    return gl.reshape(gl.permute(gl.join(low_words, high_words), (0, 2, 1)), [64, 4])


@gluon.jit
def group_of(words, G: gl.constexpr):
    """The number of group G in words as `words_of_scales` has them, all in every thread."""
    of = gl.arange(0, 4, layout=words.type.layout)
    # nothing is added up: all but one of the four registers are known to be 0
    word = gl.sum(gl.where(of == G // 4 * 2 + G % 2, words, 0), 0)
    return (word >> (16 * (G % 4 // 2))) & 255


@gluon.jit
def store_queries(q, smem, t, head0, q_token, q_head, scale, H: gl.constexpr, BH: gl.constexpr):
    """Load q of a block of heads, zeros for heads that are not there."""
    head = head0 + gl.arange(0, BH, layout=gl.SliceLayout(1, Q_L))
    column = gl.arange(0, 512, layout=gl.SliceLayout(0, Q_L))
    p = q + t.to(gl.int64) * q_token + gl.expand_dims(head.to(gl.int64) * q_head, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(head < H, 1) & (gl.expand_dims(column, 0) < 512)
    x = gl.load(gl.multiple_of(p, [1, 16]), mask=mask, other=0.0)
    values = gl.reshape(x.to(gl.float32), [BH, 8, 64])
    # of each 64 columns of a head the largest magnitude becomes less than 2^15; NaN and infinity stay
    largest = gl.max(values.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    exponent = gl.maximum(largest >> 23, 15)
    scaled = values * gl.expand_dims(((268 - exponent) << 23).to(gl.float32, bitcast=True), 2)
    smem.q.store(gl.reshape(scaled.to(gl.float16), [BH, 512]))
    powers = ((exponent - 14) << 23).to(gl.float32, bitcast=True) * (scale * LOG2E)
    smem.q_powers.store(gl.reshape(gl.permute(powers, (1, 0)), [8 * BH]))
    # the last 64 columns: lanes of four warps hold them, and others store nothing
    of_rope = gl.arange(0, 64, layout=gl.SliceLayout(0, Q_L))
    p = q + t.to(gl.int64) * q_token + gl.expand_dims(head.to(gl.int64) * q_head, 1) + gl.expand_dims(of_rope + 448, 0)
    mask = gl.expand_dims(head < H, 1) & (gl.expand_dims(of_rope, 0) < 64)
    smem.q_rope.store(gl.load(gl.multiple_of(p, [1, 16]), mask=mask, other=0.0))


@gluon.jit
def slots_of(keys, tiles, k):
    """Indices of tile k, -1 in columns that do not count; and whether (1 or 0) it belongs to the window."""
    first, second = keys.first, keys.second
    inside = (k < tiles.edge).to(gl.int32)
    at = first.rows + tiles.t.to(gl.int64) * first.stride
    begin = tiles.begin0 + k * 64
    end = tiles.n0
    if second is not None:  # noqa: SIM102 - a constant, and a value
        if inside == 0:
            at = second.rows + tiles.t.to(gl.int64) * second.stride
            begin = tiles.begin1 + (k - tiles.edge) * 64
            end = tiles.n1
    end = gl.where(k < tiles.count, end, 0)
    column = begin + gl.arange(0, 64, layout=ONE_L)
    return gl.load(at + column, mask=column < end, other=-1), inside


@gluon.jit
def locate(keys, smem, slot, inside):
    """Store addresses of the records of a tile, 0 where there is none, and of their scales."""
    ok, data, scale = page_of(keys, slot, inside)
    smem.addresses.store(gl.where(ok, data.to(gl.int64), 0))
    smem.of_scales.store(scale.to(gl.int64))


@gluon.jit
def copy_words(to, start, FIRST: gl.constexpr):
    """Start to copy words of each key's record, from FIRST on, as many as `to` has columns; zeros without a record."""
    WORDS: gl.constexpr = to.shape[1]
    of = gl.arange(0, WORDS, layout=gl.SliceLayout(0, LINES_L))
    p = gl.expand_dims(start.to(gl.pointer_type(gl.int32)), 1) + gl.expand_dims(of + FIRST, 0)
    mask = gl.expand_dims(start != 0, 1) & (gl.expand_dims(of, 0) < WORDS)
    copy_async(to, gl.multiple_of(p, [1, 16]), mask=mask)


@gluon.jit
def copy_tile(smem, b):
    """Start to copy the records that `locate` has found to place b."""
    start = smem.addresses.load(gl.SliceLayout(1, LINES_L))
    there = smem.addresses.load(ONE_L) != 0
    copy_words(smem.c0.index(b), start, 0)
    copy_words(smem.c1.index(b), start, 32)
    copy_words(smem.c2.index(b), start, 64)
    copy_words(smem.last.index(b), start, 96)
    copy_words(reinterpret(smem.rope.index(b), gl.int32, [64, 32], KEY_WORDS_S), start, 112)
    copy_async(smem.scales.index(b), smem.of_scales.load(ONE_L).to(gl.pointer_type(gl.int64)), mask=there)
    smem.seen.index(b).store(there.to(gl.int32))
    async_copy.commit_group()


@gluon.jit
def query_of(smem, G: gl.constexpr, BH: gl.constexpr):
    """Group G of q as the right operand of logits, in the order in which threads have codes of a key."""
    LAYOUT: gl.constexpr = Q_8_L if BH == 8 else Q_16_L if BH == 16 else Q_32_L
    x = gl.reshape(smem.q.slice(64 * G, 64, dim=1).load(LAYOUT), [BH, 4, 4, 2, 2])
    return gl.convert_layout(gl.reshape(gl.permute(x, (2, 3, 1, 4, 0)), [64, BH]), RIGHT_L, assert_trivial=True)


@gluon.jit
def product_of(codes, of_q, smem, by, z, G: gl.constexpr, BH: gl.constexpr):
    """Add the part of group G to the logits z. codes: [64, 64] fp16. of_q: of `query_of`, or None. by: scales."""
    if of_q is None:  # noqa: SIM108 - a constant
        of_group = query_of(smem, G, BH)
    else:
        of_group = of_q[G]
    x = gl.convert_layout(codes, LEFT_L, assert_trivial=True)
    s = mma_v2(x, of_group, gl.zeros([64, BH], gl.float32, layout=PRODUCT_L))
    return z + s * gl.expand_dims(by[G], 1) * gl.expand_dims(smem.q_powers.slice(G * BH, BH).load(COLUMN_L), 0)


@gluon.jit
def by_key(words, LAYOUT: gl.constexpr, SHARED: gl.constexpr):
    """Codes of each key, [64, 4 * words], as fp16, each 64 columns in the order of `query_of`."""
    N: gl.constexpr = words.shape[1] // 16
    x = reinterpret(words, gl.uint8, [64, 64 * N], SHARED).load(LAYOUT)
    x = x.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    return gl.permute(gl.reshape(x, [64, N, 4, 4, 2, 2]), (0, 3, 4, 2, 5, 1))


@gluon.jit
def products_of_pair(words, of_q, smem, by, z, G: gl.constexpr, BH: gl.constexpr):
    """Add the parts of groups G and G + 1 to the logits z. words: of 128 codes of each key."""
    first, second = gl.split(gl.reshape(by_key(words, BY_KEY_L, PAIR_CODES_S), [64, 64, 2]))
    z = product_of(first, of_q, smem, by, z, G, BH)
    return product_of(second, of_q, smem, by, z, G + 1, BH)


@gluon.jit
def logits(smem, b, of_q, by, scale, BH: gl.constexpr):
    """Logits of 64 keys in base 2, [64, BH]."""
    rope = mma_v2(
        smem.rope.index(b).load(LEFT_L),
        smem.q_rope.permute((1, 0)).load(RIGHT_L),
        gl.zeros([64, BH], gl.float32, layout=PRODUCT_L),
    )
    z = rope * (scale * LOG2E)
    z = products_of_pair(smem.c0.index(b), of_q, smem, by, z, 0, BH)
    z = products_of_pair(smem.c1.index(b), of_q, smem, by, z, 2, BH)
    z = products_of_pair(smem.c2.index(b), of_q, smem, by, z, 4, BH)
    last = gl.reshape(by_key(smem.last.index(b), BY_KEY_LAST_L, LAST_CODES_S), [64, 64])
    return product_of(last, of_q, smem, by, z, 6, BH)


@gluon.jit
def weights_of(p, by, scales, G: gl.constexpr):
    """Weights [64, BH] times the scales of group G, in units of the largest, as fp16."""
    # the inverse of 2^127 is the subnormal 2^-127
    inverse = gl.maximum((254 - group_of(scales, G)) << 23, 0x400000).to(gl.float32, bitcast=True)
    return (p * gl.expand_dims(by[G] * inverse, 1)).to(gl.float16)


@gluon.jit
def store_weights_of_pair(to, p, by, scales, G: gl.constexpr):
    """Store the weights of groups G and G + 1."""
    both = gl.join(weights_of(p, by, scales, G), weights_of(p, by, scales, G + 1))
    to.store(gl.permute(both, (2, 0, 1)))


@gluon.jit
def shrunk(acc, shrink, before, after, G: gl.constexpr, H: gl.constexpr):
    """Sums of groups G (first of two) and H, when largest logits and scales grow. before, after: scales."""
    by = power(group_of(before, G) - group_of(after, G) + 127)
    if G != H:
        of = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIR_L)))
        by = gl.where(of == 0, by, power(group_of(before, H) - group_of(after, H) + 127))
        by = gl.expand_dims(gl.expand_dims(by, 1), 2)
    columns = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(1, PAIR_L)), assert_trivial=True)
    return acc * (gl.expand_dims(gl.expand_dims(columns, 0), 1) * by)


@gluon.jit
def by_dim(words, LAYOUT: gl.constexpr):
    """Codes as fp16, [words, keys] four times: their first, second, third and fourth codes."""
    x = words.permute((1, 0)).load(LAYOUT)
    return gl.inline_asm_elementwise(
        BY_DIM, "=r,=r,=r,=r,r,r", [x],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def sums_of_pair(words, weights, acc):
    """Add weighted sums of 128 codes of each key to acc, [2, 64, BH], whose dims are as `ordered` has them."""
    x0, x1, x2, x3 = by_dim(words, BY_DIM_L)
    x = gl.reshape(gl.join(gl.join(x0, x2), gl.join(x1, x3)), [2, 2, 8, 64, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 5, 1, 4, 2, 3)), [2, 64, 64])
    return mma_v2(gl.convert_layout(x, LEFT_PAIR_L, assert_trivial=True), weights.load(RIGHT_PAIR_L), acc)


@gluon.jit
def sums_of_last(words, weights, acc):
    """As `sums_of_pair`, of the last 64 codes: the sums of the first 32 keys, and those of the others."""
    x0, x1, x2, x3 = by_dim(words, BY_DIM_LAST_L)
    x = gl.reshape(gl.join(gl.join(x0, x2), gl.join(x1, x3)), [2, 8, 2, 32, 2, 2])
    x = gl.reshape(gl.permute(x, (2, 5, 0, 4, 1, 3)), [2, 64, 32])
    return mma_v2(gl.convert_layout(x, LEFT_PAIR_L, assert_trivial=True), weights.load(RIGHT_PAIR_L), acc)


@gluon.jit
def in_units(acc, scales, G: gl.constexpr):
    """Sums of groups G and G + 1, times the units in which they are."""
    of = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, PAIR_L)))
    by = gl.where(of == 0, power(group_of(scales, G)), power(group_of(scales, G + 1)))
    return acc * gl.expand_dims(gl.expand_dims(by, 1), 2)


@gluon.jit
def ordered(sums, N: gl.constexpr, BH: gl.constexpr):
    """Sums of N groups of codes, as [64 N, BH]."""
    sums = gl.permute(gl.reshape(sums, [N, 2, 2, 2, 8, BH]), (0, 2, 4, 3, 1, 5))
    return gl.reshape(sums, [64 * N, BH])


@gluon.jit
def write_columns(out, x, row, factor, head0, out_head, FIRST: gl.constexpr, H: gl.constexpr):
    """Write [N, BH] times factors of columns as dims of the output, from FIRST on. row: of the token in out."""
    N: gl.constexpr = x.shape[0]
    x = x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(0, x.type.layout)), 0)
    dim = gl.arange(0, N, layout=gl.SliceLayout(1, x.type.layout))
    head = head0 + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, x.type.layout))
    to = gl.expand_dims(out + row + head.to(gl.int64) * out_head, 0) + gl.expand_dims(FIRST + dim, 1)
    mask = gl.expand_dims(head < H, 0) & (gl.expand_dims(dim, 1) < N)
    gl.store(gl.multiple_of(to, [8, 1]), x.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def store_part(to, x, FIRST: gl.constexpr, BH: gl.constexpr):
    """Store [N, BH] in fp16, dims from FIRST on, where `kernels_small_decode.combine_tiles` reads them."""
    N: gl.constexpr = x.shape[0]
    x = gl.permute(gl.reshape(x.to(gl.float16), [N // 16, 2, 8, BH // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    x = gl.reshape(x, [N * BH])
    of = gl.arange(0, N * BH, layout=x.type.layout)
    at = FIRST // 128 * (128 * BH) + FIRST % 128 * 8 + of // (N * 8) * 1024 + of % (N * 8)
    gl.store(gl.multiple_of(to + at, [4]), x)


@stable_gluon
def attend_few_heads(
    q,  # [T, H, 512] bf16
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    part,  # [programs, 512, BH] fp16, in the order of `kernels_small_decode`
    part_sums,  # [programs, 2 BH + 8] fp32, as `kernels_small_decode.attend_tile` has them
    window_keys,  # [pages, page bytes] uint8
    window_rows,  # [T, width0] int32
    window_lens,  # [T] int32
    compressed_keys,  # [pages, page bytes] uint8
    compressed_rows,  # [T, width1] int32
    compressed_lens,  # [T] int32
    q_token: tl.int64, q_head: tl.int64, out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    width0: tl.int32, stride0: tl.int64, size0: tl.int32,
    factor0: tl.int32, log0: tl.int32, pitch0: tl.int32, last_slot0: tl.int32,
    width1: tl.int32, stride1: tl.int64, size1: tl.int32,
    factor1: tl.int32, log1: tl.int32, pitch1: tl.int32, last_slot1: tl.int32,
    parts: tl.int32, most: tl.int32, shift: tl.int32, scale: tl.float32, empty_lse: tl.float32,
    SEGMENTS: gl.constexpr, H: gl.constexpr, BH: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (T x parts x blocks of BH heads,), heads fastest, since programs share keys. Four warps.

    WHOLE: whether a program attends a whole row, and writes its output; parts is 1 then. Otherwise it attends a part:
    `most` tiles of 64 keys of one segment, of those for which index rows have room, as `own_tile` has it. A part
    without keys stores nothing. shift: 2^shift times 128 is at least the number of keys of a part. BH: 8, 16 or 32.
    q, out and pages begin at multiples of 16 bytes. Segments are as the fields of `Segment` have them.
    """
    wait_prior_grid(PDL)
    BLOCKS: gl.constexpr = (H + BH - 1) // BH
    program = gl.program_id(0)
    head0 = (program % BLOCKS) * BH
    row_part = program // BLOCKS
    t = row_part // parts
    first = Segment(window_keys, window_rows, window_lens, width0, stride0, size0, factor0, log0, pitch0, last_slot0)
    second = None
    if SEGMENTS == 2:
        second = Segment(
            compressed_keys, compressed_rows, compressed_lens, width1, stride1, size1, factor1, log1, pitch1, last_slot1
        )
    keys = Keys(first, second, False)
    n0, n1 = lengths(keys, t, t >= 0)
    tiles0 = (n0 + 63) >> 6
    tiles1 = (n1 + 63) >> 6
    begin0 = t * 0
    begin1 = t * 0
    edge = tiles0
    count = tiles0 + tiles1
    if not WHOLE:
        index = row_part % parts
        before = (((width0 + 63) >> 6) + most - 1) // most
        inside = (index < before).to(gl.int32)
        begin = gl.where(inside != 0, index, index - before) * most
        count = gl.minimum(gl.maximum(gl.where(inside != 0, tiles0, tiles1) - begin, 0), most)
        edge = count * inside
        begin0 = begin * 64
        begin1 = begin * 64
    tiles = Tiles(t, n0, n1, edge, begin0, begin1, count)
    P_S: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // BH, BH // 8, [1, 0])
    P_PAIR_S: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // BH, BH // 8, [2, 1, 0])
    LARGEST_L: gl.constexpr = LARGEST_8_L if BH == 8 else LARGEST_16_L if BH == 16 else LARGEST_32_L
    if (count > 0) | WHOLE:
        slot, in_window = slots_of(keys, tiles, 0)
        next_slot, next_in_window = slots_of(keys, tiles, 1)
        smem = Shared(
            # a buffer for each: the compiler confuses parts of one buffer
            c0=allocate(gl.int32, [2, 64, 32], PAIR_S), c1=allocate(gl.int32, [2, 64, 32], PAIR_S),
            c2=allocate(gl.int32, [2, 64, 32], PAIR_S), last=allocate(gl.int32, [2, 64, 16], LAST_S),
            rope=allocate(gl.bfloat16, [2, 64, 64], KEYS_S), scales=allocate(gl.int64, [2, 64], FLAT_S),
            seen=allocate(gl.int32, [2, 64], FLAT_S),
            addresses=allocate(gl.int64, [64], FLAT_S), of_scales=allocate(gl.int64, [64], FLAT_S),
            q=allocate(gl.float16, [BH, 512], Q_S), q_rope=allocate(gl.bfloat16, [BH, 64], Q_S),
            q_powers=allocate(gl.float32, [8 * BH], FLAT_S),
            largest=allocate(gl.float32, [4, BH], RAW_S), scale=allocate(gl.int32, [4, 4], RAW_S),
            p0=allocate(gl.float16, [2, 64, BH], P_PAIR_S), p1=allocate(gl.float16, [2, 64, BH], P_PAIR_S),
            p2=allocate(gl.float16, [2, 64, BH], P_PAIR_S), p_last=allocate(gl.float16, [2, 32, BH], P_PAIR_S),
            p_rope=allocate(gl.bfloat16, [64, BH], P_S),
        )  # fmt: skip
        locate(keys, smem, slot, in_window)
        barrier()
        copy_tile(smem, 0)
        barrier()
        locate(keys, smem, next_slot, next_in_window)
        store_queries(q, smem, t, head0, q_token, q_head, scale, H, BH)
        of_q = None
        # more columns take too many registers
        if BH == 8:
            barrier()
            of_q = (
                query_of(smem, 0, BH), query_of(smem, 1, BH), query_of(smem, 2, BH), query_of(smem, 3, BH),
                query_of(smem, 4, BH), query_of(smem, 5, BH), query_of(smem, 6, BH),
            )  # fmt: skip
        largest = gl.full([BH], NOTHING, gl.float32, layout=COLUMN_L)
        # 2^-126, so that scale bytes of 0 are counted as half of it
        scales = gl.full([4], 0x10001, gl.int32, layout=gl.SliceLayout(0, ALL_L))
        sums = gl.zeros([64, BH], gl.float32, layout=PRODUCT_L)
        acc0 = gl.zeros([2, 64, BH], gl.float32, layout=PAIR_L)
        acc1 = gl.zeros([2, 64, BH], gl.float32, layout=PAIR_L)
        acc2 = gl.zeros([2, 64, BH], gl.float32, layout=PAIR_L)
        acc_last = gl.zeros([2, 64, BH], gl.float32, layout=PAIR_L)
        acc_rope = gl.zeros([64, BH], gl.float32, layout=PRODUCT_L)
        b = t * 0
        for k in range(count):
            async_copy.wait_group(0)
            barrier()
            if k + 1 < count:
                copy_tile(smem, 1 - b)
            slot, in_window = slots_of(keys, tiles, k + 2)
            both = smem.scales.index(b).load(KEY_L)
            low = both.to(gl.int32)
            high = (both >> 32).to(gl.int32)
            found = gl.reduce(gl.reshape(words_of_scales(low, high), [4, 16, 4]), 1, larger)
            smem.scale.store(found)
            by = (
                scale_of(low, high, 0), scale_of(low, high, 1), scale_of(low, high, 2), scale_of(low, high, 3),
                scale_of(low, high, 4), scale_of(low, high, 5), scale_of(low, high, 6),
            )  # fmt: skip
            z = logits(smem, b, of_q, by, scale, BH)
            # a key of which one scale is NaN is NaN. Chosen, not added: q may be NaN, and there are keys that are not
            there = gl.expand_dims(smem.seen.index(b).load(KEY_L) != 0, 1)
            z = gl.where(gl.expand_dims(without_scale(low, high) != 0, 1), float("nan"), z)
            z = gl.where(there, z, -float("inf"))
            smem.largest.store(gl.max(gl.reshape(z, [4, 16, BH]), 1))
            grown = gl.max(smem.largest.load(LARGEST_L), 0)
            grown = gl.maximum(largest, gl.convert_layout(grown, COLUMN_L, assert_trivial=True))
            grown_scales = larger(scales, gl.reduce(smem.scale.load(ALL_L), 0, larger))
            # the addresses of this tile have been read: a barrier was between
            locate(keys, smem, slot, in_window)
            shrink = gl.exp2(largest - grown)
            p = gl.exp2(z - gl.expand_dims(grown, 0))
            sums = sums * gl.expand_dims(shrink, 0) + p
            largest = grown
            store_weights_of_pair(smem.p0, p, by, grown_scales, 0)
            store_weights_of_pair(smem.p1, p, by, grown_scales, 2)
            store_weights_of_pair(smem.p2, p, by, grown_scales, 4)
            smem.p_last.store(gl.reshape(weights_of(p, by, grown_scales, 6), [2, 32, BH]))
            smem.p_rope.store(p.to(gl.bfloat16))
            acc0 = shrunk(acc0, shrink, scales, grown_scales, 0, 1)
            acc1 = shrunk(acc1, shrink, scales, grown_scales, 2, 3)
            acc2 = shrunk(acc2, shrink, scales, grown_scales, 4, 5)
            acc_last = shrunk(acc_last, shrink, scales, grown_scales, 6, 6)
            acc_rope = acc_rope * gl.expand_dims(shrink, 0)
            scales = grown_scales
            acc0 = sums_of_pair(smem.c0.index(b), smem.p0, acc0)
            acc1 = sums_of_pair(smem.c1.index(b), smem.p1, acc1)
            acc2 = sums_of_pair(smem.c2.index(b), smem.p2, acc2)
            acc_last = sums_of_last(smem.last.index(b), smem.p_last, acc_last)
            left = smem.rope.index(b).permute((1, 0)).load(LEFT_L)
            acc_rope = mma_v2(left, smem.p_rope.load(RIGHT_L), acc_rope)
            b = 1 - b
        launch_dependents(PDL)
        async_copy.wait_group(0)
        total = gl.sum(sums, 0)
        last = gl.sum(acc_last, 0)
        head = gl.arange(0, BH, layout=COLUMN_L)
        if WHOLE:
            empty = total == 0.0
            whole = total
            if sink is not None:
                # one more logit of value zero; a sink of +inf leaves nothing
                bias = gl.load(sink + head0 + head, mask=head0 + head < H, other=0.0) * LOG2E
                whole += gl.exp2(bias - largest)
            factor = gl.where(empty, 0.0, 1.0 / whole)
            row = t.to(gl.int64) * out_token
            PAIR: gl.constexpr = PAIR_8_L if BH == 8 else PAIR_16_L if BH == 16 else PAIR_32_L
            LAST: gl.constexpr = LAST_8_L if BH == 8 else LAST_16_L if BH == 16 else LAST_32_L
            for j in gl.static_range(3):
                acc = in_units((acc0, acc1, acc2)[j], scales, 2 * j)
                acc = gl.convert_layout(ordered(acc, 2, BH), PAIR, assert_trivial=True)
                write_columns(out, acc, row, factor, head0, out_head, 128 * j, H)
            last = gl.convert_layout(ordered(last * power(group_of(scales, 6)), 1, BH), LAST, assert_trivial=True)
            write_columns(out, last, row, factor, head0, out_head, 384, H)
            write_columns(out, acc_rope, row, factor, head0, out_head, 448, H)
            once = head0 + head < H
            if lse is not None:
                at = lse + t.to(gl.int64) * lse_token + (head0 + head).to(gl.int64) * lse_head
                gl.store(at, gl.where(empty, empty_lse, (largest + gl.log2(total)) * LN2), mask=once)
            if max_logits is not None:
                at = max_logits + t.to(gl.int64) * max_token + (head0 + head).to(gl.int64) * max_head
                # maxima pass over a NaN among logits, and the total of weights does not; a finite one adds nothing
                gl.store(at, gl.where(empty, -float("inf"), largest * LN2 + total * 0.0), mask=once)
        else:
            to = part + program.to(gl.int64) * (512 * BH)
            at = part_sums + program * (2 * BH + 8)
            powers = at + 2 * BH
            for g in gl.static_range(7):
                gl.store(powers + g, power(gl.minimum(group_of(scales, g) + shift, 254)))
            for j in gl.static_range(3):
                store_part(to, ordered((acc0, acc1, acc2)[j] * power(127 - shift), 2, BH), 128 * j, BH)
            store_part(to, ordered(last * power(127 - shift), 1, BH), 384, BH)
            exponent, inverse = powers_of(gl.max(gl.max(gl.abs(acc_rope), 0), 0))
            gl.store(powers + 7, power(exponent))
            store_part(to, acc_rope * inverse, 448, BH)
            gl.store(at + head, largest)
            gl.store(at + BH + head, total)
    else:
        launch_dependents(PDL)
