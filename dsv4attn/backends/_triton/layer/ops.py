"""`layer_ops`: the table of the layer ops by the kernels of this folder; and selection, made of several launchers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import architecture
from dsv4attn.backends._triton.layer.compressor import latents
from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.backends._triton.layer.hyper_connections import launch as hyper_connections
from dsv4attn.backends._triton.layer.indexer import launch as index_logits
from dsv4attn.backends._triton.layer.indexer import query as index_query
from dsv4attn.backends._triton.layer.indexer.candidates import select_blocks, select_inside
from dsv4attn.backends._triton.layer.projections import few_rows, norms, products
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends._triton.layer.selection import ranks, scratch
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.contract.layer_ops import CodedProducts, LayerOps, default_layer_ops
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops import candidates as torch_candidates
from dsv4attn.core.torch_ops import selection as torch_selection
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.candidates import check_block_size
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.tiles import linear as torch_linear

_CODED = CodedProducts(few_rows.most_rows, few_rows.multiply_codes)


def layer_ops(
    *, deterministic: bool = False, exact_sums: bool = False, score: Callable[..., Any] | None = None
) -> LayerOps:
    """All layer ops by kernels, but for products, which a library multiplies where bits may depend on a step.

    deterministic: no token's bits depend on the other tokens of a step. exact_sums: index scores keep the bits of fp32
    on every device, see `index_logits.multiplies_codes`. score: what computes scores, with the arguments of
    `index_logits.score`, which is the default.
    """
    sums: dict[str, Any] = {"exact_sums": exact_sums}
    scoring: dict[str, Any] = {
        "score": partial(index_logits.score, exact_rows=deterministic, **sums) if score is None else score
    }
    fallback: dict[str, Any] = {"deterministic": deterministic}
    multiplies_codes = index_logits.multiplies_codes(KVCacheLayout.index_fp8(), architecture(), **sums)
    return evolve(
        # a field that is left out below has torch's op, which is the deterministic one in a deterministic table
        default_layer_ops(deterministic=deterministic),
        norm_q_kv=norms.norm_q_kv,
        save_partial_states=compress.save_partial_states,
        compress_norm_rope_store=compress.compress_norm_rope_store,
        compress_latents=partial(latents.compress_latents, **fallback),
        norm_rope_store=latents.norm_rope_store,
        indexer_q_rope_quant=index_query.indexer_q_rope_quant,
        fp8_paged_mqa_logits=partial(index_logits.fp8_paged_mqa_logits, **sums),
        fp8_mqa_logits=partial(index_logits.fp8_mqa_logits, **sums),
        select_topk=partial(select_topk, **fallback, **scoring),
        select_candidates=partial(select_candidates, **fallback, **sums),
        select_topk_of_candidates=partial(select_topk_of_candidates, **fallback, **sums),
        mhc_pre=partial(hyper_connections.mhc_pre, deterministic=deterministic),
        mhc_post=hyper_connections.mhc_post,
        mhc_fused_post_pre=partial(hyper_connections.mhc_fused_post_pre, deterministic=deterministic),
        hc_head=partial(hyper_connections.hc_head, deterministic=deterministic),
        mhc_pre_delayed=partial(hyper_connections.mhc_pre_delayed, deterministic=deterministic),
        mhc_fused_post_pre_delayed=partial(hyper_connections.mhc_fused_post_pre_delayed, deterministic=deterministic),
        mhc_collapse=hyper_connections.mhc_collapse,
        linear=products.linear if deterministic else torch_linear,
        transient_bytes=transient_bytes,
        sum_bits=14 if multiplies_codes else 24,
        propose_candidates=partial(propose_candidates, **scoring),
        choose_candidates=ranks.choose,
        most_over_ranks=select.MOST,
        coded=_CODED if architecture() in few_rows.CODED else None,
    )


@without_modes
def select_topk(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    *,
    score: Callable[..., Any],
    deterministic: bool,
) -> None:
    """See `torch_ops.selection`, which selects more than `select.MOST` entries."""
    if out.shape[1] > select.MOST:
        torch_selection.select_topk(query, cache, token_map, out, max_entries, deterministic=deterministic)
    else:
        _select(query, cache, token_map, out, max_entries, score)


@without_modes
def propose_candidates(
    ownership: Ownership,
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    numbers: Tensor,
    scores: Tensor,
    max_entries: int,
    *,
    score: Callable[..., Any],
) -> None:
    """See `LayerOps`."""
    _select(query, cache, token_map, numbers, max_entries, score, (ownership, scores))


def _select(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    score: Callable[..., Any],
    proposed: tuple[Ownership, Tensor] | None = None,
) -> None:
    """Select at most `select.MOST` entries. proposed: an owner, and where it writes scores of what it selects."""
    topk = out.shape[1]
    if not _has_entries(cache, token_map, max_entries):
        out.fill_(-1)
        if proposed is not None:
            proposed[1].fill_(-inf)
        return
    plan = select.plan_in_parts(out, max_entries, topk)
    for part, (scores, memory) in scratch.parts(out, max_entries, plan.columns):
        maxima, of_part = memory[:, plan.lists :] if plan.run else None, token_map.tokens(part)
        run, together = score(query.tokens(part), cache, of_part, scores, maxima, plan.run)
        of_ranks = None if proposed is None else (proposed[0], proposed[1][part])
        select.select(
            scores, maxima, of_part.visible_lens, out[part], max_entries, run=run, together=together, plan=plan,
            memory=memory, proposed=of_ranks,
        )  # fmt: skip


@without_modes
def select_candidates(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    block_size: int,
    max_entries: int,
    *,
    deterministic: bool,
    exact_sums: bool = False,
) -> None:
    """See `torch_ops.candidates`, which writes more than `select.MOST` blocks."""
    check_block_size(block_size)
    if out.shape[1] > select.MOST or not _has_entries(cache, token_map, max_entries):
        torch_candidates.select_candidates(
            query, cache, token_map, out, block_size, max_entries, deterministic=deterministic
        )
    else:
        exact: dict[str, bool] = {"exact_rows": deterministic, "exact_sums": exact_sums}
        select_blocks(query, cache, token_map, out, block_size, max_entries, **exact)


@without_modes
def select_topk_of_candidates(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    candidates: Tensor,
    block_size: int,
    out: Tensor,
    max_entries: int,
    *,
    deterministic: bool,
    exact_sums: bool = False,
) -> None:
    """See `torch_ops.candidates`, which selects more than `select.MOST` entries, or among very many blocks."""
    check_block_size(block_size)
    if max(out.shape[1], candidates.shape[1]) > select.MOST:
        torch_candidates.select_topk_of_candidates(
            query, cache, token_map, candidates, block_size, out, max_entries, deterministic=deterministic
        )
    elif candidates.shape[1] and _has_entries(cache, token_map, max_entries):
        select_inside(query, cache, token_map, candidates, block_size, out, max_entries, exact_sums=exact_sums)
    else:
        out.fill_(-1)


def transient_bytes(max_tokens: int) -> int:
    """The buffer of a selection, and what the ops make for each token."""
    return scratch.CAPTURED + 2**20 + 1024 * max_tokens


def _has_entries(cache: PagedKVCache, token_map: TokenMap, max_entries: int) -> bool:
    """Whether there is anything to select: the kernels that score need a block table with a block."""
    return max_entries > 0 and token_map.block_table.numel() > 0 and cache.num_blocks > 0
