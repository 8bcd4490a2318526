"""The packer of V4.1's records against bytes written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.core.cache.v41_packer import (
    FLASHMLA,
    VLLM,
    decode_e4m3,
    fp4_group,
    fp8_group,
    pack_fp4,
    pack_fp8,
    page_of,
    unpack_fp4,
    unpack_fp8,
)


@pytest.mark.parametrize(
    ("values", "floor", "codes", "byte"),
    [
        # the largest is 448 exactly, so that the scale is 1
        ([448.0, -448.0, 1.0, -0.0, 0.5, 2.0**-9, 2.0**-10, 3 * 2.0**-10], VLLM, "7e fe 38 80 30 01 00 02", 127),
        # just above 448 the scale is 2; halves of the values
        ([450.0, 17.0, 19.0, 1.0], VLLM, "76 50 52 30", 128),
        # zeros: 2^-22 is the power of two above 1e-4 / 448, and 2^-13 the one above 1e-4
        ([0.0, -0.0], VLLM, "00 80", 105),
        ([0.0, -0.0], FLASHMLA, "00 80", 114),
        # 448 * 2^-14 = 0.02734375 is where both floors meet; a step above, they agree
        ([0.02734375], VLLM, "7e", 113),
        ([0.02734375], FLASHMLA, "76", 114),
        ([0.027587890625], VLLM, "76", 114),
        ([0.027587890625], FLASHMLA, "76", 114),
    ],
)
def test_a_group_of_fp8_has_these_bytes(values: list[float], floor: str, codes: str, byte: int) -> None:
    assert fp8_group(values, floor) == ([*bytes.fromhex(codes)], byte)


@pytest.mark.parametrize(
    ("values", "codes", "byte"),
    [
        # scale 1: every value of the grid, and every tie, which goes to the even code
        ([6.0, 0.0, -0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0], [7, 0, 8, 1, 10, 3, 4, 13, 6], 0x38),
        ([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, -0.25], [7, 0, 2, 2, 4, 4, 6, 6, 14, 8], 0x38),
        # 6.5 / 6 = 1.083 rounds up to 1.125; 6.25 / 6 = 1.0417 rounds down to 1, and the largest saturates
        ([6.5, 1.0], [7, 2], 0x39),
        ([6.25, 1.0], [7, 2], 0x38),
        # the least scale is 2^-9, also of zeros; a group with a NaN has no codes
        ([0.0, -0.0, 2.0**-10, 3 * 2.0**-11], [0, 8, 1, 2], 0x01),
        ([1.0, math.nan, -1.0], [0, 0, 0], 0x7F),
        # a scale of 448 saturates
        ([6 * 512.0, -448.0], [7, 10], 0x7E),
    ],
)
def test_a_group_of_fp4_has_these_bytes(values: list[float], codes: list[int], byte: int) -> None:
    assert fp4_group(values) == (codes, byte)


def test_records_have_their_sizes_and_read_as_they_were_written() -> None:
    row = [(-1.0) ** d * 2.0 ** (d % 13 - 6) for d in range(512)]
    fp8, fp4 = pack_fp8(row), pack_fp4(row)

    assert (fp8.size, fp4.size) == (528, 288)
    np.testing.assert_array_equal(unpack_fp8(fp8, 512), row)
    assert np.abs(unpack_fp4(fp4, 512) - row).max() <= 64 / 6


def test_the_even_dim_is_in_the_low_half() -> None:
    record = pack_fp4([6.0, -1.0] + [0.0] * 14)

    assert record.tolist() == [0xA7, 0, 0, 0, 0, 0, 0, 0, 0x38]
    assert unpack_fp4(record, 16)[:3].tolist() == [6.0, -1.0, 0.0]


def test_a_page_has_records_in_turn_or_codes_before_scales() -> None:
    records = [np.array([1, 2, 3, 9], dtype=np.uint8), np.array([4, 5, 6, 8], dtype=np.uint8)]

    assert page_of(records, 3, 10, split=False).tolist() == [1, 2, 3, 9, 4, 5, 6, 8, 255, 255]
    assert page_of(records, 3, 10, split=True).tolist() == [1, 2, 3, 4, 5, 6, 9, 8, 255, 255]


def test_codes_of_e4m3_are_those_of_the_format() -> None:
    assert [decode_e4m3(code) for code in (0, 1, 7, 8, 0x38, 0x7E, 0xFE, 0x81)] == [
        0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 1, 448, -448, -(2.0**-9)
    ]  # fmt: skip
    assert math.isnan(decode_e4m3(0x7F))
    assert math.isnan(decode_e4m3(0xFF))
