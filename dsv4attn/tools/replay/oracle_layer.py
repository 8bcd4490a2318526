"""A whole layer in float64 numpy, token by token, from hidden states. The checks of a replay judge the layer by it.

Nothing is rounded here: `check_layer` says how far a layer that rounds may be from it. Letters are those of
`core.model.geometry` and `core.contract.layer_ops`.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from dsv4attn.core.model.geometry import LayerGeometry, ModelGeometry
from dsv4attn.core.model.quantized_weight import Weight
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.testing.kit.factories import frequencies
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle.attention import F64
from dsv4attn.testing.oracle.layer import entry_window, rms_norm, softmax
from dsv4attn.tools.replay.random_weights import RandomWeights


class OracleLayer:
    """One layer."""

    def __init__(
        self, geometry: ModelGeometry, layer: LayerGeometry, weights: AttentionWeights, source: RandomWeights
    ) -> None:
        """Take the weights. source: makes their float64 copies, and shares them between layers."""
        self._geometry, self._layer, self._weights, self._source = geometry, layer, weights, source
        self._inv_freq = frequencies(layer.rope)
        sink = weights.attn_sink
        self.sink = None if sink is None else self._copy(sink)

    @property
    def rounds_latents(self) -> bool:
        """Whether entries and index keys are made of latents that are rounded to bf16 (V4.1)."""
        return self._geometry.shared_latent

    def latent(self, hidden: F64) -> F64:
        """[lora] the latent of q of a token: projected, normalised."""
        return self._norm(self._copy(self._weights.wq_a) @ hidden, self._weights.q_norm)

    def query(self, latent: F64, position: int) -> tuple[F64, F64]:
        """([H, D], [H]) q of a token: projected, normalised, rotated; and how much the norm enlarges errors of a head.

        The second is the root mean square of all heads before their norm, divided by that of each head. Heads that are
        not normalised (V4.1) have the root mean square of all.
        """
        raw = (self._copy(self._weights.wq_b) @ latent).reshape(self._layer.num_heads, -1)
        turned = oracle.q_norm_rope(raw, *self._turn(position), self._layer.rope_dim, self._layer.q_eps)
        size = np.sqrt(np.mean(raw**2))
        return turned, size / np.sqrt(np.mean(raw**2, -1)) if self._layer.q_norm else np.full(len(raw), size)

    def key(self, hidden: F64, position: int) -> F64:
        """[D] the window key of a token."""
        row = self._norm(self._copy(self._weights.wkv) @ hidden, self._weights.kv_norm)
        return oracle.apply_rope(row, *self._turn(position), self._layer.rope_dim)

    def entry_tokens(self, entry: int) -> list[int]:
        """Positions of the tokens that an entry covers; with overlap those of the entry before too."""
        window = entry_window(entry, self._layer.compress_ratio, overlap=self._layer.overlap)
        return [position for position, _ in window]

    def entry(self, hidden: F64, entry: int, *, index: bool = False) -> F64:
        """[d] a compressed entry, or an index key, from the hidden states [n, hidden] of its tokens.

        Each channel is the mean of its kv over the tokens, weighed by the softmax of its scores; then normalised, and
        rotated to the first position of the entry's own window. With overlap a token of the window before counts by the
        first half of its channels, a token of the entry's own by the second. In V4.1 an index key is projected from the
        entry before its rotation, and normalised.
        """
        indexer, ratio, of_latent = self._weights.indexer, self._layer.compress_ratio, self._geometry.shared_latent
        weights = indexer.compressor if index and indexer and not of_latent else self._weights.compressor
        assert weights is not None
        positions = np.array(self.entry_tokens(entry))
        kv = hidden @ self._copy(weights.wkv).T
        # without scores all tokens count alike
        score = np.zeros_like(kv) if weights.wgate is None else hidden @ self._copy(weights.wgate).T
        if weights.ape is not None:
            score += self._copy(weights.ape)[positions % ratio]
        if self._layer.overlap:
            is_previous, dim = positions < entry * ratio, kv.shape[1] // 2
            kv, score = (np.where(is_previous[:, None], both[:, :dim], both[:, dim:]) for both in (kv, score))
        row = self._norm((softmax(score) * kv).sum(0), weights.norm)
        if index and of_latent:
            assert indexer is not None
            assert indexer.wk is not None
            assert indexer.k_norm is not None
            row = self._norm(self._copy(indexer.wk) @ row, indexer.k_norm)
        return oracle.apply_rope(row, *self._turn(entry * ratio), self._layer.rope_dim)

    def index_query(self, latent: F64, hidden: F64, position: int) -> tuple[F64, F64]:
        """([Hi, Di], [Hi]) queries of the indexer, rotated, and weights of its heads with all factors of the score."""
        heads, dim = self._geometry.index_n_heads, self._geometry.index_head_dim
        weights = self._weights.indexer
        assert weights is not None
        raw = (self._copy(weights.wq_b) @ latent).reshape(heads, dim)
        factors = self._copy(weights.weights_proj) @ hidden / np.sqrt(heads * dim)
        return oracle.apply_rope(raw, *self._turn(position), self._layer.rope_dim), factors

    def output(self, attended: F64, position: int, dims: list[int]) -> F64:
        """Some elements of a token's output from its attended rows [H, D]."""
        weights, groups = self._weights, self._geometry.o_groups
        first = self._copy(weights.wo_a)
        split = first.reshape(groups, -1, first.shape[1])
        z = oracle.inverse_rope_project(attended, *self._turn(position), self._layer.rope_dim, split, None)
        assert isinstance(weights.wo_b, Tensor)
        return np.asarray(weights.wo_b[dims].double().cpu().numpy() @ z.reshape(-1))

    def _copy(self, weight: Weight) -> F64:
        assert isinstance(weight, Tensor)
        return self._source.exact(weight)

    def _turn(self, position: int) -> tuple[F64, F64]:
        return oracle.rope_cos_sin(position, self._inv_freq)

    def _norm(self, row: F64, weight: Tensor) -> F64:
        return rms_norm(row, self._copy(weight), self._geometry.eps)
