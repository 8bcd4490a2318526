"""The norms between the projections of a layer: of the latent of q, and of the key."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.compressor import rms_norm
from dsv4attn.core.torch_ops.tiles import arithmetic_of

__all__ = ["norm_q_kv"]


@without_modes
def norm_q_kv(
    q: Tensor,
    kv: Tensor,
    q_weight: Tensor,
    kv_weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of both: (q [T, L], kv [T, D]) in dtype, rounded once. Neither argument is changed.

    q: [T, L] bf16 or fp32 - latents of q.
    kv: [T, D] of the dtype of q - keys.
    q_weight: [L] bf16 or fp32 - weight of the norm of q.
    kv_weight: [D] bf16 or fp32 - weight of the norm of kv.
    eps: epsilon of both norms.
    dtype: of the results, bf16 or fp32.
    """
    arithmetic = arithmetic_of(deterministic)
    pairs = (q, q_weight), (kv, kv_weight)
    normed = [rms_norm(x, weight, eps, arithmetic).to(dtype) for x, weight in pairs]
    return normed[0], normed[1]
