"""The layer's steps on Hopper: each function of `index` and `streams` serves what it can, the shared steps the rest."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from dsv4attn.backends._triton.layer import index_logits
from dsv4attn.backends._triton.layer.steps import TritonLayerSteps
from dsv4attn.backends.sm90 import index, streams
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["Sm90LayerSteps"]


class Sm90LayerSteps(TritonLayerSteps):
    """The shared steps, with scores and hyper-connections of many tokens by the kernels for Hopper.

    If they are deterministic, no scores: which kernel serves a token depends on how many its request has.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        """See `TritonLayerSteps`."""
        super().__init__(deterministic=deterministic)
        fused = partial(streams.mhc_fused_post_pre, deterministic=deterministic)
        self.mhc_fused_post_pre = fused  # type: ignore[method-assign]
        delayed = partial(streams.mhc_fused_post_pre_delayed, deterministic=deterministic)
        self.mhc_fused_post_pre_delayed = delayed  # type: ignore[method-assign]

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
        given = query, cache, block_table, token_to_req, visible_lens, scores, maxima, run
        if self._deterministic or not index.score(*given):
            super()._score(*given)

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        kv_cache: PagedKVCache | Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        schedule_metadata: object = None,
        max_model_len: int = 0,
    ) -> Tensor:
        """See `LayerSteps`."""
        given = q, kv_cache, weights, context_lens, block_tables
        found = None if self._deterministic else index.fp8_paged_mqa_logits(*given, max_model_len)
        if found is None:
            found = index_logits.fp8_paged_mqa_logits(*given, schedule_metadata, max_model_len)
        return found

    def fp8_mqa_logits(
        self, q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
    ) -> Tensor:
        """See `LayerSteps`."""
        given = q, kv, weights, cu_seqlen_ks, cu_seqlen_ke
        found = None if self._deterministic else index.fp8_mqa_logits(*given)
        return index_logits.fp8_mqa_logits(*given) if found is None else found
