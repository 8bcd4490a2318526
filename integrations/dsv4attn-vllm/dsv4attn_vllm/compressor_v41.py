"""vLLM's compressor of DeepSeek-V4.1 with its steps on dsv4attn: latents of tokens, and the entries made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.compressor import CompressorStateCache, DeepseekCompressor

from dsv4attn import KVCacheLayout, PagedKVCache
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.metadata_v41 import StateBackend

if TYPE_CHECKING:
    from dsv4attn_vllm.serving import Serving

__all__ = ["Compressor", "adopt", "in_fp32"]


class StateCache(CompressorStateCache):
    """The rings of the requests; their metadata are made by dsv4attn's builder."""

    def get_attn_backend(self) -> type[StateBackend]:
        """Return the backend that names the builder."""
        return StateBackend


class Compressor(DeepseekCompressor):
    """A compressor of vLLM, with its weights and its rings. It is made by `adopt` of one that vLLM has built."""

    _serving: Serving
    _norm_fp32: Tensor | None = None
    _states: PagedKVCache | None = None
    _entries: PagedKVCache | None = None

    def forward(self, kv_score: Tensor, positions: Tensor) -> Tensor | None:
        """Save the states of a step's tokens, and return latents [T, 512] bf16, before RoPE.

        kv_score: [T', 512 r] fp32, kv first. positions: [T'] int64. Rows behind the tokens of the step are not read.
        None: vLLM measures memory. Shape and dtype are checked then too, so that wrong ones are refused at load.
        """
        ratio = self.compress_ratio
        if kv_score.dtype != torch.float32 or kv_score.shape[-1] != ratio * self.head_dim:
            expected, actual = f"[T, {ratio * self.head_dim}] torch.float32", f"{list(kv_score.shape)} {kv_score.dtype}"
            raise RefusedError(f"{self.prefix}: kv_score", expected=expected, actual=actual, cure="report it")
        by_prefix = get_forward_context().attn_metadata
        if not isinstance(by_prefix, dict):
            return None
        steps = self._serving.layer_steps
        self._norm_fp32 = in_fp32(self.norm.weight, self._norm_fp32)
        norm = self._norm_fp32, self.rms_norm_eps
        if self.state_cache is None:
            requests = by_prefix[self.k_cache_prefix].dsv4attn.req_id_per_token
            tokens = len(requests)
            return steps.compress_latents(kv_score[:tokens], None, positions[:tokens], requests, *norm, ratio)
        state, states = by_prefix[self.state_cache.prefix], self.state_cache.kv_cache
        if self._states is None or self._states.tensor is not states:
            self._states = PagedKVCache(states, KVCacheLayout.compressor_state(self.head_dim))
        tokens = len(state.requests)
        kv, score = kv_score[:tokens].split(self.head_dim, -1)
        ring = self._states, state.ring_table
        return steps.compress_latents(kv, score, positions[:tokens], state.requests, *norm, ratio, *ring)

    def insert_cache(self, latent: Tensor | None, positions: Tensor, rotary_emb: Any) -> None:  # noqa: ANN401 - vLLM's
        """Store the entries that the tokens of a step complete."""
        if latent is None:
            return
        by_prefix = get_forward_context().attn_metadata
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        if self._entries is None or self._entries.tensor is not cache:
            self._entries = PagedKVCache(cache, self._serving.compressed_layout)
        tokens = len(latent)
        slots, table = by_prefix[self.k_cache_prefix].slot_mapping[:tokens], rotary_emb.cos_sin_cache
        norm = None, self.rms_norm_eps, table
        store = self._serving.layer_steps.norm_rope_store
        store(latent, positions[:tokens], slots, *norm, self.compress_ratio, self._entries)


def in_fp32(weight: Tensor, copy: Tensor | None) -> Tensor:
    """The weight of a norm in fp32: itself, or a copy that is made anew, as torch does not count how vLLM loads it."""
    weight = weight.detach()
    if weight.dtype == torch.float32:
        return weight
    return weight.float() if copy is None else copy.copy_(weight)


def adopt(compressor: DeepseekCompressor, serving: Serving) -> None:
    """Turn a compressor that vLLM has built, and its rings, into those of dsv4attn."""
    compressor.__class__ = Compressor
    compressor._serving = serving  # noqa: SLF001 - of this module
    if compressor.state_cache is not None:
        compressor.state_cache.__class__ = StateCache
