"""Keys of kernels that are the same in every process.

Triton's key of a kernel has the global constants of the functions that the kernel calls. Triton merges the constants of
a function before it has looked for them, so the key lacks those of a function that had no key yet. The keys of a
process then depend on which kernels the process compiled before, and a kernel that another process has compiled may not
be found in the cache. Functions that get their key before their callers cause no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, ModuleType

from triton.runtime.jit import JITCallable

from dsv4attn.backends._triton.untyped import Kernel


def settle_key(kernel: Kernel) -> None:
    """Compute Triton's key of a kernel, after the keys of all functions that the kernel calls.

    A kernel that has a key, and an interpreted kernel, stay as they are.
    """
    _settle(kernel, set())


def _settle(function: Kernel, visited: set[int]) -> None:
    if not isinstance(function, JITCallable) or function.hash is not None or id(function) in visited:
        return
    visited.add(id(function))
    for callee in _possible_callees(function):
        _settle(callee, visited)
    _ = function.cache_key


def _possible_callees(function: Kernel) -> Iterator[object]:
    """Whatever the names in a function's code may refer to outside of the function."""
    names = dict.fromkeys(_names(function.fn.__code__))
    scope = function.get_capture_scope()
    for value in (scope[name] for name in names if name in scope):
        yield value
        # Triton's own functions are in no key
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] != "triton":
            yield from (getattr(value, name) for name in names if hasattr(value, name))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    # variables of an enclosing function
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
