"""Random weights of layers of the model's true sizes, and random hidden states, for replays of whole layers.

Matrices are N(0, 1 / columns), so that every projection of a vector of unit RMS has unit RMS. Weights of the norms of
keys and entries have a few channels much louder than the rest. Scores of a compressor, with their position bias, have
variance 2, so that tokens of a window count very differently. Weights are fp32, because many CPUs multiply bf16 far
more slowly; hidden states have the dtype of the replay.

The matrices of q, keys and output are the same for all layer types, which are computed one after another: they are
nearly all of the memory (0.4 GiB for Flash). Checks need some of them in float64 too (0.5 GiB).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.model.weights import AttentionWeights, weight_shapes
from dsv4attn.testing.oracle.attention import F64

LOUDEST = 3.0
"""Weight of the loud channels of a key; one in 64 is loud, the others lie around 1."""

_OF_KEYS = "kv_norm", "compressor.norm"
_SPREAD = 0.4
_HIDDEN, _SHARED, _OWN = range(3)
_LAYER_TYPES = list(LayerKind)


class RandomWeights:
    """Weights of one layer of each type, and their float64 copies. Equal arguments give equal numbers."""

    def __init__(self, geometry: ModelGeometry, seed: int, device: torch.device | str = "cpu") -> None:
        """Draw nothing yet. device: where the weights will be; their numbers are drawn on the CPU."""
        self._geometry, self._seed, self._device = geometry, seed, device
        self._shared: dict[str, Tensor] = {}
        self._exact: dict[int, F64] = {}
        self._norms: list[Tensor] = []

    def of(self, layer: LayerGeometry, sink: Tensor) -> AttentionWeights:
        """The weights of a layer type. sink: [H] fp32."""
        of_layer = _generator(self._seed, _OWN, _LAYER_TYPES.index(layer.kind))
        common = _generator(self._seed, _SHARED)
        weights = {}
        for name, shape in weight_shapes(self._geometry, layer).items():
            if name == "attn_sink":
                weights[name] = sink
            elif "." in name:
                weights[name] = _drawn(name, shape, of_layer).to(self._device)
            else:
                # a window-only layer has the first names of every layer, so the order is the same
                if name not in self._shared:
                    self._shared[name] = _drawn(name, shape, common).to(self._device)
                weights[name] = self._shared[name]
        self._norms += [weights[name] for name in _OF_KEYS if name in weights]
        return AttentionWeights.from_dict(weights, self._geometry, layer)

    @property
    def key_rms(self) -> float:
        """Root mean square of a key or an entry, the largest of the layer types that were drawn."""
        return max(math.sqrt(float(norm.square().mean())) for norm in self._norms)

    def exact(self, weight: Tensor) -> F64:
        """The float64 copy of a weight, made in the first call."""
        if id(weight) not in self._exact:
            self._exact[id(weight)] = weight.cpu().numpy().astype(np.float64)
        return self._exact[id(weight)]


def hidden_bank(geometry: ModelGeometry, rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[rows, hidden] hidden states of unit RMS, as the norm before a layer leaves them."""
    drawn = torch.randn(
        rows, geometry.hidden_size, generator=_generator(seed, _HIDDEN), dtype=torch.float32, device="cpu"
    )
    return drawn.mul_(drawn.square().mean(-1, keepdim=True).rsqrt()).to(dtype)


def _generator(*numbers: int) -> torch.Generator:
    """A generator of its own for these numbers."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1))


def norm_weights(shape: tuple[int, ...], random: torch.Generator, *, loud: bool) -> Tensor:
    """Weights of a norm, around 1. loud: one channel in 64 has the weight LOUDEST."""
    weights = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    weights.mul_(_SPREAD).exp_().clamp_(max=LOUDEST)
    if loud:
        weights[torch.randperm(shape[0], generator=random, device="cpu")[: -(-shape[0] // 64)]] = LOUDEST
    return weights


def _drawn(name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    if name.endswith("norm"):
        return norm_weights(shape, random, loud=name in _OF_KEYS)
    scale = 1.0 if name.endswith("ape") else 1 / math.sqrt(shape[-1])
    return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu").mul_(scale)
