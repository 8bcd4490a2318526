"""Whether two tensors share memory, from addresses, shapes and strides alone: nothing is read on a device."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dsv4attn.errors import ArgumentError

__all__ = ["check_apart", "check_results_apart", "share_memory", "span"]

_Dims = list[tuple[int, int]]
"""(stride in bytes, size) of each dimension that has more than one element, the largest stride first."""


def span(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of the last one."""
    return _extent(_dims(tensor), tensor.element_size()) if tensor.numel() else 0


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a byte belongs to an element of both tensors.

    Exact for tensors whose dimensions have the same strides, such as columns of one buffer; other tensors share memory
    if their ranges of addresses do. Tensors without memory, as on "meta", share none.
    """
    if a.device != b.device or a.device.type == "meta" or not (a.numel() and b.numel()):
        return False
    gap = b.data_ptr() - a.data_ptr()
    return -span(b) < gap < span(a) and _meet(_dims(a), _dims(b), gap, a.element_size(), b.element_size())


def check_apart(name: str, written: Tensor | None, **others: Tensor | None) -> None:
    """Raise ArgumentError if a tensor that is written shares memory with another argument of the same call."""
    if written is None:
        return
    for other, tensor in others.items():
        if tensor is not None and share_memory(written, tensor):
            actual = f"the memory of {other}" if written is tensor else f"a tensor that overlaps {other}"
            hint = "a kernel may write a row before others have been read: allocate another tensor"
            raise ArgumentError(name, expected=f"memory apart from that of {other}", actual=actual, hint=hint)


def check_results_apart(results: Mapping[str, Tensor | None], **read: Tensor | None) -> None:
    """Raise ArgumentError if a result of a call shares memory with what the call reads, or with another result.

    Every function that writes to memory of its caller asks this before its first launch.
    results: tensors that the call writes, by the names of its arguments; None for those that the caller did not give.
    read: tensors that it reads, by the names of its arguments.
    """
    written: dict[str, Tensor | None] = {}
    for name, result in results.items():
        check_apart(name, result, **read, **written)
        written[name] = result


def _dims(tensor: Tensor) -> _Dims:
    size = tensor.element_size()
    dims = [(stride * size, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return sorted(dims, reverse=True)


def _extent(dims: _Dims, size: int) -> int:
    return sum(stride * (n - 1) for stride, n in dims) + size


def _meet(a: _Dims, b: _Dims, gap: int, a_size: int, b_size: int) -> bool:
    """Whether elements meet. gap: address of the first element of b, less that of a. sizes: bytes of an element."""
    if not -_extent(b, b_size) < gap < _extent(a, a_size):
        return False
    if not (a and b) or a[0][0] != b[0][0]:
        return True
    pitch = a[0][0]
    if not pitch or _extent(a[1:], a_size) > pitch or _extent(b[1:], b_size) > pitch:
        return True
    # a row of b meets the row of a that begins at or before it, or the row after that one
    first = gap % pitch
    return any(_meet(a[1:], b[1:], start, a_size, b_size) for start in (first, first - pitch))
