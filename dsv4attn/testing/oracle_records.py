"""The oracle of V4.1's records in float64 numpy: rows to bytes and back, one group at a time.

Like `oracle`, it shares no code with what it judges. fp8: e4m3fn codes under one power of two for 32 dims. fp4: e2m1
codes, two to a byte, under a scale in e4m3fn for 16 dims. All dims are codes.
"""

from __future__ import annotations

import numpy as np

from dsv4attn.testing.oracle import (
    E8M0_BIAS,
    E8M0_NAN,
    F64,
    U8,
    decode_e4m3,
    encode_e4m3,
    round_bf16,
    scale_exponent,
)

FP8_GROUP, FP4_GROUP = 32, 16
LEAST_SCALE = 2.0**-9  # the smallest e4m3fn number above zero
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of the e2m1 codes 0 to 7; bit 3 is the sign
NAN_SCALE = 0x7F


def record_fp8(row: F64, scale_floor: float = 0.0) -> U8:
    """Return codes of a row [D], then a byte for each group. scale_floor: 1e-4 is FlashMLA's rule, 0 is vLLM's."""
    values, codes, scales = round_bf16(row), list[U8](), []
    for start in range(0, len(row), FP8_GROUP):
        group = values[start : start + FP8_GROUP]
        exponent = scale_exponent(max(float(np.abs(group).max()), 448 * scale_floor), 448.0)
        codes.append(encode_e4m3(np.ldexp(group, -exponent), False))
        scales.append(exponent + E8M0_BIAS)
    return np.concatenate([*codes, np.array(scales, dtype=np.uint8)])


def read_fp8(record: U8, dim: int) -> F64:
    """Return [dim] values of a record, as bf16; scale byte 255 is NaN."""
    byte = np.repeat(record[dim:].astype(np.int64), FP8_GROUP)[:dim]
    scale = np.where(byte == E8M0_NAN, np.nan, np.ldexp(1.0, byte - E8M0_BIAS))
    return round_bf16(decode_e4m3(record[:dim], False) * scale)


def record_fp4(row: F64) -> U8:
    """Return packed codes of a row [D], the even dim low, then a scale for each group."""
    values, codes, scales = round_bf16(row), list[U8](), []
    for start in range(0, len(row), FP4_GROUP):
        code, scale = group_fp4(values[start : start + FP4_GROUP])
        codes.append(code)
        scales.append(scale)
    flat = np.concatenate(codes)
    return np.concatenate([flat[::2] | flat[1::2] << 4, np.array(scales, dtype=np.uint8)])


def group_fp4(values: F64) -> tuple[U8, int]:
    """Return codes 0 to 15 of a group, and its scale byte: of a sixth of the largest magnitude, at least 2^-9."""
    if np.isnan(values).any():
        return np.zeros(len(values), dtype=np.uint8), NAN_SCALE
    byte = int(encode_e4m3(np.array(max(float(np.abs(values).max()) / 6, LEAST_SCALE)), False))
    sizes = np.minimum(np.abs(values) / decode_e4m3(np.array(byte, dtype=np.uint8), False), VALUES[-1])
    # of two equally near ones the even code: its distance counts as a little less
    distance = np.abs(sizes[:, None] - VALUES) + 1e-9 * (np.arange(8) % 2)
    codes = distance.argmin(1) + 8 * np.signbit(values)
    return codes.astype(np.uint8), byte


def read_fp4(record: U8, dim: int) -> F64:
    """Return [dim] values of a record."""
    packed, scales = record[: dim // 2], record[dim // 2 :]
    codes = np.stack([packed & 15, packed >> 4], axis=1).ravel()
    values = np.where(codes > 7, -VALUES[codes & 7], VALUES[codes & 7])
    return np.asarray(values * np.repeat(decode_e4m3(scales, False), FP4_GROUP)[:dim])
