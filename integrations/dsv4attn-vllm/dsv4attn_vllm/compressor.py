"""vLLM's compressors with their parts on dsv4attn: states of tokens, and the entries that they complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import CompressorStateCache, DeepseekCompressor
from vllm.models.deepseek_v41 import compressor as v41

from dsv4attn import EntryNorm, KVCacheLayout, PagedKVCache, StatePages
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.metadata import StateBackend, V41StateBackend

if TYPE_CHECKING:
    from dsv4attn_vllm.serving import Serving

_LONG = 128
"""For this ratio vLLM's metadata say whether any request completes an entry."""


class OnDsv4attn:
    """What compressors of V4 and V4.1 share.

    vLLM's layer constructs its own class of compressor. `adopt` turns such a compressor, with its weights and its state
    cache, into one of dsv4attn.
    """

    _serving: Serving
    _norm_fp32: Tensor | None = None
    _states: PagedKVCache | None = None
    _entries: PagedKVCache | None = None
    # of vLLM's classes
    head_dim: int
    prefix: str
    k_cache_prefix: str
    _static_forward_context: Any

    def _check_scores(self, kv_score: Tensor, columns: int) -> None:
        """Check kv_score [T', columns] fp32. In a call without metadata too, so that wrong ones are refused at load."""
        if kv_score.dtype != torch.float32 or kv_score.shape[-1] != columns:
            expected, actual = f"[T, {columns}] torch.float32", f"{list(kv_score.shape)} {kv_score.dtype}"
            raise RefusedError(f"{self.prefix}: kv_score", expected=expected, actual=actual, cure="report it")

    def _bound_states(self, states: Tensor, columns: int) -> PagedKVCache:
        """The state cache. columns: of kv, and of scores, in a record."""
        self._states = bound_cache(self._states, states, KVCacheLayout.compressor_state(columns))
        return self._states

    def _bound_entries(self) -> PagedKVCache:
        """The cache of compressed entries, or of index keys."""
        serving = self._serving
        is_index = self.head_dim == serving.model.index_head_dim
        layout = serving.index_layout if is_index else serving.compressed_layout
        entries = self._static_forward_context[self.k_cache_prefix].kv_cache
        self._entries = bound_cache(self._entries, entries, layout)
        return self._entries


class Compressor(OnDsv4attn, DeepseekCompressor):
    """A compressor of V4, of a layer or of its indexer."""

    def cache_norm_weight_fp32(self) -> None:
        """Do nothing. vLLM's layer on a CPU calls this when weights are loaded, but weights also change without it."""

    def _norm_weight(self) -> Tensor:
        """The weight of the norm [d]: vLLM's own, or a copy in fp32 of another dtype, made in every step.

        Torch does not count how vLLM loads weights, so a copy may be older than the weight.
        """
        weight = self.norm.weight.detach()
        if weight.dtype in (torch.float32, torch.bfloat16):
            return weight
        self._norm_fp32 = in_fp32(weight, self._norm_fp32)
        return self._norm_fp32

    def forward(self, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> None:  # noqa: ANN401 - vLLM's module
        """Save the states of a step's tokens, then store the entries that they complete.

        kv_score: [T', 2 w] fp32, kv first. positions: [T'] int64. Rows after the tokens of the step are not read.
        """
        width = self.coff * self.head_dim
        self._check_scores(kv_score, 2 * width)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            # vLLM measures memory
            return
        ops, states = self._serving.layer_ops, self._bound_states(self.state_cache.kv_cache, width)
        state = metadata[self.state_cache.prefix]
        kv, score = kv_score.split(width, -1)
        ops.save_partial_states(kv, score, self.ape, positions, states, state.slot_mapping)
        if self.compress_ratio == _LONG and state.c128_boundary is False and not is_capturing(positions.device):
            return
        ops.compress_norm_rope_store(
            StatePages(states, state.block_table),
            state.token_to_req_indices,
            positions,
            metadata[self.k_cache_prefix].slot_mapping,
            EntryNorm(self._norm_weight(), self.rms_norm_eps, rotary_emb.cos_sin_cache),
            self.compress_ratio,
            self._bound_entries(),
            overlap=self.overlap,
        )


class StateCache(CompressorStateCache):
    """The states of V4's requests, where the backend is deterministic."""

    def get_attn_backend(self) -> type[StateBackend]:
        """Return the backend that says that the mode is served."""
        return StateBackend


class V41StateCache(v41.CompressorStateCache):
    """The rings of the requests; their metadata are made by dsv4attn's builder."""

    def get_attn_backend(self) -> type[V41StateBackend]:
        """Return the backend that names the builder."""
        return V41StateBackend


class V41Insert(OnDsv4attn, v41.DeepseekCompressor):
    """vLLM's compressor of V4.1, whose entries are stored by dsv4attn: vLLM's kernel for 4 bits is one of sm_100."""

    def insert_cache(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:  # noqa: ANN401 - vLLM's
        """Store the entries that the tokens of a step complete. Rows after the tokens of the step are not read."""
        if latent is None:
            return
        slots = get_forward_context().attn_metadata[self.k_cache_prefix].slot_mapping[: len(latent)]
        tokens, norm = len(slots), EntryNorm(None, self.rms_norm_eps, rotary_emb.cos_sin_cache)
        store = self._serving.layer_ops.norm_rope_store
        store(latent[:tokens], positions[:tokens], slots, norm, self.compress_ratio, self._bound_entries())


class V41Compressor(V41Insert):
    """A compressor of V4.1: it makes latents, from which entries and index keys are made."""

    def forward(self, kv_score: Tensor, positions: Tensor) -> Tensor | None:
        """Save the states of a step's tokens, and return latents [T, 512] bf16, before RoPE.

        kv_score: [T', 512 r] fp32, kv first. positions: [T'] int64. Rows after the tokens of the step are not read.
        None: vLLM measures memory.
        """
        ratio = self.compress_ratio
        self._check_scores(kv_score, ratio * self.head_dim)
        by_prefix = get_forward_context().attn_metadata
        if not isinstance(by_prefix, dict):
            return None
        ops = self._serving.layer_ops
        self._norm_fp32 = in_fp32(self.norm.weight, self._norm_fp32)
        weight, eps = self._norm_fp32, self.rms_norm_eps
        if self.state_cache is None:
            requests = by_prefix[self.k_cache_prefix].dsv4attn.req_id_per_token
            tokens = len(requests)
            return ops.compress_latents(kv_score[:tokens], None, positions[:tokens], requests, weight, eps, ratio)
        state = by_prefix[self.state_cache.prefix]
        tokens = len(state.requests)
        kv, score = kv_score[:tokens].split(self.head_dim, -1)
        rings = StatePages(self._bound_states(self.state_cache.kv_cache, self.head_dim), state.ring_table)
        return ops.compress_latents(kv, score, positions[:tokens], state.requests, weight, eps, ratio, rings)


def in_fp32(weight: Tensor, copy: Tensor | None) -> Tensor:
    """The weight of a norm in fp32: itself, or a copy that is made anew, as torch does not count how vLLM loads it."""
    weight = weight.detach()
    if weight.dtype == torch.float32:
        return weight
    return weight.float() if copy is None else copy.copy_(weight)


def bound_cache(bound: PagedKVCache | None, tensor: Tensor, layout: KVCacheLayout) -> PagedKVCache:
    """A cache on the tensor that vLLM bound last: `bound` itself while it is on this tensor.

    vLLM binds other tensors when it wakes up.
    """
    return bound if bound is not None and bound.tensor is tensor else PagedKVCache(tensor, layout)


def adopt(compressor: DeepseekCompressor | v41.DeepseekCompressor, serving: Serving) -> None:
    """Turn a compressor that vLLM has built into one of dsv4attn.

    So are its rings in V4.1, and its states where the backend is deterministic.
    """
    if isinstance(compressor, v41.DeepseekCompressor):
        compressor.__class__ = V41Compressor
        if compressor.state_cache is not None:
            compressor.state_cache.__class__ = V41StateCache
    else:
        compressor.__class__ = Compressor
        if serving.backend.deterministic:
            compressor.state_cache.__class__ = StateCache
    compressor._serving = serving  # noqa: SLF001 - of this module


def adopt_insert(compressor: v41.DeepseekCompressor, serving: Serving) -> None:
    """Let a compressor that vLLM has built store its entries by dsv4attn; all else stays vLLM's."""
    compressor.__class__ = V41Insert
    compressor._serving = serving  # noqa: SLF001 - of this module
