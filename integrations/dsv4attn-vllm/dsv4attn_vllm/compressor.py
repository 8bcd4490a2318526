"""vLLM's compressor with its two steps on dsv4attn: states of tokens, and the entries that they complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import DeepseekCompressor

from dsv4attn import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.contract.layer_ops import LayerSteps, takes_bf16_norm
from dsv4attn.core.torch_modes import is_capturing
from dsv4attn_vllm.guard import RefusedError

if TYPE_CHECKING:
    from dsv4attn_vllm.serving import Serving

__all__ = ["Compressor", "adopt"]

_LONG = 128
"""The ratio of which vLLM's metadata say whether any request completes an entry."""


class Compressor(DeepseekCompressor):
    """A compressor of vLLM, with its weights and its state cache.

    It is made by `adopt` of one that vLLM has built: vLLM's layer names the class of its own compressor itself.
    """

    _serving: Serving
    _norm_weight_fp32: Tensor | None
    _bound: tuple[PagedKVCache, PagedKVCache] | None

    def use(self, serving: Serving) -> None:
        """Run on the backend of a model."""
        self._serving, self._norm_weight_fp32, self._bound = serving, None, None

    def cache_norm_weight_fp32(self) -> None:
        """Do nothing: vLLM's layer on a CPU calls it when weights are loaded, which may change without."""

    def _norm_weight(self, steps: LayerSteps) -> Tensor:
        """The weight of the norm [d]: vLLM's own, which may be loaded again, or a copy of every step in fp32.

        The copy is for steps that take no bf16. It is made anew as torch does not count how vLLM loads weights.
        """
        weight = self.norm.weight.detach()
        if weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and takes_bf16_norm(steps)):
            return weight
        if self._norm_weight_fp32 is None:
            self._norm_weight_fp32 = torch.empty_like(weight, dtype=torch.float32)
        return self._norm_weight_fp32.copy_(weight)

    def _caches(self) -> tuple[PagedKVCache, PagedKVCache]:
        """States and entries, as vLLM bound them last; it binds others when it wakes up."""
        states, entries = self.state_cache.kv_cache, self._static_forward_context[self.k_cache_prefix].kv_cache
        bound = self._bound
        if bound is None or bound[0].tensor is not states or bound[1].tensor is not entries:
            serving = self._serving
            keys = serving.index_layout if self.head_dim == serving.model.index_head_dim else serving.compressed_layout
            layout = KVCacheLayout.compressor_state(self.coff * self.head_dim)
            self._bound = bound = PagedKVCache(states, layout), PagedKVCache(entries, keys)
        return bound

    def forward(self, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> None:  # noqa: ANN401 - vLLM's module
        """Save the states of a step's tokens, then store the entries that they complete.

        kv_score: [T', 2 w] fp32, kv first. positions: [T'] int64. Rows behind the tokens of the step are not read.
        Shape and dtype are checked without metadata too, so that wrong ones are refused at load.
        """
        width = self.coff * self.head_dim
        if kv_score.dtype != torch.float32 or kv_score.shape[-1] != 2 * width:
            expected, actual = f"[T, {2 * width}] torch.float32", f"{list(kv_score.shape)} {kv_score.dtype}"
            cure = "report it"
            raise RefusedError(f"{self.prefix}: kv_score", expected=expected, actual=actual, cure=cure)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            # vLLM measures memory
            return
        steps, (states, cache) = complete(self._serving.backend).layer_steps, self._caches()
        state = metadata[self.state_cache.prefix]
        kv, score = kv_score.split(width, -1)
        steps.save_partial_states(kv, score, self.ape, positions, states, state.slot_mapping)
        if self.compress_ratio == _LONG and state.c128_boundary is False and not is_capturing(positions.device):
            return
        steps.compress_norm_rope_store(
            states,
            state.block_table,
            state.token_to_req_indices,
            positions,
            metadata[self.k_cache_prefix].slot_mapping,
            self._norm_weight(steps),
            self.rms_norm_eps,
            rotary_emb.cos_sin_cache,
            self.compress_ratio,
            cache,
            overlap=self.overlap,
        )


def adopt(compressor: DeepseekCompressor, serving: Serving) -> None:
    """Turn a compressor that vLLM has built into a `Compressor`."""
    compressor.__class__ = Compressor
    compressor.use(serving)
