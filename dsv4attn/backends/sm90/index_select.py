"""Scores and selection in one launch on Hopper: the launcher of `kernels_index_select`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import launch, multiprocessors
from dsv4attn.backends._triton.layer.index_select import capacity_of, slack_of
from dsv4attn.backends.sm90 import index_logits
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["MOST", "scratch_bytes", "select", "variants"]

MOST = 1024
"""Entries that can be selected in a row."""
TOKENS, WARPS, REGISTERS, PROGRAMS = index_logits.TOKENS, index_logits.WARPS, index_logits.REGISTERS, 4
"""Tokens and warps of a program, registers of a thread, and programs of a multiprocessor."""


def programs_of(tokens: int) -> int:
    """Programs of a launch."""
    return min(PROGRAMS * multiprocessors(), -(-tokens // TOKENS))


def scratch_bytes(tokens: int, topk: int) -> int:
    """Temporaries of `select`, at most: the lists of all tokens in flight."""
    return 8 * programs_of(tokens) * TOKENS * capacity_of(topk)


def select(query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: Tensor, max_entries: int) -> bool:
    """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

    The rule is that of `_triton.layer.select.select`. False if this kernel does not serve the call; nothing is written
    then.
    """
    from dsv4attn.backends.sm90.kernels_index_select import select_index  # not where kernels are interpreted

    (tokens, topk), table = out.shape, token_map.block_table
    paging = index_logits.paging_of(cache)
    if paging is None or not index_logits.serves(query) or topk > MOST or not (max_entries > 0 and table.numel()):
        return False
    if not tokens or not topk:
        return True
    programs, capacity = programs_of(tokens), capacity_of(topk)
    lists = out.new_empty(programs, TOKENS * capacity, dtype=torch.int64)
    values, (requests, columns) = index_logits.raw(query.values), table.shape
    launch(
        select_index,
        (programs,),
        (
            values, query.weights, cache.tensor, table, token_map.token_to_req, token_map.visible_lens, lists, out,
            tokens, requests, max_entries, min(columns * cache.block_size, max_entries), topk, slack_of(topk),
            values.stride(0), values.stride(1), query.weights.stride(0), table.stride(0), columns - 1, *paging,
            out.stride(0),
        ),
        {"CAPACITY": capacity},
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )  # fmt: skip
    return True


def variants(topk: int) -> Iterator[Variant]:
    """Every variant that `select` can need."""
    from dsv4attn.backends.sm90.kernels_index_select import select_index  # not where kernels are interpreted

    if topk <= MOST:
        types = {"Q": "*u8", "KEYS": "*u8", "W": "*fp32", "LISTS": "*i64"}
        constants = {"CAPACITY": capacity_of(topk)}
        yield Variant.from_types(select_index, types, constants, num_warps=WARPS, maxnreg=REGISTERS)
