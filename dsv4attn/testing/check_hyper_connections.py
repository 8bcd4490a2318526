"""Hyper-connections: streams to mix, and checks of the mixes, the new streams and the input of a sublayer."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing import oracle_layer
from dsv4attn.testing.case import Bench, Measure, Wrong, dtype_name, worst_of
from dsv4attn.testing.factories import CaseInput, normal
from dsv4attn.testing.strided import StridedTensors
from dsv4attn.testing.tolerances import F64, UNIT, Formula, hold_values, rounded, summed

__all__ = [
    "ResidualStreams", "runs_collapse", "runs_delayed", "runs_first", "runs_fused", "runs_fused_delayed", "runs_head",
    "runs_no_delayed", "runs_nothing", "runs_post", "runs_pre",
]  # fmt: skip

X, Y, FN, BASE, SCALE, NORM, POST, COMB, HEAD = range(90, 99)
"""Streams of random numbers."""
DISTINCT = 61
"""Rows that differ; those behind them repeat them, so that thousands of rows are judged at the cost of these."""
NEAR = 2.0**-20
"""Step of the differences from which the slopes of Sinkhorn's iterations are taken."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class ResidualStreams(CaseInput):
    """Residual streams of some tokens, and the parameters of their mixes.

    layout: layout of the window cache of the attention behind the streams.
    streams: n.
    hidden: d.
    count: tokens.
    dtype: type of the streams.
    size: scale of the streams; with a small one rms_eps matters.
    rms_eps: epsilon under the root.
    pre_eps: added to the weights of the streams.
    sinkhorn_eps: epsilon of Sinkhorn's iterations.
    post_mult: factor of the weights of a sublayer's output.
    repeat: iterations.
    normed: whether the sublayer's input goes through an RMSNorm.
    norm_eps: its epsilon.
    """

    kind: LayerKind = attrs.field(default=LayerKind.SWA, converter=LayerKind)
    streams: int = 4
    hidden: int = 96
    count: int = 13
    dtype: torch.dtype = torch.bfloat16
    size: float = 1.0
    rms_eps: float = 1e-6
    pre_eps: float = 1e-6
    sinkhorn_eps: float = 1e-6
    post_mult: float = 2.0
    repeat: int = 20
    normed: bool = False
    norm_eps: float = 1e-6

    def problems(self, *, lse: bool = True) -> list[Problem]:
        """Decode on a layer whose queries have the type of the streams."""
        layer = self.geometry.layer_of_kind(LayerKind.SWA)
        return [Problem("decode", layer, CacheFacts.of(self.layout, 64), q_dtype=dtype_name(self.dtype), lse=lse)]

    # values

    def _rows(self, drawn: F64) -> F64:
        """Rows of all tokens, of the distinct ones."""
        return drawn[np.arange(self.count) % DISTINCT]

    @property
    def distinct(self) -> range:
        """Tokens whose rows differ."""
        return range(min(self.count, DISTINCT))

    @cached_property
    def residual(self) -> F64:
        """[T, n, d] streams; they differ in size."""
        sizes = 2.0 ** (np.arange(self.streams) % 4 - 1)
        drawn = self.drawn(X, DISTINCT, self.streams, self.hidden) * sizes[:, None] + 0.1
        return self._rows(rounded(self.size * drawn, self.dtype))

    @cached_property
    def x(self) -> F64:
        """[T, d] outputs of a sublayer."""
        return self._rows(rounded(self.size * self.drawn(Y, DISTINCT, self.hidden), self.dtype))

    @cached_property
    def fn(self) -> F64:
        """[2 n + n * n, n * d] of the mixes: of order 1, since the streams are divided by their size."""
        rows, columns = 2 * self.streams + self.streams**2, self.streams * self.hidden
        return rounded(self.drawn(FN, rows, columns) / math.sqrt(columns), torch.float32)

    @cached_property
    def scale(self) -> F64:
        """[3] factors of pre, post, comb, unlike each other."""
        return rounded(np.array([0.7, 1.3, 2.1]), torch.float32)

    @cached_property
    def base(self) -> F64:
        """[2 n + n * n] added to the mixes."""
        return rounded(self.drawn(BASE, 1, 2 * self.streams + self.streams**2)[0], torch.float32)

    @cached_property
    def norm_weight(self) -> F64 | None:
        """[d] weight of the RMSNorm, or None."""
        return self.drawn_norm_weight(NORM, self.hidden, self.dtype) if self.normed else None

    @cached_property
    def post(self) -> F64:
        """[T, n] weights of a sublayer's output."""
        return rounded(self._rows(2 * oracle_layer.sigmoid(self.drawn(POST, DISTINCT, self.streams))), torch.float32)

    @cached_property
    def comb(self) -> F64:
        """[T, n, n] mixes of the streams, far from symmetric."""
        logits = 2 * self.drawn(COMB, DISTINCT, self.streams, self.streams)
        return rounded(self._rows(oracle_layer.sinkhorn(logits, 1e-6, 20)), torch.float32)

    @cached_property
    def head(self) -> tuple[F64, F64, F64]:
        """[n, n * d] fn, [1] scale and [n] base of the gate of the head."""
        fn, scale, base = self.fn[: self.streams], np.array([1.7]), self.drawn(HEAD, 1, self.streams)[0]
        return fn, rounded(scale, torch.float32), rounded(base, torch.float32)

    def floats(self, values: F64, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, dtype)

    # formulas

    def mixes(self, streams: F64, fn: F64) -> Formula:
        """`oracle_layer.hc_mixes` of the streams [n, d] of a token.

        The partial sums of a row of fn times the streams are at most the product of both 2-norms.
        """
        value, flat = oracle_layer.hc_mixes(streams, fn, self.rms_eps), streams.reshape(-1)
        root = math.sqrt(float(np.mean(flat**2)) + self.rms_eps)
        products = np.linalg.norm(fn, axis=1) * float(np.linalg.norm(flat)) / root
        terms = summed(len(flat))
        return Formula(value, (terms + UNIT) * products + (terms / 2 + 5 * UNIT) * np.abs(value))

    def logits(self, streams: F64) -> list[Formula]:
        """Logits of pre [n], post [n] and comb [n * n]."""
        parts = [self.streams, self.streams, self.streams**2]
        mixes = self.mixes(streams, self.fn)
        zero = np.zeros_like(self.base)
        values = oracle_layer.hc_logits(mixes.value, self.scale, self.base, parts)
        scaled = oracle_layer.hc_logits(np.abs(mixes.value), self.scale, zero, parts)
        errors = oracle_layer.hc_logits(mixes.error, self.scale, zero, parts)
        return [Formula(v, e + UNIT * (s + np.abs(v))) for v, e, s in zip(values, errors, scaled, strict=True)]

    def combined(self, logits: Formula) -> Formula:
        """Mixes [n, n] of the streams, from their logits [n * n].

        An error of a logit moves a mix by its slope. Roundings of the iterations add up, not more: dividing rows or
        columns by their sums takes two positive matrices no further apart in Hilbert's projective metric. An
        entry is off by at most twice this distance.
        """
        n = self.streams

        def iterated(values: F64) -> F64:
            return oracle_layer.sinkhorn(values.reshape(*values.shape[:-1], n, n), self.sinkhorn_eps, self.repeat)

        value = iterated(logits.value)
        slopes = (iterated(logits.value + NEAR * np.eye(n * n)) - value) / NEAR
        error = np.tensordot(logits.error, np.abs(slopes), 1)
        spread = np.ptp(logits.value.reshape(n, n), axis=1).max()
        lost = (2 * spread + 6) * UNIT + summed(n) + 2 * self.repeat * (summed(n) + 2 * UNIT)
        return Formula(value, error + 2 * lost * value)

    def weighed(self, weights: Formula, streams: F64) -> Formula:
        """The sum [d] of streams [n, d], each times its weight [n]."""
        sizes = weights.value @ np.abs(streams)
        return Formula(weights.value @ streams, weights.error @ np.abs(streams) + (summed(len(streams)) + UNIT) * sizes)

    def gate(self, logits: Formula, eps: float, factor: float = 1.0) -> Formula:
        """`factor` times the sigmoid of logits [n], plus eps."""
        value = factor * oracle_layer.sigmoid(logits.value)
        return Formula(value + eps, factor * logits.error / 4 + 6 * UNIT * (value + eps))

    # arguments

    @property
    def mixing(self) -> tuple[Any, ...]:
        """Arguments of `mhc_pre` behind the streams, up to `sinkhorn_repeat`."""
        tensors = self.floats(self.fn), self.floats(self.scale), self.floats(self.base)
        return *tensors, self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult, self.repeat

    @property
    def norm(self) -> dict[str, Any]:
        """Arguments of the RMSNorm; none without it."""
        if self.norm_weight is None:
            return {}
        return {"norm_weight": self.floats(self.norm_weight, self.dtype), "norm_eps": self.norm_eps}


def rows_of(found: Tensor, inputs: ResidualStreams, what: str, *shape: int, dtype: torch.dtype = torch.float32) -> F64:
    """The distinct rows of a result of this shape and type. Raises Wrong if the others are not like them."""
    if tuple(found.shape) != (inputs.count, *shape) or found.dtype != dtype:
        raise Wrong(f"{what}: {list(found.shape)} {found.dtype}, expected {[inputs.count, *shape]} {dtype}")
    return found.double().cpu().numpy().astype(np.float64)


def judge_each(
    found: F64, inputs: ResidualStreams, what: str, wanted: list[Formula], dtype: torch.dtype = torch.float32
) -> Measure:
    """Compare the rows found with those wanted, in a dtype. Raises Wrong."""
    worst = Measure(0.0, 1.0)
    for token in range(inputs.count):
        where = partial(_place, f"{what} of token {token}")
        worst = worst_of(worst, hold_values(found[token], wanted[token % DISTINCT], dtype, where))
    return worst


def _place(what: str, at: tuple[int, ...]) -> str:
    return f"{what}, {list(at)}"


def _judge_mixes(inputs: ResidualStreams, made: tuple[Tensor, Tensor, Tensor], residual: F64) -> Measure:
    """post, comb and layer_input of streams [T, n, d]."""
    n, d = inputs.streams, inputs.hidden
    post = rows_of(made[0], inputs, "post", n, 1)
    comb = rows_of(made[1], inputs, "comb", n, n)
    layer_input = rows_of(made[2], inputs, "layer_input", d, dtype=inputs.dtype)
    posts, combs, layer_inputs = [], [], []
    for token in inputs.distinct:
        pre, behind, mixed = inputs.logits(residual[token])
        posts.append(inputs.gate(behind, 0.0, inputs.post_mult))
        combs.append(inputs.combined(mixed))
        entering = inputs.weighed(inputs.gate(pre, inputs.pre_eps), residual[token])
        layer_inputs.append(entering.normed(inputs.norm_weight, inputs.norm_eps) if inputs.normed else entering)
    return worst_of(
        judge_each(post[..., 0], inputs, "post", posts),
        judge_each(comb, inputs, "comb", combs),
        judge_each(layer_input, inputs, "layer_input", layer_inputs, inputs.dtype),
    )


def runs_pre(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_pre`: the mixes of the streams, and the input of the sublayer."""
    strided = StridedTensors(inputs.strided)
    residual = strided("residual", inputs.floats(inputs.residual, inputs.dtype))
    before = residual.clone()
    made = bench.layer_ops.mhc_pre(residual, *inputs.mixing, **inputs.norm)
    strided.check()
    _unchanged(residual, before)
    return _judge_mixes(inputs, made, inputs.residual)


def _unchanged(residual: Tensor, before: Tensor) -> None:
    if not torch.equal(residual, before):
        raise Wrong("the streams that were given were changed")


def judge_streams(inputs: ResidualStreams, found: Tensor) -> Measure:
    """Compare new streams with those of `oracle_layer.hc_post`. Raises Wrong."""
    new = rows_of(found, inputs, "residual", inputs.streams, inputs.hidden, dtype=inputs.dtype)
    wanted = []
    for token in inputs.distinct:
        x, residual, post, comb = (values[token] for values in (inputs.x, inputs.residual, inputs.post, inputs.comb))
        sizes = oracle_layer.hc_post(np.abs(x), np.abs(residual), post, comb)
        error = (summed(inputs.streams + 1) + UNIT) * sizes
        wanted.append(Formula(oracle_layer.hc_post(x, residual, post, comb), error))
    return judge_each(new, inputs, "residual", wanted, inputs.dtype)


def post_arguments(inputs: ResidualStreams, strided: StridedTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual, post and comb."""
    x, residual = (strided(name, inputs.floats(getattr(inputs, name), inputs.dtype)) for name in ("x", "residual"))
    return x, residual, inputs.floats(inputs.post[..., None]), inputs.floats(inputs.comb)


def runs_post(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_post`: the new streams."""
    strided = StridedTensors(inputs.strided)
    x, residual, post, comb = post_arguments(inputs, strided)
    before = residual.clone()
    found = bench.layer_ops.mhc_post(x, residual, post, comb)
    strided.check()
    _unchanged(residual, before)
    return judge_streams(inputs, found)


def runs_fused(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_fused_post_pre`: the new streams, and the mixes of these, rounded as they are returned."""
    strided = StridedTensors(inputs.strided)
    x, residual, post, comb = post_arguments(inputs, strided)
    before = residual.clone()
    steps = bench.layer_ops
    new, *made = steps.mhc_fused_post_pre(x, residual, post, comb, *inputs.mixing, **inputs.norm)
    strided.check()
    _unchanged(residual, before)
    streams = new.double().cpu().numpy().astype(np.float64)
    measure = judge_streams(inputs, new)
    return worst_of(measure, _judge_mixes(inputs, (made[0], made[1], made[2]), streams))


def runs_head(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`hc_head`: the output behind the last layer."""
    strided, (fn, scale, base) = StridedTensors(inputs.strided), inputs.head
    streams = strided("residual", inputs.floats(inputs.residual, inputs.dtype))
    parameters = inputs.floats(fn), inputs.floats(scale), inputs.floats(base), inputs.rms_eps, inputs.pre_eps
    found = bench.layer_ops.hc_head(streams, *parameters)
    strided.check()
    out, wanted = rows_of(found, inputs, "the head's output", inputs.hidden, dtype=inputs.dtype), []
    for token in inputs.distinct:
        mixes = inputs.mixes(inputs.residual[token], fn)
        value = mixes.value * scale + base
        error = mixes.error * scale + UNIT * (np.abs(mixes.value * scale) + np.abs(value))
        wanted.append(inputs.weighed(inputs.gate(Formula(value, error), inputs.pre_eps), inputs.residual[token]))
    return judge_each(out, inputs, "the head's output", wanted, inputs.dtype)


def runs_nothing(bench: Bench, inputs: ResidualStreams) -> Measure:
    """No tokens: every step returns empty tensors of its shapes."""
    none = attrs.evolve(inputs, count=0)
    checks = runs_pre, runs_post, runs_fused, runs_head
    return worst_of(*[check(bench, none) for check in checks])


PREVIOUS = 99
"""Stream of random numbers."""
Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""pre, post, comb and layer_input."""


def previous_of(inputs: ResidualStreams) -> F64:
    """[T, n] pre of the sublayer before, unlike any that the streams of the case input have."""
    drawn = normal((inputs.seed, PREVIOUS), np.arange(DISTINCT), inputs.streams)
    return rounded(oracle_layer.sigmoid(drawn)[np.arange(inputs.count) % DISTINCT] + inputs.pre_eps, torch.float32)


def collapsed(streams: F64, previous: F64 | None) -> Formula:
    """`oracle_layer.collapse` of the streams [n, d] of a token."""
    value = oracle_layer.collapse(streams, previous)
    if previous is None:
        return Formula.exact(value)
    sizes = oracle_layer.collapse(np.abs(streams), np.abs(previous))
    return Formula(value, (summed(len(streams)) + UNIT) * sizes)


def _judge(inputs: ResidualStreams, made: Made, residual: F64, previous: F64 | None) -> Measure:
    """Compare with the mixes of the streams [T, n, d]."""
    n, d = inputs.streams, inputs.hidden
    pre, post, comb = (
        rows_of(found, inputs, name, *shape)
        for found, name, shape in zip(made, ("pre", "post", "comb"), ((n,), (n, 1), (n, n)), strict=False)
    )
    layer_input = rows_of(made[3], inputs, "layer_input", d, dtype=inputs.dtype)
    gates, posts, combs, layer_inputs = [], [], [], []
    for token in inputs.distinct:
        own, behind, mixed = inputs.logits(residual[token])
        gates.append(inputs.gate(own, inputs.pre_eps))
        posts.append(inputs.gate(behind, 0.0, inputs.post_mult))
        combs.append(inputs.combined(mixed))
        entering = collapsed(residual[token], None if previous is None else previous[token])
        layer_inputs.append(entering.normed(inputs.norm_weight, inputs.norm_eps) if inputs.normed else entering)
    return worst_of(
        judge_each(pre, inputs, "pre", gates),
        judge_each(post[..., 0], inputs, "post", posts),
        judge_each(comb, inputs, "comb", combs),
        judge_each(layer_input, inputs, "layer_input", layer_inputs, inputs.dtype),
    )


def _same(what: str, now: Tensor, before: Tensor) -> None:
    if not torch.equal(now, before):
        raise Wrong(f"{what} that were given were changed")


def _runs(bench: Bench, inputs: ResidualStreams, previous: F64 | None) -> Measure:
    strided = StridedTensors(inputs.strided)
    residual = strided("residual", inputs.floats(inputs.residual, inputs.dtype))
    given = None if previous is None else inputs.floats(previous)
    before = residual.clone(), None if given is None else given.clone()
    made = bench.layer_ops.mhc_pre_delayed(residual, given, *inputs.mixing, **inputs.norm)
    strided.check()
    _same("the streams", residual, before[0])
    if given is not None and before[1] is not None:
        _same("the weights", given, before[1])
    return _judge(inputs, made, inputs.residual, previous)


def runs_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_pre_delayed`: the mixes of the streams, and the input of the sublayer by the weights of the one before."""
    return _runs(bench, inputs, previous_of(inputs))


def runs_first(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_pre_delayed` without weights of a sublayer before: the input is stream 0."""
    return _runs(bench, inputs, None)


def runs_fused_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_fused_post_pre_delayed`: the new streams, and the mixes and the input that these have."""
    strided, previous = StridedTensors(inputs.strided), previous_of(inputs)
    x, residual, post, comb = post_arguments(inputs, strided)
    before = residual.clone()
    steps, given = bench.layer_ops, inputs.floats(previous)
    new, *made = steps.mhc_fused_post_pre_delayed(x, residual, post, comb, given, *inputs.mixing, **inputs.norm)
    strided.check()
    _same("the streams", residual, before)
    streams = new.double().cpu().numpy().astype(np.float64)
    measure = judge_streams(inputs, new)
    return worst_of(measure, _judge(inputs, (made[0], made[1], made[2], made[3]), streams, previous))


def runs_collapse(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_collapse`: the output behind the last layer."""
    strided, previous = StridedTensors(inputs.strided), previous_of(inputs)
    streams = strided("residual", inputs.floats(inputs.residual, inputs.dtype))
    found = bench.layer_ops.mhc_collapse(streams, inputs.floats(previous))
    strided.check()
    out = rows_of(found, inputs, "the output", inputs.hidden, dtype=inputs.dtype)
    wanted = [collapsed(inputs.residual[token], previous[token]) for token in inputs.distinct]
    return judge_each(out, inputs, "the output", wanted, inputs.dtype)


def runs_no_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """No tokens: every step returns empty tensors of its shapes."""
    none = attrs.evolve(inputs, count=0)
    checks = partial(_runs, previous=None), runs_delayed, runs_fused_delayed, runs_collapse
    return worst_of(*[check(bench, none) for check in checks])
