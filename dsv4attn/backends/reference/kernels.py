"""DeepSeek-V4 attention in vectorised torch, step by step from top to bottom: the definition for every backend.

Records -> insert and gather -> q-norm and RoPE -> attention over selected keys -> output projection.
Letters are those of `core.model.geometry`. All arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache import fp4
from dsv4attn.core.cache.key_codecs import dequantize_keys, quantize_keys
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.model.rope import angles_at, apply_rope
from dsv4attn.core.torch_ops.tiles import Linear

TILE_BYTES = 64 * 2**20
"""Most bytes of temporaries of a tile; large enough that matrix products dominate."""


# records


def read_records(cache: PagedKVCache, slots: Tensor) -> Tensor:
    """[n, D] fp32 keys in `slots` [n]; every slot must exist."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    if not cache.layout.is_quantised:
        return cache.region("row")[block, offset].float()
    codes, scales = (cache.region(name)[block, offset] for name in ("nope", "scale"))
    values = dequantize_keys(codes, scales, cache.layout)
    if not cache.layout.plain_dims:
        return values
    return torch.cat([values, cache.region("rope")[block, offset].float()], dim=-1)


# insert and gather


def insert(k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
    """Write rotated keys k [n, D] to their slots [<= n]; slots that do not exist are skipped."""
    n = min(k.shape[0], slot_mapping.shape[0])
    slots = slot_mapping[:n].long()
    live = (slots >= 0) & (slots < cache.capacity)
    slots, k = slots[live], k[:n][live]
    place = slots // cache.block_size, slots % cache.block_size
    if not cache.layout.is_quantised:
        cache.region("row")[place] = k.to(cache.layout.dtype)
        return
    coded = cache.layout.coded_dims
    if cache.layout.rounds_to_fp4:
        k = fp4.dequantize(*fp4.quantize(k.float()))
    cache.region("nope")[place], cache.region("scale")[place] = quantize_keys(k[:, :coded].float(), cache.layout)
    if cache.layout.plain_dims:
        cache.region("rope")[place] = k[:, coded:].bfloat16()


def gather(
    out: Tensor, cache: PagedKVCache, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor, offset: int
) -> None:
    """out[i, offset + j] = the record at position seq_lens[i] - gather_lens[i] + j; rows without a record stay.

    Records before the first position, past the block table, or for rows past the last row of out, are absent.
    """
    seq_lens = seq_lens.long().clamp(min=0)
    lens = seq_lens if gather_lens is None else gather_lens.long()
    columns = torch.arange(max(out.shape[1] - offset, 0), device=out.device)
    positions = (seq_lens - lens)[:, None] + columns
    inside = (positions >= 0) & (positions < block_table.shape[1] * cache.block_size)
    request, row = ((columns < lens[:, None]) & inside).nonzero(as_tuple=True)
    for part in tiles(request.shape[0], record_bytes(cache.layout)):
        i, j = request[part], row[part]
        position = positions[i, j]
        block = block_table[i, position // cache.block_size].long()
        exists = (block >= 0) & (block < cache.num_blocks)
        slots = block * cache.block_size + position % cache.block_size
        out[i[exists], offset + j[exists]] = read_records(cache, slots[exists]).to(out.dtype)


# q-norm and rope


def qnorm_rope(q: Tensor, positions: Tensor, cos_sin_cache: Tensor, eps: float | None) -> None:
    """Q [T, H, D] in place: q * rsqrt(mean(q^2) + eps) per head, then RoPE on the trailing part; rounded once.

    Without eps there is no norm.
    """
    rope = cos_sin_cache.shape[-1]
    for part in tiles(q.shape[0], 16 * q[:1].numel()):
        x = q[part].float()
        if eps is not None:
            x *= torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x[..., -rope:] = apply_rope(x[..., -rope:], angles_at(cos_sin_cache, positions[part])[:, None])
        q[part] = x.to(q.dtype)


def rotated(k: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, inverse: bool = False) -> Tensor:
    """A copy of k [T, ..., D] with RoPE, or its inverse, on the trailing part, in the dtype of k."""
    rope = cos_sin_cache.shape[-1]
    table = angles_at(cos_sin_cache, positions).view(k.shape[0], *(1,) * (k.ndim - 2), rope)
    return torch.cat([k[..., :-rope], apply_rope(k[..., -rope:], table, inverse=inverse).to(k.dtype)], dim=-1)


# attention


def attend(
    q: Tensor,
    keys: Sequence[PagedKeys] | GatheredKeys,
    scale: float,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    max_logits: Tensor | None = None,
    empty_lse: float = -inf,
    *,
    rows: int | None = None,
) -> None:
    """Attention of every row of q [T, H, D] over its own keys; keys are values.

    z_j = scale * q . k_j, lse = ln(sum_j exp z_j), out = sum_j exp(z_j - lse) k_j * sigmoid(lse - sink).
    The last factor is the effect on a softmax of one more logit, the sink, with value zero. rows: of a tile, by default
    as many as TILE_BYTES allows; one row has bits that depend on its own keys alone.
    """
    for part in tiles(q.shape[0], attend_bytes(q.shape[1], q.shape[2], width_of(keys)), rows):
        k, present = read_gathered(keys, part) if isinstance(keys, GatheredKeys) else read_paged(keys, part)
        if not k.shape[1]:
            out[part] = 0
            for result, nothing in ((lse, empty_lse), (max_logits, -inf)):
                if result is not None:
                    result[part] = nothing
            continue
        z = torch.bmm(q[part].float(), k.mT).mul_(scale).masked_fill_(~present[:, None], -torch.inf)
        top = z.amax(-1, keepdim=True)
        if max_logits is not None:
            max_logits[part] = top.squeeze(-1)
        top.nan_to_num_(neginf=0.0, nan=torch.nan, posinf=torch.inf)
        p = z.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        row_lse = top + total.log()
        weight = 1 if attn_sink is None else torch.sigmoid(row_lse - attn_sink[:, None])
        # a row without keys has total 0; it is defined to be zero
        out[part] = torch.bmm(p, k).mul_((weight / total).masked_fill_(total == 0, 0))
        if lse is not None:
            lse[part] = row_lse.masked_fill_(total == 0, empty_lse).squeeze(-1)


def read_gathered(keys: GatheredKeys, part: slice) -> tuple[Tensor, Tensor]:
    """Keys [t, K, D] fp32 of a tile of rows, zero where absent, and which are present [t, K]."""
    rows, present = listed(keys.rows, part, keys.kv.shape[0])
    picked = keys.kv.index_select(0, rows.flatten()).float().unflatten(0, rows.shape)
    return picked.masked_fill_(~present[..., None], 0), present


def read_paged(segments: Sequence[PagedKeys], part: slice) -> tuple[Tensor, Tensor]:
    """The same, dequantised straight from the pages of every segment."""
    found = []
    for segment in segments:
        slots, present = listed(segment.rows, part, segment.cache.capacity)
        picked = read_records(segment.cache, slots.flatten()).unflatten(0, slots.shape)
        # zero the key, not only its weight: an absent slot may hold NaN
        found.append((picked.masked_fill_(~present[..., None], 0), present))
    if len(found) == 1:
        return found[0]
    return torch.cat([k for k, _ in found], dim=1), torch.cat([present for _, present in found], dim=1)


def listed(rows: DenseIndices | RaggedIndices, part: slice, capacity: int) -> tuple[Tensor, Tensor]:
    """Indices [t, K] int64 of a tile of rows, 0 where absent, and which are present: in length and in range.

    K is the tile's longest row: later columns cannot count, and a short context should cost little.
    """
    if isinstance(rows, DenseIndices):
        lens, width = rows.lens[part], rows.indices.shape[1]
    else:
        start = rows.indptr[part]
        lens, width = rows.indptr[1:][part] - start, min(rows.width, rows.indices.shape[0])
    columns = torch.arange(min(max(int(lens.max()), 0), width) if capacity else 0, device=lens.device)
    if isinstance(rows, DenseIndices):
        indices = rows.indices[part, : columns.shape[0]]
    else:
        indices = rows.indices[(start[:, None] + columns).clamp_(max=rows.indices.shape[0] - 1)]
    # in 64 bits: torch compares int32 with what is left of the capacity in 32 bits
    indices = indices.long()
    present = (columns < lens[:, None]) & (indices >= 0) & (indices < capacity)
    return indices.masked_fill(~present, 0), present


# output projection


def inv_rope_o_proj(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Tensor, num_groups: int, linear: Linear
) -> Tensor:
    """Undo the keys' rotation at the query's position, then project each group of heads by its own matrix.

    o: [T, H, D]. wo_a: [G * rank, H / G * D]. linear: the product. Returns [T, G, rank].
    """
    weight = wo_a.unflatten(0, (num_groups, -1)).float()
    out = o.new_empty(o.shape[0], *weight.shape[:2])
    for part in tiles(o.shape[0], 24 * o[:1].numel()):
        grouped = (
            rotated(o[part], positions[part], cos_sin_cache, inverse=True).flatten(1).unflatten(1, (num_groups, -1))
        )
        for group in range(num_groups):
            out[part, group] = linear(grouped[:, group].float(), weight[group])
    return out


# tiles


def tiles(n: int, row_bytes: int, rows: int | None = None) -> Iterator[slice]:
    """Cut n rows into tiles whose temporaries stay within TILE_BYTES, or into tiles of a given number of rows."""
    step = rows or max(TILE_BYTES // max(row_bytes, 1), 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def width_of(keys: Sequence[PagedKeys] | GatheredKeys) -> int:
    """Columns of all index lists together."""
    rows = [keys.rows] if isinstance(keys, GatheredKeys) else [segment.rows for segment in keys]
    return sum(r.indices.shape[1] if isinstance(r, DenseIndices) else r.width for r in rows)


def record_bytes(layout: KVCacheLayout) -> int:
    """Temporaries of one record being read or written."""
    return 24 * max(layout.head_dim, layout.num_groups * layout.group_size + layout.plain_dims) + 256


def attend_bytes(heads: int, dim: int, width: int) -> int:
    """Temporaries of one row being attended."""
    return width * (16 * dim + 12 * heads + 64) + 16 * heads * dim + 256
