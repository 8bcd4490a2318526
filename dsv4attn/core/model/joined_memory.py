"""When tensors may become views of one memory, so that one product reads them all and none is held twice.

A tensor that is moved keeps its object, name, shape, dtype and `requires_grad`; only its memory is another. Other
tensors that share the old memory would no longer see what is written to it. So a tensor moves only if it has its memory
for itself, as far as torch knows: no other tensor uses it, and neither numpy nor another process has it. Tensors that
move together may have shared their memory before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

__all__ = ["follow_each_other", "has_own_memory", "lies_in", "movable", "users_of"]


def follow_each_other(tensors: Sequence[Tensor]) -> bool:
    """Whether dense matrices of one dtype lie in one memory, each where the one before ends."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if (
            not _is_plain(tensor)
            or tensor.data_ptr() != end
            or tensor.dtype != first.dtype
            or tensor.element_size() == 1
            or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return False
        end += tensor.numel() * tensor.element_size()
    return True


def lies_in(tensor: Tensor, place: Tensor) -> bool:
    """Whether a tensor is dense, and its memory is that of a dense place of its shape and dtype."""
    return (
        _is_plain(tensor)
        and (tensor.data_ptr(), tensor.dtype, tensor.shape) == (place.data_ptr(), place.dtype, place.shape)
        and tensor.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()
    )


def movable(tensors: Sequence[Tensor]) -> list[bool]:
    """Which of the tensors can be given other memory together, so that nothing else notices.

    Of a tensor that is named twice, only the first can: it has one memory. Tensors of one byte an element stay.
    """
    by_memory: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        if tensor.element_size() > 1 and has_own_memory(tensor):
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), {})[id(tensor)] = tensor
    able: set[int] = set()
    for sharing in by_memory.values():
        ordered = sorted(sharing.values(), key=Tensor.data_ptr)
        ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in ordered]
        apart = all(end <= after.data_ptr() for end, after in zip(ends, ordered[1:], strict=False))
        if apart and users_of(ordered[0]) == len(ordered):
            able.update(sharing)
    answers = []
    for tensor in tensors:
        answers.append(id(tensor) in able)
        able.discard(id(tensor))
    return answers


def has_own_memory(tensor: Tensor) -> bool:
    """Whether a tensor is dense, is not computed from another, and torch manages its memory in this process alone."""
    if not _is_plain(tensor) or tensor.grad_fn is not None or (tensor.device.type == "cpu" and tensor.is_shared()):
        return False
    return tensor.untyped_storage().resizable()


def users_of(tensor: Tensor) -> int:
    """How many tensors use the memory of a tensor, itself included; more than one where torch does not count them.

    Torch counts them under a private name alone. Public is a weak reference to a storage, which says when its memory is
    free. That is too late: joined memory stays, as captured graphs read it, while others may use it or not.
    """
    if not hasattr(torch._C, "_storage_Use_Count"):  # noqa: SLF001 - no public name
        return 2
    return _count(tensor) - _count_of_one() + 1


def _count(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001 - no public name


@cache
def _count_of_one() -> int:
    """What torch counts for a tensor that has its memory for itself."""
    return _count(torch.empty(1, dtype=torch.uint8, device="cpu"))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, of no subclass that keeps its values in another way, and has memory."""
    return (
        (type(tensor) is Tensor or issubclass(type(tensor), torch.nn.Parameter))
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.device.type != "meta"
        and tensor.numel() > 0
    )
