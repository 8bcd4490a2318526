"""Reading keys inside an attention loop: from slots to a tile of rows, in the dtype of the matrix product.

A tile is two pieces of C columns side by side (one, if a key is narrow), since a register file holds no whole tile.
`SegmentForm.kind` chooses one of the readers: WORDS for V4's own 448 + 64 record on aligned pages, four codes at a
time; FP4_WORDS for V4's records of 4 bits and these dims, eight codes at a time; BYTES for V4's records of other dims
or alignment, whose last ROPE dims are bf16; CODES and NIBBLES for V4.1's records, whose dims are all codes, of fp8 and
of e2m1; CODE_WORDS and NIBBLE_WORDS for those of 512 dims on aligned pages, four and eight codes at a time; ROWS for
plain rows. The bf16 values of a record begin right after its codes. A row that is not `ok` reads as zeros and touches
no memory. FORM, ROW and TILE are `forms.SegmentForm`, `RowForm` and `TileForm`.

A NaN code is decoded to NaN; unless ASM is CONVERTED, so is its whole word. Which values of a key are NaN does not
matter: each of its logits is then, and with it the whole row of the output.

ASM chooses how words are decoded: 0 by plain integer operations, SHIFTED and CONVERTED in PTX, the latter where the
processor has instructions that convert e4m3 codes. No processor has one for FNUZ codes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention.ptx import CONVERT, DECODE, DECODE_E2M1

WORDS = tl.constexpr(0)
BYTES = tl.constexpr(1)
ROWS = tl.constexpr(2)
CODES = tl.constexpr(3)
NIBBLES = tl.constexpr(4)
CODE_WORDS = tl.constexpr(5)
NIBBLE_WORDS = tl.constexpr(6)
FP4_WORDS = tl.constexpr(7)

SHIFTED = tl.constexpr(1)
CONVERTED = tl.constexpr(2)


Pages = namedtuple("Pages", "base size factor log stride row_stride last_slot")
"""Where the keys of a segment are. base: pointer to a cache's uint8 pages, or to rows. size, factor, log: rows of a
page, and how to divide by them, see `attention.launch.divider`. stride, row_stride: in units of the form."""


@triton.jit
def page_and_row(slot, ok, pages, page_stride):
    """Offset of each slot's page, int64, in the unit of page_stride, and the slot's number in the page.

    Zeros where not ok. Pages are found by a multiplication, since a division takes twenty instructions.
    """
    slot = tl.where(ok, slot, 0)
    twice = slot.to(tl.uint32, bitcast=True) << 1
    page = (tl.umulhi(twice, pages.factor.to(tl.uint32, bitcast=True)) >> pages.log.to(tl.uint32)).to(tl.int32)
    return page.to(tl.int64) * page_stride, (slot - page * pages.size).to(tl.int64)


@triton.jit
def load_words(pages, slot, ok, runtime_zero, FORM: tl.constexpr):
    """Raw int32 words of a record of 448 codes, 64 bf16 values and 8 scale bytes: 32 + 32 + 32 + 16, 32, 1, 1 a row.

    slot, ok: [N] int32 and bool. Words stay words so that a loop can carry them from one tile to the next, one register
    for four codes.
    """
    base = pages.base
    page, row = page_and_row(slot, ok, pages, pages.stride.to(tl.int64) * 16)
    if FORM.interleaved:
        data = tl.multiple_of((base + (page + row * 584)).to(tl.pointer_type(tl.int32)), 8)
        scale = tl.multiple_of((base + (page + row * 584 + 576)).to(tl.pointer_type(tl.int32)), 8)
    else:
        data = tl.multiple_of((base + (page + row * 576)).to(tl.pointer_type(tl.int32)), 16)
        behind = page + pages.size.to(tl.int64) * 576
        scale = tl.multiple_of((base + (behind + row * 8)).to(tl.pointer_type(tl.int32)), 8)
    of, mask = tl.arange(0, 32)[None, :], ok[:, None]
    short = tl.arange(0, 16)[None, :]
    # the compiler cannot prove that `runtime_zero` is 0: each thread loads two words, those next to its RoPE values
    x0 = tl.load(data[:, None] + of, mask=mask, other=0)
    x1 = tl.load(data[:, None] + (32 + of), mask=mask, other=0)
    x2 = tl.load(data[:, None] + (64 + of), mask=mask, other=0)
    x3 = tl.load(data[:, None] + (2 * runtime_zero + 96 + short), mask=mask, other=0)
    rope = tl.load(data[:, None] + (112 + of), mask=mask, other=0)
    low = tl.load(scale, mask=ok, other=0)
    high = tl.load(scale + 1, mask=ok, other=0)
    return x0, x1, x2, x3, rope, low, high


@triton.jit
def halves(words, N: tl.constexpr, W: tl.constexpr, DT: tl.constexpr):
    """[N, W] int32 of two bf16 values each as [N, 2 * W] in DT."""
    if tl.bfloat16 == DT:
        low, high = (words & 0xFFFF).to(tl.uint16), ((words >> 16) & 0xFFFF).to(tl.uint16)
    else:
        low, high = words << 16, words & -0x10000
    return tl.reshape(tl.join(low, high), [N, 2 * W]).to(DT, bitcast=True)


@triton.jit
def scale_of(bits, ASM: tl.constexpr):
    """2^(byte - 127) of the lowest byte: fp32, or for ASM int32 of the same bf16 twice."""
    byte = bits & 255
    if ASM:
        half = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
        scale = half | (half << 16)
    else:
        scale = numerics.scale_of_byte(byte)
    return scale


@triton.jit
def spread(scale, N: tl.constexpr, G: tl.constexpr, W: tl.constexpr = 32):
    """[N, G] as [N, W], each over W / G words."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], [N, G, W // G]), [N, W])


@triton.jit
def codes(words, scale, fnuz, N: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Words [N, W] of four e4m3 codes, under scales [N, W] as `scale_of` makes them, as [N, 2 * W] of two bf16 values.

    A code's bits, put where bf16 has exponent and mantissa, are its value times 2^-120 (2^-119 in FNUZ). Two packed
    multiplications put it right, and are exact; one with the product of both powers overflows above byte 134.
    All four values of a word are NaN if one of its codes is: see above. CONVERTED needs one multiplication, and fnuz to
    be false; there a NaN code alone is NaN.
    """
    if ASM == CONVERTED:
        first, second = tl.inline_asm_elementwise(
            CONVERT, "=&r,=&r,r,r", [words, scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        return tl.reshape(tl.join(first, second), [N, 2 * W])
    unit = tl.where(fnuz, 0x7B007B00, 0x7B807B80) if ASM else tl.where(fnuz, 0x7B000000, 0x7B800000)
    nan = numerics.has_nan(words, fnuz)
    if ASM:
        unit += tl.zeros_like(words)
        # NaN through the scale: another unit would take registers that the kernel does not have
        scale = tl.where(nan, 0x7FC07FC0, scale)
        first, second = tl.inline_asm_elementwise(
            DECODE, "=r,=r,r,r,r", [words, scale, unit], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        unit = tl.where(nan, 0x7FC00000, unit).to(tl.float32, bitcast=True)
        first = _half(words, scale, unit, 0) | (_half(words, scale, unit, 8) << 16)
        second = _half(words, scale, unit, 16) | (_half(words, scale, unit, 24) << 16)
    return tl.reshape(tl.join(first, second), [N, 2 * W])


@triton.jit
def _half(words, scale, unit, SHIFT: tl.constexpr):
    """The bf16 bits of one code of each word; the value is exact, so cutting is rounding."""
    code = words >> SHIFT
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    return ((bits.to(tl.float32, bitcast=True) * unit * scale).to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def unpack_words(x0, x1, x2, x3, rope, low, high, fnuz, N: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr):
    """Both pieces, [N, 256] each, of what `load_words` returned, in the order of `columns`."""
    # a scale serves 64 codes: computed once, and broadcast to their 16 words
    shift = (tl.arange(0, 2) * 8)[None, :]
    k0 = codes(x0, spread(scale_of(low[:, None] >> shift, ASM), N, 2), fnuz, N, 32, ASM)
    k1 = codes(x1, spread(scale_of(low[:, None] >> (shift + 16), ASM), N, 2), fnuz, N, 32, ASM)
    k2 = codes(x2, spread(scale_of(high[:, None] >> shift, ASM), N, 2), fnuz, N, 32, ASM)
    k3 = codes(x3, tl.broadcast_to(scale_of(high >> 16, ASM)[:, None], [N, 16]), fnuz, N, 16, ASM)
    k3 = in_turn(k3, rope, N)
    left, right = beside(k0, k1, N, 64), beside(k2, k3, N, 64)
    return halves(left, N, 128, DT), halves(right, N, 128, DT)


@triton.jit
def in_turn(codes, rope, N: tl.constexpr):
    """[N, 32] and [N, 32] as [N, 64]: eight columns of codes, then eight of the rope, in each thread; see `columns`."""
    pair = tl.join(tl.reshape(codes, [N, 8, 4]), tl.reshape(rope, [N, 8, 4]))
    return tl.reshape(tl.permute(pair, (0, 1, 3, 2)), [N, 64])


@triton.jit
def pairs(words, scale, N: tl.constexpr, W: tl.constexpr, ASM: tl.constexpr):
    """Words [N, W] of eight e2m1 codes, under scales [N, W] as `scales_of_codes` makes them, as [N, 4 * W] of two bf16.

    A code's bits, put where bf16 has exponent and mantissa, are its value times 2^-126.
    """
    if ASM:
        unit = 0x7E807E80 + tl.zeros_like(words)
        a, b, c, d = tl.inline_asm_elementwise(
            DECODE_E2M1, "=&r,=&r,=&r,=&r,r,r,r", [words, scale, unit],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a = _pair(words, scale, 0)
        b = _pair(words, scale, 8)
        c = _pair(words, scale, 16)
        d = _pair(words, scale, 24)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [N, 4 * W])


@triton.jit
def _pair(words, scale, SHIFT: tl.constexpr):
    """The bf16 bits of the two codes of one byte of each word."""
    unit = tl.full((), 253 << 23, tl.int32).to(tl.float32, bitcast=True)
    code = words >> SHIFT
    even = ((code & 8) << 28) | ((code & 7) << 22)
    odd = ((code & 0x80) << 24) | ((code & 0x70) << 18)
    low = (even.to(tl.float32, bitcast=True) * unit * scale).to(tl.int32, bitcast=True)
    high = (odd.to(tl.float32, bitcast=True) * unit * scale).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def scales_of_codes(bits, N: tl.constexpr, G: tl.constexpr, ASM: tl.constexpr):
    """The e4m3fn values [N, G] of the lowest bytes of int64 [N, K]: fp32, or for ASM int32 of the same bf16 twice."""
    shift = (tl.arange(0, G // bits.shape[1]) * 8).to(tl.int64)[None, None, :]
    byte = tl.reshape(bits[:, :, None] >> shift, [N, G]).to(tl.int32) & 255
    scale = numerics.dequantize(byte, 127 + tl.zeros_like(byte), False)
    if ASM:
        half = (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        scale = half | (half << 16)
    return scale


@triton.jit
def record_words(pages, slot, ok, DATA: tl.constexpr, SCALES: tl.constexpr, FORM: tl.constexpr):
    """Addresses [N] of each slot's data and of its scales, as bytes.

    slot, ok: [N] int32 and bool. DATA, SCALES: bytes, multiples of 16.
    """
    page, row = page_and_row(slot, ok, pages, pages.stride.to(tl.int64) * 16)
    if FORM.interleaved:
        data = page + row * (DATA + SCALES)
        scale = data + DATA
    else:
        data = page + row * DATA
        scale = page + pages.size.to(tl.int64) * DATA + row * SCALES
    return tl.multiple_of(pages.base + data, 16), tl.multiple_of(pages.base + scale, 16)


@triton.jit
def read_code_words(pages, slot, ok, FORM: tl.constexpr, TILE: tl.constexpr):
    """Both pieces, [N, 256] each in DT, of records of 512 e4m3fn codes and 16 exponents; see `record_words`."""
    N: tl.constexpr = TILE.keys
    DT: tl.constexpr = TILE.dtype
    ASM: tl.constexpr = TILE.assembly
    data, scale = record_words(pages, slot, ok, 512, 16, FORM)
    data = data.to(tl.pointer_type(tl.int32))[:, None] + tl.arange(0, 32)[None, :]
    scale, mask = scale.to(tl.pointer_type(tl.int32)), ok[:, None]
    # all loads are in flight before the first word is decoded
    x0 = tl.load(data, mask=mask, other=0)
    x1 = tl.load(data + 32, mask=mask, other=0)
    x2 = tl.load(data + 64, mask=mask, other=0)
    x3 = tl.load(data + 96, mask=mask, other=0)
    s0 = tl.load(scale, mask=ok, other=0)
    s1 = tl.load(scale + 1, mask=ok, other=0)
    s2 = tl.load(scale + 2, mask=ok, other=0)
    s3 = tl.load(scale + 3, mask=ok, other=0)
    # a scale serves 32 codes: computed once, and broadcast to their 8 words
    shift = (tl.arange(0, 4) * 8)[None, :]
    k0 = codes(x0, spread(scale_of(s0[:, None] >> shift, ASM), N, 4), False, N, 32, ASM)
    k1 = codes(x1, spread(scale_of(s1[:, None] >> shift, ASM), N, 4), False, N, 32, ASM)
    k2 = codes(x2, spread(scale_of(s2[:, None] >> shift, ASM), N, 4), False, N, 32, ASM)
    k3 = codes(x3, spread(scale_of(s3[:, None] >> shift, ASM), N, 4), False, N, 32, ASM)
    return halves(beside(k0, k1, N, 64), N, 128, DT), halves(beside(k2, k3, N, 64), N, 128, DT)


@triton.jit
def read_nibble_words(pages, slot, ok, runtime_zero, FORM: tl.constexpr, TILE: tl.constexpr):
    """Both pieces, [N, 256] each in DT, of records of 512 e2m1 codes and 32 scales in e4m3fn; see `record_words`."""
    N: tl.constexpr = TILE.keys
    DT: tl.constexpr = TILE.dtype
    ASM: tl.constexpr = TILE.assembly
    data, scale = record_words(pages, slot, ok, 256, 32, FORM)
    # the compiler cannot prove that `runtime_zero` is 0: each thread loads two words, the 16 codes of one scale
    data = data.to(tl.pointer_type(tl.int32))[:, None] + (2 * runtime_zero + tl.arange(0, 32))[None, :]
    scale = scale.to(tl.pointer_type(tl.int64))[:, None] + tl.arange(0, 2)[None, :]
    mask = ok[:, None]
    x0 = tl.load(data, mask=mask, other=0)
    x1 = tl.load(data + 32, mask=mask, other=0)
    s0 = tl.load(scale, mask=mask, other=0)
    s1 = tl.load(scale + 2, mask=mask, other=0)
    left = pairs(x0, spread(scales_of_codes(s0, N, 16, ASM), N, 16), N, 32, ASM)
    right = pairs(x1, spread(scales_of_codes(s1, N, 16, ASM), N, 16), N, 32, ASM)
    return halves(left, N, 128, DT), halves(right, N, 128, DT)


@triton.jit
def read_fp4_words(pages, slot, ok, runtime_zero, FORM: tl.constexpr, TILE: tl.constexpr):
    """Both pieces, [N, 256] each in DT, of records of 448 e2m1 codes and 64 bf16 values, in the order of `columns`.

    A record has 28 scales in e4m3fn, and 4 bytes of padding.
    """
    N: tl.constexpr = TILE.keys
    DT: tl.constexpr = TILE.dtype
    ASM: tl.constexpr = TILE.assembly
    data, scale = record_words(pages, slot, ok, 352, 32, FORM)
    words, of, mask = data.to(tl.pointer_type(tl.int32))[:, None], tl.arange(0, 32)[None, :], ok[:, None]
    # the compiler cannot prove that `runtime_zero` is 0: each thread loads two words, and of the last codes one, which
    # are those next to its RoPE values
    x0 = tl.load(words + (2 * runtime_zero + of), mask=mask, other=0)
    x1 = tl.load(words + (2 * runtime_zero + 32 + tl.arange(0, 16)[None, :]), mask=mask, other=0)
    x2 = tl.load(words + (runtime_zero + 48 + tl.arange(0, 8)[None, :]), mask=mask, other=0)
    rope = tl.load(words + (56 + of), mask=mask, other=0)
    wide, part = scale.to(tl.pointer_type(tl.int64)), scale.to(tl.pointer_type(tl.int32))
    # a scale serves two words
    s0 = tl.load(wide[:, None] + tl.arange(0, 2)[None, :], mask=mask, other=0)
    s1 = tl.load(wide + 2, mask=ok, other=0)
    s2 = tl.load(part + 6, mask=ok, other=0)
    scale0 = spread(scales_of_codes(s0, N, 16, ASM), N, 16)
    scale1 = spread(scales_of_codes(s1[:, None], N, 8, ASM), N, 8, 16)
    scale2 = spread(scales_of_codes(s2.to(tl.int64)[:, None], N, 4, ASM), N, 4, 8)
    left = pairs(x0, scale0, N, 32, ASM)
    k2, k3 = pairs(x1, scale1, N, 16, ASM), pairs(x2, scale2, N, 8, ASM)
    right = beside(k2, in_turn(k3, rope, N), N, 64)
    return halves(left, N, 128, DT), halves(right, N, 128, DT)


@triton.jit
def columns(C: tl.constexpr, IN_TURN: tl.constexpr):
    """Which column of a key stands at each place of the left and of the right piece.

    IN_TURN: the last 128 of a record read by WORDS or FP4_WORDS alternate, eight columns of codes and eight of the
    rope: in their order they would have to change threads, and a product does not mind theirs, as long as q and the
    output have the same.
    """
    left = tl.arange(0, C)
    right = C + left
    if IN_TURN:
        turn = left - 128
        right = tl.where(left < 128, right, 384 + turn // 8 % 2 * 64 + turn // 16 * 8 + turn % 8)
    return left, right


@triton.jit
def beside(left, right, N: tl.constexpr, W: tl.constexpr):
    """[N, W] and [N, W] as [N, 2 * W]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [N, 2 * W])


@triton.jit
def widen(values, DT: tl.constexpr):
    """Loaded values in DT; bf16 becomes fp32 by its bits, because interpreted casts lose subnormal numbers."""
    if values.dtype == tl.bfloat16 and tl.bfloat16 != DT:
        values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values.to(DT)


@triton.jit
def read_piece(
    pages, slot, ok, fnuz, FIRST: tl.constexpr, C: tl.constexpr, FORM: tl.constexpr, ROW: tl.constexpr, DT: tl.constexpr
):
    """Columns FIRST .. FIRST + C of each slot's key, [N, C] in DT; columns past the last are zero.

    slot, ok: [N] int32 and bool. fnuz: as in FORM, which knows it of one of two segments that are read by one loop.
    """
    NOPE: tl.constexpr = ROW.nope
    D: tl.constexpr = ROW.nope + ROW.rope
    base = pages.base
    page, of = page_and_row(slot, ok, pages, pages.stride.to(tl.int64) * FORM.unit)
    column = FIRST + tl.arange(0, C)
    if FORM.kind == ROWS:
        WIDE: tl.constexpr = FORM.unit * (base.dtype.element_ty.primitive_bitwidth // 8)
        row = tl.multiple_of(base + (page + of * pages.row_stride * FORM.unit), WIDE)
        mask = ok[:, None] & (column < D)[None, :]
        values = widen(tl.load(row[:, None] + column[None, :], mask=mask, other=0.0), DT)
    else:
        CODED: tl.constexpr = NOPE if FORM.kind == BYTES else D
        PACKED: tl.constexpr = CODED if FORM.coding == numerics.FP8 else CODED // 2
        DATA: tl.constexpr = PACKED + 2 * (D - CODED)
        if FORM.interleaved:
            data = page + of * (DATA + FORM.scales)
            scale = data + DATA
        else:
            data = page + of * DATA
            scale = page + pages.size.to(tl.int64) * DATA + of * FORM.scales
        is_code = ok[:, None] & (column < CODED)[None, :]
        at = column if FORM.coding == numerics.FP8 else column // 2
        code = tl.load(base + (data[:, None] + at[None, :]), mask=is_code, other=0).to(tl.int32)
        byte = tl.load(base + (scale[:, None] + (column // FORM.group)[None, :]), mask=is_code, other=127).to(tl.int32)
        if FORM.coding == numerics.FP8:
            value = numerics.dequantize(code, byte, fnuz)
        else:
            value = numerics.decode_e2m1((code >> (column % 2 * 4)[None, :]) & 15, byte, FORM.coding)
        values = tl.where(is_code, value, 0.0)
        if FORM.kind != BYTES:
            return values.to(DT)
        rope = (base + (data + PACKED)).to(tl.pointer_type(tl.bfloat16))[:, None] + (column - NOPE)[None, :]
        is_rope = ok[:, None] & ((column >= NOPE) & (column < D))[None, :]
        values = tl.where(is_code, values, tl.load(rope, mask=is_rope, other=0.0).to(tl.float32)).to(DT)
    return values
