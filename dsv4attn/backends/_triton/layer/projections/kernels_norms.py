"""The kernel of the norms between the projections of a layer: of the latent of q, and of the key."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import cast
from dsv4attn.backends._triton.sizes import next_power_of_2


@triton.jit
def normed(x, weight, eps, DIM: tl.constexpr):
    """Row x [BLOCK] fp32 over the root of its mean square over DIM values, times weight; zeros past DIM stay zeros."""
    return x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps) * weight


@stable_kernel
def norm_kernel(
    Q,  # [n, Q_DIM]
    KV,  # [n, KV_DIM]
    Q_WEIGHT,  # [Q_DIM]
    KV_WEIGHT,  # [KV_DIM]
    Q_OUT,  # [n, Q_DIM], dense
    KV_OUT,  # [n, KV_DIM], dense
    q_stride: tl.int64, kv_stride: tl.int64, eps: tl.float32,
    Q_DIM: tl.constexpr, KV_DIM: tl.constexpr, ROW_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): both rows of a token.

    ROW_ALIGNED, OUT_ALIGNED: bytes that divide the address of every row of Q and KV, and of every row of the results.
    """
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    q_dim, kv_dim = tl.arange(0, next_power_of_2(Q_DIM)), tl.arange(0, next_power_of_2(KV_DIM))
    q_live, kv_live = q_dim < Q_DIM, kv_dim < KV_DIM
    # all loads come first
    q = tl.load(tl.multiple_of(Q + token * q_stride, ROW_ALIGNED) + q_dim, mask=q_live, other=0.0).to(tl.float32)
    kv = tl.load(tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED) + kv_dim, mask=kv_live, other=0.0).to(tl.float32)
    q_weight = tl.load(Q_WEIGHT + q_dim, mask=q_live, other=0.0).to(tl.float32)
    kv_weight = tl.load(KV_WEIGHT + kv_dim, mask=kv_live, other=0.0).to(tl.float32)
    q = cast(normed(q, q_weight, eps, Q_DIM), Q_OUT.dtype.element_ty, EXACT_CASTS)
    kv = cast(normed(kv, kv_weight, eps, KV_DIM), KV_OUT.dtype.element_ty, EXACT_CASTS)
    tl.store(tl.multiple_of(Q_OUT + token * Q_DIM, OUT_ALIGNED) + q_dim, q, mask=q_live)
    tl.store(tl.multiple_of(KV_OUT + token * KV_DIM, OUT_ALIGNED) + kv_dim, kv, mask=kv_live)
