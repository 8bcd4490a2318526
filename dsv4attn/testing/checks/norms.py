"""The norms between the projections of a layer: of the latent of q, and of the key."""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import torch

from dsv4attn.testing.case import Bench, Measure, worst_of
from dsv4attn.testing.kit.factories import CaseInput
from dsv4attn.testing.kit.strided import StridedTensors, unchanged
from dsv4attn.testing.kit.tolerances import F64, Formula, hold_shape, hold_values, rounded

LATENT, KEY, LATENT_WEIGHT, KEY_WEIGHT = range(110, 114)
"""Streams of random numbers."""
SIZES = (1.0, 30.0, 1e-3, 0.0, 1e-5)
"""Scales of every fifth row: eps matters, and one has only zeros."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class NormRows(CaseInput):
    """Products of the hidden states of some tokens, with the weights of both norms.

    count: tokens.
    dtype: type of the products.
    weight_dtype: type of the weights.
    out_dtype: type of the results.
    eps: of both norms.
    """

    count: int = 7
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.bfloat16
    eps: float = 1e-6

    def _rows(self, stream: int, dim: int) -> F64:
        sizes = np.resize(SIZES, self.count)[:, None]
        return rounded(sizes * self.drawn(stream, self.count, dim), self.dtype)

    @cached_property
    def latents(self) -> F64:
        """[T, L] latents of q."""
        return self._rows(LATENT, self.geometry.q_lora_rank)

    @cached_property
    def keys(self) -> F64:
        """[T, D] keys."""
        return self._rows(KEY, self.geometry.head_dim)

    @cached_property
    def weights(self) -> tuple[F64, F64]:
        """[L] and [D]."""
        latent = self.drawn_norm_weight(LATENT_WEIGHT, self.geometry.q_lora_rank, self.weight_dtype)
        return latent, self.drawn_norm_weight(KEY_WEIGHT, self.geometry.head_dim, self.weight_dtype)


def _normed(bench: Bench, inputs: NormRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Both results. Raises Wrong if an argument was changed, or a result has another shape or type."""
    strided, sources = StridedTensors(inputs.strided), (inputs.latents, inputs.keys)
    rows = [strided(name, inputs.tensor(x, inputs.dtype)) for name, x in zip(("q", "kv"), sources, strict=True)]
    arguments = [*rows, *(inputs.tensor(weight, inputs.weight_dtype) for weight in inputs.weights)]
    names = "q", "kv", "q's weight", "kv's weight"
    with unchanged(**dict(zip(names, arguments, strict=True))):
        results: tuple[torch.Tensor, torch.Tensor] = bench.layer_ops.norm_q_kv(*arguments, inputs.eps, inputs.out_dtype)
    strided.check()
    for name, result, source in zip(("q", "kv"), results, sources, strict=True):
        hold_shape(result, source.shape, inputs.out_dtype, f"{name}:")
    return results


def normalises(bench: Bench, inputs: NormRows) -> Measure:
    """Both results are those of float64, rounded once."""
    measures, sources = [], (inputs.latents, inputs.keys)
    for name, result, source, weight in zip(("q", "kv"), _normed(bench, inputs), sources, inputs.weights, strict=True):
        for token in range(inputs.count):
            formula = Formula.exact(source[token]).normed(weight, inputs.eps)
            measures.append(hold_values(result[token], formula, inputs.out_dtype, f"{name} of token {token}"))
    return worst_of(*measures)


def norms_no_rows(bench: Bench, inputs: NormRows) -> Measure:
    """No tokens have no results."""
    _normed(bench, attrs.evolve(inputs, count=0))
    return Measure()
