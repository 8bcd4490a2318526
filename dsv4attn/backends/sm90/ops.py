"""The layer ops on Hopper: `index_logits` and `hyper_connections` serve what they can, the shared kernels the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.layer import index_logits as shared_index_logits
from dsv4attn.backends._triton.layer import ops
from dsv4attn.backends.sm90 import hyper_connections, index_logits
from dsv4attn.core.contract.layer_ops import LayerOps

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


def score(*given: Any) -> None:  # noqa: ANN401 - those of `index_logits.score`
    """See `_triton.layer.index_logits.score`."""
    if not index_logits.score(*given):
        shared_index_logits.score(*given)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Any,  # noqa: ANN401 - a cache, or its tensor
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule_metadata: object = None,
    max_model_len: int = 0,
) -> Tensor:
    """See `torch_ops.indexer`."""
    given = q, kv_cache, weights, context_lens, block_tables
    logits = index_logits.fp8_paged_mqa_logits(*given, max_model_len)
    if logits is None:
        return shared_index_logits.fp8_paged_mqa_logits(*given, schedule_metadata, max_model_len)
    return logits


def fp8_mqa_logits(
    q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, cu_seqlen_ks: Tensor, cu_seqlen_ke: Tensor
) -> Tensor:
    """See `torch_ops.indexer`."""
    given = q, kv, weights, cu_seqlen_ks, cu_seqlen_ke
    logits = index_logits.fp8_mqa_logits(*given)
    return shared_index_logits.fp8_mqa_logits(*given) if logits is None else logits
