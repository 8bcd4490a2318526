"""Selects the backend of a problem: `select_backend`, `explain`, `load_backend`, and the registry of backends.

`decide` is a pure function of facts; this module gathers those facts. An explicit choice never falls back. An automatic
choice considers backends native to the device, vendor before generic. Two of equal rank are an error. The trace has the
outcome and the reasons of every candidate.

`select_backend` is the one call that an engine needs; `explain` gives the same choice without raising.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import evolve

from dsv4attn.config import AUTO, PHASES, Setting, Settings, load_settings, parse_request
from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.contract.problem import Problem
from dsv4attn.errors import ArgumentError, NoBackendError, UnknownNameError
from dsv4attn.plugins import BUILT_IN, PluginRegistry, Registered
from dsv4attn.selection.build import build, build_for, check_reference_ops, configured, conflict_of, options_line
from dsv4attn.selection.decision import Candidate, Selection, decide

if TYPE_CHECKING:
    import torch

__all__ = [
    "Candidate",
    "Selection",
    "backend_names",
    "build",
    "decide",
    "explain",
    "load_backend",
    "registered",
    "registry_for",
    "registry_of",
    "resolve",
    "select_backend",
]

_log = logging.getLogger("dsv4attn")


@cache
def _registry(*lists: Any) -> PluginRegistry:  # noqa: ANN401 - the lists of a registry, or none
    if not lists:
        return PluginRegistry.load(entry_points=())
    allow, deny, allow_source, deny_source = lists
    return PluginRegistry.load(allow=allow, deny=deny, allow_source=allow_source, deny_source=deny_source)


def registry_for(settings: Settings) -> PluginRegistry:
    """The registry of this process under some settings; loaded once."""
    keys = ("plugins.allow", "plugins.deny")
    return _registry(settings.allow, settings.deny, *(settings.sources.get(key, key) for key in keys))


def registry_of(*names: str, settings: Settings | None = None) -> PluginRegistry:
    """The registry that has these backends. If all of them are built in, no plugin is loaded."""
    if names and all(name in BUILT_IN for name in names):
        return _registry()
    return registry_for(load_settings() if settings is None else settings)


def explain(
    problem: Problem | Sequence[Problem],
    *,
    backend: str | None = None,
    device: DeviceFacts | torch.device | str | None = None,
    settings: Settings | None = None,
    registry: PluginRegistry | None = None,
) -> Selection:
    """The choice and its trace: from argument, environment, configuration file, or automatic. Nothing is launched.

    problem: one, or several of one phase that one backend must run. backend: NAME, "auto", or
    "decode=NAME,prefill=NAME". device: of this machine, by default its first accelerator or the CPU; or facts of any
    other, `DeviceFacts.named("sm_120")`, whose packages are taken to be installed.
    settings: by default those of the `DSV4ATTN_` variables and the configuration file. registry: the plugins to choose
    from, by default those that are installed.
    """
    settings = _settings(settings)
    registry = registry_for(settings) if registry is None else registry
    facts = device if isinstance(device, DeviceFacts) else DeviceFacts.here(device)
    problems = _problems(problem)
    request = _request(problems, backend, settings)
    packages = {package for entry in registry.backends.values() for package in entry.info.packages}
    installed = {package: version_of(package) for package in packages} if facts.present else None
    if installed and "triton" in installed:
        # builds of torch for ROCm and XPU contain Triton under another name
        installed["triton"] = facts.triton_version
    selection = decide(facts, registry.backends, problems, request, registry.failures, installed)
    selection = evolve(selection, ignored=settings.ignored, reference_ops=settings.reference_ops)
    return _without_conflict(_with_options(selection, settings), settings)


def _with_options(selection: Selection, settings: Settings) -> Selection:
    """The selection, whose chosen backend names the options that the settings give it."""
    if selection.chosen is None or not (line := options_line(selection.chosen.info, settings)):
        return selection
    trace = (evolve(c, ways=(line, *c.ways)) if c.state == "chosen" else c for c in selection.trace)
    return evolve(selection, trace=tuple(trace))


def _without_conflict(selection: Selection, settings: Settings) -> Selection:
    """The selection; it has no choice if the settings forbid what the problems ask of the chosen backend."""
    if selection.chosen is None:
        return selection
    info = selection.chosen.info
    reason = conflict_of(info, settings, selection.problems)
    if reason is None:
        return selection
    trace = tuple(
        evolve(candidate, state="refused", reasons=(reason,), note="", ways=())
        if candidate.name == info.name
        else candidate
        for candidate in selection.trace
    )
    what = "ops of the reference in" if reason.code == "CAPTURE" else "the options of"
    verdict = f"{what} backend {info.name!r} contradict the problem"
    return evolve(selection, chosen=None, trace=trace, verdict=verdict, error=NoBackendError)


def _settings(settings: Settings | None) -> Settings:
    """The argument, or for None the settings of environment and configuration file."""
    if settings is None:
        return load_settings()
    check_type("settings", settings, Settings, cure="pass Settings(options={name: {...}}), or None for the user's own")
    return settings


def _problems(problem: object) -> tuple[Problem, ...]:
    """The argument as a tuple of problems. Raises ArgumentError unless all are problems."""
    several = isinstance(problem, Iterable) and not isinstance(problem, str)
    problems: tuple[Any, ...] = tuple(problem) if several else (problem,)  # type: ignore[arg-type]
    for value in problems:
        check_type("problem", value, Problem, cure="pass Problem.of(geometry, kind, phase), or several of one phase")
    return problems


def _request(problems: Sequence[Problem], backend: str | None, settings: Settings) -> Setting:
    """The requested backend, and the source of the request."""
    request = settings.request(problems[0].phase if problems else "decode")
    if backend is not None:
        cure = "pass a name, or hand a backend that you have built to the layers"
        check_type("backend", backend, str, cure=cure)
    if backend is not None and problems:
        named = parse_request(backend, "argument backend").get(problems[0].phase)
        request = Setting(named, "argument") if named else request
    return request


def resolve(
    problem: Problem | Sequence[Problem],
    *,
    backend: str | None = None,
    device: DeviceFacts | torch.device | str | None = None,
    settings: Settings | None = None,
    registry: PluginRegistry | None = None,
) -> Selection:
    """Like `explain`, but raises NoBackendError with the whole trace if no backend can run the problem.

    Call it at plan time, not in a forward. An automatic choice is logged once, with its reason. If a built-in backend
    is requested by name and can run the problem, no plugin is loaded.

    problem, backend, device, settings, registry: see `explain`.
    """
    settings, problems = _settings(settings), _problems(problem)
    requested = _request(problems, backend, settings).value
    smallest = registry_of(requested, settings=settings) if registry is None else registry
    selection = explain(problems, backend=backend, device=device, settings=settings, registry=smallest)
    if selection.chosen is None and registry is None:
        # an error shows every candidate
        whole = registry_for(settings)
        selection = explain(problems, backend=backend, device=device, settings=settings, registry=whole)
    selection.require()
    if selection.request.value == AUTO:
        _log_once(logging.INFO, f"{selection.problems[0].phase} runs on {selection.verdict}")
        for candidate in selection.trace:
            if candidate.state == "broken":
                _log_once(logging.WARNING, f"backend {candidate.name} was passed over: {candidate.lines[0]}")
    return selection


@cache
def _log_once(level: int, text: str) -> None:
    _log.log(level, "dsv4attn: %s", text)


def select_backend(
    *problems: Problem,
    backend: str | None = None,
    device: DeviceFacts | torch.device | str | None = None,
    settings: Settings | None = None,
    registry: PluginRegistry | None = None,
) -> Backend:
    """Choose and build the backend of some layers: the one call that an engine needs.

    problems: decode and prefill problems in any order; one backend runs all problems of a phase. Give all layer kinds
    of a model at once to have one backend for the model, or call once for each kind. Phases are resolved separately;
    if they differ, the result is a `PhasedBackend` of both. If a problem is deterministic, the backend of its phase is
    built with the option `deterministic=True`.
    backend, device, settings, registry: see `explain`.

    Raises NoBackendError with the whole trace, also if a problem asks for determinism and an option of the settings
    switches it off. Raises ConfigError if DSV4ATTN_REFERENCE_OPS names an op that none of the layers has, and
    BrokenBackendError if the chosen backend cannot be made.
    """
    for problem in problems:
        check_type("problems", problem, Problem, cure="pass Problem.of(layer, phase='decode') and one for 'prefill'")
    settings = _settings(settings)
    check_reference_ops(settings, problems)
    facts = device if isinstance(device, DeviceFacts) else DeviceFacts.here(device)
    by_phase = [[problem for problem in problems if problem.phase == phase] for phase in PHASES]
    choices = [
        (
            resolve(of_phase, backend=backend, device=facts, settings=settings, registry=registry).require().info,
            of_phase,
        )
        for of_phase in by_phase
        if of_phase
    ]
    if not choices:
        raise ArgumentError("problems", expected="at least one", actual="none")
    # one backend serves both phases if its name and its determinism are the same
    builds = {(info.name, any(problem.deterministic for problem in of_phase)) for info, of_phase in choices}
    backends = [build_for(info, settings, of_phase) for info, of_phase in choices[: len(builds)]]
    return backends[0] if len(backends) == 1 else PhasedBackend(*backends)


def backend_names() -> list[str]:
    """Names that `load_backend` accepts."""
    return sorted(registry_for(load_settings()).backends)


def registered(name: str) -> Registered:
    """The descriptor of this name and its distribution. Raises like `load_backend`; the backend is not imported."""
    registry = registry_of(name)
    if name not in registry.backends:
        failed = [failure.summary for failure in registry.failures if failure.plugin == name]
        if failed:
            raise NoBackendError(f"backend {name!r} cannot be used: {'; '.join(failed)}")
        raise UnknownNameError("backend", name, registry.backends, map(str, registry.failures))
    return registry.backends[name]


def load_backend(name: str = "reference", **options: Any) -> Backend:  # noqa: ANN401 - options are the backend's own
    """Build the backend of this name. Options override those of the configuration file.

    An explicit choice never falls back, and the name of a built-in backend loads no plugin. Raises UnknownNameError for
    names that no backend has, NoBackendError for plugins that could not be loaded, ArgumentError for options that the
    backend does not take, BrokenBackendError if the backend cannot be made.
    name: name of a built-in backend or of a plugin's.
    """
    check_type("name", name, str, cure=f"pass one of {', '.join(BUILT_IN)}, or a plugin's, or call select_backend")
    return configured(registered(name).info, load_settings(), options)
