"""`check_compatible` and `convert_cache`: fingerprints, and conversion without loss (G20), read by the oracle."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn import KVCacheLayout, PagedKVCache, check_compatible, convert_cache, load_backend
from dsv4attn.core.cache import convert
from dsv4attn.core.cache.layout import Arrangement, Fp8Format
from dsv4attn.errors import ArgumentError, LayoutMismatchError
from dsv4attn.testing.kit.oracle_cache import OracleCache, PagePlacement, place_of
from dsv4attn.testing.kit.tolerances import read_row
from dsv4attn.testing.oracle import attention as oracle
from tests.core.attention.strategies import examples
from tests.harness import storage_of

DIMS: dict[str, Any] = {"nope_dim": 22, "rope_dim": 6, "group_size": 8}
RECORDS = {
    f"{dialect.name}-{arrangement.value}": KVCacheLayout.fp8_ds_mla(**DIMS, fp8_format=dialect, arrangement=arrangement)
    for dialect, arrangement in product(Fp8Format, (Arrangement.SPLIT, Arrangement.INTERLEAVED))
}
ROWS = {str(dtype): KVCacheLayout.rows(22, 6, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)}
LAYOUTS = {**RECORDS, **ROWS}
OCP, FNUZ = RECORDS["OCP-split"], RECORDS["FNUZ-split"]
BF16, FP32 = ROWS.values()
BUILT_IN = [
    *(
        KVCacheLayout.fp8_ds_mla(fp8_format=f, arrangement=a)
        for f, a in product(Fp8Format, (Arrangement.SPLIT, Arrangement.INTERLEAVED))
    ),
    KVCacheLayout.rows(),
    KVCacheLayout.rows(dtype=torch.float32),
]


def keys_of(cache: PagedKVCache) -> NDArray[np.float64]:
    """[capacity, D] keys, read by the oracle from the bytes of the pages."""
    layout, size = cache.layout, cache.block_size
    if not layout.is_quantised:
        return cache.tensor.double().flatten(0, 1).numpy()
    raw = storage_of(cache.tensor).numpy()
    starts = [cache.tensor.storage_offset() + block * cache.page_stride for block in range(cache.num_blocks)]
    return np.array([read_row(raw[start + place_of(layout, i, size)], layout) for start in starts for i in range(size)])


def holds(layout: KVCacheLayout, codes: NDArray[np.uint8], scales: tuple[int, int] = (100, 140)) -> PagedKVCache:
    """A cache of 3 pages of 4 with gaps, filled with any codes under scales of a range; rows hold what those mean."""
    book = OracleCache.blank(layout if layout.is_quantised else OCP, 3, PagePlacement(4, gap=10, bytes_before=6), "cpu")
    rng = np.random.default_rng(int(codes.sum()))
    rope = (rng.standard_normal((12, 6)).astype(np.float32).view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    bytes_ = rng.integers(*scales, (12, 8), endpoint=True).astype(np.uint8)
    bytes_[:, 3:] = 0
    book.write_records(range(12), [*np.concatenate([codes, rope, bytes_], axis=1)])
    if layout.is_quantised:
        return book.cache
    cache = PagedKVCache.allocate(layout, 3, 4)
    cache.tensor.copy_(torch.from_numpy(keys_of(book.cache)).unflatten(0, (3, 4)))
    return cache


def random_codes(seed: int) -> NDArray[np.uint8]:
    """Any codes, NaN and -0 included, for 12 records."""
    return np.random.default_rng(seed).integers(0, 256, (12, 22)).astype(np.uint8)


def blank(layout: KVCacheLayout, page: int = 4) -> PagedKVCache:
    """Twelve slots of zeros."""
    return PagedKVCache.allocate(layout, 12 // page, page)


def bytes_in(cache: PagedKVCache) -> bytes:
    """All bytes of a cache, gaps included."""
    return bytes(storage_of(cache.tensor).view(torch.uint8).tolist())


# identity


@pytest.mark.parametrize(("writer", "reader"), list(permutations(BUILT_IN, 2)))
def test_g20_no_two_built_in_layouts_are_compatible(writer: KVCacheLayout, reader: KVCacheLayout) -> None:
    ways: list[tuple[KVCacheLayout | str, KVCacheLayout | str]] = [
        (writer, reader),
        (writer.fingerprint, reader),
        (writer, reader.fingerprint),
        (writer.fingerprint, reader.fingerprint),
    ]
    for a, b in ways:
        with pytest.raises(LayoutMismatchError, match="convert_cache") as info:
            check_compatible(a, b)
        assert writer.fingerprint in str(info.value)
        assert reader.fingerprint in str(info.value)


@pytest.mark.parametrize("layout", BUILT_IN)
def test_g20_a_layout_is_compatible_with_itself_and_its_fingerprint(layout: KVCacheLayout) -> None:
    check_compatible(layout, evolve(layout, page_alignment=4))
    check_compatible(layout, layout.fingerprint)
    check_compatible(layout.fingerprint, layout)


def test_g20_a_mismatch_names_what_differs_and_nothing_else() -> None:
    with pytest.raises(LayoutMismatchError, match="e4m3fnuz, interleaved instead of e4m3fn, split ->"):
        check_compatible(RECORDS["FNUZ-interleaved"], OCP.fingerprint)
    with pytest.raises(LayoutMismatchError, match="nothing instead of split"):
        check_compatible(OCP.fingerprint.removesuffix(":split"), OCP)


# conversion

LOSSLESS = [
    (a, b)
    for a, b in product(LAYOUTS, LAYOUTS)
    if LAYOUTS[a].fp8_format is LAYOUTS[b].fp8_format
    or (a in RECORDS and b in ROWS)
    or (a[:3], b[:4]) == ("OCP", "FNUZ")
]


@pytest.mark.parametrize(("source", "target"), LOSSLESS)
@pytest.mark.parametrize("page", [1, 2, 4, 12])
def test_g20_every_key_of_every_lossless_pair_stays(source: str, target: str, page: int) -> None:
    cache = holds(LAYOUTS[source], random_codes(page))
    original, other = bytes_in(cache), blank(LAYOUTS[target], page)

    convert_cache(cache, other)

    np.testing.assert_array_equal(keys_of(other), keys_of(cache))
    assert np.isnan(keys_of(cache)).any()
    assert bytes_in(cache) == original


@examples(60)
@given(seed=st.integers(0, 2**32), pair=st.sampled_from(LOSSLESS), data=st.data())
def test_g20_only_the_slots_that_are_named_are_written(seed: int, pair: tuple[str, str], data: st.DataObject) -> None:
    source, target = holds(LAYOUTS[pair[0]], random_codes(seed)), holds(LAYOUTS[pair[1]], random_codes(seed + 1))
    slots = data.draw(st.lists(st.integers(0, 11), max_size=12))
    expected = keys_of(target)
    expected[slots] = keys_of(source)[slots]

    convert_cache(source, target, torch.tensor(slots, dtype=torch.int32))

    np.testing.assert_array_equal(keys_of(target), expected)


@pytest.mark.parametrize("dialect", Fp8Format)
def test_g20_arrangements_move_bytes_there_and_back(dialect: Fp8Format) -> None:
    split = holds(RECORDS[f"{dialect.name}-split"], random_codes(1), (0, 255))
    between, back = blank(RECORDS[f"{dialect.name}-interleaved"], 3), blank(split.layout)

    convert_cache(split, between)
    convert_cache(between, back)

    for name in ("nope", "rope", "scale"):
        assert torch.equal(split.region(name), back.region(name))


def can_be_ocp(codes: NDArray[np.uint8], byte: int) -> bool:
    """Whether some OCP scale holds a group of FNUZ codes: all are tried."""
    values = oracle.decode_e4m3(codes, True)
    values = values[~np.isnan(values)]
    known = oracle.decode_e4m3(np.arange(256, dtype=np.uint8), False)
    return bool(np.isin(values * 2.0 ** (byte - np.arange(255.0)[:, None]), known).all(1).any())


@examples(60)
@given(seed=st.integers(0, 2**32), byte=st.integers(0, 254), large=st.booleans())
def test_g20_between_dialects_a_key_stays_or_nothing_is_written(seed: int, byte: int, large: bool) -> None:
    codes = random_codes(seed)
    codes[:, :] = np.where((codes & 0x7F) == 0x7F, codes - (not large), codes)
    codes[1:] = 0
    source, target = holds(FNUZ, codes, (byte, byte)), holds(OCP, random_codes(7))
    groups = [codes[0, i : i + 8] for i in range(0, 22, 8)]
    original = bytes_in(target)

    if all(can_be_ocp(group, byte) for group in groups):
        convert_cache(source, target)
        np.testing.assert_array_equal(keys_of(target), keys_of(source))
    else:
        with pytest.raises(LayoutMismatchError, match=r"e4m3fn:.*cannot hold slot 0 ->"):
            convert_cache(source, target)
        assert bytes_in(target) == original


def test_g20_the_largest_and_the_smallest_fnuz_code_of_one_group_have_no_ocp_scale() -> None:
    codes = np.zeros((12, 22), dtype=np.uint8)
    codes[5, 8:10] = 0x7F, 0x01

    with pytest.raises(LayoutMismatchError, match="slot 5"):
        convert_cache(holds(FNUZ, codes), blank(OCP))
    slots = torch.tensor([4, 6])
    convert_cache(holds(FNUZ, codes), blank(OCP), slots)
    codes[5, 9] = 0
    convert_cache(holds(FNUZ, codes), blank(OCP))


@pytest.mark.parametrize(("code", "fits"), [(0x7E, False), (0x77, True)])
def test_g20_the_last_ocp_scale_serves_what_fnuz_reaches_without_it(code: int, fits: bool) -> None:
    codes = np.full((12, 22), code, dtype=np.uint8)
    source, target = holds(OCP, codes, (254, 254)), blank(FNUZ)
    if fits:
        convert_cache(source, target)
        np.testing.assert_array_equal(keys_of(target), keys_of(source))
    else:
        with pytest.raises(LayoutMismatchError, match="slot 0"):
            convert_cache(source, target)


def first_value(cache: PagedKVCache) -> float:
    """The first value of the first key; unlike `keys_of`, not rounded to bf16."""
    if not cache.layout.is_quantised:
        return float(cache.tensor[0, 0, 0])
    code, byte = (cache.region(name)[0, 0, :1].numpy() for name in ("nope", "scale"))
    value = oracle.decode_e4m3(code, cache.layout.fp8_format is Fp8Format.FNUZ)
    return float(np.nan if byte[0] == 255 else value[0] * 2.0 ** (int(byte[0]) - 127))


@pytest.mark.parametrize("source", ["OCP-split", "FNUZ-split"])
@pytest.mark.parametrize("target", LAYOUTS)
def test_g20_at_the_ends_of_the_scales_a_key_stays_or_is_refused(source: str, target: str) -> None:
    for byte, code in product([0, 1, 2, 3, 253, 254, 255], [0x01, 0x08, 0x40, 0x7E]):
        codes = np.full((12, 22), code, dtype=np.uint8)
        cache, other = holds(RECORDS[source], codes, (byte, byte)), blank(LAYOUTS[target])
        value = first_value(cache)
        beyond = not np.isnan(value) and (value >= 2.0**128 or (value < 2.0**-133 and target == "torch.bfloat16"))
        without_scale = (source, target[:3], byte, code) in {
            ("OCP-split", "FNU", 254, 0x7E),
            ("FNUZ-split", "OCP", 0, 0x01),
        }
        if (target in ROWS and beyond) or without_scale:
            with pytest.raises(LayoutMismatchError, match="cannot hold slot 0"):
                convert_cache(cache, other)
            continue

        convert_cache(cache, other)

        np.testing.assert_equal(first_value(other), value, err_msg=f"scale byte {byte}, code {code}")


def test_g20_nothing_is_written_if_the_last_of_many_keys_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "TILE_SLOTS", 4)
    codes = random_codes(3)
    codes[11, :2] = 0x7F, 0x01
    codes[:11][(codes[:11] & 0x7F) == 0x7F] = 0x10
    source, target = holds(FNUZ, codes), holds(OCP, random_codes(4))
    original = bytes_in(target)

    with pytest.raises(LayoutMismatchError, match="slot 11"):
        convert_cache(source, target)

    assert bytes_in(target) == original
    convert_cache(source, target, torch.arange(11))
    np.testing.assert_array_equal(keys_of(target)[:11], keys_of(source)[:11])


def test_g20_fp32_rows_become_bf16_if_nothing_finer_is_in_them() -> None:
    source, target = blank(FP32), blank(BF16)
    source.tensor[1, 2, 3] = 1 + 2.0**-7
    convert_cache(source, target)
    assert torch.equal(target.tensor.float(), source.tensor)

    source.tensor[2, 1, 0] = 1 + 2.0**-8
    with pytest.raises(LayoutMismatchError, match="rows/1:bfloat16:nope22:rope6, which cannot hold slot 9"):
        convert_cache(source, target)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *product(ROWS.values(), RECORDS.values()),
        (OCP, KVCacheLayout.fp8_ds_mla(22, 6, group_size=4)),
        (OCP, KVCacheLayout.fp8_ds_mla(24, 6, group_size=8)),
        (BF16, KVCacheLayout.rows(24, 4)),
        (OCP, KVCacheLayout.rows(24, 4)),
    ],
)
def test_g20_pairs_that_cannot_keep_keys_are_refused_whatever_they_hold(
    source: KVCacheLayout, target: KVCacheLayout
) -> None:
    with pytest.raises(LayoutMismatchError, match=r"^target: expected a layout that holds keys of"):
        convert_cache(blank(source), blank(target))


@pytest.mark.parametrize("slots", [[-1], [0, 12], [11, 3]])
def test_g20_slots_must_be_in_both_caches(slots: list[int]) -> None:
    with pytest.raises(ArgumentError, match=r"slots: expected slots of both caches, 0 \.\. 7"):
        convert_cache(blank(OCP), PagedKVCache.allocate(OCP, 2, 4), torch.tensor(slots))


def test_g20_a_cache_is_not_converted_onto_itself() -> None:
    cache = blank(OCP)
    with pytest.raises(ArgumentError, match="target: expected memory of its own"):
        convert_cache(cache, cache.with_layout(arrangement=Arrangement.INTERLEAVED))


def test_g20_caches_of_no_slots_are_converted() -> None:
    convert_cache(PagedKVCache.allocate(OCP, 0, 4), PagedKVCache.allocate(FNUZ, 0, 4))


def test_g20_more_slots_than_a_tile_of_real_records_read_as_a_backend_reads_them() -> None:
    source, target = (PagedKVCache.allocate(layout, 67, 64) for layout in (BUILT_IN[0], BUILT_IN[4]))
    backend, k = load_backend(), torch.randn(67 * 64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    backend.quantize_and_insert_k_cache(k, source, torch.arange(67 * 64))

    convert_cache(source, target)

    def gathered(cache: PagedKVCache) -> Tensor:
        out = torch.zeros(1, 67 * 64, 512, dtype=torch.bfloat16)
        table, lens = torch.arange(67, dtype=torch.int32)[None], torch.tensor([67 * 64], dtype=torch.int32)
        backend.dequantize_and_gather_k_cache(out, cache, lens, None, table, 0)
        return out

    assert torch.equal(gathered(source), gathered(target))
    assert gathered(target).abs().amax() > 1
