"""Hyper-connections of many tokens on Hopper: the launcher of `kernels_hyper_connections`, for four streams in bf16.

The shared steps of `_triton.layer.hyper_connections` serve every other call, with results of the same meaning.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, WIDE, launch, multiprocessors
from dsv4attn.backends._triton.layer import hyper_connections, hyper_connections_variants
from dsv4attn.backends._triton.layer.hyper_connections import Delayed, Numbers
from dsv4attn.core.contract.warmup import WarmupSpec

__all__ = ["mhc_fused_post_pre", "mhc_fused_post_pre_delayed", "variants"]

STREAMS, TOKENS, COLUMNS, WARPS = 4, 64, 64, 8
SLICES, STAGES = 2, 2
"""Slices of COLUMNS columns whose products a program adds up; tiles in flight.

H200, torch 2.11, Triton 3.6, 2026-11-23: 8,192 tokens of 4,096 take 187 us; with one slice and three stages 224.
"""
FEW = 256
"""Largest number of tokens for which the shared kernels are faster."""
CHUNK = 8192
"""Tokens of a pair of launches. Smaller chunks cost more launches and gain nothing: the second launch finds no data of
the first in the cache."""


def mhc_fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
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
    """See `definitions`, mhc_fused_post_pre. deterministic: as of `hyper_connections.mhc_pre`."""
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    if not (_serves(x, residual, post, comb, fn) and (deterministic or x.shape[0] > FEW)):
        mixes = fn, hc_scale, hc_base, *numbers[:5], norm_weight, norm_eps
        return hyper_connections.mhc_fused_post_pre(x, residual, post, comb, *mixes, deterministic=deterministic)
    return _fused(x, residual, post, comb, fn, hc_scale, hc_base, norm_weight, numbers, None)


def mhc_fused_post_pre_delayed(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `definitions`, mhc_fused_post_pre_delayed. deterministic: as of `hyper_connections.mhc_pre`."""
    numbers = rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, norm_eps
    given = x, residual, post, comb
    if not (_serves(*given, fn) and (deterministic or x.shape[0] > FEW)):
        every = *given, previous_pre, fn, hc_scale, hc_base, *numbers[:5], norm_weight, norm_eps
        return hyper_connections.mhc_fused_post_pre_delayed(*every, deterministic=deterministic)
    delayed, mixes = Delayed(previous_pre, post.new_empty(residual.shape[:2])), (fn, hc_scale, hc_base)
    new, new_post, new_comb, out = _fused(*given, *mixes, norm_weight, numbers, delayed)
    assert delayed.pre is not None
    return new, delayed.pre, new_post, new_comb, out


def _fused(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    norm: Tensor | None,
    numbers: Numbers,
    delayed: Delayed | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new streams, post, comb, input of the sublayer)."""
    count, hidden = x.shape
    new = torch.empty_like(residual, memory_format=torch.contiguous_format)
    new_post, new_comb, out = hyper_connections.results(residual)
    groups = hidden // (COLUMNS * SLICES)
    products = fn.new_empty(min(count, CHUNK), groups, 32, dtype=torch.float32)
    given = x, residual, post, comb, fn, new, products
    results = scale, base, norm, new_post, new_comb, out
    strides = x.stride(0), residual.stride(0), residual.stride(1), fn.stride(0)
    for first in range(0, count, CHUNK):
        end = min(first + CHUNK, count)
        tiles = -(-(end - first) // TOKENS) * groups
        per = -(-tiles // multiprocessors())
        from dsv4attn.backends.sm90.kernels_hyper_connections import (
            post_products_tiles,  # not where kernels are interpreted
        )

        launch(
            post_products_tiles,
            (-(-tiles // per),),
            (*given, first, end, hidden, per, *strides),
            _constants(),
            num_warps=WARPS,
        )
        hyper_connections.mix(new, products, *results, first, end, numbers, CHUNK, delayed)
    return new, new_post, new_comb, out


def _serves(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, fn: Tensor) -> bool:
    """Whether the kernel reads inputs of these shapes, dtypes and alignments."""
    hidden, n = x.shape[1], residual.shape[1]
    if INTERPRETED or x.dtype != torch.bfloat16 or n != STREAMS or hidden % (COLUMNS * SLICES):
        return False
    dense = post.is_contiguous() and comb.is_contiguous()
    return dense and alignment_of_rows(x, residual, post[:, :, 0], comb, fn) == WIDE


@cache
def _constants() -> dict[str, Any]:
    return {"SLICES": SLICES, "STAGES": STAGES}


def variants(bounds: WarmupSpec, arch: str) -> Iterator[Variant]:
    """Every variant that `mhc_fused_post_pre` can need in addition to the variants of the shared steps."""
    model = bounds.model
    if model is None or "hyper_connections" not in bounds.parts:
        return
    if INTERPRETED or bounds.q_dtype != torch.bfloat16 or model.hc_mult != STREAMS:
        return
    hidden = model.hidden_size
    if hidden % (COLUMNS * SLICES):
        return
    from dsv4attn.backends.sm90.kernels_hyper_connections import (
        post_products_tiles,  # not where kernels are interpreted
    )

    types = dict.fromkeys(("X", "STREAMS", "OUT"), "*bf16") | dict.fromkeys(("POST", "COMB", "FN", "PRODUCTS"), "*fp32")
    yield Variant.from_types(post_products_tiles, types, _constants(), num_warps=WARPS)
    dims, splits = (STREAMS, hidden, bounds.q_dtype), hidden // (COLUMNS * SLICES)
    for norm in dict.fromkeys((None, bounds.q_dtype, torch.float32)):
        yield from hyper_connections_variants.mix_variants(
            dims, norm, splits, WIDE, CHUNK, delayed=model.shared_latent, aligned=bounds.aligned_rows, arch=arch
        )
