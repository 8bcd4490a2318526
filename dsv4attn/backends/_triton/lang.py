"""Arithmetic that kernels have in common. Exact on every device, and in the interpreter, whose casts are not.

fp8 is read and written by integer operations, so no device needs the type. Interpreted, bf16 arithmetic multiplies
bit patterns and casts to bf16 cut bits off: a kernel then computes in fp32 (constant DT) and rounds by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) as fp32 of an E8M0 byte, int32. 0 is the subnormal 2^-127 and 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def dequantize(code, byte, FNUZ: tl.constexpr):
    """fp32 value of e4m3 codes (int32, 0..255) under E8M0 scale bytes (int32), exact for every finite code.

    The code's seven low bits, put where fp32 has exponent and mantissa, are its value times 2^-120 (2^-119 in FNUZ),
    subnormals included. Two multiplications, because one factor of both powers can overflow.
    """
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    unit: tl.constexpr = 0x7B000000 if FNUZ else 0x7B800000  # 2^119, 2^120
    value = bits.to(tl.float32, bitcast=True) * tl.full((), unit, tl.int32).to(tl.float32, bitcast=True)
    return value * power_of_two(byte)


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
