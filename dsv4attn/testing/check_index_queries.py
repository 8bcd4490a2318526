"""Queries of the indexer, rotated and quantised, and their comparison with the oracle."""

from __future__ import annotations

import math
from functools import cached_property

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.testing import oracle, oracle_layer
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_compressor import attention_problems
from dsv4attn.testing.check_slots import stale_rows
from dsv4attn.testing.layer_tolerances import UNIT, CodeRule, Formula, hold_values
from dsv4attn.testing.random_step import normal
from dsv4attn.testing.strided import StridedTensors
from dsv4attn.testing.tolerances import F64, rounded

__all__ = [
    "IndexQueries",
    "makes_no_queries",
    "quantises_queries",
    "quantises_without_positions_of_padding",
    "run_queries",
    "shape_error",
]

Q, WEIGHTS, ANGLES, POSITIONS = range(70, 74)
"""Streams of random numbers."""
SIZES = (1.0, 1e-3, 30.0, 0.0)
"""Scales of q for every 32 dims, so that groups have different scales, and one has only zeros."""
SMALL = 1e-6
"""Scale of every seventh q: below the floor of a scale."""
FOLDED = 4 * UNIT
"""Budget of a weight: the factor of the score is rounded, and multiplied; so is the scale, which is a power of two."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class IndexQueries:
    """Queries of the indexer.

    geometry: the model.
    layout: layout of the index keys.
    heads: heads of the indexer.
    count: tokens.
    dtype: type of q.
    weight_dtype: type of the weights.
    table_rows: rows of the table of cosines and sines; positions are below it.
    strided: names of arguments (q, weights, cos_sin_cache) whose rows lie apart, or "all".
    seed: seed of all random numbers.
    device: torch device.
    """

    geometry: ModelGeometry
    layout: KVCacheLayout
    heads: int = 8
    count: int = 9
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16
    table_rows: int = 64
    strided: str = ""
    seed: int = 0
    device: str = "cpu"

    @property
    def layer(self) -> LayerGeometry:
        """The layer's geometry."""
        return self.geometry.layer_of_kind(LayerKind.C4A)

    def named_layouts(self) -> list[KVCacheLayout]:
        """The layout of the keys."""
        return [self.layout]

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """Decode on the layer of the indexer."""
        return attention_problems(self.layer, self.layout, lse=lse)

    @cached_property
    def q(self) -> F64:
        """[T, Hi, Di] queries before rotation; heads differ in size."""
        dim, numbers = self.layout.head_dim, np.arange(self.count * self.heads)
        sizes = 2.0 ** (numbers % 9 - 4) * np.where(numbers % 7 == 3, SMALL, 1.0)
        blocks = np.resize(SIZES, dim // 32 + 1)[np.arange(dim) // 32]
        drawn = normal((self.seed, Q), numbers, dim) * sizes[:, None]
        drawn[numbers % 2 == 1] *= blocks
        return rounded(drawn.reshape(self.count, self.heads, dim), self.dtype)

    @cached_property
    def weights(self) -> F64:
        """[T, Hi] weights of the heads, none of them zero."""
        drawn = normal((self.seed, WEIGHTS), np.arange(self.count), self.heads)
        return rounded(np.where(np.abs(drawn) < 0.01, 0.5, drawn), self.weight_dtype)

    @cached_property
    def table(self) -> F64:
        """[positions, rope] cosines, then sines, of random angles."""
        shape = self.table_rows, self.layer.rope_dim // 2
        angles = np.random.default_rng((self.seed, ANGLES)).uniform(-math.pi, math.pi, shape)
        return rounded(np.concatenate([np.cos(angles), np.sin(angles)], 1), torch.float32)

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """[T] positions, the first and the last of the table among them."""
        drawn = np.random.default_rng((self.seed, POSITIONS)).integers(0, self.table_rows, self.count)
        drawn[:2] = [0, self.table_rows - 1][: self.count]
        return drawn

    def turned(self, token: int) -> Formula:
        """[Hi, Di] rotated queries of a token."""
        cos, sin = np.split(self.table[self.positions[token]], 2)
        return Formula.exact(self.q[token]).turned(cos, sin)

    def tensor(self, values: NDArray[np.generic], dtype: torch.dtype | None = None) -> Tensor:
        """Values on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)


def run_queries(bench: Bench, inputs: IndexQueries, positions: NDArray[np.int64] | None = None) -> IndexQuery:
    """Rotate and quantise. Raises Wrong if q or the weights were changed.

    positions: [T], instead of the positions of the case input.
    """
    strided = StridedTensors(inputs.strided)
    q, weights = (
        strided("q", inputs.tensor(inputs.q, inputs.dtype)),
        strided("weights", inputs.tensor(inputs.weights, inputs.weight_dtype)),
    )
    table, before = strided("cos_sin_cache", inputs.tensor(inputs.table, torch.float32)), (q.clone(), weights.clone())
    steps = complete(bench.backend).layer_ops
    at = inputs.tensor(inputs.positions if positions is None else positions)
    made = steps.indexer_q_rope_quant(q, weights, at, table, inputs.layout)
    strided.check()
    if not (torch.equal(q, before[0]) and torch.equal(weights, before[1])):
        raise Wrong("q or the weights were changed")
    return made


def shape_error(query: IndexQuery, layout: KVCacheLayout, tokens: int, heads: int) -> str:
    """What is wrong with shapes and types of a query; "" if nothing is."""
    dim = layout.head_dim
    values: tuple[tuple[int, ...], torch.dtype] = (tokens, heads, dim), layout.dtype
    scales = None
    if layout.fp8_format:
        values = (tokens, heads, dim), layout.fp8_format.dtype
    elif layout.is_quantised:
        values, scales = ((tokens, heads, dim // 2), torch.uint8), ((tokens, heads, layout.num_groups), torch.uint8)
    wanted = {"values": values, "weights": ((tokens, heads), torch.float32), "scales": scales}
    for name, expected in wanted.items():
        tensor: Tensor | None = getattr(query, name)
        found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found != expected:
            return f"{name} of the query: {found}, expected {expected}"
    return ""


def quantises_queries(bench: Bench, inputs: IndexQueries) -> Measure:
    """Codes, or values, are those of the rotated q, and weights have all factors of the score."""
    query, layout, worst = run_queries(bench, inputs), inputs.layout, Measure()
    if error := shape_error(query, layout, inputs.count, inputs.heads):
        raise Wrong(error)
    weights = query.weights.double().cpu().numpy()
    for token in range(inputs.count):
        shifts, where = np.zeros(inputs.heads), f"token {token}"
        if layout.is_quantised:
            shifts = _judge_codes(inputs, query, token, weights[token])
        else:
            values = query.values[token]
            worst = max(worst, _hold(values, inputs.turned(token), layout.dtype, f"q of {where}"), key=_fraction)
        wanted = oracle_layer.fold_weights(inputs.weights[token], layout.head_dim, shifts)
        formula = Formula(wanted, FOLDED * np.abs(wanted))
        worst = max(worst, _hold(weights[token], formula, torch.float32, f"weights of {where}"), key=_fraction)
    return worst


def quantises_without_positions_of_padding(bench: Bench, inputs: IndexQueries) -> Measure:
    """Positions of padding change no other query."""
    padding, positions = stale_rows(inputs.count, inputs.positions)
    found, wanted = run_queries(bench, inputs, positions), run_queries(bench, inputs)
    live = inputs.tensor(np.flatnonzero(~padding))
    for name in ("values", "weights", "scales"):
        one, other = getattr(found, name), getattr(wanted, name)
        if one is not None and not torch.equal(one[live].view(torch.uint8), other[live].view(torch.uint8)):
            raise Wrong(f"a position of padding changed {name} of another query")
    return Measure()


def _fraction(measure: Measure) -> float:
    return measure.fraction


def _hold(found: Tensor | F64, formula: Formula, dtype: torch.dtype, what: str) -> Measure:
    return hold_values(found, formula, dtype, lambda at: f"{what}, {list(at)}")


def _judge_codes(inputs: IndexQueries, query: IndexQuery, token: int, weights: F64) -> F64:
    """Exponents [Hi] of the scales that are folded into the weights. Raises Wrong if a code or a scale is wrong."""
    codes = query.values[token].view(torch.uint8).cpu().numpy()
    scales = None if query.scales is None else query.scales[token].cpu().numpy().astype(np.int64) - oracle.E8M0_BIAS
    turned, shifts = inputs.turned(token), np.zeros(inputs.heads)
    for head in range(inputs.heads):
        if scales is None:
            shifts[head] = _shift(weights[head], inputs.weights[token], head, inputs.layout.head_dim)
            exponents, row = np.array([int(shifts[head])]), codes[head]
        else:
            exponents, row = scales[head], oracle_layer.unpack_e2m1(codes[head])
        formula = Formula(turned.value[head], turned.error[head])
        if error := CodeRule.of(inputs.layout).error(formula, row, exponents):
            raise Wrong(f"token {token}, head {head}: {error}")
    return shifts


def _shift(weight: float, weights: F64, head: int, dim: int) -> int:
    """Exponent of the scale that was folded into the weight of a head."""
    folded = abs(weight / oracle_layer.fold_weights(weights, dim, 0)[head])
    return round(math.log2(folded)) if 0 < folded < math.inf else 999


def makes_no_queries(bench: Bench, inputs: IndexQueries) -> Measure:
    """No tokens make no queries."""
    none = attrs.evolve(inputs, count=0)
    if error := shape_error(run_queries(bench, none), none.layout, 0, none.heads):
        raise Wrong(error)
    return Measure()
