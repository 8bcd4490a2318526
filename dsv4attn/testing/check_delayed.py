"""Delayed hyper-connections: a sublayer's input by the weights of the one before, and comparisons of all that goes out.

Streams and parameters are those of `mixing.Mixing`.
"""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import torch
from torch import Tensor

from dsv4attn.core.contract.backend import complete
from dsv4attn.testing import oracle_layer, oracle_v41
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_hyper_connections import (
    DISTINCT,
    ResidualStreams,
    judge_each,
    judge_streams,
    post_arguments,
    rows_of,
    worst_of,
)
from dsv4attn.testing.layer_tolerances import UNIT, Formula, summed
from dsv4attn.testing.random_step import normal
from dsv4attn.testing.strided import StridedTensors
from dsv4attn.testing.tolerances import F64, rounded

__all__ = ["runs_collapse", "runs_delayed", "runs_first", "runs_fused_delayed", "runs_no_delayed"]

PREVIOUS = 99
"""Stream of random numbers."""
Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""pre, post, comb and layer_input."""


def previous_of(inputs: ResidualStreams) -> F64:
    """[T, n] pre of the sublayer before, unlike any that the streams of the case input have."""
    drawn = normal((inputs.seed, PREVIOUS), np.arange(DISTINCT), inputs.streams)
    return rounded(oracle_layer.sigmoid(drawn)[np.arange(inputs.count) % DISTINCT] + inputs.pre_eps, torch.float32)


def collapsed(streams: F64, previous: F64 | None) -> Formula:
    """`oracle_v41.collapse` of the streams [n, d] of a token."""
    value = oracle_v41.collapse(streams, previous)
    if previous is None:
        return Formula.exact(value)
    sizes = oracle_v41.collapse(np.abs(streams), np.abs(previous))
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
    residual = strided("residual", inputs.tensor(inputs.residual, inputs.dtype))
    given = None if previous is None else inputs.tensor(previous)
    before = residual.clone(), None if given is None else given.clone()
    made = complete(bench.backend).layer_ops.mhc_pre_delayed(residual, given, *inputs.mixing, **inputs.norm)
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
    steps, given = complete(bench.backend).layer_ops, inputs.tensor(previous)
    new, *made = steps.mhc_fused_post_pre_delayed(x, residual, post, comb, given, *inputs.mixing, **inputs.norm)
    strided.check()
    _same("the streams", residual, before)
    streams = new.double().cpu().numpy().astype(np.float64)
    measure = judge_streams(inputs, new)
    return worst_of(measure, _judge(inputs, (made[0], made[1], made[2], made[3]), streams, previous))


def runs_collapse(bench: Bench, inputs: ResidualStreams) -> Measure:
    """`mhc_collapse`: the output behind the last layer."""
    strided, previous = StridedTensors(inputs.strided), previous_of(inputs)
    streams = strided("residual", inputs.tensor(inputs.residual, inputs.dtype))
    found = complete(bench.backend).layer_ops.mhc_collapse(streams, inputs.tensor(previous))
    strided.check()
    out = rows_of(found, inputs, "the output", inputs.hidden, dtype=inputs.dtype)
    wanted = [collapsed(inputs.residual[token], previous[token]) for token in inputs.distinct]
    return judge_each(out, inputs, "the output", wanted, inputs.dtype)


def runs_no_delayed(bench: Bench, inputs: ResidualStreams) -> Measure:
    """No tokens: every step returns empty tensors of its shapes."""
    none = attrs.evolve(inputs, count=0)
    checks = partial(_runs, previous=None), runs_delayed, runs_fused_delayed, runs_collapse
    return worst_of(*[check(bench, none) for check in checks])
