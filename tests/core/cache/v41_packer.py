"""An independent packer and reader of V4.1's records, of V4's of 4 bits, and of MXFP4, from the written formats alone.

It imports nothing of the library. Values are exact fractions, codes are found by the distance to every value of the
grid, and bytes are placed one record at a time, so that it is slow and has no code in common with what it judges.

    fp8, 528 bytes: a code of e4m3fn for each of 512 dims, RoPE dims too; then 16 exponents biased by 127, of 32 dims.
    fp4, 288 bytes: e2m1 codes, the even dim in the low half; then 32 scales in e4m3fn, of 16 dims.
    nvfp4, 384 bytes: e2m1 codes of 448 dims as above, 64 bf16 values; after all of these of a page 28 scales in e4m3fn,
        of 16 dims, and 4 bytes of padding, for each record.
    mxfp4, of index keys: e2m1 codes, and an exponent biased by 127 for each 32 dims.
    "interleaved": record i of a page begins at i * record. "split": all codes of the page, then all scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]

FP8_GROUP, FP4_GROUP = 32, 16
VLLM, FLASHMLA = "1e-4 under the maximum", "1e-4 under the scale"
"""The two floors: max(a, 1e-4) / 448, and max(a / 448, 1e-4), each rounded up to a power of two."""
E2M1 = tuple(map(Fraction, ("0", "1/2", "1", "3/2", "2", "3", "4", "6")))


@cache
def e4m3() -> tuple[Fraction, ...]:
    """Values of the codes 0 to 126 of e4m3fn; 127 is NaN."""
    values = []
    for code in range(127):
        exponent, mantissa = divmod(code, 8)
        values.append(Fraction(8 * (exponent > 0) + mantissa) * Fraction(2) ** (max(exponent, 1) - 10))
    return tuple(values)


@cache
def power(exponent: int) -> Fraction:
    """A power of two."""
    return Fraction(2) ** exponent


def nearest(value: Fraction, grid: Sequence[Fraction]) -> int:
    """Number of the nearest value of a grid, of the even number between two; beyond the last it is the last."""
    low, high = 0, len(grid) - 1
    if value >= grid[high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if grid[middle] <= value else (low, middle)
    below, above = value - grid[low], grid[high] - value
    if below == above:
        return low if low % 2 == 0 else high
    return low if below < above else high


def fp8_group(values: Sequence[float], floor: str = VLLM) -> tuple[list[int], int]:
    """Codes of a group of numbers, and its scale byte."""
    top = max(abs(Fraction(v)) for v in values)
    tiny = Fraction("1e-4")
    scale = max(top, tiny) / 448 if floor == VLLM else max(top / 448, tiny)
    exponent = -127
    while power(exponent) < scale:
        exponent += 1
    codes = [nearest(abs(Fraction(v)) / power(exponent), e4m3()) | _sign(v, 0x80) for v in values]
    return codes, exponent + 127


def fp4_group(values: Sequence[float]) -> tuple[list[int], int]:
    """Codes of a group, 0 to 15, and its scale byte. A group with a NaN has a NaN for a scale, and codes of zero."""
    if any(math.isnan(v) for v in values):
        return [0] * len(values), 0x7F
    top = max(abs(Fraction(v)) for v in values) / 6
    byte = nearest(max(top, Fraction(1, 512)), e4m3())
    return [nearest(abs(Fraction(v)) / e4m3()[byte], E2M1) | _sign(v, 8) for v in values], byte


def _sign(value: float, bit: int) -> int:
    return bit if math.copysign(1.0, value) < 0 else 0


def pack_fp8(row: Sequence[float], floor: str = VLLM) -> U8:
    """The record of a row of bf16 values: D codes, then a byte for each group."""
    groups = [fp8_group(row[i : i + FP8_GROUP], floor) for i in range(0, len(row), FP8_GROUP)]
    return np.array([code for codes, _ in groups for code in codes] + [byte for _, byte in groups], dtype=np.uint8)


def pack_fp4(row: Sequence[float]) -> U8:
    """The record of a row of bf16 values: D / 2 bytes of codes, then a byte for each group."""
    groups = [fp4_group(row[i : i + FP4_GROUP]) for i in range(0, len(row), FP4_GROUP)]
    codes = [code for codes, _ in groups for code in codes]
    pairs = [codes[i] + 16 * codes[i + 1] for i in range(0, len(codes), 2)]
    return np.array(pairs + [byte for _, byte in groups], dtype=np.uint8)


def mxfp4_group(values: Sequence[float]) -> tuple[list[int], int]:
    """Codes of a group, 0 to 15, and its scale byte: the smallest power of two that leaves no value beyond 6."""
    top, exponent = max(abs(Fraction(v)) for v in values), -126
    while 6 * power(exponent) < top:
        exponent += 1
    signs = [8 if v < 0 else 0 for v in values]
    return [nearest(abs(Fraction(v)) / power(exponent), E2M1) | s for v, s in zip(values, signs, strict=True)], (
        exponent + 127
    )


def pack_nvfp4(row: Sequence[float], nope: int) -> U8:
    """The record of a row of bf16 values: codes, bf16 values, and scales with zeros up to a multiple of 8 bytes."""
    groups = [fp4_group(row[i : min(i + FP4_GROUP, nope)]) for i in range(0, nope, FP4_GROUP)]
    codes = [code for codes, _ in groups for code in codes]
    pairs = [codes[i] + 16 * codes[i + 1] for i in range(0, nope, 2)]
    scales = [byte for _, byte in groups] + [0] * (-len(groups) % 8)
    plain = (np.array(row[nope:], dtype=np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return np.concatenate([np.array(pairs, dtype=np.uint8), plain, np.array(scales, dtype=np.uint8)])


def unpack_nvfp4(record: U8, nope: int, rope: int) -> F64:
    """[nope + rope] values of what `pack_nvfp4` makes, exact in float64; a scale may have a sign, or be NaN."""
    row, end = np.empty(nope + rope), nope // 2 + 2 * rope
    for d in range(nope):
        code, scale = int(record[d // 2]) // (16 if d % 2 else 1) % 16, decode_e4m3(int(record[end + d // FP4_GROUP]))
        row[d] = math.copysign(float(E2M1[code % 8]), -1.0 if code > 7 else 1.0) * scale
    plain = np.ascontiguousarray(record[nope // 2 : end]).view("<u2").astype(np.uint32) << 16
    row[nope:] = plain.view(np.float32)
    return row


@cache
def decode_e4m3(code: int) -> float:
    """The value of a byte."""
    value = math.nan if code % 128 == 127 else float(e4m3()[code % 128])
    return math.copysign(value, -1.0 if code > 127 else 1.0)


def unpack_fp8(record: U8, dim: int) -> F64:
    """[dim] values of a record, exact in float64; scale byte 255 is NaN."""
    row = np.empty(dim)
    for d in range(dim):
        byte = int(record[dim + d // FP8_GROUP])
        row[d] = math.nan if byte == 255 else math.ldexp(decode_e4m3(int(record[d])), byte - 127)
    return row


def unpack_fp4(record: U8, dim: int) -> F64:
    """[dim] values of a record, exact in float64; a scale may have a sign, or be NaN."""
    row = np.empty(dim)
    for d in range(dim):
        code = int(record[d // 2]) // (16 if d % 2 else 1) % 16
        size = math.copysign(float(E2M1[code % 8]), -1.0 if code > 7 else 1.0)
        row[d] = size * decode_e4m3(int(record[dim // 2 + d // FP4_GROUP]))
    return row


def page_of(records: Sequence[U8], data: int, stride: int, *, split: bool) -> U8:
    """Bytes of a page of `stride` bytes with these records, whose first `data` bytes are codes; elsewhere 0xFF."""
    page = np.full(stride, 0xFF, dtype=np.uint8)
    count, size = len(records), len(records[0])
    for i, record in enumerate(records):
        code_at = i * (data if split else size)
        scale_at = count * data + i * (size - data) if split else code_at + data
        page[code_at : code_at + data] = record[:data]
        page[scale_at : scale_at + size - data] = record[data:]
    return page


def bf16(values: F64) -> F64:
    """Float64 rounded to bf16, ties to even; NaN stays."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return np.where(np.isnan(values), np.nan, rounded)
