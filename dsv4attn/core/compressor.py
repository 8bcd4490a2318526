"""`Compressor`: entries of a compressed cache, or index keys, from the hidden states of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.layer_ops import LayerSteps, Linear, takes_bf16_norm
from dsv4attn.core.layer_weights import CompressorWeights
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.weights import dense_weight

__all__ = ["Compressor"]


class Compressor:
    """A compressor of one layer. Projections, sums and the norm are fp32, whatever the dtype of the model.

    layer: ratio and kind. weights: of this compressor. cos_sin_cache: [positions, rope] fp32 of the layer. steps,
    linear: see `layer_ops`.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        weights: CompressorWeights,
        cos_sin_cache: Tensor,
        steps: LayerSteps,
        linear: Linear,
    ) -> None:
        self._layer, self._table, self._steps, self._linear = layer, cos_sin_cache, steps, linear
        # copies, made once: kv first, scores second
        self._projection = torch.cat([dense_weight(getattr(weights, name), name).float() for name in ("wkv", "wgate")])
        self._ape, self._norm = weights.ape.float().contiguous(), weights.norm.contiguous()
        if not takes_bf16_norm(steps):
            self._norm = self._norm.float()

    @property
    def width(self) -> int:
        """W - channels of the kv of a token."""
        return self._ape.shape[1]

    def __call__(
        self,
        hidden_states: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        states: PagedKVCache,
        cache: PagedKVCache,
    ) -> None:
        """Save the states of all tokens of a step, then store the entries that they complete.

        hidden_states: [T', hidden], rows behind the tokens of the step are not read. positions: [T'] int64. states: the
        state cache. cache: of keys, or of index keys. `metadata.state` has the slots of states, `metadata.compressed`
        those of entries.
        """
        swa, compressed, state = metadata.swa, metadata.compressed, metadata.state
        assert compressed is not None
        assert state is not None
        tokens, layer = swa.num_actual_tokens, self._layer
        positions = positions[:tokens]
        kv, score = self._linear(hidden_states[:tokens].float(), self._projection).split(self.width, -1)
        self._steps.save_partial_states(kv, score, self._ape, positions, states, state.slot_mapping[:tokens])
        self._steps.compress_norm_rope_store(
            states,
            state.block_table,
            swa.token_to_req_indices,
            positions,
            compressed.slot_mapping[:tokens],
            self._norm,
            layer.eps,
            self._table,
            layer.compress_ratio,
            cache,
            overlap=layer.overlap,
        )
