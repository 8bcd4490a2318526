"""Kernels for decodes of few tokens: a program attends one tile of keys, and another kernel combines a row's tiles.

Where every tile has a multiprocessor to itself, a decode takes as long as one tile, from its first load to its last
store. So nothing is pipelined: all loads of a tile are in flight at once. Both products are computed transposed, keys
by heads and columns by heads. The matrix unit multiplies 64 rows at least, and a program may have 16 heads: less of q
to load, and less to store.

Sums are stored as the matrix unit leaves them in registers, eight bytes of a thread next to those of the next one, and
not divided by totals yet. `combine_tiles` loads them in that order, and sorts what it has combined. They are fp16,
under a power of two for each 64 columns of a tile, or 32 of V4.1's records, which follows from the scale bytes of its
keys; see `bounds_of` and `code_bounds`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Triton's tuples grow in no other way

from __future__ import annotations

from collections import namedtuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import allocate_shared_memory as allocate
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4attn.backends._triton.launching.kernels_pdl import (
    launch_dependents,
    wait_prior_grid,
    wait_then_launch_dependents,
)
from dsv4attn.backends._triton.launching.runtime import stable_gluon
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING
from dsv4attn.backends.sm90.attention.kernels_common import FLAT_S, KEYS_S
from dsv4attn.backends.sm90.attention.kernels_load_v4 import (
    WORDS_L,
    decoded,
    load_codes,
    load_rope,
    store_words,
    without_scale,
)
from dsv4attn.backends.sm90.attention.kernels_load_v41 import (
    NIBBLES_0,
    NIBBLES_1,
    NIBBLES_2,
    NIBBLES_3,
    PIECES_128_L,
    PIECES_L,
    first_half,
    load_nibble_scales,
    load_scales,
    second_half,
    store_nibbles,
)
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    CODE_PAGES,
    FP8_PAGES,
    NIBBLE_PAGES,
    Entries,
    Keys,
    Segment,
    cdiv,
    coded_page_of,
    entry_slots,
    own_tile,
    page_of,
    tile_with_keys,
)
from dsv4attn.backends.sm90.compat import barrier, copy_async

QUERIES_L = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
"""128 columns of q: sixteen bytes in each thread."""
HEADS_L = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
CELLS_L = gl.constexpr(gl.BlockedLayout([1, 2, 2], [32, 1, 1], [4, 1, 1], [2, 1, 0]))
"""Of 8 heads and 64 columns, 128 cells of two columns and two heads, as `store_sums` has them in a thread."""
SUMS_L = gl.constexpr(gl.SliceLayout(1, CELLS_L))
"""The heads of those."""
FOURS_L = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
ROWS_L = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
BYTES_L = gl.constexpr(gl.BlockedLayout([1, 2], [8, 4], [8, 1], [1, 0]))
"""Eight numbers of each key of a tile, in the threads of WORDS_L."""

Stages = namedtuple("Stages", "k0 k1 k2 k3")  # noqa: PYI024 - as in `kernels_schedule`
"""A tile of keys in shared memory, [1, N, 128] bf16 each, as roles of `kernels_load_v41` have several."""


@gluon.jit
def load_queries(q, q_s, t, head0, q_token, q_head, H: gl.constexpr, BH: gl.constexpr):
    """Start to copy q of a block of heads, zeros for heads that are not there."""
    head = head0 + gl.arange(0, BH, layout=gl.SliceLayout(1, QUERIES_L))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, QUERIES_L))
    p = q + t.to(gl.int64) * q_token + gl.expand_dims(head.to(gl.int64) * q_head, 1) + gl.expand_dims(column, 0)
    p = gl.multiple_of(p, [1, 16])
    mask = gl.expand_dims(head < H, 1) & (gl.expand_dims(column, 0) < 128)
    for g in gl.static_range(4):
        copy_async(q_s.index(g), p + 128 * g, mask=mask)
    async_copy.commit_group()


@gluon.jit
def bounds_of(low, high, rope):
    """[N, 8] exponents of powers of two: for each 64 columns of a key one, of which 2^16 exceed 128 times their values.

    So weighted sums of 128 keys, divided by the largest of their powers, are numbers of fp16, as exact as products of
    bf16 unless they are below 2^-14 of it. low, high: [N] words of scale bytes, which are exponents of codes up to 448.
    rope: [N, 32] words of bf16 values.
    """
    of = gl.arange(0, 8, layout=gl.SliceLayout(0, BYTES_L))
    low = gl.expand_dims(gl.convert_layout(low, gl.SliceLayout(1, BYTES_L), assert_trivial=True), 1)
    high = gl.expand_dims(gl.convert_layout(high, gl.SliceLayout(1, BYTES_L), assert_trivial=True), 1)
    largest = gl.max(gl.maximum(rope & 0x7FFF, (rope >> 16) & 0x7FFF), 1) >> 7
    largest = gl.expand_dims(gl.convert_layout(largest, gl.SliceLayout(1, BYTES_L), assert_trivial=True), 1)
    of = gl.expand_dims(of, 0)
    return gl.where(of == 7, largest - 7, (gl.where(of < 4, low, high) >> of % 4 * 8) & 255)


@gluon.jit
def load_keys(keys, slot, inside, k0, k1, k2, k3, bias_s, PDL: gl.constexpr):
    """Load and decode a tile, all of it at once, and let the next kernel begin while it is loaded; `bounds_of` it."""
    ok, data, scale = page_of(keys, slot, inside)
    x0 = load_codes(data, ok, 0, WORDS_L)
    x1 = load_codes(data, ok, 16, WORDS_L)
    x2 = load_codes(data, ok, 32, WORDS_L)
    x3 = load_codes(data, ok, 48, WORDS_L)
    x4 = load_codes(data, ok, 64, WORDS_L)
    x5 = load_codes(data, ok, 80, WORDS_L)
    x6 = load_codes(data, ok, 96, WORDS_L)
    rope = load_rope(data, ok)
    scales = gl.load(scale, mask=ok, other=0)
    launch_dependents(PDL)
    bias_s.store(gl.where(ok, 0.0, -float("inf")))
    low = scales.to(gl.int32)
    high = (scales >> 32).to(gl.int32)
    store_words(k3, 0, decoded(x6, high, without_scale(low, high), 2), rope)
    store_words(k2, 0, decoded(x4, high, None, 0), decoded(x5, high, None, 1))
    store_words(k0, 0, decoded(x0, low, None, 0), decoded(x1, low, None, 1))
    store_words(k1, 0, decoded(x2, low, None, 2), decoded(x3, low, None, 3))
    return bounds_of(low, high, rope)


@gluon.jit
def code_bounds(scales):
    """As `bounds_of`, [N, 16] of each 32 columns of records of codes: of column 4 i + j, columns 32 (4 j + i) on.

    scales: of `load_scales`, whose bytes are exponents of codes up to 448.
    """
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, scales.type.layout))
    return (scales >> gl.expand_dims(of // 4 * 8, 0)) & 255


@gluon.jit
def nibble_bounds(scales):
    """As `code_bounds`, of records of nibbles. scales: of `load_nibble_scales`, e4m3; what they scale is 6 at most.

    A scale of exponent field e is less than 2^(e - 6), NaN apart, and what it scales less than 2^(e - 3).
    """
    of = gl.arange(0, 16, layout=gl.SliceLayout(0, scales.type.layout))
    both = scales >> gl.expand_dims(of // 4 % 2 * 16, 0)
    return gl.maximum((both >> 3) & 15, (both >> 11) & 15) + (127 - 9 - 3)


@gluon.jit
def load_code_keys(data, scale, ok, stages, bias_s, PDL: gl.constexpr):
    """Load and decode a tile of records of codes, and let the next kernel begin meanwhile; `code_bounds` of it."""
    LAYOUT: gl.constexpr = data.type.layout.parent
    x0 = load_codes(data, ok, 0, LAYOUT)
    x1 = load_codes(data, ok, 16, LAYOUT)
    x2 = load_codes(data, ok, 32, LAYOUT)
    x3 = load_codes(data, ok, 48, LAYOUT)
    x4 = load_codes(data, ok, 64, LAYOUT)
    x5 = load_codes(data, ok, 80, LAYOUT)
    x6 = load_codes(data, ok, 96, LAYOUT)
    x7 = load_codes(data, ok, 112, LAYOUT)
    scales = load_scales(data, scale, ok, 1, CODE_PAGES, False, LAYOUT)
    launch_dependents(PDL)
    bias_s.store(gl.where(ok, 0.0, -float("inf")))
    first_half(stages, 0, x4, x5, x6, x7, scales)
    second_half(stages, 0, x0, x1, x2, x3, scales)
    return code_bounds(scales)


@gluon.jit
def load_nibble_keys(data, scale, ok, stages, bias_s, PDL: gl.constexpr):
    """As `load_code_keys`, of records of nibbles; `nibble_bounds` of it."""
    LAYOUT: gl.constexpr = data.type.layout.parent
    x0 = load_codes(data, ok, 0, LAYOUT)
    x1 = load_codes(data, ok, 16, LAYOUT)
    x2 = load_codes(data, ok, 32, LAYOUT)
    x3 = load_codes(data, ok, 48, LAYOUT)
    scales = load_nibble_scales(scale, ok, LAYOUT)
    launch_dependents(PDL)
    bias_s.store(gl.where(ok, 0.0, -float("inf")))
    store_nibbles(stages.k3, 0, x3, scales, NIBBLES_3)
    store_nibbles(stages.k2, 0, x2, scales, NIBBLES_2)
    store_nibbles(stages.k1, 0, x1, scales, NIBBLES_1)
    store_nibbles(stages.k0, 0, x0, scales, NIBBLES_0)
    return nibble_bounds(scales)


@gluon.jit
def load_coded_keys(
    keys, slot, inside, stages, bias_s, KIND: gl.constexpr, INTERLEAVED: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """As `load_keys`, of V4.1's records; bounds in the order of `code_bounds`."""
    ok, data, scale = coded_page_of(keys, slot, inside, KIND, INTERLEAVED)
    if KIND == NIBBLE_PAGES:
        if inside != 0:
            bounds = load_code_keys(data, scale, ok, stages, bias_s, PDL)
        else:
            bounds = load_nibble_keys(data, scale, ok, stages, bias_s, PDL)
    else:
        bounds = load_code_keys(data, scale, ok, stages, bias_s, PDL)
    return bounds


@gluon.jit
def store_powers(to, inverses_s, bounds):
    """Store powers of two of each 32 columns, and for each 16 rows of a product their inverses in shared memory.

    bounds: the largest of keys' bounds, [16], in the order of `code_bounds`.
    """
    power = gl.minimum(gl.maximum(bounds, 1), 253)
    of = gl.arange(0, 16, layout=power.type.layout)
    gl.store(to + (of % 4 * 4 + of // 4), (power << 23).to(gl.float32, bitcast=True))
    inverse = ((254 - power) << 23).to(gl.float32, bitcast=True)
    inverse = gl.reshape(gl.permute(gl.reshape(inverse, [4, 4]), (1, 0)), [16])
    inverses_s.store(gl.reshape(gl.join(inverse, inverse), [32]))


@gluon.jit
def store_heads(to, x, BH: gl.constexpr):
    """Store [BH] fp32."""
    gl.store(to + gl.arange(0, BH, layout=HEADS_L), gl.convert_layout(x, HEADS_L))


@gluon.jit
def store_sums(to, x, inverses, BH: gl.constexpr):
    """Store [128, BH] in fp16, columns by heads, eight heads after the other.

    `interpreted.kernels_small_decode.place` has the order.

    inverses: of the powers of the columns of each of eight warps.
    """
    x = gl.reshape(x, [8, 16, BH])
    inverse = inverses.load(gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout)))
    x = (x * gl.expand_dims(gl.expand_dims(inverse, 1), 2)).to(gl.float16)
    # warps; both rows of a thread; which of eight rows; which eight heads; which quarter of them; both of its heads
    x = gl.permute(gl.reshape(x, [8, 2, 8, BH // 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    x = gl.reshape(x, [128 * BH])
    LAYOUT: gl.constexpr = x.type.layout
    gl.store(gl.multiple_of(to + gl.arange(0, 128 * BH, layout=LAYOUT), [8]), x)


@stable_gluon
def attend_tile(
    q,  # [T, H, 512] bf16
    part,  # [programs, 512, BH] fp16, in the order of `store_sums`
    part_sums,  # [programs, 2 BH + POWERS] fp32: largest logits, base 2; totals of weights relative to these; powers
    window_keys,  # [pages, page bytes] uint8
    window_rows,  # [T, width0] int32
    window_lens,  # [T] int32
    compressed_keys,  # [pages, page bytes] uint8
    compressed_rows,  # [T, width1] int32, slots; or entries, if least1 is width1, and not 0
    compressed_lens,  # [T] int32; of entries, how many a row may see
    requests,  # as the field of `Entries`; not read where rows are slots
    table,  # the same
    q_token: tl.int64, q_head: tl.int64,
    width0: tl.int32, stride0: tl.int64, size0: tl.int32,
    factor0: tl.int32, log0: tl.int32, pitch0: tl.int32, last_slot0: tl.int32,
    width1: tl.int32, stride1: tl.int64, size1: tl.int32,
    factor1: tl.int32, log1: tl.int32, pitch1: tl.int32, last_slot1: tl.int32,
    table_stride: tl.int64, known: tl.int32, columns: tl.int32, least1: tl.int32,
    tiles: tl.int32, scale: tl.float32,
    SEGMENTS: gl.constexpr, KIND: gl.constexpr, INTERLEAVED: gl.constexpr, POWERS: gl.constexpr,
    H: gl.constexpr, BH: gl.constexpr, N: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (T x tiles x blocks of BH heads,), heads fastest, since programs share keys. Eight warps.

    tiles: of N keys, of each row, see `own_tile`; all records of a tile have one format. BH: 16, 32 or 64. N: 64 or
    128. q and pages begin at multiples of 16 bytes. Segments are as the fields of `Segment` have them. A tile without
    keys stores nothing. KIND: FP8_PAGES, CODE_PAGES or NIBBLE_PAGES. INTERLEAVED: as `coded_page_of` has it. POWERS: 8
    with FP8_PAGES, or else 16.
    """
    wait_prior_grid(PDL)
    # keys by heads: 64 keys are four warps' rows, and the other four have the other half of the heads
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 2] if N == 64 else [8, 1], [16, BH // 2 if N == 64 else BH, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BH, 16])
    WEIGHTS_S: gl.constexpr = gl.NVMMASharedLayout(2 * BH, 16, 2)
    CODED_L: gl.constexpr = (PIECES_L if N == 64 else PIECES_128_L) if KIND == NIBBLE_PAGES else WORDS_L
    BLOCKS: gl.constexpr = (H + BH - 1) // BH
    program = gl.program_id(0)
    head0 = (program % BLOCKS) * BH
    tile = (program // BLOCKS) % tiles
    t = program // (BLOCKS * tiles)
    first = Segment(window_keys, window_rows, window_lens, width0, stride0, size0, factor0, log0, pitch0, last_slot0)
    second = None
    if SEGMENTS == 2:
        second = Segment(
            compressed_keys, compressed_rows, compressed_lens, width1, stride1, size1, factor1, log1, pitch1, last_slot1
        )
    keys = Keys(first, second, False)
    inside, begin, n, width, at = own_tile(keys, t, tile, least1, N)
    # indices after the length are read too, and not used: they would have to wait for it
    column = begin + gl.arange(0, N, layout=gl.SliceLayout(1, CODED_L))
    slot = gl.load(at + column, mask=column < width, other=-1)
    if SEGMENTS == 2:  # noqa: SIM102 - a constant, and a value
        if (inside == 0) & (least1 > 0):
            entries = Entries(requests, table, table_stride, known, columns)
            slot = entry_slots(entries, second, t, slot)
    slot = gl.where(column < n, slot, -1)
    q_s = allocate(gl.bfloat16, [4, BH, 128], KEYS_S)
    load_queries(q, q_s, t, head0, q_token, q_head, H, BH)
    if begin < n:
        k0 = allocate(gl.bfloat16, [1, N, 128], KEYS_S)
        k1 = allocate(gl.bfloat16, [1, N, 128], KEYS_S)
        k2 = allocate(gl.bfloat16, [1, N, 128], KEYS_S)
        k3 = allocate(gl.bfloat16, [1, N, 128], KEYS_S)
        bias_s = allocate(gl.float32, [N], FLAT_S)
        p_s = allocate(gl.bfloat16, [N, BH], WEIGHTS_S)
        inverses_s = allocate(gl.float32, [32], FLAT_S)
        if KIND == FP8_PAGES:
            bounds = load_keys(keys, slot, inside, k0, k1, k2, k3, bias_s, PDL)
        else:
            stages = Stages(k0, k1, k2, k3)
            bounds = load_coded_keys(keys, slot, inside, stages, bias_s, KIND, INTERLEAVED, PDL)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        s = gl.zeros([N, BH], gl.float32, layout=SCORES)
        s = warpgroup_mma(k0.index(0), q_s.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(k1.index(0), q_s.index(1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(k2.index(0), q_s.index(2).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(k3.index(0), q_s.index(3).permute((1, 0)), s, is_async=True)
        sums = part_sums + program * (2 * BH + POWERS)
        if KIND == FP8_PAGES:
            power = gl.minimum(gl.maximum(gl.max(bounds, 0), 1), 253)
            of = gl.arange(0, 8, layout=gl.SliceLayout(0, BYTES_L))
            gl.store(sums + 2 * BH + of, (power << 23).to(gl.float32, bitcast=True))
            # four warps have 64 columns
            inverse = ((254 - power) << 23).to(gl.float32, bitcast=True)
            inverse = gl.join(inverse, inverse)
            inverses_s.store(gl.reshape(gl.join(inverse, inverse), [32]))
        else:
            store_powers(sums + 2 * BH, inverses_s, gl.max(bounds, 0))
        bias = gl.expand_dims(bias_s.load(gl.SliceLayout(1, SCORES)), 1)
        s = warpgroup_mma_wait(0, [s])
        # chosen, not added: q may be NaN, and so are its products with keys that are not there
        z = gl.where(bias == 0.0, s * (scale * LOG2E), -float("inf"))
        largest = gl.maximum(gl.max(z, 0), NOTHING)
        p = gl.exp2(z - gl.expand_dims(largest, 0))
        p_s.store(p.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        zero = gl.zeros([128, BH], gl.float32, layout=OUT)
        a = warpgroup_mma(k0.index(0).permute((1, 0)), p_s, zero, use_acc=False, is_async=True)
        b = warpgroup_mma(k1.index(0).permute((1, 0)), p_s, zero, use_acc=False, is_async=True)
        c = warpgroup_mma(k2.index(0).permute((1, 0)), p_s, zero, use_acc=False, is_async=True)
        d = warpgroup_mma(k3.index(0).permute((1, 0)), p_s, zero, use_acc=False, is_async=True)
        a, b, c, d = warpgroup_mma_wait(0, [a, b, c, d])
        to = part + program.to(gl.int64) * (512 * BH)
        store_sums(to, a, inverses_s.slice(0, 8), BH)
        store_sums(to + 128 * BH, b, inverses_s.slice(8, 8), BH)
        store_sums(to + 256 * BH, c, inverses_s.slice(16, 8), BH)
        store_sums(to + 384 * BH, d, inverses_s.slice(24, 8), BH)
        # after the parts, which need not wait for it
        store_heads(sums, largest, BH)
        store_heads(sums + BH, gl.sum(p, 0), BH)
    else:
        async_copy.wait_group(0)
        launch_dependents(PDL)


@stable_gluon
def combine_tiles(
    part,  # as `attend_tile` has them
    part_sums,
    out,  # [T, H, 512] bf16
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    window_lens,  # [T] int32
    compressed_lens,  # [T] int32
    out_token: tl.int64, out_head: tl.int64, lse_token: tl.int64, lse_head: tl.int64,
    max_token: tl.int64, max_head: tl.int64,
    heads: tl.int32, block: tl.int32, size: tl.int32, tiles: tl.int32, width0: tl.int32, width1: tl.int32,
    least1: tl.int32, empty_lse: tl.float32, U: gl.constexpr, P: gl.constexpr, POWERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (T x blocks of 8 heads x 8 / P pieces of 64 columns,), columns fastest. Four warps.

    block: heads of a program of `attend_tile`. size: keys of a tile. tiles: of a row. U: tiles whose parts are loaded
    together. P: pieces of a program: 1, 2, 4 or 8. POWERS: as `attend_tile` has it. least1: columns of the second
    segment that count, whatever its lengths say. out begins at a multiple of 16 bytes.
    """
    program = gl.program_id(0)
    first = program % (8 // P) * P
    eights = cdiv(heads, 8)
    eight = (program // (8 // P)) % eights
    t = program // (8 // P * eights)
    of = gl.arange(0, 128, layout=gl.SliceLayout(1, SUMS_L))
    second = gl.arange(0, 2, layout=gl.SliceLayout(0, SUMS_L))
    within = gl.expand_dims(of % 4 * 2, 1) + gl.expand_dims(second, 0)
    head = eight * 8 + within
    # read before the kernel that computes parts has ended, see `kernels_pdl`
    before = cdiv(width0, size)
    of_first = cdiv(gl.minimum(gl.maximum(gl.load(window_lens + t), 0), width0), size)
    there = of_first + cdiv(gl.minimum(gl.maximum(gl.load(compressed_lens + t), least1), width1), size)
    if sink is not None:
        bias = gl.load(sink + head, mask=head < heads, other=0.0) * LOG2E
    wait_then_launch_dependents(PDL)
    blocks = cdiv(heads, block)
    own = eight // (block // 8)
    rest = eight % (block // 8)
    cell = rest * 1024 + gl.arange(0, 512, layout=FOURS_L)
    largest = gl.full([128, 2], NOTHING, gl.float32, layout=SUMS_L)
    total = gl.zeros([128, 2], gl.float32, layout=SUMS_L)
    accs = ()
    for _ in gl.static_range(P):
        accs = accs + (gl.zeros([128, 2, 2], gl.float32, layout=CELLS_L),)
    for begin in range(0, there, U):
        # every load of a round is on its way before the first is used
        ms, ls, ss, vs = (), (), (), ()
        top = largest
        for u in gl.static_range(U):
            exists = begin + u < there
            row = (t * tiles + tile_with_keys(begin + u, of_first, before)) * blocks + own
            own_sums = gl.multiple_of(part_sums + row * (2 * block + POWERS), 8)
            sums = gl.multiple_of(own_sums + rest * 8, 8) + within
            m = gl.load(sums, mask=exists, other=NOTHING)
            ms = ms + (m,)
            ls = ls + (gl.load(sums + block, mask=exists, other=0.0),)
            for k in gl.static_range(P):
                if POWERS == 8:
                    ss = ss + (gl.load(own_sums + 2 * block + first + k, mask=exists, other=0.0),)
                else:
                    # two warps have 32 columns
                    at = own_sums + (2 * block + (first + k) * 2) + of // 64
                    ss = ss + (gl.expand_dims(gl.load(at, mask=exists, other=0.0), 1),)
            values = gl.multiple_of(part + row.to(gl.int64) * (512 * block), 16) + cell
            for k in gl.static_range(P):
                piece = first + k
                v = gl.load(values + ((piece // 2) * (128 * block) + piece % 2 * 512), mask=exists, other=0.0)
                v = gl.convert_layout(gl.reshape(v, [128, 2, 2]), CELLS_L, assert_trivial=True)
                vs = vs + (v.to(gl.float32),)
            top = gl.maximum(top, m)
        shrink = gl.exp2(largest - top)
        total *= shrink
        ws = ()
        for u in gl.static_range(U):
            weight = gl.exp2(ms[u] - top)
            total += ls[u] * weight
            for k in gl.static_range(P):
                ws = ws + (gl.expand_dims(weight * ss[u * P + k], 1),)
        now = ()
        for k in gl.static_range(P):
            acc = accs[k] * gl.expand_dims(shrink, 1)
            for u in gl.static_range(U):
                acc += vs[u * P + k] * ws[u * P + k]
            now = now + (acc,)
        accs = now
        largest = top
    empty = total == 0.0
    whole = total
    if sink is not None:
        # one more logit of value zero; a sink of +inf leaves nothing
        whole += gl.exp2(bias - largest)
    factor = gl.expand_dims(gl.where(empty, 0.0, 1.0 / whole), 1)
    line = eight * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, ROWS_L))
    to = gl.multiple_of(out + t.to(gl.int64) * out_token + line.to(gl.int64) * out_head, [16])
    for k in gl.static_range(P):
        # cells are quarters of a group's warps, eighths of rows, and quarters of eight heads
        rows = gl.reshape((accs[k] * factor).to(gl.bfloat16), [4, 8, 4, 2, 2])
        rows = gl.convert_layout(gl.reshape(gl.permute(rows, (2, 4, 0, 3, 1)), [8, 64]), ROWS_L)
        column = (first + k) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS_L))
        mask = gl.expand_dims(line < heads, 1) & (gl.expand_dims(column, 0) < 512)
        gl.store(gl.expand_dims(to, 1) + gl.expand_dims(column, 0), rows, mask=mask)
    if first == 0:
        once = (gl.expand_dims(of, 1) < 4) & (head < heads)
        if lse is not None:
            it = lse + t.to(gl.int64) * lse_token + head.to(gl.int64) * lse_head
            gl.store(it, gl.where(empty, empty_lse, (largest + gl.log2(total)) * LN2), mask=once)
        if max_logits is not None:
            it = max_logits + t.to(gl.int64) * max_token + head.to(gl.int64) * max_head
            # maxima pass over a NaN among logits, and the total of weights does not; a finite one adds nothing
            gl.store(it, gl.where(empty, -float("inf"), largest * LN2 + total * 0.0), mask=once)
