"""Checks of counts and types, for arguments that are not tensors; `round_up`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from dsv4attn.errors import ArgumentError, did_you_mean

__all__ = ["at_least", "check_count", "check_type", "is_flag", "known_fields", "known_keywords", "round_up", "shown"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


def check_count(argument: str, value: object, minimum: int) -> int:
    """The value, if it is an integer of at least `minimum`, one of numpy's too; otherwise ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or (number := int(value)) < minimum:
        raise ArgumentError(argument, expected=f"an integer of at least {minimum}", actual=repr(value))
    return number


def check_type(argument: str, value: object, expected_type: type, *, cure: str) -> None:
    """Raise ArgumentError, with a cure, unless a value has a type."""
    if not isinstance(value, expected_type):
        raise ArgumentError(argument, expected=f"a {expected_type.__name__}", actual=shown(value), hint=cure)


def shown(value: object) -> str:
    """A value as errors show it: None and strings as they are, of others the type."""
    return repr(value) if value is None or isinstance(value, str) else type(value).__name__


def at_least(minimum: int) -> Any:  # noqa: ANN401 - attrs validators are untyped
    """Attrs validator of a count."""
    return lambda _, attribute, value: check_count(attribute.name, value, minimum)


def is_flag(_: object, attribute: Any, value: object) -> None:  # noqa: ANN401 - attrs' own
    """Attrs validator of what is true or false: the string "false" is neither."""
    if not isinstance(value, bool):
        raise ArgumentError(attribute.name, expected="True or False", actual=repr(value))


def known_keywords(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, which answers a keyword that it does not have with ArgumentError and the nearest one."""
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]

    @wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in known:
                expected, actual = f"a keyword of {', '.join(known)}", f"{name!r}{did_you_mean(name, known)}"
                raise ArgumentError(function.__qualname__.removesuffix(".__init__"), expected=expected, actual=actual)
        return function(*args, **kwargs)

    return checked


def known_fields(cls: _C) -> _C:
    """The class, whose constructor has `known_keywords`."""
    cls.__init__ = known_keywords(cls.__init__)  # type: ignore[misc]
    return cls
