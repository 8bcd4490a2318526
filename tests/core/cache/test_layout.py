"""V4 cache layouts: sizes, pages, fingerprints, tensors that are refused, and addresses beyond 2^31 bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.errors import ArgumentError, LayoutMismatchError
from tests.harness import bytes_of

FLASH = KVCacheLayout.fp8_ds_mla()
TINY = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
SHORT_GROUP = KVCacheLayout.fp8_ds_mla(22, 6, group_size=8)
MANY_GROUPS = KVCacheLayout.fp8_ds_mla(80, 8, group_size=8)
INTERLEAVED = KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED)
FNUZ = KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ)
BF16, FP32 = KVCacheLayout.rows(), KVCacheLayout.rows(dtype=torch.float32)
QUANTISED = [FLASH, INTERLEAVED, FNUZ, TINY, SHORT_GROUP, MANY_GROUPS]


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator that gives the same numbers in every run."""
    return torch.Generator().manual_seed(seed)


def random_bytes(n: int) -> Tensor:
    """Return n random bytes."""
    return torch.randint(0, 256, (n,), dtype=torch.uint8, generator=seeded())


def read_all(cache: PagedKVCache) -> Tensor:
    """Return every record of a cache through the reference backend, as [blocks * block_size, D] in its row dtype."""
    out = torch.zeros(cache.num_blocks, cache.block_size, cache.layout.head_dim, dtype=cache.layout.row_dtype)
    table = torch.arange(cache.num_blocks, dtype=torch.int32)[:, None]
    lens = torch.full((cache.num_blocks,), cache.block_size, dtype=torch.int32)
    ReferenceBackend().dequantize_and_gather_k_cache(out, cache, lens, None, table, 0)
    return out.flatten(0, 1)


@pytest.mark.parametrize(
    ("block_size", "raw", "stride"),
    [
        (64, 37376, 37440),
        (2, 1168, 1728),
        (256, 149504, 149760),
        (16, 9344, 9792),
        (32, 18688, 19008),
        (128, 74752, 74880),
    ],
)
def test_a_page_of_584_byte_records_has_the_published_stride(block_size: int, raw: int, stride: int) -> None:
    assert FLASH.record_bytes == INTERLEAVED.record_bytes == FNUZ.record_bytes == 584
    assert (FLASH.data_bytes, FLASH.scale_bytes, FLASH.num_groups, FLASH.head_dim) == (576, 8, 7, 512)
    assert FLASH.page_bytes(block_size) == raw
    assert FLASH.page_stride(block_size) == stride
    assert PagedKVCache.allocate(FLASH, 3, block_size).tensor.stride() == (stride, 584, 1)


@pytest.mark.parametrize(
    ("layout", "record"), [(BF16, 1024), (FP32, 2048), (TINY, 48), (SHORT_GROUP, 42), (MANY_GROUPS, 112)]
)
def test_other_dims_give_other_records_without_padding_pages_of_rows(layout: KVCacheLayout, record: int) -> None:
    assert layout.record_bytes == record
    assert layout.page_bytes(16) == 16 * record
    assert layout.page_stride(16) == (
        16 * record if not layout.is_quantised else -(-16 * record // layout.data_bytes) * layout.data_bytes
    )


@pytest.mark.parametrize("layout", QUANTISED, ids=lambda layout: layout.fingerprint)
@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize(("gap", "start"), [(0, 0), (34, 6)])
def test_a_region_is_at_the_bytes_the_formula_says(
    layout: KVCacheLayout, block_size: int, gap: int, start: int
) -> None:
    stride = layout.page_stride(block_size) + gap
    flat = random_bytes(start + 3 * stride)
    shape = (3, block_size, layout.record_bytes)
    cache = PagedKVCache(flat.as_strided(shape, (stride, layout.record_bytes, 1), start), layout)
    raw = bytes(flat.tolist())
    data, scales, split = layout.data_bytes, layout.scale_bytes, layout.arrangement is Arrangement.SPLIT

    for block in range(3):
        for token in range(block_size):
            page = start + block * stride
            at = page + token * (data if split else data + scales)
            scale = page + block_size * data + token * scales if split else at + data
            for name, begin, count in (
                ("nope", at, layout.nope_dim),
                ("rope", at + layout.nope_dim, 2 * layout.rope_dim),
                ("scale", scale, scales),
            ):
                assert bytes(bytes_of(cache.region(name)[block, token]).tolist()) == raw[begin : begin + count]


def test_a_row_of_a_plain_cache_is_where_the_tensor_says() -> None:
    tensor = torch.randn(4, 3, 8, 64, generator=seeded()).bfloat16()[:, 1:2, :, :32]
    cache = PagedKVCache(tensor, KVCacheLayout.rows(24, 8))

    assert torch.equal(cache.region("row"), tensor.squeeze(1))
    assert (cache.num_blocks, cache.block_size, cache.capacity) == (4, 8, 32)


GOLDEN = {
    "fp8_ds_mla/1:e4m3fn:nope448:rope64:bf16:ue8m0x64:scales8:split": FLASH,
    "fp8_ds_mla/1:e4m3fn:nope448:rope64:bf16:ue8m0x64:scales8:interleaved": INTERLEAVED,
    "fp8_ds_mla/1:e4m3fnuz:nope448:rope64:bf16:ue8m0x64:scales8:split": FNUZ,
    "fp8_ds_mla/1:e4m3fn:nope24:rope8:bf16:ue8m0x8:scales8:split": TINY,
    "fp8_ds_mla/1:e4m3fn:nope80:rope8:bf16:ue8m0x8:scales16:split": MANY_GROUPS,
    "rows/1:bfloat16:nope448:rope64": BF16,
    "rows/1:float32:nope448:rope64": FP32,
}


def test_g2_a_fingerprint_never_changes() -> None:
    # engines store these strings: a change here breaks their caches. Every run is another process, with other hashes
    assert {layout.fingerprint: layout for layout in GOLDEN.values()} == GOLDEN


EQUAL_SIZE = [
    FLASH,
    INTERLEAVED,
    FNUZ,
    KVCacheLayout.fp8_ds_mla(group_size=56),
    KVCacheLayout.fp8_ds_mla(group_size=128),
    KVCacheLayout.fp8_ds_mla(512, 32),
    KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ, arrangement=Arrangement.INTERLEAVED),
]


@pytest.mark.parametrize(("left", "right"), list(combinations(EQUAL_SIZE, 2)))
def test_g2_layouts_of_equal_size_never_compare_compatible(left: KVCacheLayout, right: KVCacheLayout) -> None:
    assert left.record_bytes == right.record_bytes == 584

    with pytest.raises(LayoutMismatchError, match=r"^swa cache: .*equally long, but mean different things") as info:
        check_layout(left, right, "swa cache")

    assert left.fingerprint in str(info.value)
    assert right.fingerprint in str(info.value)


def test_g2_a_mismatch_names_exactly_the_fields_that_differ() -> None:
    with pytest.raises(LayoutMismatchError) as info:
        check_layout(FNUZ, FLASH, "cache")

    assert "fp8_format='e4m3fnuz' not 'e4m3fn'" in str(info.value)
    assert "group_size" not in str(info.value)
    assert "fp8_max" not in str(info.value)
    with pytest.raises(LayoutMismatchError, match=r"dtype=torch\.float32 not torch\.bfloat16") as info:
        check_layout(FP32, BF16, "cache")
    assert "equally long" not in str(info.value)


def test_g2_layouts_that_mean_the_same_bytes_are_compatible() -> None:
    check_layout(KVCacheLayout.fp8_ds_mla(), FLASH, "cache")
    # what a writer clamps to and how pages are allocated does not change what a byte means
    check_layout(KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ, fp8_max=224), FNUZ, "cache")
    check_layout(evolve(FLASH, page_alignment=1), FLASH, "cache")


def zero_bytes(*shape: int) -> Tensor:
    """Return zero bytes of a shape."""
    return torch.zeros(shape, dtype=torch.uint8)


def strided(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0, size: int = 10**6) -> Tensor:
    """Return a view into `size` bytes."""
    return zero_bytes(size).as_strided(shape, strides, start)


BAD_TENSORS: list[tuple[Callable[[], Tensor], KVCacheLayout, int | None, str]] = [
    (lambda: zero_bytes(2, 64, 584).view(torch.int8), FLASH, None, "dtype torch.uint8 for fp8_ds_mla, got torch.int8"),
    (lambda: zero_bytes(2, 64, 1024), BF16, None, "dtype torch.bfloat16 for rows, got torch.uint8"),
    (lambda: torch.zeros(2, 64, 512), BF16, None, "dtype torch.bfloat16 for rows, got torch.float32"),
    (lambda: zero_bytes(2, 64, 512), FLASH, None, r"\[blocks, block_size, 584\].*got \[2, 64, 512\]"),
    (lambda: zero_bytes(2, 64, 584), FLASH, 32, r"got \[2, 64, 584\]"),
    (lambda: zero_bytes(2, 3, 64, 584), FLASH, None, r"got \[2, 3, 64, 584\]"),
    (lambda: zero_bytes(2, 37440), FLASH, None, "pass block_size with a 2-D byte tensor"),
    (lambda: zero_bytes(37440), FLASH, 64, r"got \[37440\]"),
    (lambda: torch.zeros(2, 64).bfloat16(), KVCacheLayout.rows(24, 8), 2, r"got \[2, 64\]"),
    (lambda: zero_bytes(2, 37375), FLASH, 64, "at least 37376 bytes in a page, got 37375"),
    (lambda: strided((2, 64, 584), (37375, 584, 1)), FLASH, None, "a page stride of at least 37376 bytes, got 37375"),
    (lambda: zero_bytes(1, 64, 584).expand(3, 64, 584), FLASH, None, "a page stride of at least 37376 bytes, got 0"),
    (lambda: strided((2, 64, 584), (37441, 584, 1)), FLASH, None, "begin at even bytes.*page stride 37441"),
    (lambda: strided((2, 64, 584), (37440, 584, 1), 3), FLASH, None, "begin at even bytes.*first page at byte 3"),
    (lambda: strided((2, 64, 584), (37440, 640, 1)), FLASH, None, r"strides \(584, 1\), got \(640, 1\)"),
    (lambda: strided((2, 64, 584), (80000, 1168, 2)), FLASH, None, r"strides \(584, 1\), got \(1168, 2\)"),
    (lambda: strided((2, 40000), (90000, 2)), FLASH, 64, r"strides \(1,\), got \(2,\)"),
    (
        lambda: torch.zeros(2, 8, 64).bfloat16()[..., ::2],
        KVCacheLayout.rows(24, 8),
        None,
        "unit stride on the last dim",
    ),
]


@pytest.mark.parametrize(("make", "layout", "block_size", "said"), BAD_TENSORS, ids=[b[-1][:40] for b in BAD_TENSORS])
def test_a_tensor_that_cannot_be_such_a_cache_is_refused(
    make: Callable[[], Tensor], layout: KVCacheLayout, block_size: int | None, said: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^cache tensor: expected .*{said}"):
        PagedKVCache(make(), layout, block_size=block_size)


def test_the_storage_may_end_before_the_padding_of_the_last_page_but_not_before_its_records() -> None:
    assert PagedKVCache(strided((2, 64, 584), (37440, 584, 1), size=37440 + 37376), FLASH).capacity == 128
    assert PagedKVCache(strided((2, 37376), (37440, 1), size=37440 + 37376), FLASH, block_size=64).capacity == 128
    with pytest.raises(ArgumentError, match="at least 37376 bytes in a page, got 37000"):
        PagedKVCache(strided((2, 37000), (37440, 1), size=37440 + 37000), FLASH, block_size=64)


@pytest.mark.parametrize("layout", [FLASH, INTERLEAVED], ids=["split", "interleaved"])
def test_every_shape_engines_use_for_a_cache_reads_the_same(layout: KVCacheLayout) -> None:
    flat = random_bytes(3 * 9792)
    three = flat.as_strided((3, 16, 584), (9792, 584, 1))
    caches = [
        PagedKVCache(three, layout),
        PagedKVCache(three, layout, block_size=16),
        PagedKVCache(three.unsqueeze(1), layout),
        PagedKVCache(flat.view(3, 9792), layout, block_size=16),
        PagedKVCache(flat.view(3, 9792)[:, :9344], layout, block_size=16),
    ]

    for cache in caches:
        assert (cache.num_blocks, cache.block_size, cache.capacity) == (3, 16, 48)
        assert torch.equal(bytes_of(read_all(cache)), bytes_of(read_all(caches[0])))
        assert cache.tensor.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("layout", [*QUANTISED, BF16, FP32], ids=lambda layout: layout.fingerprint)
@pytest.mark.parametrize(("gap", "start"), [(64, 0), (1728, 4352), (2, 2)])
def test_g2_packed_pages_and_a_view_with_poisoned_gaps_read_the_same_bits(
    layout: KVCacheLayout, gap: int, start: int
) -> None:
    """Gaps are 0xFF: NaN in fp8, in bf16 and in fp32, and the scale byte that means NaN."""
    element, last = layout.dtype.itemsize, layout.record_bytes // layout.dtype.itemsize
    stride = layout.page_bytes(8) + gap * element
    flat = torch.full((start * element + 5 * stride,), 0xFF, dtype=torch.uint8).view(layout.dtype)
    packed = PagedKVCache(torch.zeros(5, 8, last, dtype=layout.dtype), layout)
    sparse = PagedKVCache(flat.as_strided((5, 8, last), (stride // element, last, 1), start), layout)
    keys = torch.randn(40, layout.head_dim, generator=seeded()).bfloat16()
    slots = torch.randperm(40, generator=seeded(1))

    for cache in (packed, sparse):
        ReferenceBackend().quantize_and_insert_k_cache(keys, cache, slots)

    assert torch.equal(bytes_of(read_all(packed)), bytes_of(read_all(sparse)))
    assert bool(read_all(sparse).isfinite().all())
    gaps = torch.ones_like(bytes_of(flat), dtype=torch.bool)
    for block in range(5):
        gaps[start * element + block * stride :][: layout.page_bytes(8)] = False
    assert int(gaps.sum()) >= 5 * gap
    assert bool((bytes_of(flat)[gaps] == 0xFF).all())


def test_with_layout_reads_the_same_bytes_another_way() -> None:
    cache = PagedKVCache.allocate(FLASH, 2, 16)
    ReferenceBackend().quantize_and_insert_k_cache(torch.randn(32, 512, generator=seeded()), cache, torch.arange(32))
    other = cache.with_layout(fp8_format=Fp8Format.FNUZ)

    assert other.tensor.data_ptr() == cache.tensor.data_ptr()
    assert other.layout == FNUZ
    assert torch.equal(read_all(other)[:, :448], read_all(cache)[:, :448] / 2)
    assert torch.equal(bytes_of(read_all(other)[:, 448:]), bytes_of(read_all(cache)[:, 448:]))
    assert not torch.equal(read_all(cache.with_layout(arrangement=Arrangement.INTERLEAVED)), read_all(cache))
    assert cache.with_layout() is not cache
    assert cache.with_layout().layout == FLASH


def test_g5_writing_through_the_other_dialect_keeps_to_its_largest_value() -> None:
    cache = PagedKVCache.allocate(FLASH, 1, 4).with_layout(fp8_format=Fp8Format.FNUZ)
    ReferenceBackend().quantize_and_insert_k_cache(torch.full((1, 512), 448.0), cache, torch.tensor([0]))

    assert cache.layout.fp8_max == 240.0
    assert bool(read_all(cache)[0].eq(448).all())


@pytest.mark.parametrize("layout", [FLASH, BF16])
def test_a_cache_without_blocks_is_a_cache(layout: KVCacheLayout) -> None:
    empty = torch.empty(0, 64, layout.record_bytes // layout.dtype.itemsize, dtype=layout.dtype)

    for cache in (
        PagedKVCache.allocate(layout, 0, 64),
        PagedKVCache(empty, layout),
        PagedKVCache(empty[:, None], layout),
    ):
        assert (cache.capacity, cache.num_blocks, cache.block_size) == (0, 0, 64)
        assert read_all(cache).shape == (0, 512)
        ReferenceBackend().quantize_and_insert_k_cache(torch.ones(2, 512), cache, torch.tensor([0, 1]))


def test_a_cache_says_what_it_is_and_not_what_it_holds() -> None:
    text = repr(PagedKVCache.allocate(TINY, 2, 4))

    assert text == f"PagedKVCache({TINY.fingerprint}, blocks=2, block_size=4)"


@pytest.mark.parametrize(
    ("blocks", "stride", "ids"),
    [
        pytest.param(120_000, 37440, [0, 57_358, 57_359, 114_716, 114_717, 119_999], id="many-pages"),
        pytest.param(4, 2**31 + 576, [3, 2, 1, 0], id="long-pages"),
    ],
)
def test_g16_pages_past_2_31_and_2_32_bytes_are_found(blocks: int, stride: int, ids: list[int]) -> None:
    try:
        # only touched pages become memory
        flat = torch.empty(blocks * stride, dtype=torch.uint8)
    except RuntimeError as error:
        pytest.skip(f"no address space for {blocks * stride} bytes: {error}")
    huge = PagedKVCache(flat.as_strided((blocks, 64, 584), (stride, 584, 1)), FLASH)
    small = PagedKVCache.allocate(FLASH, len(ids), 64)
    keys, backend = torch.randn(64 * len(ids), 512, generator=seeded()).bfloat16(), ReferenceBackend()
    offsets = torch.arange(64)
    backend.quantize_and_insert_k_cache(keys, small, torch.arange(64 * len(ids)))
    backend.quantize_and_insert_k_cache(keys, huge, (torch.tensor(ids)[:, None] * 64 + offsets).flatten())
    out = torch.empty(1, 64 * len(ids), 512, dtype=torch.bfloat16)
    backend.dequantize_and_gather_k_cache(
        out, huge, torch.tensor([64 * len(ids)], dtype=torch.int32), None, torch.tensor([ids], dtype=torch.int32), 0
    )

    assert max(ids) * stride > 2**32
    assert torch.equal(bytes_of(out[0]), bytes_of(read_all(small)))
    for i, block in enumerate(ids):
        page = flat[block * stride : block * stride + 37376]
        assert torch.equal(page, small.tensor[i].flatten()), "written at another byte"


def test_rows_may_have_rope_in_all_dims_and_records_of_codes_may_not() -> None:
    cache = PagedKVCache.allocate(KVCacheLayout.rows(0, 8), 2, 4)
    assert (cache.layout.head_dim, cache.region("row").shape) == (8, (2, 4, 8))
    for make, name in (
        (KVCacheLayout.fp8_ds_mla, "nope_dim"),
        (KVCacheLayout.v41_fp8, "nope_dim"),
        (KVCacheLayout.v41_fp4, "nope_dim"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: expected an integer of at least 1, got 0"):
            make(0, 8)
    with pytest.raises(ArgumentError, match=r"^rope_dim: expected an integer of at least 1, got 0"):
        KVCacheLayout.rows(0, 0)
