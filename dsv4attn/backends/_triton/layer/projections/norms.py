"""The op that normalises the latent of q and the key between the projections of a layer, in one launch.

This file launches `kernels_norms`. Bits of a row depend on that row alone.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.layer.projections.kernels_norms import norm_kernel
from dsv4attn.core.tensorspec import check_norm_weight, check_strides, check_tensor
from dsv4attn.core.torch_modes import without_modes

WARPS = 4


@without_modes
def norm_q_kv(
    q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `torch_ops.norms`. Of two dtypes of q and kv, or of the weights, the narrower is widened before."""
    check_tensor("kv", kv, "T _", kv.dtype, {"T": q.shape[0]})
    check_strides(q=q, kv=kv, q_weight=q_weight, kv_weight=kv_weight)
    q, kv = _alike(q, kv)
    pairs = ("q_weight", q_weight, q), ("kv_weight", kv_weight, kv)
    weights = _alike(*(check_norm_weight(weight, x.shape[1], name) for name, weight, x in pairs))
    (count, q_dim), kv_dim = q.shape, kv.shape[1]
    q_out, kv_out = q.new_empty(count, q_dim, dtype=dtype), q.new_empty(count, kv_dim, dtype=dtype)
    launch(
        norm_kernel,
        (count,),
        (q, kv, *weights, q_out, kv_out, q.stride(0), kv.stride(0), float(eps)),
        _constants(q_dim, kv_dim, alignment_of_rows(q, kv), dtype, architecture()),
        num_warps=WARPS,
        fp_fusion=False,
    )
    return q_out, kv_out


def _alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both tensors in the wider dtype of both."""
    if first.dtype == second.dtype:
        return first, second
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


@cache
def _constants(q_dim: int, kv_dim: int, rows: int, dtype: torch.dtype, arch: str) -> dict[str, Any]:
    # memory of our own begins at a multiple of 16
    aligned = math.gcd(q_dim * dtype.itemsize, kv_dim * dtype.itemsize, WIDE)
    return {
        "Q_DIM": q_dim,
        "KV_DIM": kv_dim,
        "ROW_ALIGNED": rows,
        "OUT_ALIGNED": aligned,
        "EXACT_CASTS": not INTERPRETED,
        "PDL": uses_pdl(arch) and not INTERPRETED,
    }


@recorded
def variants(
    q_dim: int, kv_dim: int, dtype: torch.dtype, norms: tuple[torch.dtype, ...], *, aligned_rows: bool = True
) -> None:
    """Every variant that the op can need with results of a dtype; products are of that dtype, or fp32.

    norms: dtypes of the weights. aligned_rows: whether rows of products begin at multiples of 16 bytes.
    """
    for source in dict.fromkeys((dtype, torch.float32)):
        both = [row_alignments(dim, source, aligned=aligned_rows) for dim in (q_dim, kv_dim)]
        for rows in dict.fromkeys(both[0] + both[1]):
            q, kv = (meta_rows(2, dim, dtype=source, alignment=rows) for dim in (q_dim, kv_dim))
            for norm in norms:
                norm_q_kv(q, kv, meta_rows(q_dim, dtype=norm), meta_rows(kv_dim, dtype=norm), 0.0, dtype)
