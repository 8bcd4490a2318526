"""Writes and reads cache records in plain torch, independently of the backends that are measured.

This is a second implementation of the formats of `core.layout`, on any device, fast enough for gigabytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.layout import Fp8Format, KVCacheLayout, PagedKVCache

__all__ = ["coded", "fill", "read", "read_index", "write", "write_index"]

_CHUNK = 65536
"""Records whose temporaries are alive at a time."""


def fill(cache: PagedKVCache, generator: torch.Generator) -> None:
    """Fill all slots with normal random keys."""
    for first in range(0, cache.capacity, _CHUNK):
        slots = torch.arange(first, min(first + _CHUNK, cache.capacity), device=cache.device)
        shape = (slots.shape[0], cache.layout.head_dim)
        write(cache, slots, torch.randn(shape, generator=generator, device=cache.device).bfloat16())


def write(cache: PagedKVCache, slots: Tensor, rows: Tensor) -> None:
    """Store rows [N, D] bf16 at slots [N]: each group by the least power of two that makes it fit the codes."""
    layout = cache.layout
    page, place = slots // cache.block_size, slots % cache.block_size
    groups = rows[:, : layout.nope_dim].float().unflatten(1, (layout.num_groups, layout.group_size))
    mantissa, exponent = torch.frexp(groups.abs().amax(-1).clamp_min(layout.amax_floor) / layout.fp8_max)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    codes = (groups * _power(-exponent)[..., None]).clamp(-layout.fp8_max, layout.fp8_max)
    cache.region("nope")[page, place] = codes.to(_fp8(layout)).view(torch.uint8).flatten(1)
    cache.region("rope")[page, place] = rows[:, layout.nope_dim :]
    scales = torch.zeros(slots.shape[0], layout.scale_bytes, dtype=torch.uint8, device=rows.device)
    scales[:, : layout.num_groups] = (exponent + 127).to(torch.uint8)
    cache.region("scale")[page, place] = scales


def read(cache: PagedKVCache, slots: Tensor) -> Tensor:
    """Keys [N, D] fp32 at slots [N]; slots must exist."""
    layout = cache.layout
    page, place = slots.long() // cache.block_size, slots.long() % cache.block_size
    if not layout.is_quantised:
        return cache.region("row")[page, place].float()
    codes = cache.region("nope")[page, place].contiguous().view(_fp8(layout)).float()
    scales = _power(cache.region("scale")[page, place][:, : layout.num_groups].int() - 127)
    nope = codes.unflatten(1, (layout.num_groups, layout.group_size)) * scales[..., None]
    return torch.cat([nope.flatten(1), cache.region("rope")[page, place].float()], 1)


def coded(rows: Tensor, fp8_format: Fp8Format = Fp8Format.OCP) -> tuple[Tensor, Tensor]:
    """Codes [..., D] fp8 and scales [...] fp32 of rows, rounded to bf16: one scale for a row, as index keys have."""
    rows = rows.bfloat16().float()
    mantissa, exponent = torch.frexp(rows.abs().amax(-1).clamp_min(1e-4) / fp8_format.max)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    codes = (rows * _power(-exponent)[..., None]).clamp(-fp8_format.max, fp8_format.max)
    return codes.to(fp8_format.dtype), _power(exponent)


def write_index(cache: PagedKVCache, slots: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Store `coded` index keys, codes [N, D] and scales [N], at slots [N] of `index_fp8` pages."""
    page, place = slots // cache.block_size, slots % cache.block_size
    cache.region("nope")[page, place] = codes.view(torch.uint8)
    cache.region("scale")[page, place] = scales[:, None]


def read_index(cache: PagedKVCache, slots: Tensor) -> Tensor:
    """Index keys [N, D] fp32 at slots [N]; slots must exist."""
    page, place = slots // cache.block_size, slots % cache.block_size
    return cache.region("nope")[page, place].view(_fp8(cache.layout)).float() * cache.region("scale")[page, place]


def _power(exponent: Tensor) -> Tensor:
    """2 ** exponent in fp32 for -126 to 127, exact on every device. A device's own exp2 need not be exact."""
    return ((exponent + 127) << 23).view(torch.float32)


def _fp8(layout: KVCacheLayout) -> torch.dtype:
    assert layout.fp8_format is not None
    return layout.fp8_format.dtype
