"""Hyper-connections: inputs and calls. Letters: T tokens, n streams, d hidden size."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.reprs import frozen
from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn.tools.bench.contenders import Contender, Task, returning
from dsv4attn.tools.bench.inputs import RandomNumbers
from dsv4attn.tools.bench.layer_ops import LayerOpCase

_FLASH = ModelGeometry.preset("deepseek-v4-flash")
_N = _FLASH.hc_mult
_TILE = 1024
"""Number of tokens whose streams are drawn at a time."""


@frozen(eq=False)
class StreamInputs:
    """Streams of a case and the weights of the mixes.

    case: the case.
    streams: [T, n, d] bf16.
    x: [T, d] bf16 - output of a sublayer.
    post: [T, n, 1] fp32.
    comb: [T, n, n] fp32.
    weights: of the mixes, with a norm. Of the head fn, hc_scale, hc_base, rms_eps and hc_pre_eps are used.
    """

    case: LayerOpCase
    streams: Tensor
    x: Tensor
    post: Tensor
    comb: Tensor
    weights: MixWeights


def mhc_task(case: LayerOpCase, device: torch.device) -> Task:
    """mhc_pre, mhc_post, mhc_fused_post_pre or hc_head."""
    inputs, size = _streams(case, device), case.count * case.hidden
    post, comb, weights = inputs.post, inputs.comb, inputs.weights
    fn, scale, base = weights.fn, weights.hc_scale, weights.hc_base

    def contender(name: str, backend: Backend, dtype: torch.dtype) -> Contender:
        ops, streams, x = backend.layer_ops, inputs.streams.to(dtype), inputs.x.to(dtype)
        calls = {
            "pre": lambda: ops.mhc_pre(streams, weights),
            "post": lambda: [ops.mhc_post(x, streams, post, comb)],
            "post+pre": lambda: ops.mhc_fused_post_pre(x, streams, post, comb, weights),
            "head": lambda: [ops.hc_head(streams, fn, scale, base, weights.rms_eps, weights.hc_pre_eps)],
        }
        return returning(name, calls[case.step])

    # bf16 rows of d elements that are read and written: streams, output and input of the sublayer
    rows = {"pre": _N + 1, "post": 2 * _N + 1, "post+pre": 2 * _N + 2, "head": _N + 1}[case.step]
    makes_mixes = case.step != "post"
    moved = 2 * rows * size + (4 * fn.numel() if makes_mixes else 0)
    if case.step != "head":
        moved += 4 * case.count * (_N + _N * _N) * (2 if case.step == "post+pre" else 1)
    flops = 2 * case.count * fn.numel() if makes_mixes else 0
    return Task(case, flops, moved, contender, inputs)


def _streams(case: LayerOpCase, device: torch.device) -> StreamInputs:
    normal = RandomNumbers(device, case.seed).normal
    tokens, hidden, head = case.count, case.hidden, case.step == "head"
    mixes = _N if head else 2 * _N + _N * _N
    streams = torch.empty(tokens, _N, hidden, dtype=torch.bfloat16, device=device)
    for first in range(0, tokens, _TILE):
        rows = streams[first : first + _TILE]
        rows.copy_(normal(*rows.shape))
    return StreamInputs(
        case,
        streams,
        normal(tokens, hidden).bfloat16(),
        2 * torch.sigmoid(normal(tokens, _N, 1)),
        torch.softmax(normal(tokens, _N, _N), -1),
        MixWeights(
            fn=normal(mixes, _N * hidden) * (_N * hidden) ** -0.5,
            hc_scale=normal(1 if head else 3).abs(),
            hc_base=normal(mixes),
            rms_eps=_FLASH.eps,
            hc_pre_eps=_FLASH.hc_eps,
            hc_sinkhorn_eps=_FLASH.hc_eps,
            sinkhorn_repeat=_FLASH.hc_sinkhorn_iters,
            norm_weight=(1 + 0.1 * normal(hidden)).bfloat16(),
            norm_eps=_FLASH.eps,
        ),
    )
