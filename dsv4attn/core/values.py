"""Checks of counts and types, for arguments that are not tensors; `round_up`."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from dsv4attn.errors import ArgumentError

__all__ = ["at_least", "check_count", "check_type", "round_up", "shown"]


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def check_count(argument: str, value: object, minimum: int) -> int:
    """The value, if it is an integer of at least `minimum`, one of numpy's too; otherwise ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (number := int(value)) < minimum:
        raise ArgumentError(argument, expected=f"an integer of at least {minimum}", actual=repr(value))
    return number


def check_type(argument: str, value: object, wanted: type, *, cure: str) -> None:
    """Raise ArgumentError, with a cure, unless a value has a type."""
    if not isinstance(value, wanted):
        raise ArgumentError(argument, expected=f"a {wanted.__name__}", actual=shown(value), hint=cure)


def shown(value: object) -> str:
    """A value as errors show it: None and strings as they are, of others the type."""
    return repr(value) if value is None or isinstance(value, str) else type(value).__name__


def at_least(minimum: int) -> Any:  # noqa: ANN401 - attrs validators are untyped
    """Attrs validator of a count."""
    return lambda _, attribute, value: check_count(attribute.name, value, minimum)
