"""`TritonLayerSteps`: the steps of the layer around attention, by the kernels of this wing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import inf

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.insert import quantize_and_insert_k_cache
from dsv4attn.backends._triton.launching.runtime import architecture
from dsv4attn.backends._triton.layer import (
    candidates,
    compress,
    hyper_connections,
    index_logits,
    index_query,
    latents,
    ranks,
    select,
)
from dsv4attn.backends._triton.layer.candidates import keep_candidates
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.contract.torch_layer_steps import TorchLayerSteps
from dsv4attn.core.torch_ops.candidates import check_block_size
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.tiles import INVARIANT, PLAIN

__all__ = ["SCORES_BYTES", "TritonLayerSteps"]

SCORES_BYTES = 128 * 2**20
"""Most bytes of scores that a selection holds: those of all tokens, or of as many as fit, and of one at least."""


class TritonLayerSteps(TorchLayerSteps):
    """`LayerSteps` by kernels.

    deterministic: whether no token's bits may depend on the other tokens of a step.
    """

    bf16_norm = True

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(quantize_and_insert_k_cache, INVARIANT if deterministic else PLAIN)
        self._deterministic = deterministic
        self.mhc_pre = partial(hyper_connections.mhc_pre, deterministic=deterministic)  # type: ignore[method-assign]
        fused = partial(hyper_connections.mhc_fused_post_pre, deterministic=deterministic)
        self.mhc_fused_post_pre = fused  # type: ignore[method-assign]
        self.hc_head = partial(hyper_connections.hc_head, deterministic=deterministic)  # type: ignore[method-assign]
        delayed = partial(hyper_connections.mhc_pre_delayed, deterministic=deterministic)
        self.mhc_pre_delayed = delayed  # type: ignore[method-assign]
        after = partial(hyper_connections.mhc_fused_post_pre_delayed, deterministic=deterministic)
        self.mhc_fused_post_pre_delayed = after  # type: ignore[method-assign]
        fp8 = KVCacheLayout.index_fp8()
        self.sum_bits = 14 if index_logits.multiplies_codes(fp8, architecture()) else 24

    save_partial_states = staticmethod(compress.save_partial_states)
    compress_norm_rope_store = staticmethod(compress.compress_norm_rope_store)
    indexer_q_rope_quant = staticmethod(index_query.indexer_q_rope_quant)
    fp8_paged_mqa_logits = staticmethod(index_logits.fp8_paged_mqa_logits)
    fp8_mqa_logits = staticmethod(index_logits.fp8_mqa_logits)
    norm_rope_store = staticmethod(latents.norm_rope_store)
    mhc_post = staticmethod(hyper_connections.mhc_post)
    mhc_collapse = staticmethod(hyper_connections.mhc_collapse)

    def select_topk(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        max_entries: int,
    ) -> None:
        """See `LayerSteps`."""
        if out.shape[1] > select.MOST:
            super().select_topk(query, cache, block_table, token_to_req, visible_lens, out, max_entries)
            return
        self._select(query, cache, (block_table, token_to_req, visible_lens), out, max_entries, None)

    @property
    def most_over_ranks(self) -> int:
        """See `layer_ops.RankSelection`."""
        return select.MOST

    def propose_candidates(
        self,
        ownership: Ownership,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        numbers: Tensor,
        scores: Tensor,
        max_entries: int,
    ) -> None:
        """See `layer_ops.RankSelection`."""
        self._select(
            query,
            cache,
            (block_table, token_to_req, visible_lens),
            numbers,
            max_entries,
            (ownership, scores),
        )

    choose_candidates = staticmethod(ranks.choose)

    def _select(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        tables: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        max_entries: int,
        proposed: tuple[Ownership, Tensor] | None,
    ) -> None:
        """`select_topk` of at most `select.MOST` entries, or `propose_candidates` of an owner with these scores."""
        (block_table, token_to_req, visible_lens), (tokens, topk) = tables, out.shape
        if not (max_entries > 0 and block_table.numel() and cache.num_blocks):
            out.fill_(-1)
            if proposed is not None:
                proposed[1].fill_(-inf)
            return
        run = select.wanted_run(tokens, max_entries, topk)
        # rows begin and end at multiples of the widest access
        width, columns = round_up(max_entries, 64), select.maxima_columns(max_entries, run) if run else 0
        for part, memory in _memory(out, width + columns):
            scores, maxima = memory[:, :width], memory[:, width:] if run else None
            maps = block_table, token_to_req[part], visible_lens[part]
            self._score(_rows(query, part), cache, *maps, scores, maxima, run)
            given = scores, maxima, visible_lens[part], out[part], max_entries
            some = None if proposed is None else (proposed[0], proposed[1][part])
            select.select(*given, run=run, proposed=some)

    def select_candidates(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        block_size: int,
        max_entries: int,
    ) -> None:
        """See `LayerSteps`."""
        check_block_size(block_size)
        if out.shape[1] > select.MOST or not (max_entries > 0 and block_table.numel() and cache.num_blocks):
            maps = block_table, token_to_req, visible_lens
            super().select_candidates(query, cache, *maps, out, block_size, max_entries)
            return
        width, columns = round_up(max_entries, 64), candidates.block_columns(max_entries, block_size)
        for part, memory in _memory(out, width + columns):
            scores, blocks, lens = memory[:, :width], memory[:, width:], visible_lens[part]
            self._score(_rows(query, part), cache, block_table, token_to_req[part], lens, scores, None, 0)
            candidates.select_blocks(scores, blocks, lens, out[part], block_size, max_entries)

    def select_topk_of_candidates(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        candidates: Tensor,
        block_size: int,
        out: Tensor,
        max_entries: int,
    ) -> None:
        """See `LayerSteps`."""
        check_block_size(block_size)
        if out.shape[1] > select.MOST:
            given = query, cache, block_table, token_to_req, visible_lens, candidates, block_size
            super().select_topk_of_candidates(*given, out, max_entries)
            return
        if not (max_entries > 0 and block_table.numel() and cache.num_blocks):
            out.fill_(-1)
            return
        width = round_up(max_entries, 64)
        for part, memory in _memory(out, 2 * width):
            scores, kept, lens = memory[:, :width], memory[:, width:], visible_lens[part]
            self._score(_rows(query, part), cache, block_table, token_to_req[part], lens, scores, None, 0)
            keep_candidates(scores, candidates[part], kept, block_size, max_entries)
            select.select(kept, None, lens, out[part], max_entries, run=0)

    def compress_latents(
        self,
        kv: Tensor,
        score: Tensor | None,
        positions: Tensor,
        token_to_req: Tensor,
        norm_weight: Tensor,
        eps: float,
        ratio: int,
        states: PagedKVCache | None = None,
        state_block_table: Tensor | None = None,
    ) -> Tensor:
        """See `LayerSteps`."""
        compress = super().compress_latents if ratio > latents.MOST else latents.compress_latents
        tokens, ring = (kv, score, positions, token_to_req), (states, state_block_table)
        return compress(*tokens, norm_weight, eps, ratio, *ring)

    def _score(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        scores: Tensor,
        maxima: Tensor | None,
        run: int,
    ) -> None:
        """See `index_logits.score`."""
        maps = block_table, token_to_req, visible_lens
        index_logits.score(query, cache, *maps, scores, maxima, run, exact_rows=self._deterministic)

    def transient_bytes(self, max_tokens: int) -> int:
        """Scores and lists of a selection, and what the steps make for each token."""
        return 2 * SCORES_BYTES + 2**20 + 1024 * max_tokens


def _memory(out: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows of out [T, K] that are selected together, and [rows, width] fp32 for their scores."""
    tokens = out.shape[0]
    rows = max(SCORES_BYTES // (4 * width), 1)
    for first in range(0, tokens, rows):
        part = slice(first, min(first + rows, tokens))
        yield part, out.new_empty(part.stop - first, width, dtype=torch.float32)


def _rows(query: IndexQuery, part: slice) -> IndexQuery:
    return IndexQuery(query.values[part], query.weights[part], None if query.scales is None else query.scales[part])
