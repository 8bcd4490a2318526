"""Checks of tensors: fields of attrs classes that declare shape, dtype and device, the rule of strides, signatures.

A declared shape is a string such as "T W" or "R+1": integers, letters, and letters plus a constant. Letters are bound
by `size` fields of the same class, otherwise by the first tensor that uses them; "_" fits anything.

One rule of strides for every tensor (docs/contract.md, "Strides"): the last dimension has stride 1. So a 1-D tensor is
dense, and rows of any other may lie apart, as slices of a fused projection do. Rows that are written share no memory.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor

from dsv4attn.errors import ArgumentError

__all__ = [
    "ALIGNMENT",
    "BufferSpec",
    "check_declared",
    "check_norm_weight",
    "check_strides",
    "check_tensor",
    "has_dense_rows",
    "signature",
    "size",
    "tensor",
    "usable_device",
]

BufferSpec = tuple[Sequence[int], torch.dtype]
"""Shape and dtype of one requested view."""

_KEY = "dsv4attn.tensor"
_SIZE = "dsv4attn.size"


def tensor(
    shape: str,
    dtype: torch.dtype,
    *,
    cpu: bool = False,
    copied: bool = False,
    optional: bool = False,
    none_without: str = "",
) -> Any:  # noqa: ANN401 - attrs fields are untyped
    """Attrs field of a tensor.

    shape: see the module. cpu: in host memory; all other tensors of an instance share one device. copied: the instance
    holds a copy, so that the caller may write to the tensor again. optional: may be None, which is the default.
    none_without: a letter; where that count is 0, None is taken for a tensor without elements.
    """
    options: dict[str, Any] = {"metadata": {_KEY: (shape, dtype, cpu, optional, none_without)}}
    if copied:
        options["converter"] = _copy
    return attrs.field(default=None, **options) if optional else attrs.field(**options)


def _copy(value: object) -> object:
    """A copy of a tensor; another value as it is, for the check to refuse."""
    return value.clone() if isinstance(value, Tensor) else value


def size(letter: str) -> Any:  # noqa: ANN401 - attrs fields are untyped
    """Attrs field of an int that binds a letter of the shapes."""
    return attrs.field(metadata={_SIZE: letter})


def check_declared(instance: Any) -> None:  # noqa: ANN401 - any attrs instance
    """Check every declared field of an attrs instance; call it from `__attrs_post_init__`."""
    owner = type(instance).__name__
    fields = [(f"{owner}.{f.name}", getattr(instance, f.name), f.metadata) for f in attrs.fields(type(instance))]
    letters: dict[str, int] = {}
    for name, value, metadata in fields:
        if letter := metadata.get(_SIZE):
            if not isinstance(value, int) or value < 0:
                raise ArgumentError(name, expected="a count >= 0", actual=repr(value))
            letters[letter] = value
    device: torch.device | None = None
    for name, declared_value, metadata in fields:
        value = declared_value
        shape, dtype, cpu, optional, none_without = metadata.get(_KEY, ("", None, False, True, ""))
        if dtype is None or (value is None and optional):
            continue
        if value is None and letters.get(none_without) == 0:
            value = _nothing(shape, dtype, letters, None if cpu else device)
            object.__setattr__(instance, name.rpartition(".")[2], value)
        check_tensor(name, value, shape, dtype, letters)
        required_device = torch.device("cpu") if cpu else device
        if required_device is not None and value.device != required_device:
            raise ArgumentError(name, expected=f"a tensor on {required_device}", actual=f"one on {value.device}")
        device = device if cpu else value.device


def _nothing(shape: str, dtype: torch.dtype, letters: dict[str, int], device: torch.device | None) -> Tensor:
    """A tensor of a declared shape in which every free size is 0."""
    sizes = [(letters.get(letter, 0) if letter else 0) + extra for letter, extra in _dims(shape)]
    with torch.inference_mode(False):  # it outlives the mode that it may be made in
        return torch.empty(sizes, dtype=dtype, device=device)


def check_tensor(
    name: str,
    value: object,
    shape: str,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    letters: dict[str, int],
    *,
    written: bool = False,
    any_strides: bool = False,
    like: str = "",
) -> None:
    """Check one tensor against a declared shape, a dtype and the rule of strides.

    letters: sizes by letter; letters that are not in it are added. written: see `check_strides`. any_strides: skip the
    rule of strides, for tensors that only torch reads. like: the name of a tensor of the same dtype, for the error.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    bound_letters = letters.copy()
    # the message is built in case of an error only: this runs in every call
    if isinstance(value, Tensor) and value.dtype in dtypes and _fits(value.shape, shape, letters):
        if not (any_strides or value.is_contiguous()):
            check_strides(written=(name,) if written else (), **{name: value})
        return
    used = {letter for letter, _ in _dims(shape)}
    bound = ", ".join(f"{k}={v}" for k, v in bound_letters.items() if k in used)
    declared = f"[{', '.join(shape.split())}] {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"
    declared += (f" like {like}" if like else "") + (f" with {bound}" if bound else "")
    if not isinstance(value, Tensor):
        raise ArgumentError(name, expected=f"a tensor {declared}", actual=type(value).__name__)
    actual = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    hint, argument = "", name.rpartition(".")[2]
    if value.dtype not in dtypes and dtypes[0].itemsize > 1:  # not for caches: their bytes cannot be converted
        hint = f"allocate {argument} as {dtypes[0]}" if written else f"pass {argument}.to({dtypes[0]})"
    raise ArgumentError(name, expected=declared, actual=actual, hint=hint)


def check_strides(*, written: Container[str] = (), **tensors: Tensor | None) -> None:
    """Raise ArgumentError unless the last dimension of each tensor has stride 1; call it before the first launch.

    written: names of tensors whose rows may not share memory either, as those of an expanded tensor do. A dimension of
    size 1 may have any stride. None passes.
    """
    for name, value in tensors.items():
        if value is None or value.is_contiguous() or has_dense_rows(value, written=name in written):
            continue
        actual = f"strides {list(value.stride())} of shape {list(value.shape)}"
        if has_dense_rows(value):
            hint = f"give {name} memory of its own for every row, as torch.empty does"
            raise ArgumentError(name, expected="rows that share no memory: they are written", actual=actual, hint=hint)
        dense = "stride 1 in the last dimension; rows may lie apart"
        dense = "a dense tensor, of stride 1" if value.ndim == 1 else dense
        hint = f"write to a dense tensor and copy it to {name}" if name in written else f"pass {name}.contiguous()"
        raise ArgumentError(name, expected=dense, actual=actual, hint=hint)


def check_norm_weight(weight: Tensor | None, dim: int, name: str = "norm.weight") -> Tensor:
    """The weight of a norm. Raises ArgumentError, with the name of the weight, unless it is [dim], bf16 or fp32."""
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16) or weight.shape != (dim,):
        actual = None if weight is None else f"{list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"
        hint = "pass the weight of the norm of these rows, .float() if it has another dtype"
        raise ArgumentError(name, expected=f"[{dim}] float32 or bfloat16", actual=actual, hint=hint)
    return weight


def has_dense_rows(value: Tensor, *, written: bool = False) -> bool:
    """Whether `check_strides` accepts a tensor."""
    shape, strides = value.shape, value.stride()
    if shape and shape[-1] > 1 and strides[-1] != 1:
        return False
    if not written or not value.numel():
        return True
    end = 1  # elements spanned by the dimensions so far, which come in the order of their strides
    for stride, n in sorted(zip(strides, shape, strict=True)):
        if n > 1:
            if stride < end:
                return False
            end += stride * (n - 1)
    return True


def usable_device(device: torch.device | str) -> torch.device:
    """A device, if torch can make tensors on it here; otherwise ArgumentError."""
    usable = device_of(device)
    try:
        torch.empty(0, dtype=torch.uint8, device=usable)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ArgumentError(
            "device", expected="a device that torch can use here", actual=repr(device), hint=reason
        ) from error
    return usable


@cache
def _dims(shape: str) -> tuple[tuple[str, int], ...]:
    """(letter, added constant) of each dimension; no letter for a number, "_" for anything."""
    parts = [dim.partition("+") for dim in shape.split()]
    return tuple(("", int(letter)) if letter.isdigit() else (letter, int(plus or 0)) for letter, _, plus in parts)


def _fits(actual: torch.Size, shape: str, letters: dict[str, int]) -> bool:
    """Whether sizes are the declared ones; binds letters up to the first that differs."""
    dims = _dims(shape)
    if len(actual) != len(dims):
        return False
    for (letter, extra), got in zip(dims, actual, strict=True):
        if letter != "_" and got != (letters.setdefault(letter, got - extra) if letter else 0) + extra:
            return False
    return True


ALIGNMENT = 16
"""Bytes of the widest load, for addresses that are a multiple of it."""


def signature(*values: object) -> tuple[object, ...]:
    """The signature of tensors: type, dtype, shape, strides, device, and address modulo ALIGNMENT of each.

    A prepared call depends on nothing else of its tensors: addresses and values are not part of the signature. None
    maps to None. Non-tensors get a fresh object, so they never match.
    """
    parts: list[object] = []
    for value in values:
        if value is None:
            parts.append(None)
        elif isinstance(value, Tensor):
            parts += (type(value), value.dtype, value.shape, value.stride(), value.device, value.data_ptr() % ALIGNMENT)
        else:
            parts.append(object())
    return tuple(parts)


def device_of(device: torch.device | str | int) -> torch.device:
    """The device of this name. Raises ArgumentError for a name that torch does not have."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        hint = "write it as torch does: 'cpu', 'cuda', 'cuda:1', 'xpu'"
        raise ArgumentError("device", expected="a torch device", actual=repr(device), hint=hint) from error
