"""What the reference and the oracle write into V4.1's records, byte for byte, judged by an independent packer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.testing.kit.tolerances import written
from tests.core.cache.v41_packer import FLASHMLA, VLLM, bf16, pack_fp4, pack_fp8, page_of, unpack_fp4, unpack_fp8

SPLIT = Arrangement.SPLIT
LAYOUTS = [
    KVCacheLayout.v41_fp8(),
    KVCacheLayout.v41_fp8(arrangement=SPLIT),
    KVCacheLayout.v41_fp8(scale_floor=1e-4),
    KVCacheLayout.v41_fp4(),
    KVCacheLayout.v41_fp4(arrangement=SPLIT),
    KVCacheLayout.v41_fp8(34, 6),
    KVCacheLayout.v41_fp4(34, 6),
]
each_layout = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.fingerprint}-{layout.scale_floor}"
)


def packed(row: np.ndarray, layout: KVCacheLayout) -> np.ndarray:
    """The packer's record of a row."""
    if layout.fp8_format is None:
        return pack_fp4(row.tolist())
    return pack_fp8(row.tolist(), FLASHMLA if layout.scale_floor else VLLM)


def unpacked(record: np.ndarray, layout: KVCacheLayout) -> np.ndarray:
    """The packer's reading of a record."""
    return (unpack_fp8 if layout.fp8_format else unpack_fp4)(record, layout.head_dim)


def pages(records: list[np.ndarray], layout: KVCacheLayout, size: int) -> np.ndarray:
    """Pages of these records, whose other bytes are 0xFF."""
    stride, split = layout.page_stride(size), layout.arrangement is SPLIT
    parts = [records[i : i + size] for i in range(0, len(records), size)]
    return np.stack([page_of(part, layout.data_bytes, stride, split=split) for part in parts])


def blank(layout: KVCacheLayout, blocks: int, size: int) -> PagedKVCache:
    """A cache of 0xFF."""
    flat = torch.full((blocks, layout.page_stride(size)), 0xFF, dtype=torch.uint8)
    return PagedKVCache(flat, layout, block_size=size)


def gathered(cache: PagedKVCache) -> Tensor:
    """All keys of a cache, in float64."""
    out = torch.zeros(1, cache.capacity, cache.layout.head_dim)
    table = torch.arange(cache.num_blocks, dtype=torch.int32)[None]
    lens = torch.tensor([cache.capacity], dtype=torch.int32)
    ReferenceBackend().dequantize_and_gather_k_cache(out, cache, lens, None, table, 0)
    return out[0].double()


def draws(dim: int) -> np.ndarray:
    """[12, dim] rows of many sizes: random, tiny, huge, zeros of both signs, spread, and around every tie."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(12, dim))
    rows[1] *= 1e-3
    rows[2] *= 3e-5
    rows[3] *= 1e30
    rows[4] = 0
    rows[5] = -0.0
    rows[6] *= np.exp2(np.linspace(-20, 12, dim))
    rows[7] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dim) * rng.choice([-1, 1], dim)
    rows[8] = 6.25 * np.sign(rows[8])
    rows[9] = 0.02734375
    rows[10] *= 1e-40
    rows[11] = 448.0 * 6 * rng.random(dim)
    return bf16(rows)


@each_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_records_are_those_of_the_packer_and_no_other_byte_is_written(
    layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    rows = draws(layout.head_dim)
    cache = blank(layout, 4, 3)

    ReferenceBackend().quantize_and_insert_k_cache(torch.from_numpy(rows).to(dtype), cache, torch.arange(12))

    records = [packed(row, layout) for row in rows]
    np.testing.assert_array_equal([written(row, layout) for row in rows], records, "the oracle's")
    np.testing.assert_array_equal(cache.tensor.numpy(), pages(records, layout, 3))
    np.testing.assert_array_equal(gathered(cache).numpy(), [unpacked(record, layout) for record in records])


@pytest.mark.parametrize("arrangement", [Arrangement.SPLIT, Arrangement.INTERLEAVED])
def test_every_code_under_every_scale_reads_as_the_packer_says(arrangement: Arrangement) -> None:
    """256 records, one for each byte as a scale, that hold all codes: NaN, subnormal, negative scales of fp4 too."""
    fp8, fp4 = (make(arrangement=arrangement) for make in (KVCacheLayout.v41_fp8, KVCacheLayout.v41_fp4))
    both = np.arange(256, dtype=np.uint8)
    for layout, codes in ((fp8, np.tile(both, 2)), (fp4, both)):
        records = [np.r_[codes, np.full(layout.scale_bytes, byte, dtype=np.uint8)] for byte in range(256)]
        cache = PagedKVCache(torch.from_numpy(pages(records, layout, 64)), layout, block_size=64)
        expected = np.stack([unpacked(record, layout) for record in records])
        # beyond fp32 a key is infinite
        with np.errstate(over="ignore"):
            expected = expected.astype(np.float32).astype(np.float64)
        actual = gathered(cache).numpy()
        np.testing.assert_array_equal(actual, expected)
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(actual)[numbers], np.signbit(expected)[numbers])
        assert np.isnan(expected).any()


def test_a_nan_stays_in_its_group() -> None:
    row = torch.ones(1, 512)
    row[0, 100] = torch.nan
    for layout, group in ((KVCacheLayout.v41_fp8(), 32), (KVCacheLayout.v41_fp4(), 16)):
        cache = blank(layout, 1, 1)
        ReferenceBackend().quantize_and_insert_k_cache(row, cache, torch.tensor([0]))
        nan_columns = gathered(cache)[0].isnan().nonzero().flatten()
        assert 100 in nan_columns
        assert set((nan_columns // group).tolist()) == {100 // group}
    assert cache.region("scale")[0, 0, 6] == 0x7F
    assert not cache.region("nope")[0, 0, 48:56].any()


def test_keys_rounded_to_fp4_first_read_as_the_fp4_record_where_fp8_can_hold_them() -> None:
    rows = torch.from_numpy(draws(512)).bfloat16()
    slots = torch.arange(12)
    fp4, fp8 = blank(KVCacheLayout.v41_fp4(), 4, 3), blank(KVCacheLayout.v41_fp8(rounds_to_fp4=True), 4, 3)
    for cache in (fp4, fp8):
        ReferenceBackend().quantize_and_insert_k_cache(rows, cache, slots)

    values = gathered(fp4).numpy()
    expected = np.stack([unpack_fp8(pack_fp8(row.tolist()), 512) for row in values])
    np.testing.assert_array_equal(gathered(fp8).numpy(), expected)
    plain = blank(KVCacheLayout.v41_fp8(), 4, 3)
    ReferenceBackend().quantize_and_insert_k_cache(rows, plain, slots)
    assert not torch.equal(gathered(plain), gathered(fp8))


@pytest.mark.parametrize("layout", [KVCacheLayout.v41_fp8(), KVCacheLayout.v41_fp4()], ids=lambda layout: layout.name)
def test_keys_are_rotated_then_rounded_then_quantised(layout: KVCacheLayout) -> None:
    rows = draws(512)[[0, 6, 11]]
    kv, q = torch.from_numpy(rows).bfloat16(), torch.ones(3, 2, 512).bfloat16()
    angles = torch.linspace(0, 3, 3 * 32).view(3, 32)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    cache = blank(layout, 1, 3)

    ReferenceBackend().qnorm_rope_kv_insert(q, kv, cache, torch.arange(3), torch.arange(3), table, 1e-6)

    turned = rows.copy()
    cos, sin = (part.double().numpy() for part in table.split(32, dim=1))
    turned[:, 448::2] = rows[:, 448::2] * cos - rows[:, 449::2] * sin
    turned[:, 449::2] = rows[:, 449::2] * cos + rows[:, 448::2] * sin
    records = [packed(row, layout) for row in bf16(turned)]
    np.testing.assert_array_equal(cache.tensor.numpy(), pages(records, layout, 3))
