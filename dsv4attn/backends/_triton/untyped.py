"""Type aliases for Triton's objects, which have no types."""

from __future__ import annotations

from typing import Any, TypeAlias

Kernel: TypeAlias = Any
"""The result of `triton.jit`, `gluon.jit`, `stable_kernel` or `stable_gluon`; interpreted or not."""
CompiledKernel: TypeAlias = Any
"""A `Kernel` compiled for one device: `triton.compiler.CompiledKernel`."""
