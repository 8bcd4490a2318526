"""`dsv4attn doctor`: lists versions, devices, settings, plugins and engines, and finds problems with their cures."""

from __future__ import annotations

import os
import platform
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, define, field, frozen

from dsv4attn import __version__
from dsv4attn.config import AUTO, Settings, load_settings
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.errors import BrokenBackendError, ConfigError, Dsv4AttnError, did_you_mean
from dsv4attn.plugins import BUILT_IN, PluginRegistry, trace_of
from dsv4attn.tools.cli import FAILED, OK, engines, installation, print_json
from dsv4attn.tools.cli.backends import automatic, merged
from dsv4attn.tools.cli.common import console, grid
from dsv4attn.tools.cli.options import JSON
from dsv4attn.tools.cli.progress import working

if TYPE_CHECKING:
    from dsv4attn.selection import Selection

_PACKAGES = ("torch", "triton", "attrs", "pluggy", "click", "rich", "numpy")
_RELATED = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "ZE_AFFINITY_MASK",
)
"""Variables of other packages that affect which devices and kernels there are."""


@frozen
class _Problem:
    """A problem in words, its cure, and the traceback if there is one."""

    what: str
    cure: str
    trace: str = ""


@define
class _Report:
    """Facts of the installation, and its problems.

    file: the configuration file in words.
    phases: the automatic choice. runs: the choice under the settings.
    """

    versions: dict[str, str | None]
    torch: installation.Attempt
    system: dict[str, str]
    devices: list[DeviceFacts]
    settings: Settings
    file: str
    registry: PluginRegistry
    phases: dict[str, Selection] = field(factory=dict)
    runs: dict[str, Selection] = field(factory=dict)
    engines: list[engines.EngineState] = field(factory=list)
    problems: list[_Problem] = field(factory=list)


@click.command()
@JSON
@click.pass_context
def doctor(ctx: click.Context, *, as_json: bool) -> None:
    """Look for what is wrong with this installation, and say what to do.

    The report has versions, operating system, CPU, driver, devices, the configuration and its sources, environment
    variables, the backend that will run, plugins that cannot be used, with their tracebacks, and whether an installed
    vLLM or SGLang runs DeepSeek-V4 on dsv4attn. The command imports torch and Triton in processes of their own,
    compares device nodes with the build of torch, and makes the backend of every plugin that can run here. It launches
    no kernel and imports no engine.

    \b
    Exit codes:
      0    nothing is wrong
      1    something is wrong
    """  # noqa: D301 - click wants the character
    with working("importing torch and Triton, and looking at devices, plugins and engines", shown=not as_json):
        report = _examine()
    if as_json:
        print_json(_as_json(report))
    else:
        _show(report)
    ctx.exit(FAILED if report.problems else OK)


def _examine() -> _Report:
    """Collect all facts. A broken part becomes a problem of the report."""
    from dsv4attn.selection import registry_for

    versions = {"dsv4attn": __version__, "python": platform.python_version()}
    problems = []
    try:
        settings = load_settings()
        file = settings.file or "no file"
    except ConfigError as error:
        settings, file = Settings(), "not read: problem 1 below says why"
        problems.append(_Problem(f"configuration: {error}", "correct it; everything above is without it"))
    attempts = [installation.tried(package) for package in ("torch", "triton")]
    torch = attempts[0]
    if not torch.installed:
        problems.append(_Problem("torch is not installed", torch.cure))
    for attempt in attempts:
        if attempt.error:
            what = f"`import {attempt.package}` fails: {attempt.error}"
            problems.append(_Problem(what, attempt.cure, attempt.trace))
    problems += [_Problem(*found) for found in installation.devices_without_use(torch, os.environ)]
    try:
        devices = DeviceFacts.all_here() if torch.works else [DeviceFacts.here("cpu")]
    except Exception as error:  # noqa: BLE001 - a broken torch or driver is a finding
        devices = [DeviceFacts.named("cpu")]
        cure, trace = "see whether `python -c 'import torch'` works", traceback.format_exc()
        problems.append(_Problem(f"devices: {type(error).__name__}: {error}", cure, trace))
    registry = registry_for(settings)
    packages = {**versions, **{package: version_of(package) for package in _PACKAGES}}
    packages["triton"] = devices[0].triton_version
    system = installation.system(torch)
    phases = automatic(registry, devices[0])
    report = _Report(packages, torch, system, devices, settings, file, registry, phases)
    report.engines, report.problems = engines.examine(), problems
    _judge(report)
    wrong = [state for state in report.engines if state.is_problem]
    report.problems += [_Problem(state.verdict, state.cure, state.traceback) for state in wrong]
    return report


def _judge(report: _Report) -> None:
    """Add the problems of plugins, options and choices to the report."""
    from dsv4attn.selection import explain

    settings, registry, device = report.settings, report.registry, report.devices[0]
    for failure in registry.failures:
        if failure.is_problem:
            report.problems.append(_Problem(f"{failure.plugin} {failure.what}", failure.cure, failure.traceback))
    for name in settings.options:
        if name not in registry.backends:
            what = f"options.{name} in {settings.file}: no backend has this name"
            cure = "correct the name, or remove the table: no backend reads it"
            report.problems.append(_Problem(f"{what}{did_you_mean(name, registry.backends)}", cure))
    if report.torch.works:
        report.problems += filter(None, (_built(report, name) for name in registry.backends))
    broken = {c.name: c for selection in report.phases.values() for c in selection.trace if c.cause is not None}
    for candidate in broken.values():
        what, _, cure = candidate.lines[0].partition(" -> ")
        report.problems.append(_Problem(f"{candidate.name} {what}", cure, trace_of(candidate.cause)))
    for phase, automatic_choice in report.phases.items():
        selection = automatic_choice
        if settings.request(phase).value != AUTO:
            selection = explain(selection.problems, device=device, settings=settings, registry=registry)
        report.runs[phase] = selection
        if selection.chosen is None:
            verdict, _, cure = selection.verdict.partition(" -> ")
            cure = f"{cure}{'; ' if cure else ''}`dsv4attn explain --phase {phase}` says why"
            report.problems.append(_Problem(f"{phase}: {verdict}", cure))


def _built(report: _Report, name: str) -> _Problem | None:
    """Build a plugin's backend that can run here, or one that has options; the problem if that fails."""
    from dsv4attn.selection.build import check_options, configured

    registration = report.registry.backends[name]
    states = {c.state for selection in report.phases.values() for c in selection.trace if c.name == name}
    try:
        if name not in BUILT_IN and states - {"refused", "broken"}:
            configured(registration.info, report.settings, {})
        else:
            check_options(registration.info, report.settings)
    except ConfigError as error:
        return _Problem(str(error), f"correct it: {name} refuses to load with these options")
    except Dsv4AttnError as error:
        cure = f"report it to the authors of {registration.owner}"
        what, _, known_cure = str(error).splitlines()[0].partition(" -> ")
        if not isinstance(error, BrokenBackendError):
            return _Problem(what, known_cure or cure)
        return _Problem(str(error), cure, trace_of(error.__cause__) if error.__cause__ else "")
    return None


def _values(settings: Settings) -> list[tuple[str, str, str]]:
    """(key, effective value, where it comes from)."""
    values = [(phase, settings.request(phase).value, settings.request(phase).source) for phase in ("decode", "prefill")]
    lists = {"plugins.allow": settings.allow, "plugins.deny": settings.deny}
    for key, names in lists.items():
        shown = "all" if names is None else ", ".join(names) or "none"
        values.append((key, shown, settings.sources.get(key, "default")))
    if settings.reference_ops:
        values.append(("reference ops", ", ".join(settings.reference_ops), "DSV4ATTN_REFERENCE_OPS"))
    if settings.trace:
        values.append(("trace", "stderr" if settings.trace == "1" else settings.trace, "DSV4ATTN_TRACE"))
    for name, options in settings.options.items():
        shown = ", ".join(f"{option}={value!r}" for option, value in options.items())
        values.append((f"options.{name}", shown or "none", str(settings.file)))
    return values


def _environment() -> dict[str, str]:
    names = {*_RELATED, *engines.related()}
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("DSV4ATTN_") or name in names}


def _next(report: _Report) -> list[str]:
    """Next steps: the cures, or commands for a healthy installation."""
    if report.problems:
        return list(dict.fromkeys(problem.cure for problem in report.problems))
    return [
        f"`dsv4attn run` serves a small trace on this machine's {report.devices[0].arch} and checks it",
        "`dsv4attn explain --device sm120 --heads 64` answers for any problem on any device",
    ]


def _as_json(report: _Report) -> dict[str, Any]:
    values = [{"key": key, "value": value, "source": source} for key, value, source in _values(report.settings)]
    return {
        "ok": not report.problems,
        "versions": report.versions,
        "system": report.system,
        "devices": [asdict(device) for device in report.devices],
        "configuration": {"file": report.settings.file, "values": values, "ignored": list(report.settings.ignored)},
        "environment": _environment(),
        "automatic": {p: s.chosen.info.name if s.chosen else None for p, s in report.phases.items()},
        "runs": {p: s.chosen.info.name if s.chosen else None for p, s in report.runs.items()},
        "engines": [engines.as_json(state) for state in report.engines],
        "plugins": [asdict(failure) for failure in report.registry.failures],
        "problems": [asdict(problem) for problem in report.problems],
        "next": _next(report),
    }


def _lines_of(state: engines.EngineState) -> list[str]:
    """What is shown of an engine. A problem is shown below, with its cure."""
    return [line for line in (state.verdict if state.is_problem else str(state), state.relies_on) if line]


def _show(report: _Report) -> None:
    from rich.padding import Padding
    from rich.text import Text

    versions = [f"{name} {version or 'missing'}" for name, version in report.versions.items()]
    values = [f"{key}: {value}  ({source})" for key, value, source in _values(report.settings)]
    ignored = [f"ignored: {line}" for line in report.settings.ignored]
    left_out = [str(failure) for failure in report.registry.failures if not failure.is_problem]
    environment = [f"{name}={value}" for name, value in _environment().items()]
    rows: list[tuple[str, Sequence[str]]] = [
        ("versions", ["  ".join(versions[:4]), "  ".join(versions[4:])]),
        ("system", [f"{name}: {text}" for name, text in report.system.items()]),
        ("devices", [str(device) for device in report.devices]),
        ("configuration", [report.file, *values, *ignored]),
        ("environment", environment or ["nothing that matters here"]),
        ("backends", [", ".join(report.registry.backends), *left_out]),
        ("automatic", merged({phase: selection.verdict for phase, selection in report.phases.items()})),
        ("runs", merged({phase: selection.verdict for phase, selection in report.runs.items()})),
        ("engines", [line for state in report.engines for line in _lines_of(state)]),
    ]
    out = console()
    out.print(grid(rows))
    out.print()
    if not report.problems:
        out.print("  nothing is wrong", style="bold green")
        out.print(grid([("next", _next(report))]))
    wide = len(str(len(report.problems)))
    for i, problem in enumerate(report.problems):
        lines = [(f"{i + 1:>{wide}}", [problem.what]), ("", [f"-> {problem.cure}"])]
        out.print(grid(lines, ["red"], wide=wide))
        if problem.trace:
            out.print(Padding(Text(problem.trace.rstrip(), style="dim"), (0, 0, 0, wide + 4)))
