"""From a backend's name to the backend."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsv4attn.errors import ArgumentError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from dsv4attn.core.contract import Backend, BackendInfo

__all__ = ["backend_names", "load_backend"]

_BUILT_IN = {"reference": "dsv4attn.backends.reference"}
"""Rooms by name, as strings: a room is imported only after it has been chosen."""


def backend_names() -> list[str]:
    """Names `load_backend` knows."""
    return sorted(_BUILT_IN)


def load_backend(name: str = "reference", **options: Any) -> Backend:  # noqa: ANN401 - options are the backend's own
    """Build the backend of this name. An explicit choice never falls back.

    Raises UnknownNameError for names nobody has, ArgumentError for options the backend does not take.
    """
    if name not in _BUILT_IN:
        raise UnknownNameError("backend", name, _BUILT_IN)
    info: BackendInfo = importlib.import_module(_BUILT_IN[name]).INFO
    for option in options:
        if option not in info.options:
            raise ArgumentError(
                f"backend option {option!r}",
                expected=f"one of {', '.join(info.options) or 'none'}",
                actual=f"an unknown option{did_you_mean(option, info.options)}",
            )
    module, _, factory = info.factory.partition(":")
    backend: Backend = getattr(importlib.import_module(module), factory)(**options)
    return backend
