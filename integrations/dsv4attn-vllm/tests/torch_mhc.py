"""Hyper-connections of vLLM's DeepSeek-V4.1 in torch, where TileLang is not installed: see `install`."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

from dsv4attn.core.torch_ops.arguments import MixWeights
from dsv4attn.core.torch_ops.hyper_connections import mhc_fused_post_pre_delayed, mhc_post, mhc_pre_delayed


def _weights(
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> MixWeights:
    return MixWeights(
        fn=fn,
        hc_scale=scale,
        hc_base=base,
        rms_eps=rms_eps,
        hc_pre_eps=pre_eps,
        hc_sinkhorn_eps=sinkhorn_eps,
        hc_post_mult_value=post_mult,
        sinkhorn_repeat=repeat,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
    )


def pre_delayed(
    residual: Tensor,
    fn: Tensor,
    *mixing: Any,
    pre_mix: Tensor | None = None,
    x: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """VLLM's mhc_pre_delayed_tilelang."""
    if x is not None:
        # the first layer's weights are sums over its streams, which are equal
        fn = fn.repeat(1, residual.shape[1]) / residual.shape[1]
    weights = _weights(fn, *mixing, norm_weight, norm_eps)
    pre, post, comb, layer_input = mhc_pre_delayed(residual, pre_mix, weights)
    return post, comb, layer_input, pre


def post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    *mixing: Any,
    pre_mix: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    capture_aux: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """VLLM's mhc_fused_post_pre_delayed_tilelang."""
    weights = _weights(fn, *mixing, norm_weight, norm_eps)
    streams, pre, post, comb, layer_input = mhc_fused_post_pre_delayed(x, residual, post, comb, pre_mix, weights)
    aux = streams.mean(dim=1) if capture_aux else x.new_empty(0, x.shape[1])
    return streams, post, comb, layer_input, pre, aux


def install() -> None:
    """Replace vLLM's functions that need TileLang, and leave out their compilation ahead."""
    from vllm.models.deepseek_v41.nvidia import dspark, model
    from vllm.models.deepseek_v41.nvidia.ops import mhc

    package = "vllm.model_executor.kernels.mhc"
    kernels, warmup = ModuleType(f"{package}.tilelang_kernels"), ModuleType(f"{package}.warmup")
    kernels.mhc_fused_post_pre_splits = lambda *_: ()
    warmup.MHC_PRE_NORM_KERNEL = SimpleNamespace(register_warmup=lambda **_: None)
    sys.modules |= {module.__name__: module for module in (kernels, warmup)}
    for module in (dspark, model, mhc):
        for name, function in (
            ("mhc_pre_delayed_tilelang", pre_delayed),
            ("mhc_fused_post_pre_delayed_tilelang", post_pre_delayed),
            ("mhc_post_tilelang", mhc_post),
        ):
            if hasattr(module, name):
                setattr(module, name, function)
