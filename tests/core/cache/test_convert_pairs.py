"""`convert_cache` between all pairs of layouts against the oracle, and between caches that share memory."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsv4attn import KVCacheLayout, PagedKVCache, convert_cache
from dsv4attn.core.cache.layout import Arrangement, Fp8Format
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.reshard import reshard_cache
from dsv4attn.errors import ArgumentError, LayoutMismatchError
from dsv4attn.testing.kit.oracle_cache import place_of
from dsv4attn.testing.kit.tolerances import read_row
from tests.core.attention.strategies import examples

NOPE, ROPE, DIM = 32, 16, 128
LAYOUTS = {
    **{
        f"{f.value}-{a.value}": KVCacheLayout.fp8_ds_mla(NOPE, ROPE, fp8_format=f, arrangement=a, group_size=16)
        for f, a in product(Fp8Format, (Arrangement.SPLIT, Arrangement.INTERLEAVED))
    },
    **{
        f"v41-fp8-{a.value}": KVCacheLayout.v41_fp8(NOPE, ROPE, arrangement=a)
        for a in (Arrangement.SPLIT, Arrangement.INTERLEAVED)
    },
    **{
        f"v41-fp4-{a.value}": KVCacheLayout.v41_fp4(NOPE, ROPE, arrangement=a)
        for a in (Arrangement.SPLIT, Arrangement.INTERLEAVED)
    },
    "nvfp4": KVCacheLayout.of_record("v4_nvfp4", NOPE, ROPE),
    "rows-bf16": KVCacheLayout.rows(NOPE, ROPE),
    "rows-fp32": KVCacheLayout.rows(NOPE, ROPE, dtype=torch.float32),
    **{f"index-{f.value}": KVCacheLayout.index_fp8(DIM, fp8_format=f) for f in Fp8Format},
    "index-mxfp4": KVCacheLayout.index_mxfp4(DIM),
    "index-bf16": KVCacheLayout.rows(DIM, 0),
    "index-fp32": KVCacheLayout.rows(DIM, 0, dtype=torch.float32),
    "state": KVCacheLayout.compressor_state(DIM // 2),
}
FAMILIES = [
    {name for name in LAYOUTS if name.startswith(("e4m3fn-", "e4m3fnuz-"))},
    {"v41-fp8-split", "v41-fp8-interleaved"},
    {"v41-fp4-split", "v41-fp4-interleaved"},
    {"nvfp4"},
    {"index-e4m3fn", "index-e4m3fnuz"},
    {"index-mxfp4"},
]
"""Quantised records whose codes and groups are the same."""


def possible(source: str, target: str) -> bool:
    """Whether keys of moderate values can move: into rows of equal dims, or into a record of the same family."""
    of_index = [name.startswith("index") or name == "state" for name in (source, target)]
    if of_index[0] != of_index[1]:
        return False
    plain = target.startswith("rows") or target in ("index-bf16", "index-fp32", "state")
    return plain or any({source, target} <= family for family in FAMILIES)


def memory_of(cache: PagedKVCache) -> NDArray[np.uint8]:
    """All bytes of the cache's storage, shared with it."""
    raw: NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage()).numpy()
    return raw


def records_of(cache: PagedKVCache) -> list[NDArray[np.int64]]:
    """For each slot, the places in `memory_of` of the bytes of its record."""
    first = int(cache.tensor.storage_offset()) * cache.tensor.element_size()
    starts = [first + b * cache.page_stride for b in range(cache.num_blocks)]
    return [s + place_of(cache.layout, i, cache.block_size) for s in starts for i in range(cache.block_size)]


def keys_of(cache: PagedKVCache) -> NDArray[np.float64]:
    """[capacity, D] keys, by the oracle."""
    raw = memory_of(cache)
    return np.array([read_row(raw[place], cache.layout) for place in records_of(cache)])


def filled(layout: KVCacheLayout, seed: int, *, any_codes: bool) -> PagedKVCache:
    """Three pages of four records with random codes and scales. any_codes: NaN and the largest ones, too."""
    rng, cache = np.random.default_rng(seed), PagedKVCache.allocate(layout, 3, 4)
    if not layout.is_quantised:
        values = torch.from_numpy(rng.standard_normal(cache.tensor.shape)).bfloat16()
        cache.tensor.copy_(values)
        return cache
    raw = memory_of(cache)
    for place in records_of(cache):
        codes = rng.integers(0, 256, layout.coded_dims * layout.code_bits // 8).astype(np.uint8)
        if layout.fp8_format is not None and not any_codes:
            codes = (rng.integers(1, 0x70, codes.shape) | rng.integers(0, 2, codes.shape) << 7).astype(np.uint8)
        rope = (rng.standard_normal(layout.plain_dims).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
        if layout.scale_dtype == torch.float32:
            scales = (rng.choice([1.0, 1.0, 1.5, 0.75]) * 2.0 ** rng.integers(-20, 20, 1)).astype("<f4").view(np.uint8)
        else:
            scales = rng.integers(100, 120, layout.scale_bytes).astype(np.uint8)
            scales[layout.num_groups :] = 0
        raw[place] = np.concatenate([codes, rope.view(np.uint8), scales])
    return cache


@pytest.mark.parametrize("any_codes", [False, True])
@pytest.mark.parametrize("source", LAYOUTS)
def test_g20_of_every_pair_of_layouts_keys_stay_or_nothing_is_written(source: str, *, any_codes: bool) -> None:
    first = filled(LAYOUTS[source], 1, any_codes=any_codes)
    expected, said = keys_of(first), dict[str, str]()
    for target, layout in LAYOUTS.items():
        second = filled(layout, 2, any_codes=any_codes)
        original = memory_of(second).copy()
        try:
            convert_cache(first, second)
        except LayoutMismatchError as error:
            np.testing.assert_array_equal(memory_of(second), original)
            said[target] = str(error)
            continue
        np.testing.assert_array_equal(keys_of(second), expected, err_msg=target)
    for target, layout in LAYOUTS.items():
        if possible(source, target):
            # of any codes, some have no scale in the other dialect
            assert any_codes or target not in said
        else:
            keys = f"keys of {first.layout.fingerprint} without loss, got {layout.fingerprint} -> "
            assert said[target].startswith(f"target: expected a layout that holds {keys}")


@pytest.mark.parametrize("code", [0x00, 0x01, 0x38, 0x77, 0x7E, 0x7F, 0x80, 0xB8])
@pytest.mark.parametrize(("source", "target"), [("index-e4m3fn", "index-e4m3fnuz"), ("index-e4m3fnuz", "index-e4m3fn")])
def test_g20_at_the_ends_of_fp32_scales_an_index_key_stays_or_is_refused(code: int, source: str, target: str) -> None:
    for scale in (0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 1.0 + 2.0**-23, 2.0**126, 2.0**127, np.inf, np.nan):
        first, second = (PagedKVCache.allocate(LAYOUTS[name], 1, 1) for name in (source, target))
        memory_of(first)[:DIM] = code
        memory_of(first)[DIM : DIM + 4] = np.array([scale], "<f4").view(np.uint8)
        moved = scale * (2 if target.endswith("uz") else 0.5)
        with np.errstate(over="ignore", invalid="ignore"):  # beyond fp32; zero times infinity
            exact = np.isnan(scale) or float(np.float32(moved)) == moved
            try:
                convert_cache(first, second)
            except LayoutMismatchError:
                # the scale cannot be halved or doubled, or the largest code of one dialect is NaN in the other
                assert not exact or (source == "index-e4m3fnuz" and code == 0x7F)
            else:
                np.testing.assert_array_equal(keys_of(second), keys_of(first), err_msg=str(scale))


# memory of two caches


def carved(memory: torch.Tensor, start: int, pages: int, stride: int, layout: KVCacheLayout, size: int) -> PagedKVCache:
    """Pages in some memory, beginning at a byte."""
    if layout.is_quantised:
        shape, strides = (pages, size, layout.record_bytes), (stride, layout.record_bytes, 1)
        return PagedKVCache(memory.as_strided(shape, strides, start), layout)
    element = layout.dtype.itemsize
    rows = memory.view(layout.dtype)
    return PagedKVCache(
        rows.as_strided((pages, size, layout.head_dim), (stride // element, layout.head_dim, 1), start // element),
        layout,
    )


def touched(memory: torch.Tensor, cache: PagedKVCache) -> set[int]:
    """Bytes of the memory that belong to pages of a cache, found by writing its tensor."""
    memory.zero_()
    if cache.layout.is_quantised:
        for place in records_of(cache):
            memory[torch.from_numpy(place)] = 1
    else:
        cache.tensor.fill_(torch.nan)
    found_bytes = set(memory.nonzero()[:, 0].tolist())
    if not cache.layout.is_quantised:  # some bytes of a NaN are zero
        size = cache.layout.dtype.itemsize
        found_bytes = {byte // size * size + i for byte in found_bytes for i in range(size)}
    return found_bytes


QUANTISED = KVCacheLayout.fp8_ds_mla(6, 2, group_size=8)
PLAIN = KVCacheLayout.rows(6, 2)


@examples(200)
@given(data=st.data())
def test_g20_pages_share_memory_exactly_if_some_byte_belongs_to_both(data: st.DataObject) -> None:
    memory = torch.zeros(2048, dtype=torch.uint8)
    caches = []
    for _ in range(2):
        layout, size = data.draw(st.sampled_from([QUANTISED, PLAIN])), data.draw(st.integers(1, 3))
        stride = layout.page_bytes(size) + 2 * data.draw(st.integers(0, 60))
        pages, start = data.draw(st.integers(0, 6)), 2 * data.draw(st.integers(0, 200))
        caches.append(carved(memory, start, pages, stride, layout, size))
    first, second = caches
    both = touched(memory, first) & touched(memory, second)

    assert first.overlaps(second) == second.overlaps(first) == bool(both)


def test_g20_rows_that_lie_apart_in_a_page_may_hold_those_of_another_cache() -> None:
    memory = torch.zeros(400, dtype=torch.bfloat16)
    first, second, third = (
        PagedKVCache(memory.as_strided((3, 4, 8), (128, 32, 1), start), PLAIN) for start in (0, 8, 7)
    )
    # and pages that follow each other within a row of pages
    turned = PagedKVCache(memory.as_strided((4, 3, 8), (32, 128, 1), 16), PLAIN)
    assert not first.overlaps(second)
    assert not first.overlaps(turned)
    assert first.overlaps(third)
    assert second.overlaps(third)
    assert turned.overlaps(PagedKVCache(memory.as_strided((4, 3, 8), (32, 128, 1), 23), PLAIN))


def test_g20_a_cache_may_lie_between_the_pages_of_its_source() -> None:
    interleaved = evolve(QUANTISED, arrangement=Arrangement.INTERLEAVED)
    stride, memory = 2 * QUANTISED.page_bytes(4), torch.zeros(4096, dtype=torch.uint8)
    first, second = (
        carved(memory, start, 5, stride, layout, 4)
        for start, layout in ((0, QUANTISED), (QUANTISED.page_bytes(4), interleaved))
    )
    rng = np.random.default_rng(0)
    for place in records_of(first):
        memory[torch.from_numpy(place)] = torch.from_numpy(rng.integers(100, 120, len(place)).astype(np.uint8))
    expected = keys_of(first)

    convert_cache(first, second)

    np.testing.assert_array_equal(keys_of(first), expected)
    np.testing.assert_array_equal(keys_of(second), expected)


@pytest.mark.parametrize("shift", [-3, -1, 0, 1, 3])
def test_g20_a_target_in_the_memory_of_its_source_is_refused_at_any_address(shift: int) -> None:
    interleaved = evolve(QUANTISED, arrangement=Arrangement.INTERLEAVED)
    stride, memory = QUANTISED.page_stride(4), torch.zeros(20 * 64, dtype=torch.uint8)
    first = carved(memory, 4 * stride, 4, stride, QUANTISED, 4)
    second, same = (carved(memory, (4 + shift) * stride, 4, stride, layout, 4) for layout in (interleaved, QUANTISED))
    memory.fill_(3)

    with pytest.raises(ArgumentError, match=r"^target: expected memory of its own, got the memory of source"):
        convert_cache(first, second)
    pages = torch.arange(4)
    with pytest.raises(ArgumentError, match=r"^target: expected memory of its own, got the memory of sources"):
        reshard_cache([(first, pages)], (same, pages), 4, Ownership(0, 1))
    assert bool((memory == 3).all())


@pytest.mark.parametrize(("dim", "block_size", "count"), [(130, 1, 2), (129, 2, 4), (29, 6, 4), (2, 3, 2)])
def test_pages_whose_scales_are_not_aligned_are_refused(dim: int, block_size: int, count: int) -> None:
    layout = KVCacheLayout.index_fp8(dim)
    with pytest.raises(
        ArgumentError, match=rf"^block_size: expected a multiple of {count} records, .*, got {block_size}"
    ):
        PagedKVCache.allocate(layout, 2, block_size)
    assert PagedKVCache.allocate(layout, 2, count).region("scale").shape == (2, count, 1)
