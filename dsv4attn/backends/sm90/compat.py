"""Names in Gluon that differ between Triton 3.6, which torch 2.11 requires, and 3.9."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy

copy_async: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""(view, pointers, mask=): copies into shared memory; where masked, zeros."""


@builtin  # type: ignore[untyped-decorator, unused-ignore]
def reinterpret(view, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """A view of shared memory as another one of the same bytes."""
    method = getattr(view, "reinterpret", None) or view._reinterpret  # noqa: SLF001 - its name in 3.6
    return method(dtype, shape, layout, _semantic=_semantic)


barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier
"""(): all threads of a program wait for each other."""
