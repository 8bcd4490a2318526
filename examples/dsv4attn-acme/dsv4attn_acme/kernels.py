"""The kernels. Here they are torch, so that they run anywhere; yours are not.

Letters as in `dsv4attn.core.model.geometry`; t are the rows of a tile of queries, n the keys of a tile of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.model.rope import apply_rope

LOWEST = torch.finfo(torch.float32).min
"""Maximum of no logits. Finite, so that `-inf - LOWEST` is -inf and its exponential 0."""

MIN_AMAX = 1e-4
"""Largest magnitude that a group is taken to have at least, so that a group of zeros has a scale."""

BIAS, LARGEST_SCALE = 127, 254


def tiles(n: int, step: int) -> Iterator[slice]:
    """Cut n things into tiles."""
    return (slice(first, min(first + step, n)) for first in range(0, n, step))


# attention


def attend(call: AttentionCall, tile_rows: int, tile_tokens: int) -> None:
    """Softmax that sees one tile of keys at a time: sums are rescaled whenever the maximum rises.

    Scratch comes with any content, so every part is written before it is read.
    """
    keys, sums, state = call.scratch
    assert not isinstance(call.keys, GatheredKeys)
    for part in tiles(len(call.q), tile_rows):
        q = call.q[part].float()
        acc, top, total = sums[: len(q)].zero_(), state[0, : len(q)].fill_(LOWEST), state[1, : len(q)].zero_()
        for segment in call.keys:
            for columns in tiles(width_of(segment.rows), tile_tokens):
                slots, present = listed(segment, part, columns)
                k = keys[: len(q), : slots.shape[1]]
                read(segment.cache, slots, k)
                # zero the key, and not only its weight: an absent slot may hold NaN
                k.masked_fill_(~present[..., None], 0)
                z = torch.bmm(q, k.mT).mul_(call.layer.scale).masked_fill_(~present[:, None], -torch.inf)
                highest = torch.maximum(top, z.amax(-1, keepdim=True))
                weight, shrink = z.sub_(highest).exp_(), torch.exp(top - highest)
                total.mul_(shrink).add_(weight.sum(-1, keepdim=True))
                acc.mul_(shrink).baddbmm_(weight, k)
                top.copy_(highest)
        finish(call, part, acc, top, total)


def finish(call: AttentionCall, part: slice, acc: Tensor, top: Tensor, total: Tensor) -> None:
    """Write acc [t, H, D], top and total [t, H, 1] to rows of the result; a row without keys is 0, its lse -inf."""
    lse = top + total.log()
    factor = 1 / total
    if call.attn_sink is not None:
        # one more logit with value zero
        factor *= torch.sigmoid(lse - call.attn_sink[:, None])
    call.out[part] = acc.mul_(factor.masked_fill_(total == 0, 0))
    if call.lse is not None:
        call.lse[part] = lse[..., 0]


def width_of(rows: DenseIndices | RaggedIndices) -> int:
    """Most indices of a row."""
    return rows.indices.shape[1] if isinstance(rows, DenseIndices) else min(rows.width, len(rows.indices))


def listed(segment: PagedKeys, part: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Some columns of some rows: slots [t, n] int64, 0 where absent, and which are present."""
    rows = segment.rows
    column = torch.arange(columns.start, columns.stop, device=rows.indices.device)
    if isinstance(rows, DenseIndices):
        slots, lens = rows.indices[part, columns], rows.lens[part]
    else:
        first, last = rows.indptr[:-1][part], rows.indptr[1:][part]
        slots, lens = rows.indices[(first[:, None] + column).clamp_(max=len(rows.indices) - 1)], last - first
    present = (column < lens[:, None]) & (slots >= 0) & (slots < segment.cache.capacity)
    return slots.long().masked_fill_(~present, 0), present


# records


@cache
def scale_table(device: torch.device) -> Tensor:
    """[256] fp32: value of each scale byte; 255 is NaN."""
    values = [2.0 ** (byte - BIAS) for byte in range(LARGEST_SCALE + 1)]
    return torch.tensor([*values, torch.nan], dtype=torch.float32, device=device)


def group_of(layout: KVCacheLayout, device: torch.device) -> Tensor:
    """[nope] the scale that each code has; the last group may be short."""
    return torch.arange(layout.nope_dim, device=device) // layout.group_size


def read(cache: PagedKVCache, slots: Tensor, out: Tensor) -> None:
    """Keys [t, n, D] fp32 in existing slots [t, n]. Regions are views of data and scales with the strides of pages."""
    page, place = slots // cache.block_size, slots % cache.block_size
    if not cache.layout.is_quantised or cache.layout.fp8_format is None:
        out.copy_(cache.region("row")[page, place])
        return
    nope = cache.layout.nope_dim
    codes = cache.region("nope")[page, place].view(cache.layout.fp8_format.dtype)
    scales = scale_table(slots.device)[cache.region("scale")[page, place].int()]
    torch.mul(codes.float(), scales[..., group_of(cache.layout, slots.device)], out=out[..., :nope])
    out[..., nope:] = cache.region("rope")[page, place]


def insert(k: Tensor, cache: PagedKVCache, slots: Tensor) -> None:
    """Write keys k [n, D] fp32 to slots [n]; those that do not exist are skipped."""
    live = (slots >= 0) & (slots < cache.capacity)
    k, slots = k[live], slots[live]
    page, place = slots // cache.block_size, slots % cache.block_size
    if not cache.layout.is_quantised:
        cache.region("row")[page, place] = k.to(cache.layout.dtype)
        return
    nope = cache.layout.nope_dim
    cache.region("nope")[page, place], cache.region("scale")[page, place] = quantise(k[:, :nope], cache.layout)
    cache.region("rope")[page, place] = k[:, nope:].bfloat16()


def quantise(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    """[n, nope] fp32 to codes and scale bytes: the smallest power of two under which a group fits its format."""
    assert layout.fp8_format is not None
    values = values.bfloat16().float()
    parts = values.split(layout.group_size, dim=-1)
    amax = torch.stack([part.abs().amax(-1) for part in parts], dim=-1).clamp_(min=MIN_AMAX)
    # value = mantissa * 2 ** exponent with a mantissa of at least one half: just one half is a power of two itself
    mantissa, exponent = torch.frexp(amax / layout.fp8_max)
    byte = (exponent + BIAS - (mantissa == 0.5).int()).clamp_(0, LARGEST_SCALE)
    scale = scale_table(values.device)[byte][:, group_of(layout, values.device)]
    codes = (values / scale).clamp_(-layout.fp8_max, layout.fp8_max).to(layout.fp8_format.dtype)
    scales = values.new_zeros(len(values), layout.scale_bytes, dtype=torch.uint8)
    scales[:, : layout.num_groups] = byte
    return codes.view(torch.uint8), scales


# q-norm and rope


def normalise(x: Tensor, eps: float) -> Tensor:
    """Divide x [t, H, D] fp32 by the root of each head's mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def angles_at(cos_sin_cache: Tensor, positions: Tensor) -> Tensor:
    """Rows [t, rope] of the table. Padding may have any position; it gets the nearest row, which nothing uses."""
    return cos_sin_cache[positions.clamp(0, cos_sin_cache.shape[0] - 1)]


def rotate(x: Tensor, cos_sin: Tensor, *, inverse: bool = False) -> Tensor:
    """A copy of x [t, H, D] fp32 whose trailing dims are turned by rows cos_sin [t, rope] of the table."""
    rope = cos_sin.shape[-1]
    return torch.cat([x[..., :-rope], apply_rope(x[..., -rope:], cos_sin[:, None], inverse=inverse)], dim=-1)
