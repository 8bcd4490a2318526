"""Tensor fields that declare their shape, dtype and device, and are checked from that declaration.

A declared shape is a string such as "T W" or "R+1": integers, letters, and letters plus a constant. Letters are bound
by `size` fields of the same class, otherwise by the first tensor that uses them; "_" fits anything. A shape comment
that runs cannot go stale.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor

from dsv4attn.errors import ArgumentError

__all__ = ["check_declared", "check_tensor", "size", "tell", "tensor"]

_KEY = "dsv4attn.tensor"
_SIZE = "dsv4attn.size"


def tensor(shape: str, dtype: torch.dtype, *, cpu: bool = False, optional: bool = False) -> Any:  # noqa: ANN401 - attrs fields are untyped
    """Attrs field of a tensor.

    shape: as the module says. cpu: lives in host memory; all other tensors of an instance share one device.
    optional: may be None, and is by default.
    """
    metadata = {_KEY: (shape, dtype, cpu, optional)}
    return attrs.field(default=None, metadata=metadata) if optional else attrs.field(metadata=metadata)


def size(letter: str) -> Any:  # noqa: ANN401 - attrs fields are untyped
    """Attrs field of an int that binds a letter of the shapes."""
    return attrs.field(metadata={_SIZE: letter})


def check_declared(instance: Any) -> None:  # noqa: ANN401 - any attrs instance
    """Check every declared field of an attrs instance; call it from `__attrs_post_init__`."""
    owner = type(instance).__name__
    fields = attrs.fields(type(instance))
    letters: dict[str, int] = {}
    for f in fields:
        letter = f.metadata.get(_SIZE)
        if letter:
            value = getattr(instance, f.name)
            if not isinstance(value, int) or value < 0:
                raise ArgumentError(f"{owner}.{f.name}", expected="a count >= 0", actual=value)
            letters[letter] = value
    device: torch.device | None = None
    for f in fields:
        if _KEY not in f.metadata:
            continue
        shape, dtype, cpu, optional = f.metadata[_KEY]
        value = getattr(instance, f.name)
        if value is None and optional:
            continue
        name = f"{owner}.{f.name}"
        check_tensor(name, value, shape, dtype, letters)
        wanted = torch.device("cpu") if cpu else device
        if wanted is not None and value.device != wanted:
            raise ArgumentError(name, expected=f"a tensor on {wanted}", actual=f"one on {value.device}")
        device = device if cpu else value.device


def check_tensor(
    name: str,
    value: object,
    shape: str,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    letters: dict[str, int],
) -> None:
    """Check one tensor against a declared shape and dtype; letters that are not bound yet get bound."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    before = letters.copy()
    # words are only made when something is wrong: this runs in every call
    if isinstance(value, Tensor) and value.dtype in dtypes and _fits(value.shape, shape, letters):
        return
    wanted = f"[{', '.join(shape.split())}] {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}"
    if not isinstance(value, Tensor):
        raise ArgumentError(name, expected=f"a tensor {wanted}", actual=type(value).__name__)
    bound = ", ".join(f"{k}={v}" for k, v in before.items() if k in shape)
    actual = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    raise ArgumentError(name, expected=f"{wanted}{f' with {bound}' if bound else ''}", actual=actual)


@cache
def _dims(shape: str) -> tuple[tuple[str, int], ...]:
    """(letter, what is added to it) of each dimension; no letter for a number, "_" for anything."""
    parts = [dim.partition("+") for dim in shape.split()]
    return tuple(("", int(letter)) if letter.isdigit() else (letter, int(plus or 0)) for letter, _, plus in parts)


def _fits(actual: torch.Size, shape: str, letters: dict[str, int]) -> bool:
    """Whether sizes are the declared ones; binds letters up to the first that is not."""
    dims = _dims(shape)
    if len(actual) != len(dims):
        return False
    for (letter, extra), got in zip(dims, actual, strict=True):
        if letter != "_" and got != (letters.setdefault(letter, got - extra) if letter else 0) + extra:
            return False
    return True


def tell(*values: object) -> list[object]:
    """All that is told of tensors but for their addresses and what they hold. Equal where nothing differs.

    What is neither a tensor nor None is like nothing else.
    """
    told: list[object] = []
    for value in values:
        if isinstance(value, Tensor):
            told += (type(value), value.dtype, value.shape, value.stride(), value.device)
        else:
            told.append(None if value is None else object())
    return told
