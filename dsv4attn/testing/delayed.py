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
from dsv4attn.testing.apart import Apart
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.judge import F64, rounded
from dsv4attn.testing.judge_layer import UNIT, Formula, summed
from dsv4attn.testing.mixing import DISTINCT, Mixing, judge_each, judge_streams, post_arguments, rows_of, worst_of
from dsv4attn.testing.world import normal

__all__ = ["runs_collapse", "runs_delayed", "runs_first", "runs_fused_delayed", "runs_no_delayed"]

PREVIOUS = 99
"""Stream of random numbers."""
Made = tuple[Tensor, Tensor, Tensor, Tensor]
"""pre, post, comb and layer_input."""


def previous_of(scene: Mixing) -> F64:
    """[T, n] pre of the sublayer before, unlike any that the streams of the scene have."""
    drawn = normal((scene.seed, PREVIOUS), np.arange(DISTINCT), scene.streams)
    return rounded(oracle_layer.sigmoid(drawn)[np.arange(scene.count) % DISTINCT] + scene.pre_eps, torch.float32)


def collapsed(streams: F64, previous: F64 | None) -> Formula:
    """`oracle_v41.collapse` of the streams [n, d] of a token."""
    value = oracle_v41.collapse(streams, previous)
    if previous is None:
        return Formula.exact(value)
    sizes = oracle_v41.collapse(np.abs(streams), np.abs(previous))
    return Formula(value, (summed(len(streams)) + UNIT) * sizes)


def _judge(scene: Mixing, made: Made, residual: F64, previous: F64 | None) -> Measure:
    """Compare with the mixes of the streams [T, n, d]."""
    n, d = scene.streams, scene.hidden
    pre, post, comb = (
        rows_of(found, scene, name, *shape)
        for found, name, shape in zip(made, ("pre", "post", "comb"), ((n,), (n, 1), (n, n)), strict=False)
    )
    layer_input = rows_of(made[3], scene, "layer_input", d, dtype=scene.dtype)
    gates, posts, combs, inputs = [], [], [], []
    for token in scene.distinct:
        own, behind, mixed = scene.logits(residual[token])
        gates.append(scene.gate(own, scene.pre_eps))
        posts.append(scene.gate(behind, 0.0, scene.post_mult))
        combs.append(scene.combined(mixed))
        entering = collapsed(residual[token], None if previous is None else previous[token])
        inputs.append(entering.normed(scene.norm_weight, scene.norm_eps) if scene.normed else entering)
    return worst_of(
        judge_each(pre, scene, "pre", gates),
        judge_each(post[..., 0], scene, "post", posts),
        judge_each(comb, scene, "comb", combs),
        judge_each(layer_input, scene, "layer_input", inputs, scene.dtype),
    )


def _same(what: str, now: Tensor, before: Tensor) -> None:
    if not torch.equal(now, before):
        raise Wrong(f"{what} that were given were changed")


def _runs(bench: Bench, scene: Mixing, previous: F64 | None) -> Measure:
    apart = Apart(scene.apart)
    residual = apart("residual", scene.tensor(scene.residual, scene.dtype))
    given = None if previous is None else scene.tensor(previous)
    before = residual.clone(), None if given is None else given.clone()
    made = complete(bench.backend).layer_ops.mhc_pre_delayed(residual, given, *scene.mixing, **scene.norm)
    apart.check()
    _same("the streams", residual, before[0])
    if given is not None and before[1] is not None:
        _same("the weights", given, before[1])
    return _judge(scene, made, scene.residual, previous)


def runs_delayed(bench: Bench, scene: Mixing) -> Measure:
    """`mhc_pre_delayed`: the mixes of the streams, and the input of the sublayer by the weights of the one before."""
    return _runs(bench, scene, previous_of(scene))


def runs_first(bench: Bench, scene: Mixing) -> Measure:
    """`mhc_pre_delayed` without weights of a sublayer before: the input is stream 0."""
    return _runs(bench, scene, None)


def runs_fused_delayed(bench: Bench, scene: Mixing) -> Measure:
    """`mhc_fused_post_pre_delayed`: the new streams, and the mixes and the input that these have."""
    apart, previous = Apart(scene.apart), previous_of(scene)
    x, residual, post, comb = post_arguments(scene, apart)
    before = residual.clone()
    steps, given = complete(bench.backend).layer_ops, scene.tensor(previous)
    new, *made = steps.mhc_fused_post_pre_delayed(x, residual, post, comb, given, *scene.mixing, **scene.norm)
    apart.check()
    _same("the streams", residual, before)
    streams = new.double().cpu().numpy().astype(np.float64)
    measure = judge_streams(scene, new)
    return worst_of(measure, _judge(scene, (made[0], made[1], made[2], made[3]), streams, previous))


def runs_collapse(bench: Bench, scene: Mixing) -> Measure:
    """`mhc_collapse`: the output behind the last layer."""
    apart, previous = Apart(scene.apart), previous_of(scene)
    streams = apart("residual", scene.tensor(scene.residual, scene.dtype))
    found = complete(bench.backend).layer_ops.mhc_collapse(streams, scene.tensor(previous))
    apart.check()
    out = rows_of(found, scene, "the output", scene.hidden, dtype=scene.dtype)
    wanted = [collapsed(scene.residual[token], previous[token]) for token in scene.distinct]
    return judge_each(out, scene, "the output", wanted, scene.dtype)


def runs_no_delayed(bench: Bench, scene: Mixing) -> Measure:
    """No tokens: every step returns empty tensors of its shapes."""
    none = attrs.evolve(scene, count=0)
    checks = partial(_runs, previous=None), runs_delayed, runs_fused_delayed, runs_collapse
    return worst_of(*[check(bench, none) for check in checks])
