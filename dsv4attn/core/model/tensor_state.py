"""`TensorState`: sees whether a tensor was written, or given other memory, since a copy was made of it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["TensorState"]

_SAMPLED = 256
"""Bytes that are read of a large tensor on the CPU, in every check: about 2 us, and 0.1 us of a small tensor."""
_SMALL = 2048
"""Bytes of a tensor that is read whole."""


class TensorState:
    """What a tensor was like at some time. The tensor is not kept alive, nor is its memory.

    These changes are seen, on every device, by reading attributes of the tensor, without waiting for a device:
    - writes that torch counts: in-place operations, also under `no_grad` and by `load_state_dict`;
    - other memory, also at the same address: `tensor.data = other`, `set_`, a storage that was resized;
    - another dtype, shape or stride.

    On the CPU also writes that torch does not count (`tensor.data.copy_`, inference mode, numpy, other processes): 256
    bytes, spread over the tensor, are compared; of up to 2,048 bytes all are. A write that changes none of these bytes
    is not seen, so a write of few elements of a large matrix may be missed.

    values: whether writes are to be seen. Without them only other memory, and another dtype, shape or stride, count as
    changes: for a tensor that is read where it lies.
    """

    __slots__ = ("_dtype", "_memory", "_pointer", "_sample", "_shape", "_storage", "_stride", "_version")

    def __init__(self, tensor: Tensor, *, values: bool = True) -> None:
        storage = tensor.untyped_storage()
        self._pointer, self._storage = tensor.data_ptr(), storage._cdata  # noqa: SLF001 - the address of its record
        # while this exists, no other storage gets that address
        self._memory: Any = StorageWeakRef(storage), _view(tensor) if values else None
        # torch counts no writes to tensors of inference mode
        self._version = tensor._version if values and not tensor.is_inference() else None  # noqa: SLF001
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        view = self._memory[1]
        self._sample = None if view is None else view.tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a state belongs to no tensor: what was made of a tensor is made again of the tensor's copy."""
        return _unknown, ()

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor whose state this is has not changed since, as far as can be seen."""
        if (
            tensor.data_ptr() != self._pointer
            or tensor.untyped_storage()._cdata != self._storage  # noqa: SLF001
            or (self._version is not None and tensor._version != self._version)  # noqa: SLF001
            or tensor.stride() != self._stride
            or tensor.shape != self._shape
            or tensor.dtype != self._dtype
        ):
            return False
        return self._sample is None or self._sample == self._memory[1].tobytes()


def _unknown() -> TensorState:
    """A state that holds for no tensor."""
    state = TensorState.__new__(TensorState)
    state._pointer = -1  # noqa: SLF001
    return state


def _view(tensor: Tensor) -> memoryview | None:
    """Bytes of a tensor on the CPU that a check reads: all of a small tensor, or some, spread over it.

    The view does not keep the memory alive: it is read only while the tensor has the memory that it had.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.device.type != "cpu" or not tensor.numel():
        return None
    if tensor.layout is not torch.strided:
        return None
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = span * tensor.element_size()
    whole = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
    # an odd step reads low and high bytes of elements in turn
    return whole[:: 1 if size <= _SMALL else size // _SAMPLED | 1]
