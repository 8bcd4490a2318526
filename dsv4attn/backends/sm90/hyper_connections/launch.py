"""Hyper-connections of many tokens on Hopper: the launcher of `kernels`, for four streams in bf16.

The shared kernels of `_triton.layer.hyper_connections` serve every other call, with results of the same meaning.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, alignment_of_tokens
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch, multiprocessors
from dsv4attn.backends._triton.layer.hyper_connections import launch as hyper_connections
from dsv4attn.backends._triton.layer.hyper_connections.launch import Delayed, MixResults
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.torch_ops.arguments import MixWeights

STREAMS, TOKENS, COLUMNS, WARPS = 4, 64, 64, 8


@frozen
class Pipeline:
    """How a program goes through its tiles.

    slices: of COLUMNS columns, whose products a program adds up.
    stages: tiles in flight.
    """

    slices: int
    stages: int


MANY = Pipeline(2, 2)
"""Of plain calls. H200, torch 2.11, Triton 3.6, 2026-11-23: 8,192 tokens of 4,096 take 187 us. With one slice and three
stages they take 224 us.
"""
FIXED = Pipeline(1, 3)
"""Of deterministic calls, for any number of tokens. H100, torch 2.11, Triton 3.6, 2026-11-27, us of both launches:

| tokens, hidden size | these, with the blocks of deterministic calls | MANY, with those of plain calls | plain calls |
|---|---|---|---|
| 64, 4,096 | 14.2 | 19.4 | 10.8 |
| 2,048, 4,096 | 114.9 | 103.5 | 102.7 |
| 64, 7,168 | 17.0 | 22.2 | 15.3 |
| 2,048, 7,168 | 208.9 | 188.1 | 188.4 |

The second launch has the blocks: see `_triton.layer.hyper_connections.tuning`. It had no `by_factors` and no `early`
then.
"""
FEW = 512 * 4096
"""Largest number of elements of x for which the shared kernels are faster.

H100, torch 2.11, Triton 3.6, 2026-11-27, us of both launches of 512 tokens: of 4,096, 23.9 with the shared kernels and
26.4 with this one; of 7,168, 49.0 and 47.6.
"""
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
    """See `layer.hyper_connections.launch.fused_post_pre`, which runs the calls that this kernel does not serve."""
    count, hidden = x.shape
    fn, pipeline = weights.fn, _pipeline_of(deterministic=deterministic)
    if not (_serves(x, residual, post, comb, fn, pipeline) and (deterministic or x.numel() > FEW)):
        return hyper_connections.fused_post_pre(x, residual, post, comb, weights, delayed, deterministic=deterministic)
    new_residual = torch.empty_like(residual, memory_format=torch.contiguous_format)
    new_post, new_comb, layer_input = hyper_connections.empty_results(residual)
    results = MixResults(new_post, new_comb, layer_input)
    tuning = hyper_connections.tuning_of_calls(deterministic=deterministic)
    groups = hidden // (COLUMNS * pipeline.slices)
    products = fn.new_empty(min(count, CHUNK), groups, 32, dtype=torch.float32)
    for first in range(0, count, CHUNK):
        end = min(first + CHUNK, count)
        tiles = -(-(end - first) // TOKENS) * groups
        tiles_per_program = -(-tiles // multiprocessors())
        from dsv4attn.backends.sm90.hyper_connections.kernels import (
            post_products_tiles,  # not where kernels are interpreted
        )

        launch(
            post_products_tiles,
            (-(-tiles // tiles_per_program),),
            (
                x, residual, post, comb, fn, new_residual, products, first, end, hidden, tiles_per_program,
                x.stride(0), residual.stride(0), residual.stride(1), fn.stride(0),
            ),
            _constants(pipeline),
            num_warps=WARPS,
        )  # fmt: skip
        hyper_connections.mix(new_residual, products, weights, results, delayed, first, end, CHUNK, tuning)
    return new_residual, new_post, new_comb, layer_input


def _pipeline_of(*, deterministic: bool) -> Pipeline:
    return FIXED if deterministic else MANY


def _serves(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, fn: Tensor, pipeline: Pipeline) -> bool:
    """Whether the kernel reads inputs of these shapes, dtypes and alignments."""
    hidden, n = x.shape[1], residual.shape[1]
    if INTERPRETED or x.dtype != torch.bfloat16 or n != STREAMS or hidden % (COLUMNS * pipeline.slices):
        return False
    # by strides: the rows of one token are contiguous wherever they lie, and its kernel must be that of more tokens
    dense = post.stride()[:2] == (n, 1) and comb.stride() == (n * n, n, 1)
    aligned = alignment_of_tokens(x, residual, post[:, :, 0], comb)
    return dense and aligned == alignment_of_rows(fn) == WIDE


@cache
def _constants(pipeline: Pipeline) -> dict[str, Any]:
    return {"SLICES": pipeline.slices, "STAGES": pipeline.stages}


@recorded
def variants(bounds: WarmupSpec, *, deterministic: bool = False) -> None:
    """Every variant that `fused_post_pre` can need in addition to the variants of the shared kernels."""
    model = bounds.model
    if model is None or "hyper_connections" not in bounds.parts:
        return
    n, hidden, pipeline = model.hc_mult, model.hidden_size, _pipeline_of(deterministic=deterministic)
    streams = hyper_connections.meta_streams(FEW // hidden + 1, n, hidden, bounds.q_dtype)
    for norm_dtype in dict.fromkeys((None, bounds.q_dtype, torch.float32)):
        for norm_rows in (WIDE,) if bounds.aligned_rows or norm_dtype is None else (WIDE, 1):
            norm = None if norm_dtype is None else meta_rows(hidden, dtype=norm_dtype, alignment=norm_rows)
            weights = hyper_connections.meta_weights(n, hidden, norm, model.hc_eps)
            if _serves(*streams, weights.fn, pipeline):
                pre = streams[2][:, :, 0]
                for delayed in (Delayed(None, pre), Delayed(pre, pre)) if model.shared_latent else (None,):
                    fused_post_pre(*streams, weights, delayed, deterministic=deterministic)
