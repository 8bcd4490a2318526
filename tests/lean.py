"""Steps of Triton's interpreter with little around the functions of numpy that they call.

A step of the interpreter checks the size of what it made twice and asks types for their scalars, which takes longer
than most of numpy's functions take on a small block. Here a type says once how many bytes it has. `tests/test_lean.py`
compares each step with the interpreter's own. A release whose steps are written in another way keeps them.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np

__all__ = ["REPLACED", "lean_steps"]

REPLACED: dict[str, Any] = {}
"""The interpreter's own steps by name, and how it makes a block (`__init__`), in whose place others stand."""
_BOOL = np.dtype(bool)
_AS_THEY_ARE = {
    np.bitwise_and,
    np.bitwise_or,
    np.bitwise_xor,
    np.equal,
    np.not_equal,
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
}
"""Functions that give the same for truth values as for integers of one bit, which the interpreter takes them for."""
_ANY = 1 << 30
"""Bytes of an address: of whatever size it is, it stays so."""


def lean_steps() -> None:
    """Put lean steps in the place of the interpreter's."""
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    if [field.name for field in dataclasses.fields(handle)] != ["data", "dtype", "attr"]:
        return
    dtype_of = interpreter._get_np_dtype
    for name, step in list(vars(builder).items()):
        if not inspect.isfunction(step):
            continue
        words, given = step.__code__.co_names, tuple(inspect.signature(step).parameters)
        if (words[:2], given) == (("binary_op", "np"), ("self", "lhs", "rhs")) and len(words) == 3:
            _put(builder, name, _binary(handle, getattr(np, words[2]), builder.binary_op, dtype_of))
        elif (name, words) == ("create_select", ("ternary_op", "np", "where")):
            _put(builder, name, _select(handle, builder.ternary_op))
        elif (name, given) == ("create_addptr", ("self", "ptr", "offset")):
            _put(builder, name, _add_to_pointer(handle))
        elif (name, given) == ("create_expand_dims", ("self", "arg", "axis")):
            _put(builder, name, _expand(handle))
    if REPLACED:
        _put(handle, "__init__", _handle)
        _put_silence(interpreter.GridExecutor)


def _put(owner: Any, name: str, made: Any) -> None:
    REPLACED[name] = vars(owner)[name]
    setattr(owner, name, made)


def _put_silence(executor: Any) -> None:
    """Make infinities and NaN without a word, as a GPU does; else numpy would name these steps in its warnings."""
    run = executor.__call__

    def quietly(self: Any, *args: Any, **options: Any) -> None:
        with np.errstate(all="ignore"):
            run(self, *args, **options)

    executor.__call__ = quietly


def _handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """A handle whose size is not checked: steps make blocks that are no wider than their type."""
    self.data = data
    self.dtype = dtype
    self.attr = {} if attr is None else attr


def _lean(dtype: Any) -> tuple[Any, int]:
    """The scalar of a type, and its bytes; the type knows them from now on."""
    scalar = dtype.scalar
    dtype._lean = scalar, _ANY if hasattr(scalar, "element_ty") else max(scalar.primitive_bitwidth // 8, 1)
    known: tuple[Any, int] = dtype._lean
    return known


def _binary(handle: Any, function: Any, own: Any, dtype_of: Any) -> Any:
    any_values = function in _AS_THEY_ARE

    def step(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.data, rhs.data
        if not any_values and a.dtype is _BOOL and b.dtype is _BOOL:
            return own(self, lhs, rhs, function)
        out, dtype = function(a, b), lhs.dtype
        try:
            scalar, size = dtype._lean
        except AttributeError:
            scalar, size = _lean(dtype)
        return handle(out if out.itemsize <= size else out.astype(dtype_of(scalar)), scalar)

    return step


def _select(handle: Any, own: Any) -> Any:
    def step(self: Any, cond: Any, lhs: Any, rhs: Any) -> Any:
        out, dtype = np.where(cond.data, lhs.data, rhs.data), rhs.dtype
        try:
            scalar, size = dtype._lean
        except AttributeError:
            scalar, size = _lean(dtype)
        return handle(out, scalar) if out.itemsize <= size else own(self, cond, lhs, rhs, np.where)

    return step


def _add_to_pointer(handle: Any) -> Any:
    def step(self: Any, ptr: Any, offset: Any) -> Any:
        dtype = ptr.dtype
        try:
            size = dtype._pointed
        except AttributeError:
            size = dtype._pointed = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        return handle(ptr.data + size * offset.data.astype(np.uint64), dtype)

    return step


def _expand(handle: Any) -> Any:
    def step(self: Any, arg: Any, axis: int) -> Any:
        data, scalar = arg.data, arg.dtype.scalar
        if not 0 <= axis <= data.ndim:
            return handle(np.expand_dims(data, axis), scalar)
        return handle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), scalar)

    return step
