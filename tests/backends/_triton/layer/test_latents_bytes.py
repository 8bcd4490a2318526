"""Bytes that `norm_rope_store` writes to V4.1's records, in torch and as a kernel: those of an independent packer."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsv4attn.backends._triton.layer.compressor import latents
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import EntryNorm
from dsv4attn.testing.kit.oracle_cache import place_of
from tests.backends._triton.cache.caches import DEVICE, seeded
from tests.core.cache.v41_packer import FP8_GROUP, bf16, pack_fp4, pack_fp8, page_of, unpack_fp8
from tests.layer_ops import TorchOps

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
DIM, ROPE, PAGE, BLOCKS, POSITIONS = 512, 64, 3, 3, 16
STORES = {"kernel": latents.norm_rope_store, "torch": TorchOps().norm_rope_store}
LAYOUTS = [
    make(arrangement=arrangement)
    for make in (KVCacheLayout.v41_fp8, KVCacheLayout.v41_fp4)
    for arrangement in (Arrangement.SPLIT, Arrangement.INTERLEAVED)
]
TOKENS = [(6, 4), (7, 0), (3, 8), (11, -1), (1, 5), (12, 2), (9, BLOCKS * PAGE), (13, 7)]
"""(position, slot) of each token. At ratio 2 the even positions complete no entry."""


def rows_of(dtype: torch.dtype) -> torch.Tensor:
    """[8, 512] latents: ordinary, small, large, and with zeros of either sign and groups of zeros."""
    rows = torch.randn(len(TOKENS), DIM, generator=seeded(5))
    rows *= torch.tensor([1.0, 2.0**-6, 1.0, 1.0, 300.0, 1.0, 1.0, 2.0**-13])[:, None]
    rows[2, ::7], rows[2, 1::7] = 0.0, -0.0
    rows[5, 64:128], rows[5, -32:] = 0.0, 0.0
    return rows.to(dtype)


def rotated(row: F32, angles: F32) -> F32:
    """A row whose last dims, in pairs of neighbours, are rotated in fp32. angles: cosines, then sines."""
    out: F32 = row.copy()
    cos, sin = np.split(angles, 2)
    even, odd = row[-ROPE::2], row[-ROPE + 1 :: 2]
    out[-ROPE::2], out[-ROPE + 1 :: 2] = even * cos - odd * sin, odd * cos + even * sin
    return out


class Written:
    """A cache that a step wrote, and the records [slot] that the packer makes of the same values in bf16."""

    def __init__(self, layout: KVCacheLayout, ratio: int, store: str, x: torch.Tensor) -> None:
        angle = torch.rand(POSITIONS, ROPE // 2, generator=seeded(6)) * 6
        angles = torch.cat([angle.cos(), angle.sin()], -1)
        positions, slots = (torch.tensor(column) for column in zip(*TOKENS, strict=True))
        self.layout = layout
        memory = torch.full((BLOCKS, layout.page_stride(PAGE)), 0xFF, dtype=torch.uint8, device=DEVICE)
        cache = PagedKVCache(memory, layout, block_size=PAGE)
        norm = EntryNorm(None, 1e-20, angles.to(DEVICE))
        STORES[store](x.to(DEVICE), positions.to(DEVICE), slots.to(DEVICE), norm, ratio, cache)
        self.bytes: U8 = memory.cpu().numpy()
        self.rows = {
            slot: bf16(rotated(row, angles[position // ratio * ratio].numpy()).astype(np.float64))
            for (position, slot), row in zip(TOKENS, x.float().numpy(), strict=True)
            if 0 <= slot < BLOCKS * PAGE and (position + 1) % ratio == 0
        }

    def pages(self, pack: Callable[[list[float]], U8]) -> U8:
        """[B, bytes] with these records and 0xFF everywhere else."""
        layout, nothing = self.layout, np.full(self.layout.record_bytes, 0xFF, dtype=np.uint8)
        records = [pack(self.rows[slot].tolist()) if slot in self.rows else nothing for slot in range(BLOCKS * PAGE)]
        size, split = layout.page_stride(PAGE), layout.arrangement is Arrangement.SPLIT
        parts = [records[i : i + PAGE] for i in range(0, len(records), PAGE)]
        return np.stack([page_of(part, layout.data_bytes, size, split=split) for part in parts])


each_store = pytest.mark.parametrize("store", STORES)
each_layout = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.record_bytes}-{layout.arrangement.value}"
)
each_ratio = pytest.mark.parametrize("ratio", [1, 2])


@pytest.mark.pairwise
@each_store
@each_layout
@each_ratio
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_pages_are_those_of_the_packer(layout: KVCacheLayout, ratio: int, store: str, dtype: torch.dtype) -> None:
    written = Written(layout, ratio, store, rows_of(dtype))

    assert len(written.rows) == {1: 6, 2: 4}[ratio]
    np.testing.assert_array_equal(written.bytes, written.pages(pack_fp8 if layout.fp8_format else pack_fp4))


def with_nans() -> torch.Tensor:
    """The rows, one with a NaN, and another with one among the rotated dims, where it makes two."""
    x = rows_of(torch.bfloat16)
    x[1, 40] = x[5, -11] = torch.nan
    return x


@each_store
@each_ratio
@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if not layout.fp8_format], ids=lambda layout: layout.arrangement.value
)
def test_a_group_of_fp4_with_a_nan_is_the_packers_too(layout: KVCacheLayout, ratio: int, store: str) -> None:
    written = Written(layout, ratio, store, with_nans())
    expected = written.pages(pack_fp4)

    # the token at the even position completes an entry with ratio 1 only
    assert [int(np.isnan(row).sum()) for row in written.rows.values() if np.isnan(row).any()] == {1: [1, 2], 2: [1]}[
        ratio
    ]
    np.testing.assert_array_equal(written.bytes, expected)


@each_store
@each_ratio
@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.fp8_format], ids=lambda layout: layout.arrangement.value
)
def test_a_nan_in_fp8_reads_as_nan_and_the_other_groups_are_the_packers(
    layout: KVCacheLayout, ratio: int, store: str
) -> None:
    written = Written(layout, ratio, store, with_nans())
    expected = written.pages(pack_without_nans)
    for slot, row in written.rows.items():
        lost = np.isnan(row).reshape(-1, FP8_GROUP).any(-1)
        place, page = place_of(layout, slot % PAGE, PAGE), slot // PAGE
        assert np.isnan(unpack_fp8(written.bytes[page][place], DIM)[np.isnan(row)]).all()
        # the format leaves the bytes of such a group open
        open_bytes = place[np.concatenate([lost.repeat(FP8_GROUP), lost])]
        expected[page, open_bytes] = written.bytes[page, open_bytes]

    np.testing.assert_array_equal(written.bytes, expected)


def pack_without_nans(row: list[float]) -> U8:
    """The record of the row with zeros for NaN."""
    return pack_fp8([0.0 if math.isnan(value) else value for value in row])
