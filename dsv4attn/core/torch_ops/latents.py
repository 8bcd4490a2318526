"""DeepSeek-V4.1's compressor: latents of one or two tokens, and what is stored of a latent.

Latent e of a request summarises tokens [e * r, e * r + r) without overlap and without a bias of the place. It is bf16,
before RoPE: the key is stored from it, and the indexer's key is computed from it. With ratio 1 it is the RMSNorm of kv.
With a larger ratio the raw kv and scores of the last tokens of a request stay in a ring, for windows across two steps.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import read_rows, slots_of, store_entries, store_rows
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.model.rope import angles_at, apply_rope
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.core.torch_ops.compressor import rms_norm
from dsv4attn.core.torch_ops.tiles import arithmetic_of, tiles
from dsv4attn.errors import ArgumentError

__all__ = ["check_ring", "compress_latents", "norm_rope_store"]

_ROW_BYTES = 32
"""Temporaries for each channel of each token of a window."""


@without_modes
def compress_latents(
    kv: Tensor,
    score: Tensor | None,
    positions: Tensor,
    token_to_req: Tensor,
    norm_weight: Tensor,
    eps: float,
    ratio: int,
    states: StatePages | None = None,
    *,
    deterministic: bool = False,
) -> Tensor:
    """V4.1: latents [T, d] bf16, before RoPE, of the tokens that complete an entry; rows of others are zero.

    With ratio 1 a latent is the RMSNorm of kv. With a larger ratio a softmax of the window's scores, channel by
    channel, weighs the window's kv, and the RMSNorm follows; then kv and scores of the tokens are saved as they are.

    kv: [T, d] fp32.
    score: [T, d] fp32; None with ratio 1.
    positions: [T] int64 - tokens of a request follow each other, with consecutive positions.
    token_to_req: [T] int32 - the request of each token. A token of no request (-1) saves nothing; its latent is zero.
    norm_weight: [d] - weight of the norm.
    eps: epsilon of the norm.
    ratio: r.
    states: the ring of each request, of `KVCacheLayout.compressor_state(d)`; None with ratio 1.
    Raises ArgumentError if scores or states are missing, or if there are tokens and the ring is smaller than the ratio.
    """
    arithmetic, (count, width) = arithmetic_of(deterministic), kv.shape
    out = kv.new_empty(count, width, dtype=torch.bfloat16)
    ring = check_ring(ratio, score, states, tokens=count)
    if ratio == 1:
        for part in tiles(count, _ROW_BYTES * width):
            latent = rms_norm(kv[part], norm_weight, eps, arithmetic)
            out[part] = latent.masked_fill(token_to_req[part, None] < 0, 0).to(out.dtype)
        return out
    if not count:
        return out
    assert score is not None
    assert states is not None
    token, completes = torch.arange(count, device=kv.device), ((positions + 1) % ratio == 0) & (token_to_req >= 0)
    row = states.cache.region("row")
    # all reads come first: a token may overwrite what an earlier one of the same step reads
    for part in tiles(count, _ROW_BYTES * width * ratio):
        place, request = positions[part], token_to_req[part]
        values, weights = [kv[part].float()], [score[part].float()]
        for back in range(1, ratio):
            earlier = (token[part] - back).clamp(min=0)
            is_in_step = (
                (token[part] >= back) & (token_to_req[earlier] == request) & (positions[earlier] == place - back)
            )
            absent = is_in_step | ~completes[part] | (place < back)
            slots = _ring_slots(states, place - back, request)
            slots = slots.masked_fill(absent, -1)
            saved_kv, saved_score = read_rows(row, slots).split(width, -1)
            saved_score = saved_score.masked_fill(slots[:, None] < 0, -inf)
            values.append(kv[earlier].where(is_in_step[:, None], saved_kv))
            weights.append(score[earlier].where(is_in_step[:, None], saved_score))
        weight = torch.stack(weights).softmax(0)
        latent = rms_norm((weight * torch.stack(values)).sum(0), norm_weight, eps, arithmetic)
        out[part] = latent.masked_fill(~completes[part, None], 0).to(out.dtype)
    later = (token + ring).clamp(max=max(count - 1, 0))
    replaced = (token + ring < count) & (token_to_req[later] == token_to_req)
    for part in tiles(count, _ROW_BYTES * width):
        slots = _ring_slots(states, positions[part], token_to_req[part])
        store_rows(row, slots.masked_fill(replaced[part], -1), torch.cat([kv[part], score[part]], -1))
    return out


def _ring_slots(states: StatePages, positions: Tensor, token_to_req: Tensor) -> Tensor:
    """[n] slots of the states of tokens [n] in the rings of their requests; -1 where there is none."""
    ring = states.block_table.shape[1] * states.cache.block_size
    return slots_of((positions % ring)[:, None], states.block_table, token_to_req, states.cache)[:, 0]


def check_ring(ratio: int, score: Tensor | None, states: StatePages | None, *, tokens: int) -> int:
    """Rows of a request's ring; 0 with ratio 1. Raises ArgumentError for arguments that do not fit the ratio.

    tokens: of the step. A step without tokens needs no ring.
    """
    for name, value in (("score", score), ("states", states)):
        if ratio == 1 and value is not None:
            hint = "ratio 1 has neither scores nor states"
            raise ArgumentError(name, expected="None with ratio 1", actual=type(value).__name__, hint=hint)
        if ratio > 1 and value is None:
            hint = "windows of several tokens are weighed by scores, and may begin in the step before"
            raise ArgumentError(name, expected=f"given with ratio {ratio}", actual=None, hint=hint)
    if states is None:
        return 0
    columns, block_size = states.block_table.shape[1], states.cache.block_size
    ring = columns * block_size
    if tokens and ring < ratio:
        expected = f"blocks for at least {ratio} tokens of a request"
        raise ArgumentError("states.block_table", expected=expected, actual=f"{columns} of {block_size}")
    return ring


@without_modes
def norm_rope_store(
    x: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm: EntryNorm,
    ratio: int,
    cache: PagedKVCache,
    *,
    deterministic: bool = False,
) -> None:
    """V4.1: store keys from latents, or index keys from their projection.

    The steps are RMSNorm if the norm has a weight, rounded to bf16; RoPE on the trailing dims at the window's first
    position, (p // r) * r; quantisation.

    x: [T, d] bf16 or fp32, which is not changed.
    positions: [T] int64.
    slot_mapping: [S] int64 - slots of `cache`. Tokens from S on, tokens that complete no entry, and slots that do not
       exist are skipped.
    norm: what a row goes through; without a weight for keys.
    ratio: r.
    cache: where rows are stored: a cache of keys, or of index keys.
    """
    arithmetic = arithmetic_of(deterministic)
    n, rope = min(x.shape[0], slot_mapping.shape[0]), norm.cos_sin_cache.shape[-1]
    for part in tiles(n, _ROW_BYTES * x.shape[1]):
        place = positions[part]
        rows = x[part].float()
        if norm.weight is not None:
            rows = rms_norm(rows, norm.weight, norm.eps, arithmetic).bfloat16().float()
        turned = apply_rope(rows[:, -rope:], angles_at(norm.cos_sin_cache, place // ratio * ratio))
        slots = slot_mapping[part].masked_fill((place + 1) % ratio != 0, -1)
        store_entries(torch.cat([rows[:, :-rope], turned], -1), cache, slots)
