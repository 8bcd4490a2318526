"""`TensorState`: what a tensor was like, and whether it has changed since. The only place that asks this of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias
from weakref import ref

import torch
from torch import Tensor

__all__ = ["Place", "TensorState", "have_changed"]


class TensorState:
    """What a tensor was like at some time. Neither the tensor nor its memory is kept alive.

    Seen, by reading attributes of the tensor, so that no device is waited for:
    - another tensor in its place;
    - writes that torch counts (`Tensor._version`): in-place operations, also under `no_grad`;
    - other memory, by its address: `tensor.data = other`; and another dtype, shape or stride.

    Not seen: writes that torch does not count (`tensor.data.copy_`, fused optimizers, inference mode, other processes),
    and other memory at the old address. docs/layer.md, "Weights that change", has the whole table.

    writes: whether writes count as changes; False for a tensor that is read where it lies.
    """

    __slots__ = ("_dtype", "_numel", "_pointer", "_stride", "_tensor", "_version")

    def __init__(self, tensor: Tensor, *, writes: bool = True) -> None:
        self._tensor, self._pointer = ref(tensor), tensor.data_ptr()
        # torch counts no writes to tensors of inference mode
        self._version = tensor._version if writes and not tensor.is_inference() else None  # noqa: SLF001
        # for the shape: the number of elements is read in a third of the time, and strides say the rest
        self._dtype, self._numel, self._stride = tensor.dtype, tensor.numel(), tensor.stride()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a state belongs to no tensor: what was made of a tensor is made again of the tensor's copy."""
        return TensorState, (torch.empty(0, dtype=torch.uint8, device="cpu"),)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor; None if it no longer exists."""
        return self._tensor()

    def holds(self, tensor: Tensor | None) -> bool:
        """Whether this is the tensor whose state it is, and no change of it is seen."""
        return (
            tensor is self._tensor()
            and tensor is not None
            and tensor.data_ptr() == self._pointer
            and (self._version is None or tensor._version == self._version)  # noqa: SLF001
            and tensor.stride() == self._stride
            and tensor.numel() == self._numel
            and tensor.dtype is self._dtype
        )


Place: TypeAlias = tuple[Any, str, TensorState]
"""(owner, name, state): `owner.get(name)` is the tensor that is there now, or None."""


def have_changed(places: Iterable[Place]) -> bool:
    """Whether a change of a tensor is seen, or a place has another tensor."""
    for owner, name, state in places:  # noqa: SIM110 - in every step
        if not state.holds(owner.get(name)):
            return True
    return False
