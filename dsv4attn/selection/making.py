"""From a descriptor that has won to a backend that runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from dsv4attn.config import Settings
from dsv4attn.core.contract import Backend, BackendInfo, Forms
from dsv4attn.core.device import DeviceFacts, version_of
from dsv4attn.errors import (
    ArgumentError,
    BrokenBackendError,
    ConfigError,
    Dsv4AttnError,
    UnknownNameError,
    did_you_mean,
)
from dsv4attn.plugins import STRANGE, first_line
from dsv4attn.selection.decision import install_cure

__all__ = ["build", "configured"]


def configured(info: BackendInfo, settings: Settings, options: Mapping[str, Any]) -> Backend:
    """Build a backend with the configuration's options below the ones given."""
    found = settings.options.get(info.name, {})
    where = f"options.{info.name} in {settings.file or 'the settings'}"
    for option in found:
        if option not in info.options:
            known = f"(known: {', '.join(info.options) or 'none'})"
            raise ConfigError(where, f"unknown option {option!r}{did_you_mean(option, info.options)} {known}")
    try:
        return build(info, {**found, **options})
    except (ArgumentError, UnknownNameError) as error:
        if found and not options:
            raise ConfigError(where, str(error)) from error
        raise


def build(info: BackendInfo, options: Mapping[str, Any]) -> Backend:
    """Import and make a backend. Raises BrokenBackendError, with the cause, if its implementation cannot be had."""
    for option in options:
        if option not in info.options:
            raise ArgumentError(
                f"option {option!r} of backend {info.name}",
                expected=f"one of {', '.join(info.options) or 'none'}",
                actual=f"an unknown option{did_you_mean(option, info.options)}",
            )
    module, _, factory = info.factory.partition(":")
    try:
        made = getattr(importlib.import_module(module), factory)(**options)
        _check_made(info, made)
    except (Dsv4AttnError, KeyboardInterrupt):
        raise
    except STRANGE as error:
        if options and isinstance(error, (TypeError, ValueError)):
            actual = f"{dict(options)} ({first_line(error)})"
            raise ArgumentError(f"options of backend {info.name}", expected="values it takes", actual=actual) from error
        missing = [package for package in info.packages if package != "triton" and version_of(package) is None]
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "triton":
            missing.append("triton")
        here = DeviceFacts.here() if missing else None
        cure = f" -> {' and '.join(install_cure(package, here) for package in missing)}" if here else ""
        raise _broken(info, f"{first_line(error)}{cure}") from error
    backend: Backend = made
    return backend


def _check_made(info: BackendInfo, made: Any) -> None:  # noqa: ANN401 - whatever a stranger's factory made
    """That it is a backend, as far as one can see."""
    lacks = [name for name in _MEMBERS if not hasattr(made, name)]
    if lacks:
        raise _broken(info, f"it made {type(made).__name__}, which lacks {', '.join(lacks)}")
    if not isinstance(made.forms, Forms):
        raise _broken(info, f"it made {type(made).__name__}, whose forms are {type(made.forms).__name__}")


def _broken(info: BackendInfo, why: str) -> BrokenBackendError:
    return BrokenBackendError(f"backend {info.name!r} is broken: {info.factory}: {why}")


_MEMBERS = (
    "decode",
    "dequantize_and_gather_k_cache",
    "forms",
    "inv_rope_o_proj",
    "name",
    "prefill",
    "qnorm_rope_kv_insert",
    "quantize_and_insert_k_cache",
    "scratch",
    "scratch_bound",
    "steps",
    "transient_bytes",
)
"""What contract 1.0 asks of a backend. What later minor versions add has a default, so this list does not grow."""
