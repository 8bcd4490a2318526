"""Hyper-connections: inputs, calls, and expected results in fp32 torch. Letters: T tokens, n streams, d hidden size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.contract.backend import Backend, complete
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.tools.bench.accuracy import normalised
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.layer_ops import LayerOpCase

__all__ = ["StreamInputs", "mhc_task"]

_FLASH = ModelGeometry.preset("deepseek-v4-flash")
_N, _EPS, _HC_EPS, _REPEAT = _FLASH.hc_mult, _FLASH.eps, _FLASH.hc_eps, _FLASH.hc_sinkhorn_iters
_POST = 2.0
"""Factor of `post`."""
_TILE = 1024
"""Tokens whose expected results are computed at a time."""


@frozen(eq=False)
class StreamInputs:
    """Streams of a step and the weights of its mixes.

    case: the case.
    streams: [T, n, d] bf16.
    x: [T, d] bf16 - output of a sublayer.
    post: [T, n, 1] fp32.
    comb: [T, n, n] fp32.
    fn: [m, n * d] fp32 - m is 2 n + n * n, or n of the head.
    scale: [3] fp32, or [1] of the head.
    base: [m] fp32.
    norm: [d] bf16 - of the norm behind `pre`.
    """

    case: LayerOpCase
    streams: Tensor
    x: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    scale: Tensor
    base: Tensor
    norm: Tensor


def mhc_task(case: LayerOpCase, device: torch.device) -> Task:
    """mhc_pre, mhc_post, mhc_fused_post_pre or hc_head."""
    given, size = _streams(case, device), case.count * case.hidden
    mixes = given.fn, given.scale, given.base, _EPS, _HC_EPS
    pre = *mixes, _HC_EPS, _POST, _REPEAT, given.norm, _EPS
    back = given.x, given.streams, given.post, given.comb
    both = *back, *pre

    def contender(name: str, backend: Backend) -> Contender:
        steps = complete(backend).layer_ops
        calls = {
            "pre": lambda: steps.mhc_pre(given.streams, *pre),
            "post": lambda: [steps.mhc_post(*back)],
            "post+pre": lambda: steps.mhc_fused_post_pre(*both),
            "head": lambda: [steps.hc_head(given.streams, *mixes)],
        }
        return returning(name, calls[case.step])

    # bf16 rows of d elements that are read and written: streams, the sublayer's output, its input
    rows = {"pre": _N + 1, "post": 2 * _N + 1, "post+pre": 2 * _N + 2, "head": _N + 1}[case.step]
    mixed = case.step != "post"
    moved = 2 * rows * size + (4 * given.fn.numel() if mixed else 0)
    if case.step != "head":
        moved += 4 * case.count * (_N + _N * _N) * (2 if case.step == "post+pre" else 1)
    flops = 2 * case.count * given.fn.numel() if mixed else 0
    return Task(case, flops, moved, _expected(given), contender, given)


def _streams(case: LayerOpCase, device: torch.device) -> StreamInputs:
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    tokens, hidden, head = case.count, case.hidden, case.step == "head"
    mixes = _N if head else 2 * _N + _N * _N
    streams = torch.empty(tokens, _N, hidden, dtype=torch.bfloat16, device=device)
    for first in range(0, tokens, _TILE):
        part = streams[first : first + _TILE]
        part.copy_(normal(*part.shape))
    return StreamInputs(
        case,
        streams,
        normal(tokens, hidden).bfloat16(),
        2 * torch.sigmoid(normal(tokens, _N, 1)),
        torch.softmax(normal(tokens, _N, _N), -1),
        normal(mixes, _N * hidden) * (_N * hidden) ** -0.5,
        normal(1 if head else 3).abs(),
        normal(mixes),
        (1 + 0.1 * normal(hidden)).bfloat16(),
    )


def _expected(given: StreamInputs) -> list[Tensor]:
    """Results of all tokens, tile by tile."""
    parts = [_tile(given, slice(first, first + _TILE)) for first in range(0, given.case.count, _TILE)]
    return [torch.cat(results) for results in zip(*parts, strict=True)]


def _tile(given: StreamInputs, part: slice) -> Sequence[Tensor]:
    streams = given.streams[part].float()
    if given.case.step == "head":
        gates = torch.sigmoid(_mixes(streams, given.fn) * given.scale + given.base) + _HC_EPS
        return [torch.einsum("tn,tnd->td", gates, streams)]
    if given.case.step != "pre":
        # post and comb of the step before; comb is summed over its first index
        streams = (
            torch.einsum("tij,tid->tjd", given.comb[part], streams) + given.post[part] * given.x[part, None].float()
        )
        # what follows reads streams as they are stored
        streams = streams.bfloat16().float()
    return [
        *([] if given.case.step == "pre" else [streams]),
        *([] if given.case.step == "post" else _pre(given, streams)),
    ]


def _pre(given: StreamInputs, streams: Tensor) -> list[Tensor]:
    """Mixes `post` [t, n, 1] and `comb` [t, n, n], input of the sublayer [t, d]."""
    gate, post, comb = _mixes(streams, given.fn).split([_N, _N, _N * _N], -1)
    (a, b, c), (p, q, r) = given.scale, given.base.split([_N, _N, _N * _N])
    weights, post = torch.sigmoid(gate * a + p) + _HC_EPS, _POST * torch.sigmoid(post * b + q)
    comb = torch.softmax((comb * c + r).unflatten(-1, (_N, _N)), -1) + _HC_EPS
    comb = comb / (comb.sum(-2, keepdim=True) + _HC_EPS)
    for _ in range(_REPEAT - 1):
        for dim in (-1, -2):
            comb = comb / (comb.sum(dim, keepdim=True) + _HC_EPS)
    collapsed = torch.einsum("tn,tnd->td", weights, streams)
    return [post[..., None], comb, normalised(collapsed, _EPS) * given.norm.float()]


def _mixes(streams: Tensor, fn: Tensor) -> Tensor:
    """[t, m]: flattened streams over the root of their mean square, times fn."""
    return normalised(streams.flatten(1), _EPS) @ fn.T
