"""What a DeepSeek-V4.1 layer of vLLM runs on dsv4attn, where it differs from `attention`.

Layers read the compressed cache and the selection of another layer, queries are not normalised, and `wo_a` may have a
scale for each 32 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16

from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn_vllm.attention import Dsv4Attention
from dsv4attn_vllm.compressor_v41 import adopt
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.indexer import check_selector
from dsv4attn_vllm.indexer_v41 import IndexCache, Indexer
from dsv4attn_vllm.metadata_v41 import Backend, SWABackend
from dsv4attn_vllm.steps import COMPRESSOR, INDEXER

if TYPE_CHECKING:
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention as _Layer
else:
    _Layer = object

__all__ = ["Dsv41Attention"]

_GROUPS = [1, 32]
"""Rows and columns under one scale of vLLM's MXFP8 weights."""


class Dsv41Attention(Dsv4Attention, _Layer):
    """Goes before vLLM's class of a platform among the bases of that platform's layer."""

    backend_cls = Backend
    swa_backend_cls = SWABackend
    is_v41 = True
    _dense: Tensor | None = None

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        super().__init__(vllm_config, *args, **kwargs)
        serving = self._serving
        for cache, actual, layout in (
            ("window", self.swa_bytes_per_token, serving.swa_layout),
            ("compressed", self.compressed_bytes_per_token, serving.compressed_layout),
        ):
            if actual != layout.record_bytes:
                expected, cure = f"records of {layout.record_bytes} bytes", "install a version of vLLM that was tested"
                raise RefusedError(f"{self.prefix}: {cache} cache", expected=expected, actual=actual, cure=cure)

    # ---------------------------------------------------------------- steps around attention, see `steps`

    def _indexer_cls(self, k_cache: Any) -> Any:  # noqa: ANN401 - a cache and a class of vLLM's
        if INDEXER not in self._serving.steps:
            return super()._indexer_cls(k_cache)
        k_cache.__class__ = IndexCache
        return Indexer

    def _put_steps(self) -> None:
        if INDEXER in self._serving.steps and self.indexer is not None:
            check_selector(self.prefix, self.indexer)
        if COMPRESSOR in self._serving.steps and self.compressor is not None:
            adopt(self.compressor, self._serving)

    # ---------------------------------------------------------------- caches

    def _entries(self) -> Tensor:
        return self._compressed_kv_cache()

    def _entries_prefix(self) -> str:
        prefix = self.compressed_cache_prefix
        assert prefix is not None
        return prefix

    # ---------------------------------------------------------------- weights

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert an MXFP8 `wo_a` to bf16, at the address that captured graphs read; others as in V4."""
        if getattr(self.wo_a, "weight_block_size", None) != _GROUPS:
            super().process_weights_after_loading(act_dtype)
            return
        dense = dequant_mxfp8_to_bf16(self.wo_a.weight.data, self.wo_a.weight_scale.data)
        self._dense = dense if self._dense is None else self._dense.copy_(dense)

    def _weight(self) -> Weight:
        return self.wo_a if self._dense is None else self._dense

    # ---------------------------------------------------------------- steps

    def forward_kv(self, positions: Tensor, hidden_states: Tensor) -> None:
        """Write what `forward` writes to the caches, without queries, selection and attention."""
        by_prefix = get_forward_context().attn_metadata
        qr_kv, kv_score, _ = self._run_parallel_input_projections(hidden_states)
        kv = self._split_qkv_and_norm(qr_kv)[2]
        if isinstance(by_prefix, dict):
            self.insert_keys(kv, positions, by_prefix[self.swa_cache_layer.prefix].slot_mapping)
        if self.compressor is None:
            return
        latent = self.compressor(kv_score, positions)
        self.compressor.insert_cache(latent, positions, self.rotary_emb)
        if self.indexer is not None and self.indexer.owns_k:
            self.indexer._produce_k(latent, positions, self.indexer_rotary_emb)  # noqa: SLF001 - as vLLM's layer does

    def _wo_b(self, z: Tensor) -> Tensor:
        return self._wo_b_proj(z)
