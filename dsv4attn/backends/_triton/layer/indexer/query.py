"""The op that makes the indexer's queries: rotated, quantised as their keys are, with all factors in the weights.

This file launches `kernels_query`. Bits of a head depend on nothing but that head.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments, writer_form
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.layer.indexer.kernels_query import index_query_kernel
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.backends._triton.support import FP8_UNITS
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout
from dsv4attn.core.tensorspec import check_strides
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.indexer import IndexQuery

TILE, WARPS = 4096, 8
"""Values of q that a program takes, 32 heads of the model's, and its warps."""


@without_modes
def indexer_q_rope_quant(
    q: Tensor, weights: Tensor, positions: Tensor, cos_sin_cache: Tensor, layout: KVCacheLayout
) -> IndexQuery:
    """Rotate q [T, Hi, Di] and quantise it as the layout of the index keys asks; see `torch_ops.indexer`."""
    check_strides(q=q, weights=weights, positions=positions, cos_sin_cache=cos_sin_cache)
    tokens, heads, dim = q.shape
    values = q.new_empty(tokens, heads, _value_columns(layout), dtype=layout.dtype)
    folded, scales = q.new_empty(tokens, heads, dtype=torch.float32), None
    if _code_bits(layout) == 4:
        scales = q.new_empty(tokens, heads, layout.num_groups, dtype=torch.uint8)
    constants = _constants(layout, heads, cos_sin_cache.shape[1], alignment_of_rows(q, cos_sin_cache), architecture())
    launch(
        index_query_kernel,
        (tokens * cdiv(heads, constants["BLOCK_H"]),),
        (
            q, weights, positions, cos_sin_cache, values, scales, folded, q.stride(0), q.stride(1), weights.stride(0),
            cos_sin_cache.shape[0], cos_sin_cache.stride(0), dim**-0.5 * heads**-0.5,
        ),
        constants,
        num_warps=WARPS,
        fp_fusion=False,
    )  # fmt: skip
    if layout.fp8_format is not None:
        values = values.view(layout.fp8_format.dtype)
    return IndexQuery(values, folded, scales)


def _code_bits(layout: KVCacheLayout) -> int:
    return layout.code_bits if layout.is_quantised else 0


def _value_columns(layout: KVCacheLayout) -> int:
    """Elements of the values of a head."""
    return layout.head_dim // 2 if _code_bits(layout) == 4 else layout.head_dim


@cache
def _constants(layout: KVCacheLayout, heads: int, rope: int, rows: int, arch: str) -> Constants:
    block = min(max(TILE // next_power_of_2(layout.head_dim), 1), next_power_of_2(heads))
    # memory of our own begins at a multiple of 16
    values = math.gcd(_value_columns(layout) * layout.dtype.itemsize, WIDE)
    native = layout.fp8_format is Fp8Format.OCP and arch in FP8_UNITS
    of_heads = {"HEADS": heads, "BLOCK_H": block, "ROW_ALIGNED": rows, "VALUES_ALIGNED": values}
    of_codes = {"CODE_BITS": _code_bits(layout), "NATIVE": native, "WRITER": writer_form(layout, values)}
    overlap = {"PDL": uses_pdl(arch) and not INTERPRETED}
    return Constants({**of_heads, "D": layout.head_dim, "ROPE": rope, **of_codes, **overlap})


@recorded
def variants(
    layout: KVCacheLayout,
    heads: int,
    rope: int,
    dtype: torch.dtype,
    weight_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    *,
    aligned_rows: bool = True,
) -> None:
    """Every variant that the op can need, with q of a dtype, and weights of one of some dtypes.

    aligned_rows: whether heads of q begin at multiples of 16 bytes.
    """
    positions, angles = meta_rows(2, dtype=torch.int64), meta_rows(2, rope, dtype=torch.float32)
    for weight_dtype in weight_dtypes:
        for rows in row_alignments(layout.head_dim, dtype, aligned=aligned_rows):
            q = meta_rows(2, heads, layout.head_dim, dtype=dtype, alignment=rows)
            indexer_q_rope_quant(q, meta_rows(2, heads, dtype=weight_dtype), positions, angles, layout)
