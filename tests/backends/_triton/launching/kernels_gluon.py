"""A kernel of Triton's other language."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["single"]


@gluon.jit(do_not_specialize=["n"])
def single(out, n: tl.int32, B: gl.constexpr):
    """Write one number."""
    gl.store(out + B, n)
