"""Programmatic dependent launch (PDL): a kernel starts before the previous kernel in the stream has ended.

Kernels whose constant PDL is true are launched this way, and call the functions of `kernels_pdl`.
"""

from __future__ import annotations

from functools import cache

_ARCHITECTURES = frozenset({"sm_90"})
"""Architectures on which PDL was measured. CUDA supports it from sm_90 on."""


_OLDEST_DRIVER = 12030
"""The first driver that captures such launches in graphs: CUDA 12.3."""


def uses_pdl(arch: str) -> bool:
    """Whether kernels for an architecture use PDL. They do not if the driver of this machine is too old."""
    return arch in _ARCHITECTURES and _driver() >= _OLDEST_DRIVER


@cache
def _driver() -> int:
    """CUDA version of the driver as a number, 13010 for 13.1. Without a driver: the oldest that supports PDL."""
    import torch  # `explain` reads tunings without torch

    read = getattr(torch._C, "_cuda_getDriverVersion", None)  # noqa: SLF001 - no public name
    return int(read()) if read is not None and torch.accelerator.is_available() else _OLDEST_DRIVER
