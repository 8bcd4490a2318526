"""Scores and selection in one launch on Hopper: the launcher of `kernels_index_select`."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch, multiprocessors
from dsv4attn.backends._triton.layer.selection.scratch import buffer
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

MOST = 1024
"""Entries that can be selected in a row."""
TOKENS, WARPS, REGISTERS, PROGRAMS = index_logits.TOKENS, index_logits.WARPS, index_logits.REGISTERS, 4
"""Tokens and warps of a program, registers of a thread, and programs of a multiprocessor.

Four programs have 128 registers of each thread: with K = 512, 52 bytes are stored to local memory and 68 loaded (Triton
3.6; at most 244 and 300 with 3.9 and K = 1,024), for a block of tokens and at the choice. Three programs of 168
registers spill 20 bytes at most, and are slower.
"""
SPILLS = 600
"""Bytes that a thread of four programs may store and load in all."""


def capacity_of(topk: int) -> int:
    """Places of a token's list: at least 4 K, so that a compacted list takes little more than a quarter."""
    return max(2048, 4 << (topk - 1).bit_length())


def slack_of(topk: int) -> int:
    """Entries more than K that a compacted list may keep, which is then found sooner."""
    return topk // 2


def programs_of(tokens: int) -> int:
    """Programs of a launch."""
    return min(PROGRAMS * multiprocessors(), -(-tokens // TOKENS))


def scratch_bytes(tokens: int, topk: int) -> int:
    """Temporaries of `select`: the lists of all tokens in flight, on an H100 17 MB with K = 512 and 35 with 1,024."""
    return 8 * programs_of(tokens) * TOKENS * capacity_of(topk)


def select(query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: Tensor, max_entries: int) -> bool:
    """Write the K entries with the largest scores of each token to out [T, K] int32, ascending, then -1.

    The rule, and the bits of the scores, are those of two steps. False if this kernel does not serve the call; nothing
    is written then.
    """
    (tokens, topk), table = out.shape, token_map.block_table
    paging = index_logits.paging_of(cache)
    # where the kernel of the scores alone does not serve requests of few tokens, this one does not either
    many = tokens >= TOKENS * table.shape[0]
    if paging is None or topk > MOST or not (many and max_entries > 0 and table.numel()):
        return False
    if not index_logits.serves(query):
        return False
    if tokens and topk:
        _launch(query, cache, token_map, out, max_entries, paging)
    return True


def _launch(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, out: Tensor, max_entries: int, paging: tuple[int, ...]
) -> None:
    from dsv4attn.backends.sm90.selection.kernels_index_select import select_index  # not where kernels are interpreted

    (tokens, topk), table = out.shape, token_map.block_table
    programs, capacity = programs_of(tokens), capacity_of(topk)
    lists = buffer(out, scratch_bytes(tokens, topk)).view(torch.int64)
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
        {"CAPACITY": capacity, "PDL": uses_pdl("sm_90")},
        num_warps=WARPS,
        maxnreg=REGISTERS,
        spills=SPILLS,
    )  # fmt: skip


@recorded
def variants(topk: int) -> None:
    """Every variant that `select` can need."""
    query, cache, token_map = index_logits.meta_query(TOKENS)
    select(query, cache, token_map, meta_rows(TOKENS, topk), cache.block_size)
