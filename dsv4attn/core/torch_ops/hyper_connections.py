"""Manifold-constrained hyper-connections: n residual streams, mixed into a sublayer's input and back.

Streams X [T, n, d]. Their mixes are a linear function of the flattened, normalised streams: `pre` [n] weighs the
streams into the input of the sublayer, `post` [n] its output into each stream, and `comb` [n, n], made doubly
stochastic by Sinkhorn's iterations, the old streams into the new: new_j = post_j * y + sum_i comb_ij * X_i.

Delayed (DeepSeek-V4.1): the streams are weighed by the `pre` of the sublayer before, and the `pre` of this one goes to
the next. The first sublayer takes stream 0, and the last `pre` collapses the streams at the end, without a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.compressor import rms_norm
from dsv4attn.core.torch_ops.tiles import Arithmetic, arithmetic_of, tiles

__all__ = [
    "hc_head",
    "mhc_collapse",
    "mhc_fused_post_pre",
    "mhc_fused_post_pre_delayed",
    "mhc_post",
    "mhc_pre",
    "mhc_pre_delayed",
]

_ROW_BYTES = 24
"""Temporaries of a step for each element of a token's streams."""


def _mixes(streams: Tensor, fn: Tensor, rms_eps: float, arithmetic: Arithmetic) -> Tensor:
    """[T, m] fp32: the flattened streams over the root of their mean square, times fn [m, n * d]."""
    flat = streams.flatten(-2).float()
    return arithmetic.linear(flat, fn.float()) * torch.rsqrt(arithmetic.mean_square(flat) + rms_eps)


@without_modes
def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(post [T, n, 1] fp32, comb [T, n, n] fp32, layer_input [T, d] like residual) of residual [T, n, d].

    fn: [2 n + n * n, n * d] fp32. hc_scale: [3] fp32 and hc_base: [2 n + n * n] fp32, of pre, post, comb. The first
    of `sinkhorn_repeat` iterations normalises columns only. norm_weight: [d] - of an RMSNorm of layer_input, or
    None.
    """
    arithmetic, (count, n, d) = arithmetic_of(deterministic), residual.shape
    post = residual.new_empty(count, n, 1, dtype=torch.float32)
    comb, layer_input = post.new_empty(count, n, n), residual.new_empty(count, d)
    eps = hc_pre_eps, hc_sinkhorn_eps
    for part in tiles(count, _ROW_BYTES * n * d):
        mixes = _mixes(residual[part], fn, rms_eps, arithmetic)
        pre, post[part], comb[part] = _parts(mixes, hc_scale, hc_base, *eps, hc_post_mult_value, sinkhorn_repeat, n)
        layer_input[part] = _input(_weighed(pre, residual[part]), norm_weight, norm_eps, arithmetic)
    return post, comb, layer_input


@without_modes
def mhc_pre_delayed(
    residual: Tensor,
    previous_pre: Tensor | None,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float = 2.0,
    sinkhorn_repeat: int = 20,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """V4.1: (pre [T, n] fp32, post, comb, layer_input) of residual [T, n, d]; post and comb are `mhc_pre`'s.

    layer_input: the streams, each times its weight in `previous_pre` [T, n] fp32, the pre that the sublayer before
    this one returned; without one (None, in the first sublayer) stream 0 as it is. pre: has hc_pre_eps added, and
    is for the next sublayer. norm_weight, norm_eps: of an RMSNorm of layer_input, as in `mhc_pre`.
    """
    arithmetic, (count, n, d) = arithmetic_of(deterministic), residual.shape
    pre = residual.new_empty(count, n, dtype=torch.float32)
    post, comb, layer_input = pre.new_empty(count, n, 1), pre.new_empty(count, n, n), residual.new_empty(count, d)
    eps = hc_pre_eps, hc_sinkhorn_eps
    for part in tiles(count, _ROW_BYTES * n * d):
        mixes = _mixes(residual[part], fn, rms_eps, arithmetic)
        found = _parts(mixes, hc_scale, hc_base, *eps, hc_post_mult_value, sinkhorn_repeat, n)
        pre[part], post[part], comb[part] = found
        streams = residual[part]
        collapsed = streams[:, 0] if previous_pre is None else _weighed(previous_pre[part], streams)
        layer_input[part] = _input(collapsed, norm_weight, norm_eps, arithmetic)
    return pre, post, comb, layer_input


@without_modes
def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """V4.1: [T, d] like streams: the sum of streams [T, n, d], each times its weight in pre [T, n] fp32."""
    count, n, d = streams.shape
    out = streams.new_empty(count, d)
    for part in tiles(count, _ROW_BYTES * n * d):
        out[part] = _weighed(pre[part], streams[part]).to(out.dtype)
    return out


def _parts(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_eps: float,
    sinkhorn_eps: float,
    factor: float,
    repeat: int,
    n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre [t, n], post [t, n, 1] and comb [t, n, n] of mixes [t, 2 n + n * n], all fp32."""
    sizes = [n, n, n * n]
    gate, out, mix = (
        (values * one + part).contiguous()
        for values, one, part in zip(mixes.split(sizes, -1), scale, base.split(sizes), strict=True)
    )
    mix = mix.unflatten(-1, (n, n)).softmax(-1) + sinkhorn_eps
    for i in range(repeat):
        if i:
            mix = mix / (mix.sum(-1, keepdim=True) + sinkhorn_eps)
        mix = mix / (mix.sum(-2, keepdim=True) + sinkhorn_eps)
    return gate.sigmoid() + pre_eps, (factor * out.sigmoid())[..., None], mix


def _input(collapsed: Tensor, weight: Tensor | None, eps: float, arithmetic: Arithmetic) -> Tensor:
    """[t, d]: the collapsed streams, through an RMSNorm if it has a weight."""
    return collapsed if weight is None else rms_norm(collapsed, weight, eps, arithmetic)


def _weighed(weights: Tensor, streams: Tensor) -> Tensor:
    """[T, d] fp32: the sum of the streams [T, n, d], each times its weight [T, n], one after another."""
    total = weights[..., :1] * streams[..., 0, :].float()
    for i in range(1, streams.shape[-2]):
        total = total + weights[..., i : i + 1] * streams[..., i, :].float()
    return total


@without_modes
def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[T, n, d] like residual: post_j * x + sum_i comb_ij * residual_i, summed over the first index of comb.

    x: [T, d] - output of the sublayer. residual: [T, n, d]. post: [T, n, 1] fp32. comb: [T, n, n] fp32.
    """
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    for part in tiles(residual.shape[0], _ROW_BYTES * residual[:1].numel()):
        for j in range(residual.shape[-2]):
            mixed = _weighed(comb[part, :, j], residual[part])
            out[part, j] = (post[part, j] * x[part].float() + mixed).to(out.dtype)
    return out


@without_modes
def hc_head(
    streams: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_eps: float,
    *,
    deterministic: bool = False,
) -> Tensor:
    """[T, d] like streams: the sum of streams [T, n, d], each times the sigmoid of its gate plus hc_eps.

    hc_fn: [n, n * d] fp32. hc_scale: [1] fp32. hc_base: [n] fp32.
    """
    arithmetic, (count, n, d) = arithmetic_of(deterministic), streams.shape
    out = streams.new_empty(count, d)
    for part in tiles(count, _ROW_BYTES * n * d):
        gate = (_mixes(streams[part], hc_fn, rms_eps, arithmetic) * hc_scale + hc_base).sigmoid() + hc_eps
        out[part] = _weighed(gate, streams[part]).to(out.dtype)
    return out


def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    *mixes: Any,  # noqa: ANN401 - those of `mhc_pre`
    **options: Any,  # noqa: ANN401 - as above
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(residual, post, comb, layer_input): `mhc_post`, then `mhc_pre` of the new residual."""
    residual = mhc_post(x, residual, post, comb)
    return residual, *mhc_pre(residual, *mixes, **options)


def mhc_fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    previous_pre: Tensor | None,
    *mixes: Any,  # noqa: ANN401 - those of `mhc_pre_delayed`
    **options: Any,  # noqa: ANN401 - as above
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """V4.1: (residual, pre, post, comb, layer_input): `mhc_post`, then `mhc_pre_delayed` of the new residual."""
    residual = mhc_post(x, residual, post, comb)
    return residual, *mhc_pre_delayed(residual, previous_pre, *mixes, **options)
