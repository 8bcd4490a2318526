"""Type aliases for Triton's objects, which have no types."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["CompiledKernel", "Kernel"]

Kernel: TypeAlias = Any
"""What `triton.jit`, `gluon.jit`, `stable_kernel` or `stable_gluon` made of a function; interpreted or not."""
CompiledKernel: TypeAlias = Any
"""What Triton compiled of a `Kernel` for one device: `triton.compiler.CompiledKernel`."""
