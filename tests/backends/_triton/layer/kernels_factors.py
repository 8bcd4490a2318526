"""A kernel that takes factors apart as those of the hyper-connections do."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.kernels_hyper_connections import split_factors


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
