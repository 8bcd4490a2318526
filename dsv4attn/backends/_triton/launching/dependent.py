"""Programmatic dependent launch: a kernel is launched while the kernel before it in the stream still ends.

Kernels with constant PDL are launched so, and do what `kernels_dependent` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["launch_options", "overlaps"]

_MEASURED = frozenset({"sm_90"})
"""CUDA has it from sm_90 on. Elsewhere it was not measured."""


def overlaps(arch: str) -> bool:
    """Whether kernels for an architecture have PDL set."""
    return arch in _MEASURED


def launch_options(constants: Mapping[str, Any]) -> dict[str, bool]:
    """Options of Triton for launches of a kernel with these constants."""
    return {"launch_pdl": True} if constants.get("PDL") else {}
