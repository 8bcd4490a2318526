"""Named tuples of numbers as parameters of kernels, with the width of every number fixed.

Triton ignores `do_not_specialize` inside tuples (releases 3.6 to 3.9). Inside a tuple, Triton compiles the number 1
into the code, compiles another variant for multiples of 16, and chooses 32 or 64 bits by the value. So a stride that no
warm-up knew would compile a kernel in a request. Here the annotation of a field is the width of its number, and no
value compiles anything. Pointers are never in such a tuple: Triton would compile another variant for their alignment.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_type_hints

from triton.runtime.jit import create_function_from_signature

from dsv4attn.backends._triton.untyped import Kernel

Int32: TypeAlias = Annotated[int, "i32"]
Int64: TypeAlias = Annotated[int, "i64"]
Float32: TypeAlias = Annotated[float, "fp32"]

_FLAT = frozenset({inspect.Parameter.empty, "tl.int32", "tl.int64", "tl.float32", "tl.constexpr", "gl.constexpr"})
"""Annotations of parameters that are not named tuples of numbers. A pointer has none."""


def number_types(function: Callable[..., object]) -> dict[int, tuple[str, ...]]:
    """Triton's types of the numbers in each named tuple among a kernel's parameters.

    The key is the index of the parameter. The value is a tuple of the parameter's own class.
    """
    types = {}
    for i, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.annotation not in _FLAT:
            named_tuple = function.__globals__[parameter.annotation]
            hints = get_type_hints(named_tuple, include_extras=True).values()
            types[i] = named_tuple(*(hint.__metadata__[0] for hint in hints))
    return types


def fix_number_types(kernel: Kernel, types: dict[int, tuple[str, ...]]) -> None:
    """Let a kernel of `triton.jit` or `gluon.jit` compile the named tuples at these indices with these types."""
    create_binder = kernel.create_binder

    def create_fixed_binder() -> tuple[Any, ...]:
        *others, bind = create_binder()
        return (*others, _with_types(bind, types))

    kernel.number_types, kernel.device_caches = types, defaultdict(create_fixed_binder)


def bind_arguments(kernel: Kernel, backend: Any) -> Callable[..., tuple[Any, ...]]:  # noqa: ANN401 - Triton's own
    """The function with which a launch of a kernel processes its arguments, for Triton's compiler backend."""
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return _with_types(bind, getattr(kernel, "number_types", {}))


def _with_types(bind: Callable[..., Any], types: dict[int, tuple[str, ...]]) -> Callable[..., tuple[Any, ...]]:
    def bind_with_types(*args: object, **options: object) -> tuple[Any, ...]:
        bound, specialization, rest = bind(*args, **options)
        for i, of_numbers in types.items():
            # no attributes: nothing is known about a value
            specialization[i] = of_numbers, None
        return bound, specialization, rest

    return bind_with_types if types else bind
