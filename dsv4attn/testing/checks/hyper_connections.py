"""Hyper-connections: streams to mix, and checks of the mixes, the new streams and the input of a sublayer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn.testing.case import Bench, Check, Measure, dtype_name, worst_of
from dsv4attn.testing.kit.factories import CaseInput
from dsv4attn.testing.kit.strided import StridedTensors, unchanged
from dsv4attn.testing.kit.tolerances import F64, UNIT, Formula, as_f64, hold_shape, hold_values, rounded, summed
from dsv4attn.testing.oracle import layer as oracle_layer

X, Y, FN, BASE, SCALE, NORM, POST, COMB, HEAD, PREVIOUS = range(90, 100)
"""Streams of random numbers."""
DISTINCT = 61
"""Rows that differ. Later rows repeat these, so that thousands of rows are judged at the cost of these."""
NEAR = 2.0**-20
"""Step of the differences from which the slopes of Sinkhorn's iterations are taken."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class ResidualStreams(CaseInput):
    """Residual streams of some tokens, and the parameters of their mixes.

    layout: layout of the window cache of the attention between the streams.
    streams: n.
    hidden: d.
    count: tokens.
    dtype: type of the streams.
    size: scale of the streams. With a small scale rms_eps matters.
    rms_eps, pre_eps, sinkhorn_eps, post_mult, repeat, norm_eps: see `MixWeights`.
    normed: whether the input of the sublayer goes through an RMSNorm.
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
        """[T, n, 1] weights of a sublayer's output."""
        drawn = 2 * oracle_layer.sigmoid(self.drawn(POST, DISTINCT, self.streams))
        return rounded(self._rows(drawn), torch.float32)[..., None]

    @cached_property
    def comb(self) -> F64:
        """[T, n, n] mixes of the streams, far from symmetric."""
        logits = 2 * self.drawn(COMB, DISTINCT, self.streams, self.streams)
        return rounded(self._rows(oracle_layer.sinkhorn(logits, 1e-6, 20)), torch.float32)

    @cached_property
    def previous_pre(self) -> F64:
        """[T, n] pre of the previous sublayer, unlike the pre of any streams of this input."""
        drawn = oracle_layer.sigmoid(self.drawn(PREVIOUS, DISTINCT, self.streams))
        return rounded(self._rows(drawn) + self.pre_eps, torch.float32)

    @cached_property
    def head(self) -> tuple[F64, F64, F64]:
        """[n, n * d] fn, [1] scale and [n] base of the gate of the head."""
        fn, scale, base = self.fn[: self.streams], np.array([1.7]), self.drawn(HEAD, 1, self.streams)[0]
        return fn, rounded(scale, torch.float32), rounded(base, torch.float32)

    # formulas

    def mixes(self, streams: F64, fn: F64) -> Formula:
        """`oracle.layer.hc_mixes` of the streams [n, d] of a token.

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
    def weights(self) -> MixWeights:
        """The weights and constants of the mixes, as the ops take them."""
        fp32 = partial(self.tensor, dtype=torch.float32)
        return MixWeights(
            fn=fp32(self.fn),
            hc_scale=fp32(self.scale),
            hc_base=fp32(self.base),
            rms_eps=self.rms_eps,
            hc_pre_eps=self.pre_eps,
            hc_sinkhorn_eps=self.sinkhorn_eps,
            hc_post_mult_value=self.post_mult,
            sinkhorn_repeat=self.repeat,
            norm_weight=None if self.norm_weight is None else self.tensor(self.norm_weight, self.dtype),
            norm_eps=self.norm_eps,
        )


@contextmanager
def read_only(inputs: ResidualStreams, *names: str) -> Iterator[list[Tensor]]:
    """Tensors of a case input that an op reads, by their names. Raises Wrong if the `with` block writes to one of them.

    Rows of x and residual have gaps between them if the case input asks for that; a write to a gap is found too.
    """
    strided, tensors = StridedTensors(inputs.strided), dict[str, Tensor]()
    for name in names:
        values = getattr(inputs, name)
        if name in ("x", "residual"):
            tensors[name] = strided(name, inputs.tensor(values, inputs.dtype))
        else:
            tensors[name] = inputs.tensor(values, torch.float32)
    with unchanged(**tensors):
        yield [*tensors.values()]
    strided.check()


def judge_rows(
    result: Tensor,
    inputs: ResidualStreams,
    name: str,
    shape: tuple[int, ...],
    expected: Iterable[Formula],
    dtype: torch.dtype = torch.float32,
) -> Measure:
    """Compare the row of every token with the expected row of its distinct token. Raises Wrong.

    shape, dtype: of a row of the result.
    """
    hold_shape(result, (inputs.count, *shape), dtype, f"{name}:")
    formulas, measures = list(expected), [Measure(0.0, 1.0)]
    for token, row in enumerate(result):
        measures.append(hold_values(row, formulas[token % DISTINCT], dtype, f"{name} of token {token}"))
    return worst_of(*measures)


def judge_mixes(
    inputs: ResidualStreams, residual: F64, post: Tensor, comb: Tensor, pre: Tensor | None = None
) -> Measure:
    """Compare post, comb and, of V4.1, pre with the mixes of the streams [T, n, d]."""
    n = inputs.streams
    expected_pre, expected_post, expected_comb = [], [], []
    for token in inputs.distinct:
        pre_logits, post_logits, comb_logits = inputs.logits(residual[token])
        expected_pre.append(inputs.gate(pre_logits, inputs.pre_eps))
        expected_post.append(inputs.gate(post_logits, 0.0, inputs.post_mult)[:, None])
        expected_comb.append(inputs.combined(comb_logits))
    measures = [
        judge_rows(post, inputs, "post", (n, 1), expected_post),
        judge_rows(comb, inputs, "comb", (n, n), expected_comb),
    ]
    if pre is not None:
        measures.append(judge_rows(pre, inputs, "pre", (n,), expected_pre))
    return worst_of(*measures)


def judge_layer_input(inputs: ResidualStreams, layer_input: Tensor, collapsed: Iterable[Formula]) -> Measure:
    """Compare the input of a sublayer [T, d] with the collapsed streams of each distinct token, after the norm."""
    expected = list(collapsed)
    if inputs.normed:
        expected = [streams.normed(inputs.norm_weight, inputs.norm_eps) for streams in expected]
    return judge_rows(layer_input, inputs, "layer_input", (inputs.hidden,), expected, inputs.dtype)


def by_own_pre(inputs: ResidualStreams, residual: F64) -> Iterator[Formula]:
    """V4: of each distinct token the sum of the streams [T, n, d], weighed by the pre of the streams."""
    for token in inputs.distinct:
        pre_logits, _, _ = inputs.logits(residual[token])
        yield inputs.weighed(inputs.gate(pre_logits, inputs.pre_eps), residual[token])


def by_previous_pre(inputs: ResidualStreams, residual: F64, previous_pre: F64 | None) -> Iterator[Formula]:
    """V4.1: of each distinct token the sum of the streams [T, n, d], weighed by previous_pre; stream 0 without it."""
    for token in inputs.distinct:
        streams = residual[token]
        pre = None if previous_pre is None else previous_pre[token]
        value = oracle_layer.collapse(streams, pre)
        if pre is None:
            yield Formula.exact(value)
        else:
            sizes = oracle_layer.collapse(np.abs(streams), np.abs(pre))
            yield Formula(value, (summed(len(streams)) + UNIT) * sizes)


def judge_residual(inputs: ResidualStreams, new_residual: Tensor) -> Measure:
    """Compare new streams with those of `oracle.layer.hc_post`. Raises Wrong."""
    expected = []
    for token in inputs.distinct:
        x, residual = inputs.x[token], inputs.residual[token]
        post, comb = inputs.post[token, :, 0], inputs.comb[token]
        sizes = oracle_layer.hc_post(np.abs(x), np.abs(residual), post, comb)
        error = (summed(inputs.streams + 1) + UNIT) * sizes
        expected.append(Formula(oracle_layer.hc_post(x, residual, post, comb), error))
    shape = inputs.streams, inputs.hidden
    return judge_rows(new_residual, inputs, "residual", shape, expected, inputs.dtype)


# ops of V4


def check_pre(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_pre`: the mixes of the streams, and the input of the sublayer."""
    with read_only(inputs, "residual") as (residual,):
        post, comb, layer_input = bench.layer_ops.mhc_pre(residual, inputs.weights)
    return worst_of(
        judge_mixes(inputs, inputs.residual, post, comb),
        judge_layer_input(inputs, layer_input, by_own_pre(inputs, inputs.residual)),
    )


def check_post(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_post`: the new streams."""
    with read_only(inputs, "x", "residual", "post", "comb") as tensors:
        new_residual = bench.layer_ops.mhc_post(*tensors)
    return judge_residual(inputs, new_residual)


def check_fused(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_fused_post_pre`: the new streams, and the mixes of these streams, rounded as they are returned."""
    with read_only(inputs, "x", "residual", "post", "comb") as tensors:
        new_residual, post, comb, layer_input = bench.layer_ops.mhc_fused_post_pre(*tensors, inputs.weights)
    measure, streams = judge_residual(inputs, new_residual), as_f64(new_residual)
    return worst_of(
        measure,
        judge_mixes(inputs, streams, post, comb),
        judge_layer_input(inputs, layer_input, by_own_pre(inputs, streams)),
    )


def check_head(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`hc_head`: the output after the last layer."""
    fn, scale, base = inputs.head
    with read_only(inputs, "residual") as (residual,):
        weights = (inputs.tensor(values, torch.float32) for values in inputs.head)
        output = bench.layer_ops.hc_head(residual, *weights, inputs.rms_eps, inputs.pre_eps)
    expected = []
    for token in inputs.distinct:
        mixes = inputs.mixes(inputs.residual[token], fn)
        logits = mixes.value * scale + base
        error = mixes.error * scale + UNIT * (np.abs(mixes.value * scale) + np.abs(logits))
        expected.append(inputs.weighed(inputs.gate(Formula(logits, error), inputs.pre_eps), inputs.residual[token]))
    return judge_rows(output, inputs, "the head's output", (inputs.hidden,), expected, inputs.dtype)


# ops of V4.1


def check_pre_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_pre_delayed`: the mixes of the streams, and the input of the sublayer by the pre of the previous one."""
    with read_only(inputs, "residual", "previous_pre") as tensors:
        pre, post, comb, layer_input = bench.layer_ops.mhc_pre_delayed(*tensors, inputs.weights)
    return worst_of(
        judge_mixes(inputs, inputs.residual, post, comb, pre),
        judge_layer_input(inputs, layer_input, by_previous_pre(inputs, inputs.residual, inputs.previous_pre)),
    )


def check_first_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_pre_delayed` without the pre of a previous sublayer: the input of the sublayer is stream 0."""
    with read_only(inputs, "residual") as (residual,):
        pre, post, comb, layer_input = bench.layer_ops.mhc_pre_delayed(residual, None, inputs.weights)
    return worst_of(
        judge_mixes(inputs, inputs.residual, post, comb, pre),
        judge_layer_input(inputs, layer_input, by_previous_pre(inputs, inputs.residual, None)),
    )


def check_fused_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_fused_post_pre_delayed`: the new streams, and the mixes and the input of the sublayer of these streams."""
    with read_only(inputs, "x", "residual", "post", "comb", "previous_pre") as tensors:
        results = bench.layer_ops.mhc_fused_post_pre_delayed(*tensors, inputs.weights)
    new_residual, pre, post, comb, layer_input = results
    measure, streams = judge_residual(inputs, new_residual), as_f64(new_residual)
    return worst_of(
        measure,
        judge_mixes(inputs, streams, post, comb, pre),
        judge_layer_input(inputs, layer_input, by_previous_pre(inputs, streams, inputs.previous_pre)),
    )


def check_collapse(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_collapse`: the output after the last layer."""
    with read_only(inputs, "residual", "previous_pre") as tensors:
        output = bench.layer_ops.mhc_collapse(*tensors)
    expected = by_previous_pre(inputs, inputs.residual, inputs.previous_pre)
    return judge_rows(output, inputs, "the output", (inputs.hidden,), expected, inputs.dtype)


def check_no_tokens(*checks: Check) -> Check:
    """No tokens: the ops of some checks return empty tensors of their shapes."""
    return lambda bench, inputs: worst_of(*[check(bench, attrs.evolve(inputs, count=0)) for check in checks])
