"""The oracle's numbers and records, judged by hand-computed bytes, torch's own casts and exact arithmetic."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import read_row
from dsv4attn.testing.oracle import attention as oracle
from tests.testing.arrays import quick, rng, same_bits

INF = math.inf
FORMATS = [pytest.param(False, id="ocp"), pytest.param(True, id="fnuz")]
FP8_DTYPE = {False: torch.float8_e4m3fn, True: torch.float8_e4m3fnuz}
FP8_MAX = {False: 448.0, True: 240.0}
FLASH = {"nope_dim": 448, "rope_dim": 64, "group_size": 64, "scale_bytes": 8}
SHORT_GROUP = {"nope_dim": 22, "rope_dim": 6, "group_size": 8, "scale_bytes": 4}

any_float = st.floats(allow_nan=False, allow_infinity=False, width=64)
bf16_sized = st.floats(min_value=-3e38, max_value=3e38, width=64)


def torch_e4m3(values: oracle.F32, fnuz: bool) -> oracle.U8:
    """Cast float32 values to e4m3 codes with torch."""
    return torch.from_numpy(values).to(FP8_DTYPE[fnuz]).view(torch.uint8).numpy()


def nearest(x: float, candidates: oracle.F64) -> Fraction:
    """Return the exact distance from x to the nearest candidate."""
    at = int(np.searchsorted(candidates, x))
    around = candidates[max(at - 1, 0) : at + 1]
    return min(abs(Fraction(x) - Fraction(float(c))) for c in around)


def all_bf16() -> oracle.F64:
    """Return every finite non-negative bf16, in order."""
    return (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("fnuz", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (9, 20), (16, 7)], ids=str)
def test_a_block_scaled_matrix_is_codes_times_their_own_scale(fnuz: bool, shape: tuple[int, int]) -> None:
    codes = rng(11).integers(0, 120, shape).astype(np.uint8)
    grid = -(-shape[0] // 8), -(-shape[1] // 8)
    factors, exponents = rng(12).random(grid).astype(np.float32), rng(13).integers(100, 140, grid).astype(np.uint8)
    for scale, factor in (
        (factors.astype(np.float64), factors),
        (exponents, np.exp2(exponents.astype(np.float32) - 127)),
    ):
        result = oracle.dequantize_blocks(codes, scale, fnuz, block=8)
        for i, j in np.ndindex(shape):
            code = torch.from_numpy(codes[i : i + 1, j]).view(FP8_DTYPE[fnuz]).float()
            assert result[i, j] == float((code * float(factor[i // 8, j // 8])).bfloat16())
    exponents[-1, -1] = 255
    assert np.isnan(oracle.dequantize_blocks(codes, exponents, fnuz, block=8)[-1, -1])
    with pytest.raises(ValueError, match="do not belong"):
        oracle.dequantize_blocks(codes, np.ones((3, 4)), fnuz, block=8)


@pytest.mark.parametrize("fnuz", FORMATS)
def test_every_e4m3_code_has_the_value_torch_gives_it(fnuz: bool) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(FP8_DTYPE[fnuz]).to(torch.float64).numpy()

    np.testing.assert_array_equal(oracle.decode_e4m3(codes, fnuz), expected)
    assert np.nanmax(oracle.decode_e4m3(codes, fnuz)) == FP8_MAX[fnuz]


@pytest.mark.parametrize("fnuz", FORMATS)
def test_every_e4m3_code_survives_decode_and_encode(fnuz: bool) -> None:
    codes = np.arange(256, dtype=np.uint8)
    back = oracle.encode_e4m3(oracle.decode_e4m3(codes, fnuz), fnuz)

    changed = codes[codes != back].tolist()
    assert changed == ([] if fnuz else [0xFF])  # both OCP NaN codes become the first


@pytest.mark.parametrize("fnuz", FORMATS)
def test_encoding_equals_the_torch_cast_for_random_values_and_all_ties(fnuz: bool) -> None:
    grid = np.unique(oracle.decode_e4m3(np.arange(0x7F, dtype=np.uint8), fnuz))
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    spread = rng().standard_normal(4000) * np.exp2(rng(1).integers(-14, 8, 4000))
    positive = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(INF)), spread])
    values = np.concatenate([positive, -positive]).astype(np.float32).clip(-FP8_MAX[fnuz], FP8_MAX[fnuz])

    np.testing.assert_array_equal(oracle.encode_e4m3(values.astype(np.float64), fnuz), torch_e4m3(values, fnuz))


@quick
@given(x=any_float, fnuz=st.booleans())
def test_encoding_finds_the_nearest_value_of_any_float64(x: float, fnuz: bool) -> None:
    table = oracle.decode_e4m3(np.arange(256, dtype=np.uint8), fnuz)
    inside = min(max(x, -FP8_MAX[fnuz]), FP8_MAX[fnuz])
    chosen = float(oracle.decode_e4m3(oracle.encode_e4m3(np.array([x]), fnuz), fnuz)[0])

    assert abs(Fraction(inside) - Fraction(chosen)) == nearest(inside, np.unique(table[~np.isnan(table)]))


def test_encoding_float64_rounds_once() -> None:
    just_above_a_tie = 1.0625 + 2.0**-40  # float32 would drop the last bit and then round the tie down

    assert oracle.encode_e4m3(np.array([1.0625, just_above_a_tie]), False).tolist() == [0x38, 0x39]


@pytest.mark.parametrize(
    ("fnuz", "expected"),
    [(False, [0x7E, 0xFE, 0x7E, 0x7F, 0x00, 0x80, 0x80]), (True, [0x7F, 0xFF, 0x7F, 0x80, 0x00, 0x00, 0x00])],
)
def test_encoding_of_special_values(fnuz: bool, expected: list[int]) -> None:
    specials = np.array([INF, -INF, 1e9, math.nan, 0.0, -0.0, -1e-9])

    assert oracle.encode_e4m3(specials, fnuz).tolist() == expected


def test_a_code_shared_by_both_formats_means_half_in_fnuz() -> None:
    codes = np.array([c for c in range(256) if c not in {0x7F, 0x80, 0xFF}], dtype=np.uint8)

    np.testing.assert_array_equal(2 * oracle.decode_e4m3(codes, True), oracle.decode_e4m3(codes, False))


def test_bf16_rounding_equals_torch_for_random_float32_bit_patterns() -> None:
    bits = rng().integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:4000] &= 0x807FFFFF  # subnormals
    values = bits.view(np.float32)
    expected = torch.from_numpy(values).bfloat16().double().numpy()
    finite = ~np.isnan(values)

    rounded = oracle.round_bf16(values[finite].astype(np.float64))
    assert same_bits(rounded, expected[finite])
    assert np.isnan(oracle.round_bf16(math.nan))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1 + 2.0**-8, 1.0),  # a tie goes to the even neighbour
        (1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7),  # float32 in between would make these two ties
        (1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-7),
        (2.0**-134, 0.0),
        (math.nextafter(2.0**-134, 1), 2.0**-133),
        (-(2.0**-140), -0.0),
        (5e-324, 0.0),
        (math.nextafter((2 - 2.0**-8) * 2.0**127, 0), (2 - 2.0**-7) * 2.0**127),
        ((2 - 2.0**-8) * 2.0**127, INF),
        (-sys.float_info.max, -INF),
        (-INF, -INF),
        (-0.0, -0.0),
    ],
)
def test_bf16_rounding_at_the_edges(x: float, expected: float) -> None:
    assert same_bits(oracle.round_bf16(x), expected)


@quick
@given(x=bf16_sized)
def test_bf16_rounding_finds_the_nearest_bf16_of_any_float64(x: float) -> None:
    table = all_bf16()
    rounded = float(oracle.round_bf16(x))

    assert abs(rounded) in table
    assert abs(Fraction(x) - Fraction(rounded)) == nearest(abs(x), table)


GOLDEN = [
    pytest.param(
        # 449 is no bf16: it becomes 448 and still fits a scale of 1; 450 does not, and 225 then rounds to 224
        [448, -448, 449, 0.5, 450, 1, -0.0, 2.0**-9, 1.0, -2.0],
        {"nope_dim": 8, "rope_dim": 2, "group_size": 4, "scale_bytes": 3, "fnuz": False},
        "7e fe 7e 30  76 30 80 00  80 3f 00 c0  7f 80 00",
        [448, -448, 448, 0.5, 448, 1, -0.0, 0, 1.0, -2.0],
        id="ocp",
    ),
    pytest.param(
        [240, 1, -0.5, 480, -0.0, 1.0 + 2.0**-8 + 2.0**-40, 2.0**-133],
        {"nope_dim": 5, "rope_dim": 2, "group_size": 3, "scale_bytes": 2, "fnuz": True},
        "7f 40 b8  7f 00  81 3f 01 00  7f 80",
        [240, 1, -0.5, 480, 0, 1.0 + 2.0**-7, 2.0**-133],
        id="fnuz",
    ),
    pytest.param(
        # the second group is short; its floor 1e-4 gives 2**-22, of which 2**-28 is 1/64
        [0, -0.0, 2.0**-28, 0, 7.0],
        {"nope_dim": 3, "rope_dim": 2, "group_size": 2, "scale_bytes": 4, "fnuz": False},
        "00 80  08  00 00 e0 40  69 69 00 00",
        [0, -0.0, 2.0**-28, 0, 7.0],
        id="floor",
    ),
]


@pytest.mark.parametrize(("row", "dims", "text", "read"), GOLDEN)
def test_golden_record(row: list[float], dims: dict[str, Any], text: str, read: list[float]) -> None:
    record = oracle.quantize_record(np.array(row), **dims)

    assert record.tobytes() == bytes.fromhex(text)
    assert same_bits(oracle.dequantize_record(record, **dims), read)


@pytest.mark.parametrize("dims", [FLASH, SHORT_GROUP])
@pytest.mark.parametrize("fnuz", FORMATS)
def test_records_equal_a_torch_quantiser_byte_for_byte(fnuz: bool, dims: dict[str, int]) -> None:
    nope, group = dims["nope_dim"], dims["group_size"]
    for seed in range(12):
        row = (rng(seed).standard_normal(nope + dims["rope_dim"]) * 10.0 ** (seed % 6 - 4)).astype(np.float32)
        rounded = torch.from_numpy(row).bfloat16()
        codes, scales = [], []
        for start in range(0, nope, group):
            part = rounded[start : min(start + group, nope)].float()
            exponent = torch.ceil(torch.log2(part.abs().max().clamp(min=1e-4).double() / FP8_MAX[fnuz]))
            scaled = (part.double() / torch.exp2(exponent)).clamp(-FP8_MAX[fnuz], FP8_MAX[fnuz])
            codes.append(scaled.float().to(FP8_DTYPE[fnuz]).view(torch.uint8))
            scales.append(int(exponent) + 127)
        tail = torch.tensor(scales + [0] * (dims["scale_bytes"] - len(scales)), dtype=torch.uint8)
        expected = torch.cat([*codes, rounded[nope:].view(torch.uint8), tail])

        record = oracle.quantize_record(row.astype(np.float64), fnuz=fnuz, **dims)
        np.testing.assert_array_equal(record, expected.numpy())


@pytest.mark.parametrize("fnuz", FORMATS)
def test_the_scale_exponent_of_every_bf16_is_the_ceiling_of_its_logarithm(fnuz: bool) -> None:
    amax = all_bf16()
    quotient = (np.maximum(amax, 1e-4) / FP8_MAX[fnuz]).astype(np.float32)
    mantissas, exponents = np.frexp(quotient)
    by_float32 = exponents - (mantissas == 0.5)  # a power of two is its own ceiling

    assert [oracle.scale_exponent(a, FP8_MAX[fnuz]) for a in amax.tolist()] == by_float32.tolist()


def test_scale_bytes_stay_between_105_and_254() -> None:
    dims: dict[str, Any] = {"nope_dim": 4, "rope_dim": 0, "group_size": 1, "scale_bytes": 4, "fnuz": False}
    largest = (2 - 2.0**-7) * 2.0**127

    record = oracle.quantize_record(np.array([0.0, 1e-4, largest, -INF]), **dims)
    assert record[4:].tolist() == [105, 105, 247, 254]
    assert record[:4].tolist() == [0x00, 0x7D, 0x78, 0xFE]


@quick
@given(values=st.lists(st.floats(-1e4, 1e4), min_size=12, max_size=12), fnuz=st.booleans())
def test_a_round_trip_errs_by_at_most_half_a_step_and_repeats_itself(values: list[float], fnuz: bool) -> None:
    dims: dict[str, Any] = {"nope_dim": 10, "rope_dim": 2, "group_size": 4, "scale_bytes": 3, "fnuz": fnuz}
    row = oracle.round_bf16(values)
    record = oracle.quantize_record(row, **dims)
    back = oracle.dequantize_record(record, **dims)
    scale = np.exp2(np.repeat(record[14:].astype(np.float64) - 127, 4)[:10])
    smallest_normal = 2.0 ** (-7 if fnuz else -6)

    allowed = np.maximum(np.abs(row[:10]), smallest_normal * scale) * 2.0**-4
    assert (np.abs(back[:10] - row[:10]) <= allowed).all()
    assert same_bits(back[10:], row[10:])
    assert same_bits(oracle.dequantize_record(oracle.quantize_record(back, **dims), **dims), back)


def test_reading_a_record_in_the_wrong_format_halves_it() -> None:
    record = oracle.quantize_record(rng().standard_normal(512), fnuz=False, **FLASH)
    right, wrong = (oracle.dequantize_record(record, fnuz=fnuz, **FLASH) for fnuz in (False, True))

    np.testing.assert_array_equal(2 * wrong[:448][record[:448] != 0x80], right[:448][record[:448] != 0x80])
    assert same_bits(wrong[448:], right[448:])


def test_scale_byte_255_reads_as_nan() -> None:
    record = np.array([0x38, 0x38, 255, 126], dtype=np.uint8)
    row = oracle.dequantize_record(record, nope_dim=2, rope_dim=0, group_size=1, fnuz=False, scale_bytes=2)

    np.testing.assert_array_equal(row, [math.nan, 0.5])


def test_a_record_that_cannot_be_is_refused() -> None:
    row = np.zeros(512)
    with pytest.raises(ValueError, match="needs 448 \\+ 64 values"):
        oracle.quantize_record(row[1:], fnuz=False, **FLASH)
    with pytest.raises(ValueError, match="7 scales in 6 bytes"):
        oracle.quantize_record(row, fnuz=False, **{**FLASH, "scale_bytes": 6})
    with pytest.raises(ValueError, match="holds NaN"):
        oracle.quantize_record(np.full(512, math.nan), fnuz=False, **FLASH)
    with pytest.raises(ValueError, match="not 584 bytes"):
        oracle.dequantize_record(np.zeros(583, dtype=np.uint8), fnuz=False, **FLASH)


@pytest.mark.parametrize(
    ("arrangement", "places"),
    [("split", [(0, 1728), (576, 1736), (1152, 1744)]), ("interleaved", [(0, 576), (584, 1160), (1168, 1744)])],
)
def test_a_poisoned_page_is_read_at_the_right_bytes(arrangement: str, places: list[tuple[int, int]]) -> None:
    page = np.full(2304, 0xFF, dtype=np.uint8)
    rows = rng().standard_normal((3, 512))
    records = [oracle.quantize_record(row, fnuz=False, **FLASH) for row in rows]
    for record, (data, scales) in zip(records, places, strict=True):
        page[data : data + 576], page[scales : scales + 8] = record[:576], record[576:]

    layout = KVCacheLayout.fp8_ds_mla(448, 64, arrangement=Arrangement(arrangement))
    for token, record in enumerate(records):
        result = read_row(page[place_of(layout, token, 3)], layout)
        assert same_bits(result, oracle.dequantize_record(record, fnuz=False, **FLASH))
