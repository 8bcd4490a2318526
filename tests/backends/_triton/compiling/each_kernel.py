"""One variant of each kernel, compiled: for programs that interpret nothing, here and in the tests of the wheels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn
from unittest import mock

from triton.compiler.compiler import make_backend

from dsv4attn.backends._triton.compiling.aot import cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant

__all__ = ["compile_each", "one_of_each"]


class _Read(Exception):  # noqa: N818 - no error
    """The compiler has read a kernel, and the rest of it knows nothing of Python."""


def one_of_each(variants: Iterable[Variant]) -> dict[Any, Variant]:
    """By kernel, the variant whose constants are smallest: it compiles fastest."""
    chosen: dict[Any, Variant] = {}
    for variant in sorted(variants, key=_size):
        chosen.setdefault(variant.kernel, variant)
    return chosen


def _size(variant: Variant) -> int:
    return sum(value for _, value in variant.constants if isinstance(value, int))


def compile_each(variants: Iterable[Variant], target: str, *, whole: bool = True) -> dict[str, str]:
    """What the compiler says about one variant of each kernel, by module and name; nothing if it compiles.

    whole: False ends each compilation once the compiler has read the Python of the kernel and of all that it calls,
    and passed it through its first stage: that is all of it which another package in the process can change.
    """
    backend, said = type(make_backend(TARGETS[target].gpu)), {}
    add_stages = backend.add_stages

    def add_first(self: Any, stages: dict[str, Any], *arguments: Any) -> None:
        add_stages(self, stages, *arguments)
        for name in () if whole else [*stages][1:]:
            stages[name] = _stop

    for kernel, variant in one_of_each(variants).items():
        error = ""
        try:
            with mock.patch.object(backend, "add_stages", add_first):
                cross_compile(variant, TARGETS[target])
        except _Read:
            pass
        except Exception as raised:  # noqa: BLE001 - whatever a compiler raises
            cause = raised.__cause__ or raised
            error = f"{type(cause).__name__}: {cause}"
        said[f"{kernel.fn.__module__}.{variant.name}"] = error
    return said


def _stop(*_: object) -> NoReturn:
    raise _Read
