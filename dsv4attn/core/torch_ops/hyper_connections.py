"""Manifold-constrained hyper-connections: n residual streams, mixed into the input of a sublayer and back.

The streams are X [T, n, d]. A linear function of the flattened, normalised streams gives three mixes of a token:
`pre` [n] weighs the streams into the input of the sublayer, `post` [n] weighs the output y of the sublayer into each
stream, and `comb` [n, n] mixes the old streams into the new: new_j = post_j * y + sum_i comb_ij * X_i. Sinkhorn's
iterations make `comb` doubly stochastic. `MixWeights` has the weights and the constants of the three mixes.

Delayed hyper-connections (DeepSeek-V4.1): a sublayer weighs the streams by the `pre` of the previous sublayer, and
hands its own `pre` to the next sublayer. The first sublayer takes stream 0. After the last sublayer, its `pre`
collapses the streams, without a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn.core.torch_ops.compressor import rms_norm
from dsv4attn.core.torch_ops.tiles import Arithmetic, arithmetic_of, sigmoid, tiles

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
"""Bytes of temporaries of an op for each element of a token's streams."""


def _products(streams: Tensor, fn: Tensor, rms_eps: float, arithmetic: Arithmetic) -> Tensor:
    """[T, m] fp32: the flattened streams over the root of their mean square, times fn [m, n * d]."""
    flat = streams.flatten(-2).float()
    return arithmetic.linear(flat, fn.float()) * torch.rsqrt(arithmetic.mean_square(flat) + rms_eps)


@without_modes
def mhc_pre(residual: Tensor, weights: MixWeights, *, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(post [T, n, 1] fp32, comb [T, n, n] fp32, layer_input [T, d] like residual) of residual [T, n, d].

    weights: of the mixes, and of an RMSNorm of layer_input. deterministic: the bits of a token do not depend on the
    number of tokens.
    """
    arithmetic, (count, n, d) = arithmetic_of(deterministic), residual.shape
    post = residual.new_empty(count, n, 1, dtype=torch.float32)
    comb, layer_input = post.new_empty(count, n, n), residual.new_empty(count, d)
    for rows in tiles(count, _ROW_BYTES * n * d):
        streams = residual[rows]
        pre, post[rows], comb[rows] = _mixes_of(streams, weights, arithmetic)
        layer_input[rows] = _layer_input(_weighed(pre, streams), weights, arithmetic)
    return post, comb, layer_input


@without_modes
def mhc_pre_delayed(
    residual: Tensor, previous_pre: Tensor | None, weights: MixWeights, *, deterministic: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """V4.1: (pre [T, n] fp32, post, comb, layer_input) of residual [T, n, d]; post and comb are those of `mhc_pre`.

    previous_pre: [T, n] fp32, the pre that the previous sublayer returned. layer_input is the sum of the streams, each
    times its weight in previous_pre. Without previous_pre (None, in the first sublayer) layer_input is stream 0.
    weights, deterministic: as in `mhc_pre`. The returned pre includes hc_pre_eps, and is for the next sublayer.
    """
    arithmetic, (count, n, d) = arithmetic_of(deterministic), residual.shape
    pre = residual.new_empty(count, n, dtype=torch.float32)
    post, comb, layer_input = pre.new_empty(count, n, 1), pre.new_empty(count, n, n), residual.new_empty(count, d)
    for rows in tiles(count, _ROW_BYTES * n * d):
        streams = residual[rows]
        pre[rows], post[rows], comb[rows] = _mixes_of(streams, weights, arithmetic)
        collapsed = streams[:, 0] if previous_pre is None else _weighed(previous_pre[rows], streams)
        layer_input[rows] = _layer_input(collapsed, weights, arithmetic)
    return pre, post, comb, layer_input


@without_modes
def mhc_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """V4.1: [T, d] like streams: the sum of streams [T, n, d], each times its weight in pre [T, n] fp32."""
    count, n, d = streams.shape
    out = streams.new_empty(count, d)
    for rows in tiles(count, _ROW_BYTES * n * d):
        out[rows] = _weighed(pre[rows], streams[rows]).to(out.dtype)
    return out


def _mixes_of(streams: Tensor, weights: MixWeights, arithmetic: Arithmetic) -> tuple[Tensor, Tensor, Tensor]:
    """Pre [t, n], post [t, n, 1] and comb [t, n, n] of streams [t, n, d], all fp32."""
    n, eps = streams.shape[1], weights.hc_sinkhorn_eps
    sizes = [n, n, n * n]
    products = _products(streams, weights.fn, weights.rms_eps, arithmetic).split(sizes, -1)
    pre, post, comb = (
        (product * scale + base).contiguous()
        for product, scale, base in zip(products, weights.hc_scale, weights.hc_base.split(sizes), strict=True)
    )
    comb = comb.unflatten(-1, (n, n)).softmax(-1) + eps
    for i in range(weights.sinkhorn_repeat):
        if i:
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return sigmoid(pre) + weights.hc_pre_eps, (weights.hc_post_mult_value * sigmoid(post))[..., None], comb


def _layer_input(collapsed: Tensor, weights: MixWeights, arithmetic: Arithmetic) -> Tensor:
    """[t, d]: the collapsed streams, through an RMSNorm if the norm has a weight."""
    if weights.norm_weight is None:
        return collapsed
    return rms_norm(collapsed, weights.norm_weight, weights.norm_eps, arithmetic)


def _weighed(weights: Tensor, streams: Tensor) -> Tensor:
    """[T, d] fp32: the sum of the streams [T, n, d], each times its weight [T, n], one after another."""
    total = weights[..., :1] * streams[..., 0, :].float()
    for i in range(1, streams.shape[-2]):
        total = total + weights[..., i : i + 1] * streams[..., i, :].float()
    return total


@without_modes
def mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[T, n, d] like residual: post_j * x + sum_i comb_ij * residual_i, summed over the first index of comb.

    x: [T, d], the output of the sublayer. residual: [T, n, d]. post: [T, n, 1] fp32. comb: [T, n, n] fp32.
    """
    out = torch.empty_like(residual, memory_format=torch.contiguous_format)
    for rows in tiles(residual.shape[0], _ROW_BYTES * residual[:1].numel()):
        for j in range(residual.shape[-2]):
            mixed = _weighed(comb[rows, :, j], residual[rows])
            out[rows, j] = (post[rows, j] * x[rows].float() + mixed).to(out.dtype)
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
    for rows in tiles(count, _ROW_BYTES * n * d):
        products = _products(streams[rows], hc_fn, rms_eps, arithmetic)
        pre = sigmoid(products * hc_scale + hc_base) + hc_eps
        out[rows] = _weighed(pre, streams[rows]).to(out.dtype)
    return out


def mhc_fused_post_pre(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, weights: MixWeights, *, deterministic: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(residual, post, comb, layer_input): `mhc_post`, then `mhc_pre` of the new residual."""
    residual = mhc_post(x, residual, post, comb)
    post, comb, layer_input = mhc_pre(residual, weights, deterministic=deterministic)
    return residual, post, comb, layer_input


def mhc_fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    previous_pre: Tensor | None,
    weights: MixWeights,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """V4.1: (residual, pre, post, comb, layer_input): `mhc_post`, then `mhc_pre_delayed` of the new residual."""
    residual = mhc_post(x, residual, post, comb)
    pre, post, comb, layer_input = mhc_pre_delayed(residual, previous_pre, weights, deterministic=deterministic)
    return residual, pre, post, comb, layer_input
