"""Triton's interpreter, many times faster.

Triton's interpreter searches and replaces the functions of the language at every call of a device function: here it
does so once in a process. It reads the signature of a kernel at every launch: here once. It computes overflow checks
whose result is dropped: here it does not. It describes the type of every block again: here once per type. Then
functions are recorded and replayed (`replay.py`), with faster steps (`steps.py`) and loads (`memory.py`). A Triton
release that has changed these internals runs as it is. FAST_INTERPRETER=0 skips the last three.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from typing import Any

import numpy as np

from tests.fast_interpreter.memory import replace_loads
from tests.fast_interpreter.replay import replay_functions
from tests.fast_interpreter.steps import replace_steps


def patch_interpreter() -> None:
    """Apply all patches. TRITON_INTERPRET=1 must be set when Triton is imported."""
    replace_language_once()
    remember_signatures()
    forget_overflows()
    remember_dtypes()
    remember_blocks()
    remember_casts()
    remember_members()
    if os.environ.get("FAST_INTERPRETER") != "0":
        replace_loads()
        replace_steps()
        replay_functions()


def replace_language_once() -> None:
    """Replace the functions of the language at the first launch, and leave them replaced: only kernels call them."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is None or not hasattr(scope, "restore"):
        return
    done: set[Any] = set()
    named: dict[int, tuple[Any, set[Any]]] = {}

    class Once(scope):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            self._changes.clear()

    def once(function: Any) -> Any:
        function = inspect.unwrap(function)
        names = function.__globals__
        if id(names) not in named:
            # the dict is kept too, so that no other dict gets its id
            named[id(names)] = names, {m for m in names.values() if inspect.ismodule(m) and m in (tl, tl.core)}
        modules = named[id(names)][1]
        if modules <= done and modules:
            return Once()
        done.update(modules)
        return patch(function)

    interpreter._LangPatchScope = Once
    interpreter._patch_lang = once


def remember_signatures() -> None:
    """Keep the signature of each function of a kernel, which is read at every launch."""
    from triton.runtime import interpreter

    function = interpreter.InterpretedFunction
    start: Any = function.__init__
    rewrite: Any = getattr(function, "rewrite", None)

    def start_once(self: Any, fn: Any, **options: Any) -> None:
        start(self, fn, **options)
        fn.__signature__ = inspect.signature(fn)

    def rewrite_once(self: Any) -> Any:
        rewritten = rewrite(self)
        if "__signature__" not in vars(rewritten):
            rewritten.__signature__ = inspect.signature(rewritten)
        return rewritten

    function.__init__ = start_once
    if rewrite is not None:
        function.rewrite = rewrite_once


def forget_overflows() -> None:
    """Do not compute every sum a second time in 64 bits: only a debug build of Triton uses that check."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and dataclasses.is_dataclass(options) and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)  # type: ignore[type-var]


def remember_dtypes() -> None:
    """Keep the numpy dtype of each Triton type, instead of building the whole table at each look-up."""
    import triton.language as tl
    from triton.runtime import interpreter

    find = getattr(interpreter, "_get_np_dtype", None)
    if find is None:
        return
    dtypes: dict[Any, Any] = {}

    def remembered(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return find(scalar)
        if scalar not in dtypes:
            dtypes[scalar] = find(scalar)
        return dtypes[scalar]

    interpreter._get_np_dtype = remembered


def remember_blocks() -> None:
    """Compute the attributes of block types, and of tensors of such types, once per element type and shape."""
    from triton.language import core

    block, tensor = core.block_type.__init__, core.tensor.__init__
    attributes: dict[Any, dict[str, Any]] = {}

    def of_block(self: Any, element_ty: Any, shape: Any) -> None:
        if any(type(n) is not int for n in shape):
            block(self, element_ty, shape)
            return
        # Types are few and some cannot be hashed. Each stays alive in the attributes that are kept here.
        key = (id(element_ty), *shape)
        if key not in attributes:
            block(self, element_ty, shape)
            attributes[key] = vars(self) | {"_tensors": _attributes(tensor, self)}
        vars(self).update(attributes[key])

    def of_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - its name in Triton
        known = vars(type).get("_tensors")
        if known is None:
            tensor(self, handle, type)
        else:
            vars(self).update(known, handle=handle, type=type)

    core.block_type.__init__ = of_block
    core.tensor.__init__ = of_tensor


def remember_casts() -> None:
    """Cast narrow floats by a table with all values of their type."""
    from triton.runtime import interpreter

    convert = getattr(interpreter, "_convert_float", None)
    if convert is None:
        return
    tables: dict[Any, Any] = {}

    def looked_up(values: Any, of: Any, to: Any, rounding: Any) -> Any:
        if of.primitive_bitwidth > 16:
            return convert(values, of, to, rounding)
        key = of.name, to.name, rounding
        kind = np.dtype(f"uint{of.primitive_bitwidth}")
        if key not in tables:
            tables[key] = convert(np.arange(2**of.primitive_bitwidth, dtype=kind), of, to, rounding)
        return tables[key][np.ascontiguousarray(values).view(kind)]

    interpreter._convert_float = looked_up


def remember_members() -> None:
    """Search each module or class for operations of the language once."""
    from triton.runtime import interpreter

    members: dict[Any, list[tuple[str, Any]]] = {}
    is_builtin = interpreter.tl.core.is_builtin

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in members:
            members[package] = [(name, member) for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name, member in members[package]:
            interpreter._patch_attr(package, name, member, builder, scope)

    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_builtin"):
        interpreter._patch_builtin = patch_builtin


def _attributes(make: Any, type: Any) -> dict[str, Any]:  # noqa: A002 - its name in Triton
    """Attributes of a tensor of this type, without its handle and type."""
    from triton.language import core

    tensor = object.__new__(core.tensor)
    make(tensor, None, type)
    return {name: value for name, value in vars(tensor).items() if name not in ("handle", "type")}
