"""Hyper-connections of many tokens on Hopper: the launcher of `kernels_hyper_connections`, for four streams in bf16.

The shared kernels of `_triton.layer.hyper_connections` serve every other call, with results of the same meaning.
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
from dsv4attn.backends._triton.layer import hyper_connections
from dsv4attn.backends._triton.layer.hyper_connections import Delayed, MixResults
from dsv4attn.backends._triton.layer.hyper_connections_variants import StreamForms, mix_variants
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.torch_ops.arguments import MixWeights

__all__ = ["fused_post_pre", "variants"]

STREAMS, TOKENS, COLUMNS, WARPS = 4, 64, 64, 8
SLICES, STAGES = 2, 2
"""SLICES: slices of COLUMNS columns whose products a program adds up. STAGES: tiles in flight.

H200, torch 2.11, Triton 3.6, 2026-11-23: 8,192 tokens of 4,096 take 187 us. With one slice and three stages they take
224 us.
"""
FEW = 256
"""Largest number of tokens for which the shared kernels are faster."""
CHUNK = 8192
"""Tokens of a pair of launches. Smaller chunks cost more launches and gain nothing: the second launch finds no data of
the first in the cache."""


def fused_post_pre(
    x: Tensor,
    residual: Tensor,
    post: Tensor,
    comb: Tensor,
    weights: MixWeights,
    delayed: Delayed | None,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_triton.layer.hyper_connections.fused_post_pre`, which runs the calls that this kernel does not serve."""
    count, hidden = x.shape
    fn = weights.fn
    if not (_serves(x, residual, post, comb, fn) and (deterministic or count > FEW)):
        return hyper_connections.fused_post_pre(x, residual, post, comb, weights, delayed, deterministic=deterministic)
    new_residual = torch.empty_like(residual, memory_format=torch.contiguous_format)
    new_post, new_comb, layer_input = hyper_connections.empty_results(residual)
    results = MixResults(new_post, new_comb, layer_input)
    groups = hidden // (COLUMNS * SLICES)
    products = fn.new_empty(min(count, CHUNK), groups, 32, dtype=torch.float32)
    for first in range(0, count, CHUNK):
        end = min(first + CHUNK, count)
        tiles = -(-(end - first) // TOKENS) * groups
        tiles_per_program = -(-tiles // multiprocessors())
        from dsv4attn.backends.sm90.kernels_hyper_connections import (
            post_products_tiles,  # not where kernels are interpreted
        )

        launch(
            post_products_tiles,
            (-(-tiles // tiles_per_program),),
            (
                x, residual, post, comb, fn, new_residual, products, first, end, hidden, tiles_per_program,
                x.stride(0), residual.stride(0), residual.stride(1), fn.stride(0),
            ),
            _constants(),
            num_warps=WARPS,
        )  # fmt: skip
        hyper_connections.mix(new_residual, products, weights, results, delayed, first, end, CHUNK)
    return new_residual, new_post, new_comb, layer_input


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
    """Every variant that `fused_post_pre` can need in addition to the variants of the shared kernels."""
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
    streams = StreamForms(
        STREAMS, hidden, bounds.q_dtype, delayed=model.shared_latent, aligned=bounds.aligned_rows, arch=arch
    )
    for norm_dtype in dict.fromkeys((None, bounds.q_dtype, torch.float32)):
        yield from mix_variants(streams, norm_dtype, hidden // (COLUMNS * SLICES), WIDE, CHUNK)
