"""Names for what Triton makes: it ships no types, and annotations say at least which object is meant."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["CompiledKernel", "Kernel"]

Kernel: TypeAlias = Any
"""What `triton.jit`, `gluon.jit`, `stable_kernel` or `stable_gluon` made of a function; interpreted or not."""
CompiledKernel: TypeAlias = Any
"""What Triton compiled of a `Kernel` for one device: `triton.compiler.CompiledKernel`."""
