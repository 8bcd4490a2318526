"""Builds a backend from its descriptor: checks the options, imports the factory, checks the members of the result."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import evolve

from dsv4attn.config import Settings
from dsv4attn.core.contract.backend import Backend, BackendInfo, Capabilities, missing_members
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.contract.op_names import lacking
from dsv4attn.core.contract.problem import Problem, Reason
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.reprs import layer_text
from dsv4attn.errors import (
    ArgumentError,
    BrokenBackendError,
    ConfigError,
    Dsv4AttnError,
    NoBackendError,
    UnknownNameError,
    did_you_mean,
)
from dsv4attn.plugins import PLUGIN_ERRORS, PluginRegistry, first_line
from dsv4attn.selection.decision import install_cure

REFERENCE = "reference"
"""The backend whose ops are the definitions."""


def configured(
    info: BackendInfo, settings: Settings, options: Mapping[str, Any], needed: Mapping[str, Any] = MappingProxyType({})
) -> Backend:
    """Build a backend. The arguments `options` and `needed` override the options of the configuration.

    needed: options that a problem asks for.
    """
    from_settings = settings.options.get(info.name, {})
    where = _where(info, settings)
    for option in from_settings:
        if option not in info.options:
            names = f"(known: {', '.join(info.options) or 'none'})"
            raise ConfigError(where, f"unknown option {option!r}{did_you_mean(option, info.options)} {names}")
    try:
        backend = build(info, {**from_settings, **needed, **options})
    except (ArgumentError, UnknownNameError) as error:
        if from_settings and not options:
            raise ConfigError(where, str(error)) from error
        raise
    return _watched(info, backend, settings)


def _watched(info: BackendInfo, backend: Backend, settings: Settings) -> Backend:
    """The backend, with the ops of the reference and the trace that the settings ask for."""
    if settings.reference_ops and info.name != REFERENCE:
        from dsv4attn.selection.reference_ops import ReferenceOpsBackend

        descriptor = PluginRegistry.load(entry_points=()).backends[REFERENCE].info
        reference = build(descriptor, {"deterministic": backend.deterministic})
        backend = ReferenceOpsBackend(backend, reference, settings.reference_ops)
    if settings.trace:
        from dsv4attn.selection.tracing import TracedBackend

        backend = TracedBackend(backend, settings.trace)
    return backend


def _where(info: BackendInfo, settings: Settings) -> str:
    return f"options.{info.name} in {settings.file or 'the settings'}"


def options_line(info: BackendInfo, settings: Settings) -> str:
    """A line on the options that the settings give a backend; "" if they give none."""
    # as in the file: true, and "exact"
    options = [
        f"{name}={json.dumps(value, default=str)}" for name, value in settings.options.get(info.name, {}).items()
    ]
    return f"built with {', '.join(options)}, by {_where(info, settings)}" if options else ""


def conflict_of(info: BackendInfo, settings: Settings, problems: Sequence[Problem]) -> Reason | None:
    """The reason against a backend, if the settings contradict a problem.

    They do if they build the backend without determinism, and a problem asks for determinism; and if they send ops to
    the reference, and a problem is captured in a graph.
    """
    if settings.reference_ops and info.name != REFERENCE and any(problem.capture for problem in problems):
        actual = f"a captured graph, with DSV4ATTN_REFERENCE_OPS={','.join(settings.reference_ops)}"
        cure = "run eagerly, or take DSV4ATTN_REFERENCE_OPS away"
        return Reason("CAPTURE", actual, "eager calls: ops of the reference read values on the host", cure)
    option = _typed(False, settings.options.get(info.name, {}).get("deterministic"))
    if option is not False or not any(problem.deterministic for problem in problems):
        return None
    actual = f"deterministic = false by {_where(info, settings)}"
    cure = "leave that option out, or leave deterministic out of the problem"
    return Reason("DETERMINISTIC", actual, "true, because the problem is deterministic", cure)


def build_for(info: BackendInfo, settings: Settings, problems: Sequence[Problem]) -> Backend:
    """Build the chosen backend of some problems. It is deterministic if any problem asks for determinism.

    Raises BrokenBackendError if the backend says that it is not deterministic although its descriptor took the problem.
    """
    deterministic = any(problem.deterministic for problem in problems)
    # a backend that is always deterministic has no switch
    has_switch = info.options.get("deterministic", True) is not True
    backend = configured(info, settings, {}, {"deterministic": True} if deterministic and has_switch else {})
    if deterministic and not backend.deterministic:
        class_name = type(backend).__name__
        raise _broken(info, f"it made {class_name}, which is not deterministic, for a deterministic problem")
    return backend


def check_reference_ops(settings: Settings, problems: Sequence[Problem]) -> None:
    """Raise ConfigError if the settings send an op to the reference that no layer of the problems has."""
    missing = lacking(settings.reference_ops, [problem.layer for problem in problems])
    if missing:
        kinds = ", ".join(dict.fromkeys(layer_text(problem.layer) for problem in problems))
        cure = "take it out, or choose the backend for all kinds of layers of the model at once"
        problem = f"no layer of these kinds has {' or '.join(missing)}: {kinds} -> {cure}"
        raise ConfigError("environment variable DSV4ATTN_REFERENCE_OPS", problem)


def check_options(info: BackendInfo, settings: Settings) -> None:
    """Raise the error that every load would raise because of the configuration's options.

    Only the backend itself can check a value, so the backend is built; without options it is not. A package that this
    machine lacks is no mistake in a file, and is no error here.
    """
    if not settings.options.get(info.name):
        return
    try:
        configured(info, settings, {})
    except NoBackendError as error:
        if isinstance(error, BrokenBackendError):
            raise


def _typed(default: object, value: object) -> object:
    """The value of an option. A command line gives text, also for an option that is true or false."""
    words = {"true": True, "false": False}
    return words.get(value.lower(), value) if isinstance(default, bool) and isinstance(value, str) else value


def build(info: BackendInfo, options: Mapping[str, Any]) -> Backend:
    """Import the factory of a backend, and call it with options.

    Raises NoBackendError, as selection would, if a package that the backend needs is not installed. Raises
    BrokenBackendError, with the cause, if all packages are installed and the backend cannot be imported or made.
    """
    for option in options:
        if option not in info.options:
            raise ArgumentError(
                f"option {option!r} of backend {info.name}",
                expected=f"one of {', '.join(info.options) or 'none'}",
                actual=f"an unknown option{did_you_mean(option, info.options)}",
            )
    try:
        backend = _factory(info)(**{name: _typed(info.options[name], value) for name, value in options.items()})
        return _checked_backend(info, backend)
    except (Dsv4AttnError, KeyboardInterrupt):
        raise
    except PLUGIN_ERRORS as error:
        if options and isinstance(error, (TypeError, ValueError)):
            actual = f"{dict(options)} ({first_line(error)})"
            raise ArgumentError(f"options of backend {info.name}", expected="values it takes", actual=actual) from error
        reasons = _missing_packages(info, error) if isinstance(error, ImportError) else []
        if reasons:
            texts = "; ".join(f"{reason.code}  {reason.text}" for reason in reasons)
            raise NoBackendError(f"backend {info.name!r} cannot run here: {texts}") from error
        raise _broken(info, first_line(error)) from error


def _factory(info: BackendInfo) -> Any:  # noqa: ANN401 - a plugin's callable
    module, _, factory = info.factory.partition(":")
    try:
        return getattr(importlib.import_module(module), factory)
    except ArgumentError as error:
        # a package that is too old raises this on import
        raise NoBackendError(f"backend {info.name!r} cannot run here: {error}") from error


def _missing_packages(info: BackendInfo, error: ImportError) -> list[Reason]:
    """The reasons that selection would give, if an import failed because packages are not installed; else none."""
    missing = [package for package in info.packages if package != "triton" and version_of(package) is None]
    without_triton = (error.name or "").partition(".")[0] == "triton" and not _importable("triton")
    if not missing and not without_triton:
        return []
    device = DeviceFacts.here()
    reasons = []
    if without_triton:
        without, problem = evolve(device, triton_version=None), Problem.of(ModelGeometry.preset("flash"))
        reasons = [reason for reason in info.support(without, problem) if reason.code in ("TRITON", "INTERPRETER")]
        missing += [] if reasons else ["triton"]
    packages = [Reason("PACKAGE", f"{name} is not installed", name, install_cure(name, device)) for name in missing]
    return packages + reasons


def _importable(name: str) -> bool:
    """Whether a module of this name exists, even if its import fails."""
    try:
        importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        return not (isinstance(error, ModuleNotFoundError) and error.name == name)
    return True


def _checked_backend(info: BackendInfo, backend: Any) -> Backend:  # noqa: ANN401 - the result of a plugin's factory
    """The result of a factory. Raises BrokenBackendError unless it is a backend with all members."""
    description = f"it made {type(backend).__name__}"
    missing = missing_members(backend)
    if missing:
        raise _broken(info, f"{description}, which lacks {', '.join(missing)} -> {_CURE}")
    if not isinstance(backend, Backend):
        raise _broken(info, f"{description}, which does not derive from Backend -> {_CURE}")
    capabilities: object = backend.capabilities
    if not isinstance(capabilities, Capabilities):
        raise _broken(info, f"{description}, whose capabilities are {type(capabilities).__name__}")
    from dsv4attn.core.contract.index_ops import IndexOps
    from dsv4attn.core.contract.layer_ops import LayerOps
    from dsv4attn.core.contract.rank_ops import RankOps

    for name, table_type in (("layer_ops", LayerOps), ("index_ops", IndexOps), ("rank_ops", RankOps)):
        table = getattr(backend, name)
        if not isinstance(table, table_type):
            raise _broken(info, f"{description}, whose {name} are {type(table).__name__}, not {table_type.__name__}")
    brought = {part for part, name in backend.layer_ops.sources(backend.name).items() if name == backend.name}
    if backend.name != "reference" and brought != set(info.layer_ops):
        declared, bring = (", ".join(sorted(parts)) or "none" for parts in (info.layer_ops, brought))
        raise _broken(info, f"BackendInfo.layer_ops names {declared}, and its layer_ops bring {bring}")
    return backend


def _broken(info: BackendInfo, why: str) -> BrokenBackendError:
    return BrokenBackendError(f"backend {info.name!r} is broken: {info.factory}: {why}")


_CURE = "derive from dsv4attn.core.contract.Backend, and define what it does not"
"""What to do about an object that is no backend, or lacks required members."""
