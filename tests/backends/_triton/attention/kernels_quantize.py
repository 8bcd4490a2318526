"""A kernel that quantises and nothing else, so that a test can try every number."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.kernels_insert import encode

__all__ = ["GROUPS", "groups_kernel"]

GROUPS = tl.constexpr(1024)
"""Groups that a program quantises."""


@triton.jit
def groups_kernel(X, CODES, BYTES, S: tl.constexpr, WRITER: tl.constexpr):
    """Codes [n, S] and scale bytes [n], int32, of groups X [n, S] fp32."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * S + tl.arange(0, S)[None, :]
    codes, byte = encode(tl.load(X + at), WRITER)
    tl.store(CODES + at, codes)
    tl.store(BYTES + group, byte)
