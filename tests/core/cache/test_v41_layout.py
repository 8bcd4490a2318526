"""Layouts of V4.1: sizes, pages, fingerprints, conversions and refusals."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.core.cache.convert import check_compatible, convert_cache
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import CacheFacts
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, LayoutMismatchError
from tests.core.cache.v41_packer import bf16, pack_fp4, pack_fp8, page_of, unpack_fp4, unpack_fp8

SPLIT = Arrangement.SPLIT
FP8, FP8_SPLIT = KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp8(arrangement=SPLIT)
FP4, FP4_SPLIT = KVCacheLayout.v41_fp4(), KVCacheLayout.v41_fp4(arrangement=SPLIT)
LAYOUTS = [FP8, FP8_SPLIT, FP4, FP4_SPLIT]
V4, V4_INTERLEAVED = KVCacheLayout.fp8_ds_mla(), KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED)


def held(layout: KVCacheLayout, seed: int = 0, block_size: int = 3) -> tuple[PagedKVCache, np.ndarray]:
    """A cache of two pages that the packer wrote, and the [6, 512] values of its keys."""
    rows = bf16(np.random.default_rng(seed).normal(size=(2 * block_size, layout.head_dim)))
    pack, unpack = (pack_fp8, unpack_fp8) if layout.fp8_format else (pack_fp4, unpack_fp4)
    records = [pack(row) for row in rows]
    stride, split = layout.page_stride(block_size), layout.arrangement is SPLIT
    pages = [page_of(records[i : i + block_size], layout.data_bytes, stride, split=split) for i in (0, block_size)]
    cache = PagedKVCache(torch.from_numpy(np.stack(pages)), layout, block_size=block_size)
    return cache, np.stack([unpack(record, layout.head_dim) for record in records])


def test_records_have_the_published_sizes() -> None:
    assert [layout.record_bytes for layout in LAYOUTS] == [528, 528, 288, 288]
    assert [(layout.data_bytes, layout.scale_bytes, layout.num_groups) for layout in (FP8, FP4)] == [
        (512, 16, 16),
        (256, 32, 32),
    ]
    assert {(layout.coded_dims, layout.plain_dims, layout.nope_dim, layout.rope_dim) for layout in LAYOUTS} == {
        (512, 0, 448, 64)
    }
    assert {layout.row_dtype for layout in LAYOUTS} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("layout", "block_size", "stride"),
    [
        # whole records, though 8448 is no multiple of 512
        (FP8, 16, 8448),
        (FP8, 32, 16896),
        (FP8, 1, 528),
        (FP4, 7, 2016),
        (FP4, 128, 36864),
        # published strides of the other arrangement, and a page that is rounded up
        (FP8_SPLIT, 64, 33792),
        (FP8_SPLIT, 16, 8704),
        (FP4_SPLIT, 64, 18432),
        (FP4_SPLIT, 1, 512),
    ],
)
def test_pages_of_interleaved_records_are_whole_records(layout: KVCacheLayout, block_size: int, stride: int) -> None:
    assert layout.page_stride(block_size) == stride
    if layout.arrangement is Arrangement.INTERLEAVED:
        assert stride % layout.record_bytes == 0
    cache = PagedKVCache.allocate(layout, 2, block_size)
    assert cache.page_stride == stride


def test_g20_fingerprints_hold_record_and_arrangement_and_never_change() -> None:
    # engines store these strings: a change here breaks their caches.
    assert [layout.fingerprint for layout in LAYOUTS] == [
        "v41_fp8/1:e4m3fn:nope448:rope64:coded:ue8m0x32:scales16:interleaved",
        "v41_fp8/1:e4m3fn:nope448:rope64:coded:ue8m0x32:scales16:split",
        "v41_fp4/1:e2m1:nope448:rope64:coded:e4m3fnx16:scales32:interleaved",
        "v41_fp4/1:e2m1:nope448:rope64:coded:e4m3fnx16:scales32:split",
    ]


def test_what_a_writer_does_is_not_part_of_a_fingerprint() -> None:
    for other in (
        KVCacheLayout.v41_fp8(scale_floor=1e-4),
        KVCacheLayout.v41_fp8(rounds_to_fp4=True),
        evolve(FP8, page_alignment=3168),
    ):
        assert other != FP8
        check_layout(other, FP8, "cache")


# a record of V4's kind that has as many bytes, groups and dims as each of V4.1's
LOOK_ALIKES = [
    KVCacheLayout("fp8_ds_mla", 512, 0, torch.uint8, Fp8Format.OCP, 448.0, 32, arrangement)
    for arrangement in (Arrangement.SPLIT, Arrangement.INTERLEAVED)
]


@pytest.mark.parametrize(("left", "right"), [*combinations([FP8, FP8_SPLIT, *LOOK_ALIKES], 2)])
def test_g2_records_of_528_bytes_are_never_taken_for_each_other(left: KVCacheLayout, right: KVCacheLayout) -> None:
    assert left.record_bytes == right.record_bytes == 528
    with pytest.raises(LayoutMismatchError, match="equally long, but mean different things"):
        check_layout(left, right, "cache")
    with pytest.raises(LayoutMismatchError):
        check_compatible(left, right.fingerprint)


def test_g2_arrangements_are_refused_by_layout_though_the_bytes_could_be_read() -> None:
    with pytest.raises(LayoutMismatchError, match="interleaved instead of split"):
        check_compatible(FP4, FP4_SPLIT)
    with pytest.raises(LayoutMismatchError, match="arrangement='split' not 'interleaved'"):
        check_layout(FP4_SPLIT, FP4, "cache")


def test_a_window_cache_of_fp4_is_refused_by_name_wherever_a_window_is_named() -> None:
    window, good = PagedKVCache.allocate(FP4, 2, 4), PagedKVCache.allocate(FP8, 2, 4)
    with pytest.raises(LayoutMismatchError, match=r"^swa: expected a layout of window caches, got v41_fp4.*v41_fp8 of"):
        LayerCaches(window, good)
    assert LayerCaches(good, window).compressed is window
    model = ModelGeometry.preset("flash")
    with pytest.raises(LayoutMismatchError, match=r"^bounds.swa: expected a layout of window caches"):
        WarmupSpec.of(model, Limits(1, 1, 1), swa=FP4)
    assert (
        WarmupSpec.of(model, Limits(1, 1, 1), swa=FP8, compressed=FP4).caches(model.layer_of_kind("c4a"))[1][0] == FP4
    )


def test_dims_of_the_model_are_those_of_the_layout_though_all_are_codes() -> None:
    model = ModelGeometry.preset("flash")
    with pytest.raises(ArgumentError, match=r"^bounds.compressed: expected a layout of 448 \+ 64 dims"):
        WarmupSpec.of(model, Limits(1, 1, 1), swa=FP8, compressed=KVCacheLayout.v41_fp4(512, 0))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.fingerprint)
def test_the_first_page_may_begin_at_an_odd_byte_and_gaps_are_skipped(layout: KVCacheLayout) -> None:
    paged, values = held(layout)
    stride = paged.page_stride + (1 if layout.arrangement is SPLIT else layout.record_bytes)
    flat = torch.full((5 + 2 * stride,), 0xFF, dtype=torch.uint8)
    for page in range(2):
        flat[5 + page * stride :][: paged.page_stride] = paged.tensor[page]
    cache = PagedKVCache(flat[5:].as_strided((2, paged.page_stride), (stride, 1), 5), layout, block_size=3)

    rows = PagedKVCache.allocate(KVCacheLayout.rows(), 2, 3)
    convert_cache(cache, rows)

    np.testing.assert_array_equal(rows.tensor.double().numpy().reshape(6, 512), values)


@pytest.mark.parametrize(("layout", "stride"), [(FP8, 2176), (FP8, 2113), (FP8, 2560), (FP4, 1280), (FP4, 1153)])
def test_interleaved_pages_of_other_than_whole_records_are_refused(layout: KVCacheLayout, stride: int) -> None:
    record = layout.record_bytes
    flat, pages = torch.zeros(3 * stride, dtype=torch.uint8), (stride, record, 1)
    said = rf"^cache tensor: expected .* a multiple of {record} bytes for {layout.name}, got {stride} bytes -> allocate"
    for count in (2, 3):
        with pytest.raises(ArgumentError, match=said):
            PagedKVCache(flat.as_strided((count, 4, record), pages), layout)
        with pytest.raises(ArgumentError, match=said):
            PagedKVCache(flat.as_strided((count, stride), (stride, 1)), layout, block_size=4)
    # the stride of a single page means nothing
    PagedKVCache(flat.as_strided((1, 4, record), pages), layout)
    PagedKVCache(flat.as_strided((0, 4, record), pages), layout)


@pytest.mark.parametrize(("layout", "stride"), [(FP8, 2640), (FP4, 4608), (FP8_SPLIT, 2176), (FP4_SPLIT, 1153)])
def test_pages_of_whole_records_and_split_pages_may_lie_apart(layout: KVCacheLayout, stride: int) -> None:
    flat = torch.zeros(2 * stride, dtype=torch.uint8)
    assert PagedKVCache(flat.as_strided((2, stride), (stride, 1)), layout, block_size=4).page_stride == stride


def test_facts_of_a_cache_name_the_record() -> None:
    assert CacheFacts.of(FP8, 32) == CacheFacts("v41_fp8", "e4m3fn", 32, "interleaved", 32)
    assert CacheFacts.of(FP4_SPLIT, 64) == CacheFacts("v41_fp4", "e2m1", 64, "split", 16)


def test_a_layer_of_selected_entries_may_have_both_records() -> None:
    layer = ModelGeometry.preset("flash").layer_of_kind(LayerKind.CSA)
    both = LayerCaches(PagedKVCache.allocate(FP8, 2, 32), PagedKVCache.allocate(FP4, 2, 64))
    assert [cache.layout for cache in both.segments(layer)] == [FP8, FP4]
    other = LayerCaches(PagedKVCache.allocate(FP8, 2, 32), PagedKVCache.allocate(FP4_SPLIT, 2, 64))
    assert both.signature != other.signature
