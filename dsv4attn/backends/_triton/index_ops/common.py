"""What launchers of index kernels have in common: the size of a round, and the forms of such a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.compiled import Constants
from dsv4attn.backends._triton.untyped import Kernel

__all__ = ["BLOCK", "CONSTANTS", "depth_of", "variant_of"]

BLOCK = 1024
"""Columns a program looks at together; wider rows take several rounds."""
CONSTANTS = Constants({"BLOCK": BLOCK})

_INTEGERS = {"tl.int32", "tl.int64"}


def variant_of(
    kernel: Kernel, constants: Mapping[str, Any], *absent: str, num_warps: int = 4, **pointers: str
) -> Variant:
    """Form of an index kernel. absent: pointers that are None. pointers: types of those that are not to int32."""
    types = {
        p.name: "int" if p.annotation in _INTEGERS else "none" if p.name in absent else pointers.get(p.name, "*i32")
        for p in inspect.signature(kernel.fn).parameters.values()
        if p.name not in constants
    }
    return Variant(kernel, types, constants, num_warps=num_warps)


def depth_of(num_reqs: int) -> int:
    """Halvings after which `request_of` has one request left."""
    return max(num_reqs - 1, 0).bit_length()
