"""vLLM's indexers with their parts on dsv4attn: queries, short contexts, selection; in V4.1 index keys too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4 import attention as v4
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer, DeepseekV4IndexerCache
from vllm.models.deepseek_v41 import attention as v41
from vllm.utils.multi_stream_utils import maybe_execute_in_parallel

from dsv4attn import EntryNorm, IndexQuery, PagedKVCache, TokenMap
from dsv4attn.core.layer.indexer import Candidates
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn.core.torch_ops.selection import select_all
from dsv4attn_vllm.compressor import bound_cache, in_fp32
from dsv4attn_vllm.guard import GUARD, RefusedError
from dsv4attn_vllm.index_metadata import IndexBackend, V41IndexBackend
from dsv4attn_vllm.records import V41IndexPages
from dsv4attn_vllm.serving import serving_of

if TYPE_CHECKING:
    from vllm.models.deepseek_v4.attention import DeepseekV4Indexer as _Indexer
else:
    _Indexer = object


class IndexCache(DeepseekV4IndexerCache):
    """The cache of index keys; its metadata are made by dsv4attn's builder."""

    def get_attn_backend(self) -> type[IndexBackend]:
        """Return the backend that names the builder."""
        return IndexBackend


class Selector(torch.nn.Module):
    """Scores index keys and writes the best of them to `topk_indices_buffer`. In place of vLLM's `SparseAttnIndexer`.

    That class cannot be built on CUDA without DeepGEMM, so this one is not derived from it. It is returned by the
    indexer's own hook, and not registered out of tree: other models of the process keep vLLM's.
    """

    is_v41: ClassVar[bool] = False

    def __init__(
        self,
        k_cache: DeepseekV4IndexerCache,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        skip_k_cache_insert: bool = False,  # noqa: FBT001, FBT002
        use_fp4_cache: bool = False,  # noqa: FBT001, FBT002
        compress_ratio: int = 1,
    ) -> None:
        """Arguments as vLLM's class has them. max_model_len: in entries. topk_indices_buffer: [tokens, >= K] int32."""
        super().__init__()
        self.k_cache, self.topk_indices_buffer = k_cache, topk_indices_buffer
        self.topk_tokens, self.max_entries, self.compress_ratio = topk_tokens, max_model_len, compress_ratio
        self.serving = serving_of(get_current_vllm_config(), v41=self.is_v41)
        self._bound: PagedKVCache | None = None

    def _keys(self) -> PagedKVCache:
        self._bound = bound_cache(self._bound, self.k_cache.kv_cache, self.serving.index_layout)
        return self._bound

    def forward(
        self, hidden_states: Tensor, q_quant: Tensor | tuple[Tensor, Tensor], k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """Select for every token of the step, decodes and prefills alike, and return the buffer.

        hidden_states: its device counts. q_quant, weights: of `IndexerParts._q_rope_quant`, with rows of padding
        after them. k: None, as the compressor has stored the keys.
        """
        by_prefix, ops = get_forward_context().attn_metadata, self.serving.layer_ops
        if not isinstance(by_prefix, dict):
            # vLLM measures memory: allocate for a moment what a selection of this many tokens allocates
            torch.empty(ops.transient_bytes(weights.shape[0]), dtype=torch.uint8, device=hidden_states.device)
            return self.topk_indices_buffer
        metadata = by_prefix[self.k_cache.prefix]
        tokens = metadata.visible_lens.shape[0]
        # a graph is replayed with longer contexts
        longest = self.max_entries
        if not is_capturing(weights.device):
            longest = min(longest, metadata.max_seq_len // self.compress_ratio)
        values, scales = q_quant if isinstance(q_quant, tuple) else (q_quant, None)
        if scales is not None:
            scales = scales[:tokens].unsqueeze(-1).view(torch.uint8)
        query = IndexQuery(values[:tokens], weights[:tokens], scales)
        token_map = TokenMap(metadata.block_table, metadata.token_to_req, metadata.visible_lens)
        self._select(query, token_map, self.topk_indices_buffer[:tokens, : self.topk_tokens], longest)
        return self.topk_indices_buffer

    def _select(self, query: IndexQuery, token_map: TokenMap, out: Tensor, longest: int) -> None:
        """Write the best entries of each token to out [T, K]. longest: most entries that a token sees."""
        self.serving.layer_ops.select_topk(query, self._keys(), token_map, out, longest)


class IndexerParts(_Indexer):
    """Goes before vLLM's class of an indexer. Its projections stay vLLM's."""

    def _get_cache_cls(self) -> type[DeepseekV4IndexerCache]:
        return IndexCache

    def _get_attn_cls(self) -> type[Any]:
        return Selector

    def _q_rope_quant(
        self,
        positions: Tensor,
        q: Tensor,
        rotary_emb: Any,  # noqa: ANN401 - vLLM's module
        indexer_weights: Tensor,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        """Rotate and quantise q [T', Hi, 128] as the index keys are.

        Returns codes, for 4 bits a pair of codes and scales, and weights; see `quantized_query`.
        """
        codes, scales, weights = quantized_query(self, positions, q, rotary_emb, indexer_weights)
        return codes if scales is None else (codes, scales), weights

    def forward(
        self,
        hidden_states: Tensor,
        qr: Tensor,
        compressed_kv_score: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,  # noqa: ANN401
        qr_scale: Tensor | None = None,
        skip_compressor: bool = False,  # noqa: FBT001, FBT002
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Store the index keys of a step, and return query, its scales, and weights for `Selector`.

        Where every token sees at most K entries they are all selected here, and the result is three times None. Not in
        a captured graph, which may be replayed with longer contexts.
        """

        def store_keys() -> None:
            if not skip_compressor:
                self.compressor(compressed_kv_score, positions, rotary_emb)

        def query() -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
            q = self._wq_b_proj(qr, qr_scale).view(-1, self.n_head, self.head_dim)
            return self._q_rope_quant(positions, q, rotary_emb, indexer_weights)

        if all_are_selected(self, positions.device):
            store_keys()
            return None, None, None
        (q, weights), _ = maybe_execute_in_parallel(query, store_keys, *self.ln_events, self.aux_stream)
        return (*q, weights) if isinstance(q, tuple) else (q, None, weights)


def quantized_query(
    indexer: Any,  # noqa: ANN401 - an indexer of vLLM
    positions: Tensor,
    q: Tensor,
    rotary_emb: Any,  # noqa: ANN401 - vLLM's module
    indexer_weights: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rotate and quantise q [T', Hi, 128] as index keys are.

    Returns codes; their scales [T', Hi] int32, four exponents each, if codes have 4 bits; and weights [T', Hi] fp32,
    with all factors folded.
    """
    serving = indexer.indexer_op.serving
    ops, table = serving.layer_ops, rotary_emb.cos_sin_cache
    query = ops.indexer_q_rope_quant(q, indexer_weights, positions, table, serving.index_layout)
    scales = None if query.scales is None else query.scales.view(torch.int32).squeeze(-1)
    return query.values, scales, query.weights


def all_are_selected(indexer: Any, device: torch.device) -> bool:  # noqa: ANN401 - an indexer of vLLM
    """Select all entries, and return True, if every token of the step sees at most K of them.

    Never in a captured graph, which may be replayed with longer contexts, nor on a deterministic backend: a selection
    leaves out entries whose score is NaN.
    """
    by_prefix = get_forward_context().attn_metadata
    if not isinstance(by_prefix, dict) or is_capturing(device) or indexer.indexer_op.serving.backend.deterministic:
        return False
    metadata = by_prefix[indexer.k_cache.prefix]
    if metadata.max_seq_len // indexer.compress_ratio > indexer.topk_tokens:
        return False
    lens = metadata.visible_lens
    select_all(lens, indexer.topk_indices_buffer[: lens.shape[0], : indexer.topk_tokens])
    return True


def check_selector(prefix: str, indexer: Any) -> None:  # noqa: ANN401 - an indexer that vLLM has built
    """Raise RefusedError unless an indexer selects by `Selector`. In short contexts the difference would not show."""
    if not isinstance(indexer.indexer_op, Selector):
        actual, cure = type(indexer.indexer_op).__name__, GUARD.install
        raise RefusedError(f"{prefix}.indexer", expected="dsv4attn's Selector", actual=actual, cure=cure)


@cache
def indexer_class(engine_class: type[DeepseekV4Indexer]) -> type[DeepseekV4Indexer]:
    """A subclass of vLLM's class of a platform, with dsv4attn's ops."""
    return type(f"Dsv4{engine_class.__name__}", (IndexerParts, engine_class), {"__doc__": "An indexer on dsv4attn."})


@contextmanager
def indexer_globals() -> Iterator[None]:
    """While a layer of vLLM 0.32 is built: the names by which it finds the classes of its indexer are dsv4attn's.

    vLLM 0.33 has methods instead of these names, `_get_indexer_cls` of the layer among them. There nothing is changed.
    """
    classes = {
        "DeepseekV4Indexer": indexer_class(DeepseekV4Indexer),
        "DeepseekV4IndexerCache": IndexCache,
        "SparseAttnIndexer": Selector,
    }
    changed = {} if hasattr(v4.DeepseekV4Attention, "_get_indexer_cls") else classes
    of_vllm = {name: getattr(v4, name) for name in changed}
    vars(v4).update(changed)
    try:
        yield
    finally:
        vars(v4).update(of_vllm)


# ---------------------------------------------------------------- DeepSeek-V4.1


class V41IndexCache(V41IndexPages):
    """The cache of index keys; its metadata are made by dsv4attn's builder."""

    def get_attn_backend(self) -> type[V41IndexBackend]:
        """Return the backend that names the builder."""
        return V41IndexBackend


class V41Selector(Selector):
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

    def _select(self, query: IndexQuery, token_map: TokenMap, out: Tensor, longest: int) -> None:
        ops, keys, candidates = self.serving.layer_ops, self._keys(), self._candidates
        if candidates is not None and not candidates.is_void(longest):
            blocks, size = candidates.blocks[: len(out)], candidates.block_size
            if not self._publishes:
                ops.select_topk_of_candidates(query, keys, token_map, blocks, size, out, longest)
                return
            ops.select_candidates(query, keys, token_map, blocks, size, longest)
        super()._select(query, token_map, out, longest)


class V41Indexer(v41.DeepseekV4Indexer):
    """VLLM's indexer. Its projections stay vLLM's."""

    attn_cls = V41Selector
    _k_norm_fp32: Tensor | None = None
    _bound: PagedKVCache | None = None

    def _produce_k(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:  # noqa: ANN401 - vLLM's
        """Store index keys of latents [T, 512], which another layer's tokens read too."""
        by_prefix, serving = get_forward_context().attn_metadata, self.indexer_op.serving
        if not isinstance(by_prefix, dict) or latent is None:
            return
        cache, tokens = self.k_cache.kv_cache, len(latent)
        self._bound = bound_cache(self._bound, cache, serving.index_layout)
        self._k_norm_fp32 = in_fp32(self.k_norm.weight, self._k_norm_fp32)
        norm = EntryNorm(self._k_norm_fp32, self.k_norm.variance_epsilon, rotary_emb.cos_sin_cache)
        slots, ops = by_prefix[self.k_cache.prefix].slot_mapping[:tokens], serving.layer_ops
        ops.norm_rope_store(self.wk(latent)[0], positions[:tokens], slots, norm, self.compress_ratio, self._bound)

    def forward_q(
        self,
        qr: Any,  # noqa: ANN401 - a tensor, or quantised
        qr_scale: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,  # noqa: ANN401 - vLLM's module
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Project, rotate and quantise queries as index keys are: codes, their scales if they have 4 bits, weights."""
        q = self._wq_b_proj(qr, qr_scale).view(-1, self.n_head, self.head_dim)
        return quantized_query(self, positions, q, rotary_emb, indexer_weights)

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
        if all_are_selected(self, positions.device):
            return None, None, None
        return self.forward_q(qr, qr_scale, indexer_weights, positions, rotary_emb)
