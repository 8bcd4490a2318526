"""The layer ops on Hopper: kernels for Hopper serve what they can, the shared kernels the rest.

The kernels for Hopper are those of `indexer`, `selection` and `hyper_connections`.
"""

from __future__ import annotations

from functools import partial

from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import multiprocessors
from dsv4attn.backends._triton.layer import ops
from dsv4attn.backends._triton.layer.indexer import launch as shared_index_logits
from dsv4attn.backends.sm90.hyper_connections import launch as hyper_connections
from dsv4attn.backends.sm90.indexer import launch as index_logits
from dsv4attn.backends.sm90.selection import group_select, index_select
from dsv4attn.backends.sm90.tuning import in_one_launch
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.layer_ops import LayerOps, Op
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery


def layer_ops(*, deterministic: bool = False, exact_sums: bool = False) -> LayerOps:
    """The shared ops, with scores, selection and hyper-connections of many tokens by the kernels for Hopper.

    Deterministic ops use the shared kernels for scores and selection, because the kernel that serves a token depends on
    the number of tokens of the request. So do ops with exact sums, because the kernels for Hopper multiply codes.
    """
    by_shared = deterministic or exact_sums
    shared = ops.layer_ops(
        deterministic=deterministic, exact_sums=exact_sums, score=None if by_shared else score
    )  # fmt: skip
    with_streams = evolve(
        shared,
        mhc_fused_post_pre=partial(shared.mhc_fused_post_pre, fused=hyper_connections.fused_post_pre),
        mhc_fused_post_pre_delayed=partial(shared.mhc_fused_post_pre_delayed, fused=hyper_connections.fused_post_pre),
    )
    if by_shared:
        return with_streams
    return evolve(
        with_streams,
        fp8_paged_mqa_logits=fp8_paged_mqa_logits,
        fp8_mqa_logits=fp8_mqa_logits,
        select_topk=partial(select_topk, in_two_steps=shared.select_topk),
    )


def score(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, scores: Tensor, maxima: Tensor | None, run: int
) -> tuple[int, int]:
    """See `_triton.layer.indexer.launch.score`. The kernel for Hopper takes the given run."""
    if index_logits.score(query, cache, token_map, scores, maxima, run):
        return run, 0
    return shared_index_logits.score(query, cache, token_map, scores, maxima, run)


@without_modes
def select_topk(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    *,
    in_two_steps: Op,
) -> None:
    """See `torch_ops.selection`. In one launch, without a matrix of scores, or by groups of entries, where faster."""
    arguments, (tokens, topk) = (query, cache, token_map, out, max_entries), out.shape
    together = in_one_launch(tokens, token_map.block_table.shape[0], max_entries, topk, multiprocessors())
    if together and index_select.select(*arguments):
        return
    if not group_select.select(*arguments, score_rows=score):
        in_two_steps(*arguments)


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
