"""`TorchLayerSteps`: all layer steps in plain torch, as an object that a backend can have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import Tensor

from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.record_layout import KEY_RECORDS
from dsv4attn.core.contract.backend import Backend, complete
from dsv4attn.core.contract.layer_ops import CANDIDATES, DELAYED, LATENTS, LAYER_STEPS, LayerSteps
from dsv4attn.core.tensorspec import check_norm_weight
from dsv4attn.core.torch_modes import guard_methods
from dsv4attn.core.torch_ops import compressor, hyper_connections, indexer, latents, selection
from dsv4attn.core.torch_ops.candidates import candidate_mask, check_block_size, select_candidates
from dsv4attn.core.torch_ops.tiles import INVARIANT, PLAIN, TILE_BYTES, Arithmetic

__all__ = ["TorchLayerSteps", "complete_steps", "layer_step_sources", "v41_step_sources"]


class TorchLayerSteps:
    """`LayerSteps` in plain torch.

    insert: writes keys k [n, D] fp32 to slots of a cache of keys; a backend's `quantize_and_insert_k_cache`.
    arithmetic: `tiles.INVARIANT` of a deterministic backend.
    """

    sum_bits: int = 24
    bf16_norm: bool = True

    def __init_subclass__(cls, **options: object) -> None:
        """Clear `bf16_norm` of a class that has its own `compress_norm_rope_store` and does not say so.

        Steps of the class run with autocast off and record no gradients, from wherever they are called.
        """
        super().__init_subclass__(**options)
        guard_methods(cls, (name for part in LAYER_STEPS.values() for name in part))
        if "compress_norm_rope_store" in vars(cls) and "bf16_norm" not in vars(cls):
            cls.bf16_norm = False

    def __init__(self, insert: Callable[[Tensor, PagedKVCache, Tensor], None], arithmetic: Arithmetic = PLAIN) -> None:
        self._insert, self._arithmetic = insert, arithmetic

    save_partial_states = staticmethod(compressor.save_partial_states)
    indexer_q_rope_quant = staticmethod(indexer.indexer_q_rope_quant)
    fp8_paged_mqa_logits = staticmethod(indexer.fp8_paged_mqa_logits)
    fp8_mqa_logits = staticmethod(indexer.fp8_mqa_logits)
    mhc_post = staticmethod(hyper_connections.mhc_post)
    mhc_collapse = staticmethod(hyper_connections.mhc_collapse)

    def compress_norm_rope_store(
        self,
        states: PagedKVCache,
        state_block_table: Tensor,
        token_to_req: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        norm_weight: Tensor,
        eps: float,
        cos_sin_cache: Tensor,
        ratio: int,
        cache: PagedKVCache,
        *,
        overlap: bool,
    ) -> None:
        """See `LayerSteps`."""
        check_norm_weight(norm_weight, cache.layout.head_dim)
        insert = partial(self._store, cache)
        window = states, state_block_table, token_to_req, positions, slot_mapping
        norm = norm_weight, eps, cos_sin_cache
        compressor.compress_norm_rope_store(*window, *norm, ratio, insert, overlap=overlap, arithmetic=self._arithmetic)

    def select_topk(
        self,
        query: indexer.IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        max_entries: int,
    ) -> None:
        """See `LayerSteps`."""
        maps = block_table, token_to_req, visible_lens
        selection.select_topk(query, cache, *maps, out, max_entries, self._arithmetic)

    def select_candidates(
        self,
        query: indexer.IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        block_size: int,
        max_entries: int,
    ) -> None:
        """See `LayerSteps`."""
        maps = block_table, token_to_req, visible_lens
        select_candidates(query, cache, *maps, out, block_size, max_entries, self._arithmetic)

    def select_topk_of_candidates(
        self,
        query: indexer.IndexQuery,
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
        maps = block_table, token_to_req, visible_lens

        def inside(part: slice, start: int) -> Tensor:
            return candidate_mask(candidates[part], start, block_size)

        selection.select_topk(query, cache, *maps, out, max_entries, self._arithmetic, inside)

    def mhc_pre(
        self,
        residual: Tensor,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerSteps`."""
        mixes = fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        return hyper_connections.mhc_pre(residual, *mixes, norm_weight, norm_eps, arithmetic=self._arithmetic)

    def mhc_fused_post_pre(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        *mixes: Any,  # noqa: ANN401 - those of `mhc_pre`
        **options: Any,  # noqa: ANN401 - as above
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `LayerSteps`."""
        residual = self.mhc_post(x, residual, post, comb)
        return residual, *self.mhc_pre(residual, *mixes, **options)

    def hc_head(
        self, streams: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, rms_eps: float, hc_eps: float
    ) -> Tensor:
        """See `LayerSteps`."""
        gate = hc_fn, hc_scale, hc_base, rms_eps, hc_eps
        return hyper_connections.hc_head(streams, *gate, arithmetic=self._arithmetic)

    def _store(self, cache: PagedKVCache, k: Tensor, slots: Tensor) -> None:
        """Write keys, or index keys, k [n, d] fp32 to slots [n]."""
        if cache.layout.name in KEY_RECORDS:
            self._insert(k, cache, slots)
        else:
            store_index_keys(k, cache, slots)

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
        tokens, ring = (kv, score, positions, token_to_req), (states, state_block_table)
        return latents.compress_latents(*tokens, norm_weight, eps, ratio, *ring, arithmetic=self._arithmetic)

    def norm_rope_store(
        self,
        x: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        cos_sin_cache: Tensor,
        ratio: int,
        cache: PagedKVCache,
    ) -> None:
        """See `LayerSteps`."""
        norm, insert = (norm_weight, eps, cos_sin_cache), partial(self._store, cache)
        latents.norm_rope_store(x, positions, slot_mapping, *norm, ratio, insert, arithmetic=self._arithmetic)

    def mhc_pre_delayed(
        self,
        residual: Tensor,
        previous_pre: Tensor | None,
        fn: Tensor,
        hc_scale: Tensor,
        hc_base: Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float = 2.0,
        sinkhorn_repeat: int = 20,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `LayerSteps`."""
        mixes = fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat
        norm = norm_weight, norm_eps
        return hyper_connections.mhc_pre_delayed(residual, previous_pre, *mixes, *norm, arithmetic=self._arithmetic)

    def mhc_fused_post_pre_delayed(
        self,
        x: Tensor,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        previous_pre: Tensor | None,
        *mixes: Any,  # noqa: ANN401 - those of `mhc_pre_delayed`
        **options: Any,  # noqa: ANN401 - as above
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See `LayerSteps`."""
        residual = self.mhc_post(x, residual, post, comb)
        return residual, *self.mhc_pre_delayed(residual, previous_pre, *mixes, **options)

    def transient_bytes(self, max_tokens: int) -> int:
        """A tile, and what a step makes for each token."""
        return 2 * TILE_BYTES + 256 * max_tokens


def complete_steps(backend: Backend) -> LayerSteps:
    """The layer steps of a backend, with torch's in place of those that its own, of another class, lack."""
    whole = complete(backend)
    steps, names = whole.layer_steps, [name for part in LAYER_STEPS.values() for name in part]
    if all(hasattr(steps, name) for name in names):
        return steps
    made: Any = TorchLayerSteps(whole.quantize_and_insert_k_cache, INVARIANT if whole.deterministic else PLAIN)
    torchs = made.transient_bytes
    for name in ("sum_bits", *names):
        if hasattr(steps, name):
            setattr(made, name, getattr(steps, name))
    made.transient_bytes = lambda max_tokens: max(steps.transient_bytes(max_tokens), torchs(max_tokens))
    return cast("LayerSteps", made)


def layer_step_sources(backend: Backend) -> dict[str, str]:
    """For each part in `LAYER_STEPS`, whose steps the backend runs: its own name, or "reference" for torch's.

    A part is the backend's own if its `layer_steps` has another function than `TorchLayerSteps` for one of its steps.
    """
    steps = complete(backend).layer_steps
    assigned = getattr(steps, "__dict__", {})

    def is_own(step: str) -> bool:
        return step in assigned or getattr(type(steps), step, None) is not getattr(TorchLayerSteps, step)

    return {part: backend.name if any(map(is_own, names)) else "reference" for part, names in LAYER_STEPS.items()}


def v41_step_sources(backend: Backend) -> dict[str, str]:
    """For each step that only DeepSeek-V4.1's layers have, who runs it: the backend, or "reference" for torch's."""
    steps = complete(backend).layer_steps

    def is_own(name: str) -> bool:
        assigned = name in getattr(steps, "__dict__", {})
        return assigned or getattr(type(steps), name, None) not in (None, getattr(TorchLayerSteps, name))

    return {name: backend.name if is_own(name) else "reference" for name in (*LATENTS, *CANDIDATES, *DELAYED)}
