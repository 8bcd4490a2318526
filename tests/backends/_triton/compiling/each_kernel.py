"""One variant of each kernel, compiled: for programs that interpret nothing, here and in the tests of the wheels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dsv4attn.backends._triton.compiling.aot import cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant


def one_of_each(variants: Iterable[Variant]) -> dict[Any, Variant]:
    """By kernel, the variant whose constants are smallest: it compiles fastest."""
    chosen: dict[Any, Variant] = {}
    for variant in sorted(variants, key=_size):
        chosen.setdefault(variant.kernel, variant)
    return chosen


def _size(variant: Variant) -> int:
    values = [value for _, value in variant.constants]
    numbers = [number for value in values for number in (value if isinstance(value, tuple) else (value,))]
    return sum(number for number in numbers if isinstance(number, int))


def compile_each(variants: Iterable[Variant], target: str) -> dict[str, str]:
    """What the compiler says about one variant of each kernel, by module and name; nothing if it compiles."""
    said = {}
    for kernel, variant in one_of_each(variants).items():
        error = ""
        try:
            cross_compile(variant, TARGETS[target])
        except Exception as raised:  # noqa: BLE001 - whatever a compiler raises
            cause = raised.__cause__ or raised
            error = f"{type(cause).__name__}: {cause}"
        said[f"{kernel.fn.__module__}.{variant.name}"] = error
    return said
