"""vLLM's indexer of DeepSeek-V4.1 with its steps on dsv4attn: index keys, queries, short contexts, selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer, DeepseekV4IndexerCache

from dsv4attn import PagedKVCache
from dsv4attn.core.layer.indexer import Candidates
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn_vllm import indexer
from dsv4attn_vllm.compressor_v41 import in_fp32
from dsv4attn_vllm.indexer import select_all
from dsv4attn_vllm.metadata_v41 import IndexBackend

__all__ = ["IndexCache", "Indexer", "Selector"]


class IndexCache(DeepseekV4IndexerCache):
    """The cache of index keys; its metadata are made by dsv4attn's builder."""

    def get_attn_backend(self) -> type[IndexBackend]:
        """Return the backend that names the builder."""
        return IndexBackend


class Selector(indexer.Selector):
    """Scores index keys as in V4; publishes candidate blocks, or selects among those of another layer."""

    is_v41 = True

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - those of V4
        candidate_blocks: Tensor | None = None,
        candidate_block_size: int = 0,
        candidate_write: bool = False,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """candidate_blocks: [tokens, N] int32, which every layer of the model shares. candidate_write: publish them."""
        super().__init__(*args, **kwargs)
        self._candidates = None if candidate_blocks is None else Candidates(candidate_blocks, candidate_block_size)
        self._publishes = candidate_write

    def _select(self, query: IndexQuery, maps: tuple[Tensor, Tensor, Tensor], out: Tensor, longest: int) -> None:
        steps, keys, candidates = self.serving.layer_steps, self._keys(), self._candidates
        if candidates is None or candidates.is_void(longest):
            steps.select_topk(query, keys, *maps, out, longest)
            return
        found = candidates.blocks[: len(out)], candidates.block_size
        if self._publishes:
            steps.select_candidates(query, keys, *maps, *found, longest)
            steps.select_topk(query, keys, *maps, out, longest)
        else:
            steps.select_topk_of_candidates(query, keys, *maps, *found, out, longest)


class Indexer(DeepseekV4Indexer):
    """VLLM's indexer. Its projections stay vLLM's."""

    attn_cls = Selector
    _k_norm_fp32: Tensor | None = None
    _bound: PagedKVCache | None = None

    def _produce_k(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:  # noqa: ANN401 - vLLM's
        """Store index keys of latents [T, 512], which another layer's tokens read too."""
        by_prefix, serving = get_forward_context().attn_metadata, self.indexer_op.serving
        if not isinstance(by_prefix, dict) or latent is None:
            return
        cache, tokens = self.k_cache.kv_cache, len(latent)
        if self._bound is None or self._bound.tensor is not cache:
            self._bound = PagedKVCache(cache, serving.index_layout)
        self._k_norm_fp32 = in_fp32(self.k_norm.weight, self._k_norm_fp32)
        norm = self._k_norm_fp32, self.k_norm.variance_epsilon, rotary_emb.cos_sin_cache
        slots, steps = by_prefix[self.k_cache.prefix].slot_mapping[:tokens], serving.layer_steps
        steps.norm_rope_store(self.wk(latent)[0], positions[:tokens], slots, *norm, self.compress_ratio, self._bound)

    def forward_q(
        self,
        qr: Any,  # noqa: ANN401 - a tensor, or quantised
        qr_scale: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,  # noqa: ANN401 - vLLM's module
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Project, rotate and quantise queries as index keys are: codes, their scales if they have 4 bits, weights."""
        q, serving = self._wq_b_proj(qr, qr_scale).view(-1, self.n_head, self.head_dim), self.indexer_op.serving
        steps, table = serving.layer_steps, rotary_emb.cos_sin_cache
        query = steps.indexer_q_rope_quant(q, indexer_weights, positions, table, serving.index_layout)
        scales = None if query.scales is None else query.scales.view(torch.int32).squeeze(-1)
        return query.values, scales, query.weights

    def forward(
        self,
        qr: Any,  # noqa: ANN401
        latent: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,  # noqa: ANN401
        qr_scale: Tensor | None = None,
        *,
        cache_latent: Tensor | None = None,
        cache_positions: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Store the index keys of a step, and return query, its scales, and weights for `Selector`.

        Three times None where every token sees at most K entries, which are all selected here; not in a captured graph,
        which may be replayed with longer contexts. cache_latent, cache_positions: of all ranks that share a context.
        """
        if self.owns_k:
            self._produce_k(latent, positions, rotary_emb)
        by_prefix = get_forward_context().attn_metadata
        if isinstance(by_prefix, dict) and not is_capturing(positions.device):
            metadata = by_prefix[self.k_cache.prefix]
            if metadata.max_seq_len // self.compress_ratio <= self.topk_tokens:
                select_all(metadata.visible_lens, self.topk_indices_buffer, self.topk_tokens)
                return None, None, None
        return self.forward_q(qr, qr_scale, indexer_weights, positions, rotary_emb)
