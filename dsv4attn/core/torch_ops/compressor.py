"""The compressor: states of tokens to a paged cache, then entries from the states of their window.

Entry e of a request summarises tokens [e * r, e * r + r): a softmax per channel over the window's scores weighs the
window's kv. With overlap (c4a, and its indexer) a token has two halves of channels: its first half counts in the next
entry, its second half in its own; entry 0 has no previous window. A row of the state cache is addressed by position, so
a token that is computed again, or a draft that is replaced, overwrites its own row and nothing else.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import read_rows, slots_of, store_entries, store_rows
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.model.rope import angles_at, apply_rope
from dsv4attn.core.tensorspec import check_norm_weight
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages
from dsv4attn.core.torch_ops.tiles import PLAIN, Arithmetic, arithmetic_of, tiles

__all__ = ["compress", "compress_norm_rope_store", "compressor_bytes", "rms_norm", "save_partial_states"]


@without_modes
def save_partial_states(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, cache: PagedKVCache, slot_mapping: Tensor
) -> None:
    """Write each token's kv, and its score plus the bias of its place in the window, to its state slot.

    kv, score: [T, w] fp32.
    ape: [r, w] fp32 - the bias of each place in a window.
    positions: [T] int64.
    cache: the state cache, of layout `KVCacheLayout.compressor_state(w)`.
    slot_mapping: [S] int64 - slots of states. Tokens from S on, and slots that do not exist, are skipped.
    """
    n = min(kv.shape[0], slot_mapping.shape[0])
    for part in tiles(n, 32 * kv.shape[1]):
        row = torch.cat([kv[part], score[part] + ape[positions[part] % ape.shape[0]]], -1)
        store_rows(cache.region("row"), slot_mapping[part], row)


def compress(states: StatePages, token_to_req: Tensor, positions: Tensor, ratio: int, *, overlap: bool) -> Tensor:
    """Entries [n, d] fp32, before their norm, that the tokens at `positions` [n] complete.

    token_to_req: [n] int32 - the request of each of these tokens. States without a block do not count.
    """
    cache = states.cache
    width = cache.layout.head_dim // 2
    dim, window = (width // 2, 2 * ratio) if overlap else (width, ratio)
    offsets = torch.arange(1 - window, 1, device=positions.device)
    slots = slots_of(positions[:, None] + offsets, states.block_table, token_to_req, cache)
    row = cache.region("row")
    if overlap:  # the previous window by its first channels, the current one by its second
        parts = ((slots[:, :ratio], 0), (slots[:, ratio:], dim))
        kv = torch.cat([read_rows(row[..., first : first + dim], s) for s, first in parts], 1)
        score = torch.cat([read_rows(row[..., width + first : width + first + dim], s) for s, first in parts], 1)
    else:
        kv, score = read_rows(row[..., :width], slots), read_rows(row[..., width:], slots)
    score = score.masked_fill(slots[..., None] < 0, -inf)
    top = score.amax(1, keepdim=True).nan_to_num(neginf=0.0, nan=torch.nan, posinf=inf)
    weight = (score - top).exp()
    total = weight.sum(1)
    return (weight * kv).sum(1) / total.masked_fill(total == 0, 1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, arithmetic: Arithmetic = PLAIN) -> Tensor:
    """X [..., d] over the root of its mean square, times weight [d]: fp32."""
    x = x.float()
    x = x * torch.rsqrt(arithmetic.mean_square(x) + eps)
    return x if weight is None else x * weight.float()


@without_modes
def compress_norm_rope_store(
    states: StatePages,
    token_to_req: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    norm: EntryNorm,
    ratio: int,
    cache: PagedKVCache,
    *,
    overlap: bool,
    deterministic: bool = False,
) -> None:
    """Make the entries that the tokens of a step complete, from states that are all saved, and store them.

    The steps are softmax of the scores over the window, RMSNorm, RoPE at the window's first position, quantisation.

    states: states of the tokens of the step and of those before it.
    token_to_req: [T] int32 - the request of each token.
    positions: [T] int64 - consecutive within a request.
    slot_mapping: [S] int64 - slots of `cache`, negative for tokens that complete no entry.
    norm: what an entry goes through; its weight is not None.
    ratio: r.
    cache: where entries are stored: a cache of keys, or of index keys.
    overlap: whether an entry covers the window before its own too.
    Raises ArgumentError unless the weight of the norm is [d], fp32 or bf16.
    """
    weight = check_norm_weight(norm.weight, cache.layout.head_dim)
    n, arithmetic = min(positions.shape[0], slot_mapping.shape[0]), arithmetic_of(deterministic)
    completes = (slot_mapping[:n] >= 0) & ((positions[:n] + 1) % ratio == 0)
    # a bound of the tokens that complete an entry: n consecutive positions have n // r multiples of r, or one more
    most = min(n, n // ratio + states.block_table.shape[0])
    place = (completes.cumsum(0) - 1).masked_fill_(~completes, most).clamp_(max=most)
    tokens = torch.zeros(most + 1, dtype=torch.int64, device=positions.device)
    tokens.scatter_(0, place, torch.arange(n, device=positions.device))
    missing = torch.arange(most, device=positions.device) >= completes.sum()
    for part in tiles(most, compressor_bytes(states.cache.layout.head_dim // 2, ratio)):
        token, absent = tokens[:most][part], missing[part]
        position = positions[token]
        pooled = compress(states, token_to_req[token], position, ratio, overlap=overlap)
        entry = rms_norm(pooled, weight, norm.eps, arithmetic)
        rope = norm.cos_sin_cache.shape[-1]
        turned = apply_rope(entry[:, -rope:], angles_at(norm.cos_sin_cache, position - ratio + 1))
        entry = torch.cat([entry[:, :-rope], turned], -1)
        store_entries(entry, cache, slot_mapping[token].masked_fill(absent, -1))


def compressor_bytes(width: int, ratio: int) -> int:
    """Temporaries of one entry: kv, scores, weights and their products over the window. width: of kv of a token."""
    return ratio * width * 4 * 8 + 4096
