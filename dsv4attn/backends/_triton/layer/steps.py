"""`TritonLayerSteps`: the steps of the layer around attention, by the kernels of this wing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.insert import quantize_and_insert_k_cache
from dsv4attn.backends._triton.launching.runtime import architecture
from dsv4attn.backends._triton.layer import (
    compress,
    hyper_connections,
    hyper_connections_variants,
    index_logits,
    index_query,
    select,
)
from dsv4attn.core.definitions import INVARIANT, PLAIN, TorchLayerSteps
from dsv4attn.core.definitions.indexer import IndexQuery
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.values import round_up

if TYPE_CHECKING:
    from dsv4attn.backends._triton.compiling.variant import Variant
    from dsv4attn.core.warmup_spec import Bounds

__all__ = ["SCORES_BYTES", "TritonLayerSteps", "variants"]

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
        tokens, topk = out.shape
        if topk > select.MOST:
            super().select_topk(query, cache, block_table, token_to_req, visible_lens, out, max_entries)
            return
        if not (max_entries > 0 and block_table.numel() and cache.num_blocks):
            out.fill_(-1)
            return
        run = select.wanted_run(tokens, max_entries, topk)
        # rows begin and end at multiples of the widest access
        width, columns = round_up(max_entries, 64), select.maxima_columns(max_entries, run) if run else 0
        rows = max(SCORES_BYTES // (4 * (width + columns)), 1)
        for first in range(0, tokens, rows):
            part = slice(first, min(first + rows, tokens))
            memory = out.new_empty(part.stop - first, width + columns, dtype=torch.float32)
            scores, maxima = memory[:, :width], memory[:, width:] if run else None
            own = IndexQuery(
                query.values[part], query.weights[part], None if query.scales is None else query.scales[part]
            )
            maps = block_table, token_to_req[part], visible_lens[part]
            self._score(own, cache, *maps, scores, maxima, run)
            select.select(scores, maxima, visible_lens[part], out[part], max_entries, run=run)

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


def variants(bounds: Bounds, arch: str) -> Iterator[Variant]:
    """Every form that the steps of a model within the bounds can ask for on an architecture."""
    model, parts, index, aligned = bounds.model, bounds.parts, bounds.index_layout, bounds.aligned
    assert model is not None
    for layer in bounds.layers:
        if layer.kind is LayerKind.SWA:
            continue
        stores = [bounds.compressed, *([index] if layer.kind is LayerKind.C4A else [])]
        for layout in stores if "compressor" in parts else ():
            yield from compress.variants(
                layout,
                layer.compress_ratio,
                layer.rope_dim,
                overlap=layer.overlap,
                aligned=aligned,
                norms=(torch.bfloat16, torch.float32),
                arch=arch,
            )
        if layer.kind is LayerKind.C4A:
            heads, dtypes = model.index_n_heads, tuple(dict.fromkeys((bounds.q_dtype, torch.float32)))
            if "indexer" in parts:
                yield from index_query.variants(index, heads, layer.rope_dim, bounds.q_dtype, dtypes, arch=arch)
            if "indexer" in parts or "selection" in parts:
                yield from index_logits.variants(index, heads, arch, aligned=aligned)
            if "selection" in parts:
                entries = bounds.limits.max_model_len // layer.compress_ratio
                yield from select.variants(layer.topk, entries, arch)
    if "hyper_connections" not in parts:
        return
    dims = model.hc_mult, model.hidden_size, bounds.q_dtype
    norms = dict.fromkeys((None, bounds.q_dtype, torch.float32))
    for norm in norms:
        yield from hyper_connections_variants.variants(
            *dims, norm, delayed=model.shared_latent, aligned=bounds.aligned_rows, arch=arch
        )
