"""Writes and reads cache records in plain torch, independently of the backends that are measured.

This is a second implementation of the formats of `core.cache.layout`, on any device, fast enough for gigabytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache

__all__ = ["coded", "fill", "read", "read_index", "write", "write_index"]

_CHUNK = 65536
"""Records whose temporaries are alive at a time."""
_E2M1 = tuple(sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Values of the codes of e2m1."""
_E2M1_STEPS = ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0))
"""Middles between neighbouring sizes, and whether the middle itself rounds up: to the even code."""


def fill(cache: PagedKVCache, generator: torch.Generator) -> None:
    """Fill all slots with normal random keys."""
    for first in range(0, cache.capacity, _CHUNK):
        slots = torch.arange(first, min(first + _CHUNK, cache.capacity), device=cache.device)
        shape = (slots.shape[0], cache.layout.head_dim)
        write(
            cache, slots, torch.randn(shape, generator=generator, device=cache.device, dtype=torch.float32).bfloat16()
        )


def write(cache: PagedKVCache, slots: Tensor, rows: Tensor) -> None:
    """Store rows [N, D] bf16 at slots [N].

    Each group is scaled by the least power of two that makes it fit its codes; of e2m1 by the nearest e4m3fn.
    """
    layout = cache.layout
    page, place = slots // cache.block_size, slots % cache.block_size
    groups = rows[:, : layout.coded_dims].float().unflatten(1, (layout.num_groups, layout.group_size))
    codes, scales = _fp8_groups(layout, groups) if layout.fp8_format else _fp4_groups(groups)
    cache.region("nope")[page, place] = codes
    if layout.plain_dims:
        cache.region("rope")[page, place] = rows[:, layout.coded_dims :]
    cache.region("scale")[page, place] = torch.nn.functional.pad(scales, (0, layout.scale_bytes - layout.num_groups))


def _fp8_groups(layout: KVCacheLayout, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of codes [N, G * n] and of scales [N, G] of groups [N, G, n]."""
    mantissa, exponent = torch.frexp(groups.abs().amax(-1).clamp_min(layout.amax_floor) / layout.fp8_max)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    codes = (groups * _power(-exponent)[..., None]).clamp(-layout.fp8_max, layout.fp8_max)
    return codes.to(_fp8(layout)).view(torch.uint8).flatten(1), (exponent + 127).to(torch.uint8)


def _fp4_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [N, G * n / 2] of pairs of e2m1 codes and bytes of scales [N, G] in e4m3fn, the nearest to maximum / 6."""
    scale = (groups.abs().amax(-1) / 6).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    value = groups / scale.float()[..., None]
    size = value.abs()
    steps = [size >= least if even else size > least for least, even in _E2M1_STEPS]
    codes = torch.stack(steps).sum(0).to(torch.uint8) | (torch.signbit(value).to(torch.uint8) << 3)
    codes = codes.flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale.view(torch.uint8)


def read(cache: PagedKVCache, slots: Tensor) -> Tensor:
    """Keys [N, D] fp32 at slots [N]; slots must exist."""
    layout = cache.layout
    page, place = slots.long() // cache.block_size, slots.long() % cache.block_size
    if not layout.is_quantised:
        return cache.region("row")[page, place].float()
    data, scale = cache.region("nope")[page, place].contiguous(), cache.region("scale")[page, place]
    scale = scale[:, : layout.num_groups].contiguous()
    if layout.fp8_format:
        values, scales = data.view(_fp8(layout)).float(), _power(scale.int() - 127)
    else:
        halves = torch.stack([data & 15, data >> 4], -1).flatten(1)
        values = torch.tensor(_E2M1, device=data.device, dtype=torch.float32)[halves.int()]
        scales = scale.view(torch.float8_e4m3fn).float()
    coded = (values.unflatten(1, (layout.num_groups, layout.group_size)) * scales[..., None]).flatten(1)
    return torch.cat([coded, cache.region("rope")[page, place].float()], 1) if layout.plain_dims else coded


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
