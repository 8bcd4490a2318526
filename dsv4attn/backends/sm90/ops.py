"""The layer ops on Hopper: `index_logits` and `hyper_connections` serve what they can, the shared kernels the rest."""

from __future__ import annotations

from functools import partial

from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.layer import index_logits as shared_index_logits
from dsv4attn.backends._triton.layer import ops
from dsv4attn.backends.sm90 import hyper_connections, index_logits
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery

__all__ = ["layer_ops", "score"]


def layer_ops(*, deterministic: bool = False) -> LayerOps:
    """The shared ops, with scores and hyper-connections of many tokens by the kernels for Hopper.

    Deterministic ops use the shared kernels for scores, because the kernel that serves a token depends on the number of
    tokens of the request.
    """
    shared = ops.layer_ops(deterministic=True) if deterministic else ops.layer_ops(score=score)
    with_streams = evolve(
        shared,
        mhc_fused_post_pre=partial(shared.mhc_fused_post_pre, fused=hyper_connections.fused_post_pre),
        mhc_fused_post_pre_delayed=partial(shared.mhc_fused_post_pre_delayed, fused=hyper_connections.fused_post_pre),
    )
    if deterministic:
        return with_streams
    return evolve(with_streams, fp8_paged_mqa_logits=fp8_paged_mqa_logits, fp8_mqa_logits=fp8_mqa_logits)


def score(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, scores: Tensor, maxima: Tensor | None, run: int
) -> None:
    """See `_triton.layer.index_logits.score`."""
    if not index_logits.score(query, cache, token_map, scores, maxima, run):
        shared_index_logits.score(query, cache, token_map, scores, maxima, run)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: PagedKVCache | Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: object = None,
    max_model_len: int = 0,
) -> Tensor:
    """See `torch_ops.indexer`."""
    logits = index_logits.fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_tables, max_model_len)
    if logits is None:
        return shared_index_logits.fp8_paged_mqa_logits(
            q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len
        )
    return logits


def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
) -> Tensor:
    """See `torch_ops.indexer`."""
    logits = index_logits.fp8_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
    if logits is None:
        return shared_index_logits.fp8_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
    return logits
