"""Records of index keys and of states: quantise, read, write. No slot that does not exist is read or written.

Codes of fp8: `KVCacheLayout.index_fp8`, one power-of-two scale for a row. MXFP4: `index_mxfp4`, e2m1 codes under a
scale byte for 32 of them. Plain rows: `rows`. Values are rounded to bf16 before they are quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4attn.core.cache import fp4
from dsv4attn.core.cache.key_codecs import dequantize_keys, power_of_two, quantize_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_modes import without_modes

__all__ = [
    "quantize_index",
    "read_index_keys",
    "read_rows",
    "slots_of",
    "store_entries",
    "store_index_keys",
    "store_keys",
    "store_rows",
]


def quantize_index(values: Tensor, layout: KVCacheLayout) -> tuple[Tensor, Tensor]:
    """Rows [..., Di] to codes [..., Di * bits / 8] uint8 and biased exponents of their scales [..., groups] int32.

    A scale is the smallest power of two with amax / scale <= the largest code; see `key_codecs`.
    """
    codes, exponent = quantize_keys(values, layout)
    return codes, exponent[..., : layout.num_groups].int()


def slots_of(records: Tensor, block_table: Tensor, request: Tensor, cache: PagedKVCache) -> Tensor:
    """[n, K] int64 slots of records [n, K] of each row's request, -1 where a record has no block that exists."""
    column = torch.div(records, cache.block_size, rounding_mode="floor")
    exists = (records >= 0) & (column < block_table.shape[1]) & (request >= 0)[:, None]
    exists &= (request < block_table.shape[0])[:, None]
    if not block_table.numel():
        return torch.full_like(records, -1, dtype=torch.int64)
    row = request.long().clamp(0, block_table.shape[0] - 1)
    block = block_table[row[:, None], column.clamp(0, block_table.shape[1] - 1)].long()
    exists &= (block >= 0) & (block < cache.num_blocks)
    return (block * cache.block_size + records % cache.block_size).masked_fill(~exists, -1)


def read_rows(region: Tensor, slots: Tensor) -> Tensor:
    """Values [..., count] of a region [B, P, count] at slots [...]; zeros where a slot is negative."""
    if not region.numel():
        return region.new_zeros(*slots.shape, region.shape[2])
    place = slots.long().clamp(min=0)
    return region[place // region.shape[1], place % region.shape[1]].masked_fill(slots[..., None] < 0, 0)


def store_rows(region: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [n, count] to slots [n] of a region [B, P, count]; slots that do not exist are skipped.

    A row that is skipped repeats the write of a row that is not, or rewrites what slot 0 holds if there is none: so
    nothing is read back to the host, and no two rows write different values to a slot.
    """
    if not (region.numel() and slots.numel()):
        return
    size, slots = region.shape[1], slots.long()
    live = (slots >= 0) & (slots < region.shape[0] * size)
    first = live.int().argmax()
    some = live.index_select(0, first[None])
    row = torch.where(live, torch.arange(slots.shape[0], device=slots.device), first)
    slot = slots.index_select(0, row).masked_fill(~some, 0)
    place = slot // size, slot % size
    region[place] = torch.where(some, values.index_select(0, row).to(region.dtype), region[place])


@without_modes
def store_index_keys(k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Write index keys, or plain rows, k [n, Di] to slots [n]; slots that do not exist are skipped."""
    layout = cache.layout
    if not layout.is_quantised:
        store_rows(cache.region("row"), slot_mapping, k)
        return
    codes, exponent = quantize_index(k, layout)
    scale = power_of_two(exponent) if layout.scale_dtype == torch.float32 else exponent
    region = cache.region("scale")
    store_rows(cache.region("nope"), slot_mapping, codes)
    store_rows(region, slot_mapping, pad(scale, (0, region.shape[2] - layout.num_groups)))


def read_index_keys(cache: PagedKVCache, slots: Tensor) -> Tensor:
    """[..., Di] fp32 index keys at slots [...]; zeros where a slot is negative."""
    layout = cache.layout
    if not layout.is_quantised:
        return read_rows(cache.region("row"), slots).float()
    codes, scales = (read_rows(cache.region(name), slots) for name in ("nope", "scale"))
    return dequantize_keys(codes, scales, layout)


@without_modes
def store_keys(k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Write keys k [n, D], rotated, to slots [n]; slots that do not exist are skipped."""
    layout = cache.layout
    if not layout.is_quantised:
        store_rows(cache.region("row"), slot_mapping, k)
        return
    coded = layout.coded_dims
    if layout.rounds_to_fp4:
        k = fp4.dequantize(*fp4.quantize(k.float()))
    codes, scales = quantize_keys(k[:, :coded].float(), layout)
    store_rows(cache.region("nope"), slot_mapping, codes)
    store_rows(cache.region("scale"), slot_mapping, scales)
    if layout.plain_dims:
        store_rows(cache.region("rope"), slot_mapping, k[:, coded:].bfloat16())


def store_entries(k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """`store_keys` to a cache of keys, `store_index_keys` to a cache of index keys."""
    store = store_index_keys if cache.layout.key_record is None else store_keys
    store(k, cache, slot_mapping)
