"""Scores and selection in one launch: the launcher of `kernels_scored`.

It stands for Hopper's own kernel, which the interpreter cannot run. On an H100 it is slower than two steps (1.1 to 0.6
times as fast), and it does not compile for every target, so the package does not have it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import table_numbers
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.indexer.launch import (
    Tile,
    facts_of,
    form_of,
    pages_of,
    query_strides,
    raw,
    tiles_for,
)
from dsv4attn.backends._triton.layer.selection.launch import MOST
from dsv4attn.backends._triton.layer.selection.scratch import buffer
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from tests.backends._triton.layer.kernels_scored import select_kernel

SHORTEST = 2048
"""Places of a token's list, at least."""
PART = 1024
"""Places of a list that are read together."""


def capacity_of(topk: int) -> int:
    """Places of a token's list: at least 4 K, so that a compacted list takes little more than a quarter."""
    return max(SHORTEST, 4 << (topk - 1).bit_length())


def slack_of(topk: int) -> int:
    """Entries more than K that a compacted list may keep, which is then found sooner."""
    return topk // 2


def tile_of(layout: KVCacheLayout, arch: str) -> Tile:
    """The tile of index keys on an architecture."""
    return tiles_for(layout, arch).many


def _programs(tile: Tile, tokens: int) -> int:
    return min(tile.programs * multiprocessors(), -(-tokens // tile.tokens))


def select(query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: Tensor, max_entries: int) -> None:
    """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

    The rule is that of `selection.launch.select`, and K at most its MOST. There must be blocks, and a table with some.
    """
    (tokens, topk), table = out.shape, token_map.block_table
    assert topk <= MOST
    if not tokens or not topk:
        return
    tile = tile_of(cache.layout, architecture())
    keys, values, scales = pages_of(cache, tile), raw(query.values), query.scales
    programs, capacity = _programs(tile, tokens), capacity_of(topk)
    lists = buffer(out, 8 * programs * tile.tokens * capacity).view(torch.int64)
    launch(
        select_kernel,
        (programs,),
        (
            values, scales, query.weights, keys.tensor, table, token_map.token_to_req, token_map.visible_lens, lists,
            out, tokens, max_entries, topk, slack_of(topk), query_strides(query),
            table_numbers(table), keys.numbers, out.stride(0),
        ),
        _constants(facts_of(keys, values, tile, exact_sums=False), capacity),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def _constants(facts: tuple[Any, ...], capacity: int) -> Constants:
    return Constants({"FORM": form_of(*facts), "SIZE": capacity, "PART": min(PART, capacity)})
