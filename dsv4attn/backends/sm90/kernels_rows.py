"""The kernel of bf16 rows under its own name: the same entry point as `kernels` has."""

from __future__ import annotations

from dsv4attn.backends.sm90.kernels import attention

__all__ = ["attention"]
