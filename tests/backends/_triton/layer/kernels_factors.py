"""Kernels that take factors apart, and mix by factors, as those of the hyper-connections do."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.hyper_connections.kernels import sinkhorn_by_factors, split_factors


@stable_kernel
def parts_kernel(
    FACTORS,  # [C] fp32
    OUT,  # [3, C] fp32
    C: tl.constexpr,
):
    """Grid: (1,): the three parts of each factor, the smallest first."""
    at = tl.arange(0, C)
    parts = split_factors(tl.load(FACTORS + at), True)
    for i in tl.static_range(3):
        tl.store(OUT + (i * C + at), parts[i].to(tl.float32))


@stable_kernel
def factors_kernel(
    LOGITS,  # [C, N, N] fp32
    OUT,  # [C, N, N] fp32
    repeat: tl.int32, eps: tl.float32, C: tl.constexpr, N: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: (1,): matrices of logits by `sinkhorn_by_factors`."""
    at = tl.arange(0, C) * (N * N)
    logits = ()
    for e in tl.static_range(N * N):
        logits += (tl.load(LOGITS + at + e),)
    comb = sinkhorn_by_factors(logits, repeat, eps, N, ASM)
    for e in tl.static_range(N * N):
        tl.store(OUT + at + e, comb[e])
