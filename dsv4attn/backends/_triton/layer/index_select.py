"""Scores and selection in one launch: the launcher of `kernels_index_select`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends._triton.attention.launch import divider
from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import WIDE, architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.index_logits import (
    Tile,
    constants_of,
    dense_stride,
    multiplies_codes,
    pages_of,
    raw,
    tiles_for,
)
from dsv4attn.backends._triton.layer.kernels_index_select import select_kernel
from dsv4attn.backends._triton.layer.select import MOST
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["capacity_of", "scratch_bytes", "select", "slack_of", "variants"]

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


def scratch_bytes(layout: KVCacheLayout, tokens: int, topk: int) -> int:
    """Temporaries of `select`, at most: lists of the tokens that are in flight."""
    tile = tile_of(layout, architecture())
    return 8 * _programs(tile, tokens) * tile.tokens * capacity_of(topk)


def select(query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: Tensor, max_entries: int) -> None:
    """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

    The rule is that of `layer.select.select`, and K at most its MOST. There must be blocks, and a block table that is
    not empty.
    """
    (tokens, topk), table = out.shape, token_map.block_table
    assert topk <= MOST
    if not tokens or not topk:
        return
    tile = tile_of(cache.layout, architecture())
    keys, values, scales = pages_of(cache, tile), raw(query.values), query.scales
    programs, capacity = _programs(tile, tokens), capacity_of(topk)
    lists = out.new_empty(programs, tile.tokens * capacity, dtype=torch.int64)
    launch(
        select_kernel,
        (programs,),
        (
            values, scales, query.weights, keys.tensor, table, token_map.token_to_req, token_map.visible_lens, lists,
            out, tokens, table.shape[0], max_entries, topk, slack_of(topk), values.stride(0), values.stride(1),
            0 if scales is None else scales.stride(0), query.weights.stride(0), table.stride(0), table.shape[1],
            keys.num_blocks, keys.page_size, *divider(keys.page_size), *keys.strides, out.stride(0),
        ),
        _constants(
            cache.layout, values.shape[1], tile, keys.aligned, keys.stride, alignment_of_rows(values), capacity,
            multiplies_codes(cache.layout, architecture()),
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def _constants(
    layout: KVCacheLayout,
    heads: int,
    tile: Tile,
    aligned: int,
    stride: int,
    q_aligned: int,
    capacity: int,
    native: bool,  # noqa: FBT001 - constants of a launch
) -> dict[str, Any]:
    shared = constants_of(layout, heads, tile, aligned, stride, q_aligned, False, native)
    return {name: value for name, value in shared.items() if name not in {"LANES", "FILL"}} | {
        "SIZE": capacity,
        "PART": min(PART, capacity),
    }


def variants(topk: int, layout: KVCacheLayout, heads: int, arch: str, *, aligned: bool = True) -> Iterator[Variant]:
    """Every variant that `select` can need on an architecture, with keys of this layout.

    aligned: whether caches, and rows of plain queries, are aligned to 16 bytes.
    """
    tile, native = tile_of(layout, arch), multiplies_codes(layout, arch)
    dtype = pointer_type(torch.uint8 if layout.is_quantised else layout.dtype)
    types = {"Q": dtype, "KEYS": dtype, "W": "*fp32", "LISTS": "*i64"}
    types["Q_SCALES"] = "*u8" if layout.is_quantised and layout.fp8_format is None else "none"
    item = layout.dtype.itemsize
    packed = layout.head_dim * layout.code_bits // 8 if layout.is_quantised else layout.head_dim
    alignments = row_alignments(packed, torch.uint8 if layout.is_quantised else layout.dtype, aligned=aligned)
    for step in (WIDE,) if aligned and layout.data_bytes % WIDE == 0 else (WIDE, item):
        for stride in (dense_stride(layout, layout.data_bytes // item), 0):
            for rows in alignments:
                constants = _constants(layout, heads, tile, step, stride, rows, capacity_of(topk), native)
                yield Variant.from_types(select_kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)
