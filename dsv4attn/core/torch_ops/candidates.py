"""DeepSeek-V4.1's selection in two levels: candidate blocks of entries, and selection among their entries.

A publisher scores every visible entry and keeps the blocks with the largest scores. Its consumers have queries of their
own against the same keys, and select only entries of these blocks. Blocks count from the first entry of a request.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.selection import (
    ENTRIES,
    ascending,
    better,
    none_yet,
    score_entries,
    select_topk,
    selection_bytes,
)
from dsv4attn.core.torch_ops.tiles import arithmetic_of, tiles
from dsv4attn.errors import ArgumentError

__all__ = ["candidate_mask", "check_block_size", "select_candidates", "select_topk_of_candidates"]

_HIGHEST = torch.finfo(torch.float32).max


def check_block_size(block_size: int) -> None:
    """Raise ArgumentError unless blocks are a power of two of at most ENTRIES entries."""
    if not 1 <= block_size <= ENTRIES or block_size & (block_size - 1):
        hint = "pass candidate_block_size of the model's configuration"
        raise ArgumentError("block_size", expected=f"a power of two up to {ENTRIES}", actual=block_size, hint=hint)


@without_modes
def select_candidates(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    block_size: int,
    max_entries: int,
    *,
    deterministic: bool = False,
) -> None:
    """V4.1: write the numbers of the N blocks with the largest scores of each token to out [T, N] int32, then -1.

    A block is block_size consecutive entries of a request; block 0 has its first entries. The score of a block is the
    largest score among its entries that the token sees. The block of the newest visible entry,
    (visible_lens - 1) // block_size, is always written. Of equal blocks any may be written, in any order; torch writes
    the lower numbers first, in ascending order.

    out: [T, N] int32.
    block_size: entries of a block.
    Other arguments are those of `select_topk`. Raises ArgumentError unless block_size is a power of two up to 512.
    """
    check_block_size(block_size)
    arithmetic, (count, most) = arithmetic_of(deterministic), out.shape
    heads, dim = query.values.shape[1], cache.layout.head_dim
    for part in tiles(count, selection_bytes(heads, dim, most)):
        queries, tokens = query.tokens(part), token_map.tokens(part)
        lens, best = tokens.visible_lens[:, None], none_yet(out[part])
        newest = (lens - 1).div(block_size, rounding_mode="floor")
        for start in range(0, max_entries, ENTRIES):
            score, _ = score_entries(queries, cache, tokens, start, arithmetic)
            largest = score.clamp_(max=_HIGHEST).unflatten(-1, (-1, block_size)).amax(-1)
            first = start // block_size
            block = torch.arange(first, first + largest.shape[1], device=out.device, dtype=out.dtype)
            block = block.expand_as(largest)
            largest = largest.masked_fill((block == newest) & (lens > 0), inf)
            best = better(best, largest, block.masked_fill(largest == -inf, -1))
        out[part] = ascending(best[1])


def candidate_mask(candidates: Tensor, start: int, block_size: int) -> Tensor:
    """[t, ENTRIES]: whether entries from `start` on are in one of the blocks candidates [t, N] of their row."""
    first, blocks = start // block_size, ENTRIES // block_size
    inside = (candidates >= first) & (candidates < first + blocks)
    place = (candidates - first).where(inside, blocks).long()
    inside_blocks = torch.zeros(candidates.shape[0], blocks + 1, dtype=torch.bool, device=candidates.device)
    return inside_blocks.scatter_(1, place, value=True)[:, :blocks].repeat_interleave(block_size, 1)


def select_topk_of_candidates(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    candidates: Tensor,
    block_size: int,
    out: Tensor,
    max_entries: int,
    *,
    deterministic: bool = False,
) -> None:
    """V4.1: `select_topk` among the entries that are in one of the token's candidates [T, N] int32, and visible.

    candidates: [T, N] int32 - what `select_candidates` wrote for the same tokens. A number that is negative, or of a
       block that does not exist, is no block.
    block_size: entries of a block.
    Other arguments are those of `select_topk`. Raises ArgumentError unless block_size is a power of two up to 512.
    """
    check_block_size(block_size)

    def inside(part: slice, start: int) -> Tensor:
        return candidate_mask(candidates[part], start, block_size)

    select_topk(query, cache, token_map, out, max_entries, deterministic=deterministic, inside=inside)
