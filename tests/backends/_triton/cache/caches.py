"""Caches for tests of kernels: every layout, unaligned pages, and poison in all bytes that hold no record."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from tests.harness import storage_of

CPU = torch.device("cpu")
DEVICE = CPU if INTERPRETED else torch.accelerator.current_accelerator() or CPU
"""Where kernels run; the reference runs on the CPU."""
OCP, FNUZ = Fp8Format.OCP, Fp8Format.FNUZ
LAYOUTS = [
    KVCacheLayout.fp8_ds_mla(),
    KVCacheLayout.fp8_ds_mla(fp8_format=FNUZ),
    KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED),
    KVCacheLayout.fp8_ds_mla(24, 8, group_size=8),
    KVCacheLayout.fp8_ds_mla(32, 16, group_size=16, fp8_format=FNUZ, fp8_max=224.0),
    KVCacheLayout.fp8_ds_mla(100, 6, group_size=64),
    KVCacheLayout.fp8_ds_mla(22, 6, group_size=8, arrangement=Arrangement.INTERLEAVED),
    KVCacheLayout.fp8_ds_mla(90, 10, group_size=8),
    KVCacheLayout.fp8_ds_mla(22, 4, group_size=12),
    KVCacheLayout.rows(24, 8),
    KVCacheLayout.rows(23, 6),
    KVCacheLayout.rows(24, 8, dtype=torch.float32),
    KVCacheLayout.v41_fp8(),
    KVCacheLayout.v41_fp8(arrangement=Arrangement.SPLIT, scale_floor=1e-4),
    KVCacheLayout.v41_fp4(),
    KVCacheLayout.v41_fp4(arrangement=Arrangement.SPLIT),
    KVCacheLayout.v41_fp8(31, 10),
    KVCacheLayout.v41_fp4(34, 6),
    # those of the model's own dims are in tests/core/cache/test_four_bits.py
    KVCacheLayout.of_record("v4_nvfp4", 36, 6),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.fingerprint}:{layout.fp8_max:g}")
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator that gives the same numbers in every run."""
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, low: int, high: int) -> int:
    """Return one of low .. high."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def poisoned(
    layout: KVCacheLayout, blocks: int, size: int, *, gap: int = 0, start: int = 0, device: torch.device = DEVICE
) -> PagedKVCache:
    """Return a cache all of whose memory is 0xFF: NaN in each of its types.

    gap: bytes between pages; V4.1's interleaved pages are rounded up to whole records. start: bytes before the first
    page. Rows of an unquantised cache lie a few further apart.
    """
    element = layout.dtype.itemsize
    assert not gap % max(element, 2)
    assert not start % max(element, 2)
    apart = layout.record_bytes if layout.is_quantised else layout.record_bytes + gap % 16
    page = size * apart + (size * apart) % 2 + gap
    if layout.has_whole_record_pages:
        page = round_up(page, layout.record_bytes)
    raw = torch.full((start + blocks * page + 64,), 0xFF, dtype=torch.uint8, device=device).view(layout.dtype)
    shape, strides = (blocks, size, layout.record_bytes // element), (page // element, apart // element, 1)
    return PagedKVCache(raw.as_strided(shape, strides, start // element), layout)


def memory(cache: PagedKVCache) -> Tensor:
    """Return all bytes of a cache's storage: pages, gaps, and what stands around them."""
    return storage_of(cache.tensor).view(torch.uint8).cpu()


def strided(rows: Tensor, pad: int) -> Tensor:
    """Return the same values on the device, with NaN in `pad` elements after every row of the last dimension."""
    wide = torch.full((*rows.shape[:-1], rows.shape[-1] + pad), torch.nan, dtype=rows.dtype, device=DEVICE)
    view = wide[..., : rows.shape[-1]]
    view.copy_(rows)
    return view
