"""`Compressor`: entries of a compressed cache, or index keys, from the projected hidden states of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.metadata.metadata import AttentionMetadata
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.model.weight_copies import WeightCopies
from dsv4attn.core.model.weights import CompressorWeights
from dsv4attn.core.reprs import layer_text, one_line
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import EntryNorm, StatePages

__all__ = ["Compressor", "LatentCompressor"]


class _Compressing:
    """What compressors of both versions share. Projected kv and scores, sums and the norm are fp32 in every model.

    layer: ratio and kind.
    weights: of this compressor; the layer multiplies by `wkv` and `wgate`.
    cos_sin_cache: [positions, rope] fp32 of the layer.
    ops: of the backend.
    copies: of the layer.
    name: of this compressor among the weights of the layer.
    """

    def __init__(
        self,
        layer: LayerGeometry,
        weights: CompressorWeights,
        cos_sin_cache: Tensor,
        ops: LayerOps,
        copies: WeightCopies,
        name: str = "compressor",
    ) -> None:
        self._layer, self._table, self._ops = layer, cos_sin_cache, ops
        self._copies, self._name = copies, name
        self.load(weights)

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Kind of the layer, and device."""
        yield layer_text(self._layer)
        yield f"on {self._table.device}"

    def load(self, weights: CompressorWeights) -> None:
        """Take weights with the shapes of those before; copies of them are made in the same memory."""
        raise NotImplementedError

    def _plain(self, name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        """`WeightCopies.plain` of a weight of this compressor."""
        return self._copies.plain(f"{self._name}.{name}", value, dtype)


class Compressor(_Compressing):
    """A compressor of one layer of DeepSeek-V4, of its keys or of its index keys."""

    def load(self, weights: CompressorWeights) -> None:
        """Take weights with the shapes of those before; copies of them are made in the same memory."""
        assert weights.ape is not None
        self._ape = self._plain("ape", weights.ape, torch.float32)
        self._norm = EntryNorm(self._plain("norm", weights.norm, None), self._layer.eps, self._table)

    @property
    def width(self) -> int:
        """W - channels of the kv of a token."""
        return self._ape.shape[1]

    @without_modes
    def __call__(
        self,
        kv: Tensor,
        score: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        states: PagedKVCache,
        cache: PagedKVCache,
    ) -> None:
        """Save the states of all tokens of a step, then store the entries that they complete.

        kv, score: [T', W] fp32, rows after the tokens of the step are not read. positions: [T'] int64. states: the
        state cache. cache: of keys, or of index keys. `metadata.state` has the slots of states, `metadata.compressed`
        those of entries.
        """
        swa, compressed, state = metadata.swa, metadata.compressed, metadata.state
        assert compressed is not None
        assert state is not None
        assert state.slot_mapping is not None
        tokens, layer = swa.num_actual_tokens, self._layer
        positions, slots = positions[:tokens], state.slot_mapping[:tokens]
        self._ops.save_partial_states(kv[:tokens], score[:tokens], self._ape, positions, states, slots)
        self._ops.compress_norm_rope_store(
            StatePages(states, state.block_table),
            swa.token_to_req_indices,
            positions,
            compressed.slot_mapping[:tokens],
            self._norm,
            layer.compress_ratio,
            cache,
            overlap=layer.overlap,
        )


class LatentCompressor(_Compressing):
    """The compressor of a layer of DeepSeek-V4.1: latents, from which keys and index keys are stored."""

    def load(self, weights: CompressorWeights) -> None:
        """Take weights with the shapes of those before; copies of them are made in the same memory."""
        self._norm_weight = self._plain("norm", weights.norm, torch.float32)
        self._key_norm = EntryNorm(None, self._layer.eps, self._table)

    @property
    def width(self) -> int:
        """D - channels of the kv of a token."""
        return self._norm_weight.shape[0]

    @without_modes
    def __call__(
        self,
        kv: Tensor,
        score: Tensor | None,
        positions: Tensor,
        metadata: AttentionMetadata,
        states: PagedKVCache | None,
        cache: PagedKVCache,
    ) -> Tensor:
        """Latents [T, D] bf16 of the tokens of a step, whose entries are stored.

        kv, score: [T', D] fp32, rows after the tokens of the step are not read; no score with ratio 1. Rows of tokens
        that complete no entry are zero. states: the ring of each request, on layers whose entries have several tokens;
        `metadata.state` has its blocks. Other arguments are those of `Compressor`.
        """
        swa, compressed, state, layer = metadata.swa, metadata.compressed, metadata.state, self._layer
        assert compressed is not None
        tokens = swa.num_actual_tokens
        positions, token_to_req = positions[:tokens], swa.token_to_req_indices
        kv, score, pages = kv[:tokens], None if score is None else score[:tokens], None
        if layer.has_states:
            assert states is not None
            assert state is not None
            pages = StatePages(states, state.block_table)
            if state.req_id_per_token is not None:
                token_to_req = state.req_id_per_token
        latents = self._ops.compress_latents(
            kv, score, positions, token_to_req, self._norm_weight, layer.eps, layer.compress_ratio, pages
        )
        self.store(latents, positions, metadata, self._key_norm, cache)
        return latents

    def store(
        self, x: Tensor, positions: Tensor, metadata: AttentionMetadata, norm: EntryNorm, cache: PagedKVCache
    ) -> None:
        """Store rows [T, d] of the tokens that complete an entry: latents as keys, or what becomes index keys."""
        compressed, layer = metadata.compressed, self._layer
        assert compressed is not None
        tokens = metadata.swa.num_actual_tokens
        slots = compressed.slot_mapping[:tokens]
        self._ops.norm_rope_store(x, positions[:tokens], slots, norm, layer.compress_ratio, cache)
