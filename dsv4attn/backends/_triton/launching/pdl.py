"""Programmatic dependent launch: a kernel is launched while the kernel before it in the stream still ends.

Kernels with constant PDL are launched so, and do what `kernels_pdl` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

__all__ = ["launch_options", "uses_pdl"]

_MEASURED = frozenset({"sm_90"})
"""CUDA has it from sm_90 on. Elsewhere it was not measured."""


_CAPTURED = 12030
"""The first driver that captures such launches in graphs: CUDA 12.3."""


def uses_pdl(arch: str) -> bool:
    """Whether kernels for an architecture have PDL set: not if the driver here is too old."""
    return arch in _MEASURED and _driver() >= _CAPTURED


@cache
def _driver() -> int:
    """CUDA version of the driver as a number, 13010 for 13.1; the first that will do where there is none."""
    import torch  # not where `explain` asks for tunings

    read = getattr(torch._C, "_cuda_getDriverVersion", None)  # noqa: SLF001 - no public name
    return int(read()) if read is not None and torch.accelerator.is_available() else _CAPTURED


def launch_options(constants: Mapping[str, Any]) -> dict[str, bool]:
    """Options of Triton for launches of a kernel with these constants."""
    return {"launch_pdl": True} if constants.get("PDL") else {}
