"""Loads of Triton's interpreter, by numpy: its own take 9 ns for an element, these take 1 ns.

All of a process's memory is one array of each size of element, from which numpy takes what the addresses of a block
name. `test_memory.py` compares the loads with the interpreter's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ORIGINAL: list[Any] = []
"""The interpreter's own load, if it was replaced."""
_FIRST_PAGE = 4096
"""Where the memory begins that a process may have."""
_MEMORY_BYTES = 1 << 56
"""More bytes than a process may address."""
_FEW = 256
"""Elements that the interpreter loads in less time than numpy takes to begin."""


class _Memory:
    """All memory of this process as elements of a number of bytes, for numpy."""

    def __init__(self, size: int) -> None:
        shape = ((_MEMORY_BYTES - _FIRST_PAGE) // size,)
        self.__array_interface__ = {"version": 3, "data": (_FIRST_PAGE, True), "typestr": f"<u{size}", "shape": shape}


def replace_loads() -> None:
    """Replace the load at which all loads of blocks end."""
    from triton.runtime import interpreter

    compiled = getattr(interpreter, "_interpreter", None)
    if compiled is None or not hasattr(compiled, "load"):
        return
    own = compiled.load
    memory = {size: np.asarray(_Memory(size)) for size in (1, 2, 4, 8)}
    spare = np.zeros(1, np.uint64)  # read in the place of what is masked
    spare_address = np.uint64(spare.ctypes.data)

    def load(addresses: NDArray[np.uint64], mask: NDArray[np.bool_], other: NDArray[Any], dtype: Any) -> Any:
        size = dtype.itemsize
        if addresses.size < _FEW or size not in memory or other.dtype != dtype:
            return own(addresses, mask, other, dtype)
        whole = mask.all()
        offsets = (addresses if whole else np.where(mask, addresses, spare_address)) - np.uint64(_FIRST_PAGE)
        if size > 1:
            if int(np.bitwise_or.reduce(offsets, axis=None)) % size:
                return own(addresses, mask, other, dtype)
            offsets >>= np.uint64(size.bit_length() - 1)
        values = memory[size].take(offsets.view(np.int64)).view(dtype)
        return values if whole else np.where(mask, values, other)

    ORIGINAL.append(own)
    compiled.load = load
