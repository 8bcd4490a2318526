"""Arithmetic that kernels have in common. Exact on every device, and in the interpreter, whose casts are not.

fp8 is read and written by integer operations, so no device needs the type. Interpreted, bf16 arithmetic multiplies
bit patterns and casts to bf16 cut bits off: a kernel then computes in fp32 (constant DT) and rounds by itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.codings import CODINGS
from dsv4attn.core.cache.key_records import Coding

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1e30)
"""Where a running maximum starts: finite, so that a tile without keys makes no NaN."""
FP8 = tl.constexpr(CODINGS[Coding.FP8])
NVFP4 = tl.constexpr(CODINGS[Coding.NVFP4])
MXFP4 = tl.constexpr(CODINGS[Coding.MXFP4])
"""Codings, as in `core.cache.key_records.Coding`: which codes a record has, and under which scales."""


@triton.jit
def scale_of_byte(byte):
    """2^(byte - 127) as fp32 of an E8M0 byte, int32. 0 is the subnormal 2^-127 and 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dequantize(code, byte, fnuz):
    """fp32 value of e4m3 codes (int32, 0..255) under E8M0 scale bytes (int32), exact for every finite code, else NaN.

    The code's seven low bits, put where fp32 has exponent and mantissa, are its value times 2^-120 (2^-119 in FNUZ),
    subnormals included. Two multiplications, because one factor of both powers can overflow.
    """
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    unit = tl.where(fnuz, 0x7B000000, 0x7B800000).to(tl.float32, bitcast=True)  # 2^119, 2^120
    value = bits.to(tl.float32, bitcast=True) * unit * scale_of_byte(byte)
    return tl.where(is_nan(code, fnuz), float("nan"), value)


@triton.jit
def decode_e2m1(code, byte, CODING: tl.constexpr):
    """fp32 value of e2m1 codes (int32, 0..15) under scale bytes (int32, 0..255); exact, NaN if the scale is.

    A code's three low bits, put where fp32 has exponent and mantissa, are its value times 2^-126. CODING: NVFP4, bytes
    in e4m3fn, or MXFP4, exponents.
    """
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    unit = tl.full((), 253 << 23, tl.int32).to(tl.float32, bitcast=True)
    value = bits.to(tl.float32, bitcast=True) * unit
    # 127 is the byte of 2^0
    return value * (dequantize(byte, 127 + tl.zeros_like(byte), False) if CODING == NVFP4 else scale_of_byte(byte))


@triton.jit
def is_nan(code, fnuz):
    """Whether an e4m3 code, int32, is no number: 0x7F and 0xFF, or, in FNUZ, 0x80 alone."""
    # if fnuz is a constant, the compiler removes the other comparison
    return tl.where(fnuz, (code & 0xFF) == 0x80, (code & 0x7F) == 0x7F)


@triton.jit
def has_nan(words, fnuz):
    """Whether one of the four e4m3 codes of each word, int32, is NaN.

    Adding 1 turns a byte's upper bit if the seven below it are ones. FNUZ: subtracting 1 sets it, where it was not set,
    only in a zero, which 0x80 becomes when its own upper bit is turned. Bytes carry into the next one only from a NaN.
    """
    words ^= tl.where(fnuz, -0x7F7F7F80, 0)
    turned = (words + tl.where(fnuz, -0x01010101, 0x01010101)) ^ words
    return (turned & ~(words & tl.where(fnuz, -1, 0)) & -0x7F7F7F80) != 0


@triton.jit
def or_nan(largest, total):
    """The largest logits, or NaN where the total of weights is: maxima pass over a NaN among logits, sums do not."""
    return tl.where(total == total, largest, total)  # noqa: PLR0124 - NaN is not


@triton.jit
def round_to(x, DT: tl.constexpr, EXACT_CASTS: tl.constexpr):
    """fp32 x in dtype DT, to nearest even. EXACT_CASTS: whether casts round, as they do everywhere but interpreted."""
    if EXACT_CASTS or tl.bfloat16 != DT:
        rounded = x.to(DT)
    else:
        bits = x.to(tl.int32, bitcast=True)
        is_number = x == x  # noqa: PLR0124 - NaN is not
        nearest = tl.where(is_number, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        # the upper half is a bf16; a cast would lose subnormal numbers
        rounded = (nearest >> 16).to(tl.int16).to(DT, bitcast=True)
    return rounded


@triton.jit
def cast(x, DT: tl.constexpr, EXACT_CASTS: tl.constexpr):
    """Round x to dtype DT, to nearest even; what has that dtype stays bit for bit as it is."""
    if x.dtype == DT:
        return x
    return round_to(x.to(tl.float32), DT, EXACT_CASTS)


@triton.jit
def rotate(even, odd, cos, sin):
    """A pair turned by its angle."""
    return even * cos - odd * sin, odd * cos + even * sin


@triton.jit
def angles_of(position, TABLE, table_stride, num_positions, ALIGNED: tl.constexpr = 1):
    """Where the cosines and sines of a position stand; `position` points to it, int64.

    TABLE: [num_positions, 2 * angles] fp32, the cosines of a position before its sines. Positions of padding rows may
    be anything. Their rows are garbage anyway, and must only not fault. ALIGNED: bytes that divide every row's address.
    """
    row = tl.minimum(tl.maximum(tl.load(position), 0), num_positions - 1)
    return tl.multiple_of(TABLE + row * table_stride, ALIGNED)
