"""`without_modes`: a function that computes outside of autocast, and records no gradients.

The package is for inference. Autocast would round what is defined in fp32, and a graph of autograd would hold on to the
caches that a step writes. Functions that compute leave both modes where they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import is_grad_enabled, no_grad
from torch._C import _DisableAutocast, _is_any_autocast_enabled

__all__ = ["guard_methods", "is_autocast_on", "is_capturing", "no_autocast", "without_modes"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

is_autocast_on: Callable[[], bool] = _is_any_autocast_enabled
"""Whether autocast is on for any type of device. Torch 2.6 to 2.13 have this private name; public ones ask for one."""

no_autocast: Any = _DisableAutocast
"""A context in which autocast is off for all types of devices. Torch 2.6 to 2.13 have this private name."""

_TRACED = ("cpu", "cuda", "xpu")
"""Types of devices whose autocast is left in code that a compiler traces, which cannot trace `no_autocast`."""


def without_modes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, but it runs with autocast off and records no gradients. It costs little where both are off."""

    @wraps(function)
    def run(*args: _P.args, **options: _P.kwargs) -> _R:
        if not (is_grad_enabled() or is_autocast_on()):
            return function(*args, **options)
        if torch.compiler.is_compiling():
            return _traced(function, args, options)
        with no_grad(), no_autocast():
            return function(*args, **options)

    return run


def guard_methods(cls: type, names: Iterable[str]) -> None:
    """Put `without_modes` around those of the named methods that a class defines itself."""
    attributes = vars(cls)
    for name in names:
        method = attributes.get(name)
        if isinstance(method, staticmethod):
            setattr(cls, name, staticmethod(without_modes(method.__func__)))
        elif callable(method):
            setattr(cls, name, without_modes(method))


def _traced(function: Callable[..., _R], args: Any, options: Any) -> _R:  # noqa: ANN401 - of any function
    for device in _TRACED:
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return _traced(function, args, options)
    with no_grad():
        return function(*args, **options)


def is_capturing(device: torch.device) -> bool:
    """Whether launches on a device are recorded into a graph now, instead of run."""
    if device.type in ("cpu", "meta"):
        return False
    capturing = getattr(torch.get_device_module(device.type), "is_current_stream_capturing", None)
    return bool(capturing and capturing())
