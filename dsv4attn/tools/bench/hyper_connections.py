"""Hyper-connections: inputs and calls. Letters: T tokens, n streams, d hidden size."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.contract.backend import Backend, complete
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.layer_ops import LayerOpCase

__all__ = ["StreamInputs", "mhc_task"]

_FLASH = ModelGeometry.preset("deepseek-v4-flash")
_N, _EPS, _HC_EPS, _REPEAT = _FLASH.hc_mult, _FLASH.eps, _FLASH.hc_eps, _FLASH.hc_sinkhorn_iters
_POST = 2.0
"""Factor of `post`."""
_TILE = 1024
"""Tokens whose streams are drawn at a time."""


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
    inputs, size = _streams(case, device), case.count * case.hidden
    mixes = inputs.fn, inputs.scale, inputs.base, _EPS, _HC_EPS
    pre = *mixes, _HC_EPS, _POST, _REPEAT, inputs.norm, _EPS

    def contender(name: str, backend: Backend, dtype: torch.dtype) -> Contender:
        ops, streams = complete(backend).layer_ops, inputs.streams.to(dtype)
        mixed = inputs.x.to(dtype), streams, inputs.post, inputs.comb
        mixed_again = *mixed, *pre
        calls = {
            "pre": lambda: ops.mhc_pre(streams, *pre),
            "post": lambda: [ops.mhc_post(*mixed)],
            "post+pre": lambda: ops.mhc_fused_post_pre(*mixed_again),
            "head": lambda: [ops.hc_head(streams, *mixes)],
        }
        return returning(name, calls[case.step])

    # bf16 rows of d elements that are read and written: streams, the sublayer's output, its input
    rows = {"pre": _N + 1, "post": 2 * _N + 1, "post+pre": 2 * _N + 2, "head": _N + 1}[case.step]
    mixed = case.step != "post"
    moved = 2 * rows * size + (4 * inputs.fn.numel() if mixed else 0)
    if case.step != "head":
        moved += 4 * case.count * (_N + _N * _N) * (2 if case.step == "post+pre" else 1)
    flops = 2 * case.count * inputs.fn.numel() if mixed else 0
    return Task(case, flops, moved, contender, inputs)


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
