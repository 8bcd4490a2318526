"""Steps of Triton's interpreter that do little more than call numpy.

A step of the interpreter checks the size of its result twice and looks up scalar types, which takes longer than most
numpy functions take on a small block. Here the size of a type is computed once. `test_steps.py` compares each step with
the interpreter's original step. A Triton release whose steps are written in another way keeps its own steps.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np

REPLACED: dict[str, Any] = {}
"""The interpreter's original steps that were replaced, by name; `__init__` is that of a tensor handle."""
_BOOL = np.dtype(bool)
_SAME_FOR_BOOL = {
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
"""Functions with the same result for booleans and for integers of one bit, as which the interpreter treats booleans."""
_SMALL = 4096
"""Elements of a block that is copied in less time than numpy takes to make a view of it."""
_ADDRESS_BYTES = 1 << 30
"""Size limit of an address: an address is never made narrower."""


def replace_steps() -> None:
    """Replace the interpreter's steps."""
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    if [field.name for field in dataclasses.fields(handle)] != ["data", "dtype", "attr"]:
        return
    dtype_of = interpreter._get_np_dtype
    others: dict[Any, Any] = {
        ("create_addptr", ("self", "ptr", "offset")): _add_to_pointer(handle),
        ("create_expand_dims", ("self", "arg", "axis")): _expand(handle),
        ("create_broadcast", ("self", "arg", "shape")): _broadcast(handle),
        ("create_splat", ("self", "ret_ty", "arg")): _splat(handle, dtype_of),
    }
    for name, step in list(vars(builder).items()):
        if not inspect.isfunction(step):
            continue
        words, parameters = step.__code__.co_names, tuple(inspect.signature(step).parameters)
        if (words[:2], parameters) == (("binary_op", "np"), ("self", "lhs", "rhs")) and len(words) == 3:
            _replace(builder, name, _binary(handle, getattr(np, words[2]), builder.binary_op, dtype_of))
        elif (name, words) == ("create_select", ("ternary_op", "np", "where")):
            _replace(builder, name, _select(handle, builder.ternary_op))
        elif (name, parameters) in others:
            _replace(builder, name, others[name, parameters])
    if REPLACED:
        _replace(handle, "__init__", _make_handle)
        _silence_warnings(interpreter.GridExecutor)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    REPLACED[name] = vars(owner)[name]
    setattr(owner, name, replacement)


def _silence_warnings(executor: Any) -> None:
    """Make infinities and NaN without a warning, as a GPU does."""
    run = executor.__call__

    def quietly(self: Any, *args: Any, **options: Any) -> None:
        with np.errstate(all="ignore"):
            run(self, *args, **options)

    executor.__call__ = quietly


def _make_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Initialise a handle without the check of its size: no step makes a block that is wider than its type."""
    self.data = data
    self.dtype = dtype
    self.attr = {} if attr is None else attr


def _scalar_and_bytes(dtype: Any) -> tuple[Any, int]:
    """Scalar of a type and its bytes. Both are kept in the type."""
    scalar = dtype.scalar
    dtype._scalar_and_bytes = (
        scalar,
        _ADDRESS_BYTES if hasattr(scalar, "element_ty") else max(scalar.primitive_bitwidth // 8, 1),
    )
    known: tuple[Any, int] = dtype._scalar_and_bytes
    return known


def _binary(handle: Any, function: Any, original: Any, dtype_of: Any) -> Any:
    same_for_bool = function in _SAME_FOR_BOOL

    def step(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.data, rhs.data
        if not same_for_bool and a.dtype is _BOOL and b.dtype is _BOOL:
            return original(self, lhs, rhs, function)
        out, dtype = function(a, b), lhs.dtype
        try:
            scalar, size = dtype._scalar_and_bytes
        except AttributeError:
            scalar, size = _scalar_and_bytes(dtype)
        return handle(out if out.itemsize <= size else out.astype(dtype_of(scalar)), scalar)

    return step


def _select(handle: Any, original: Any) -> Any:
    def step(self: Any, cond: Any, lhs: Any, rhs: Any) -> Any:
        out, dtype = np.where(cond.data, lhs.data, rhs.data), rhs.dtype
        try:
            scalar, size = dtype._scalar_and_bytes
        except AttributeError:
            scalar, size = _scalar_and_bytes(dtype)
        return handle(out, scalar) if out.itemsize <= size else original(self, cond, lhs, rhs, np.where)

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


def _broadcast(handle: Any) -> Any:
    def step(self: Any, arg: Any, shape: Any) -> Any:
        data = arg.data
        if math.prod(shape) > _SMALL or data.ndim > len(shape):
            return handle(np.broadcast_to(data, shape), arg.dtype.scalar)
        out = np.empty(shape, data.dtype)
        out[...] = data
        return handle(out, arg.dtype.scalar)

    return step


def _splat(handle: Any, dtype_of: Any) -> Any:
    def step(self: Any, ret_ty: Any, arg: Any) -> Any:
        dtype, scalar = arg.dtype, arg.dtype.scalar
        out = np.empty(ret_ty.shape, dtype_of(dtype))
        out[...] = arg.data if dtype is scalar else arg.data[0]
        return handle(out, scalar)

    return step
