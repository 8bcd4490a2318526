"""Finds backends: the built-in ones, and those of plugins. Each plugin is loaded and called alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import pluggy
from attrs import field, frozen

from dsv4attn import hookspecs
from dsv4attn.config import AUTO
from dsv4attn.core.contract.backend import API_VERSION, BackendInfo
from dsv4attn.errors import did_you_mean, leave_out

__all__ = ["BUILT_IN", "PLUGIN_ERRORS", "PluginFailure", "PluginRegistry", "Registered", "first_line", "trace_of"]

BUILT_IN = ("reference", "rocm", "sm120", "sm90", "triton", "xpu")
"""Folders under `dsv4attn.backends`, each a plugin. No other file lists them: see `test_built_in_table.py`."""

PLUGIN_ERRORS = BaseException
"""Exceptions of plugin code that are caught: a Rust panic is no `Exception`. KeyboardInterrupt is always raised."""

SLOW_S = 1.0
"""Seconds after which the log names a plugin that is still being loaded."""

_log = logging.getLogger("dsv4attn")
_HOME = "dsv4attn"
_HOOK = "dsv4attn_backends"
_MACHINERY = (
    "<frozen importlib",
    f"{Path(importlib.__file__).parent}{os.sep}",
    f"{Path(pluggy.__file__).parent}{os.sep}",
    __file__,
    f"{Path(__file__).with_name('selection')}{os.sep}",
)
"""Files of a traceback between this package and a plugin's own code."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_STAGES = {
    "load": "failed to load",
    "hooks": "is not a plugin",
    "call": "failed to list its backends",
    "descriptor": "listed something else than backends",
    "version": "is incompatible",
    "name": "name refused",
    "denied": "not loaded",
    "absent": "is not installed",
    "built-in": "is loaded nevertheless",
}


@frozen
class Registered:
    """A backend that can be chosen.

    info: its descriptor.
    distribution, version: those of its package; the version may be "".
    """

    info: BackendInfo
    distribution: str
    version: str = ""

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()


@frozen
class PluginFailure:
    """A plugin or a plugin's backend that cannot be used, or an entry of a list of names that has no effect.

    distribution, version: those of the plugin's package; both may be "".
    plugin: name of the entry point, of the refused backend, or of the entry in the list.
    stage: load, hooks, call, descriptor, version, name; denied (as configured); absent, built-in (a list entry).
    error: the failure in words.
    cure: what to do, in the same words in every command and error.
    traceback: the traceback of the plugin's exception, or "".
    """

    distribution: str
    plugin: str
    stage: str
    error: str
    cure: str = ""
    traceback: str = ""
    version: str = ""

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong: a denied plugin is what the user configured."""
        return self.stage != "denied"

    @property
    def what(self) -> str:
        """The failure on one line, without the name of the plugin."""
        return f"{_STAGES[self.stage]}: {self.error}{f' ({self.owner})' if self.owner else ''}"

    @property
    def summary(self) -> str:
        """The failure and its cure on one line, without the name of the plugin, for traces."""
        doctor = "; `dsv4attn doctor` shows the traceback" if self.traceback else ""
        return f"{self.what}{f' -> {self.cure}{doctor}' if self.cure else ''}"

    def __str__(self) -> str:
        """One line for error messages."""
        return f"{self.plugin} {self.summary}"


@frozen
class _Source:
    """A plugin that can be loaded: its entry point, or a folder of built-in code."""

    plugin: str
    distribution: str
    version: str
    load: Callable[[], object]
    built_in: bool = False

    @property
    def described(self) -> str:
        """The plugin with its distribution and version."""
        return f"plugin {self.plugin} ({f'{self.distribution} {self.version}'.strip()})"

    def failed(self, stage: str, error: str, cure: str = "", trace: str = "", name: str = "") -> PluginFailure:
        """A failure of this plugin; `name` is that of a backend, if not the whole plugin failed."""
        cure = cure or f"repair or remove it, or {leave_out(self.plugin)}"
        return PluginFailure(self.distribution, name or self.plugin, stage, error, cure, trace, self.version)

    def answers_to(self, pattern: str) -> bool:
        """Whether a name or shell pattern of a list means this plugin."""
        names = (self.plugin, _normal(self.plugin), _normal(self.distribution))
        return any(fnmatchcase(name, text) for name in names for text in (pattern, _normal(pattern)))


class _UnfitError(Exception):
    """A plugin breaks the plugin contract without an exception of its own. It has the text and cure of the failure."""

    def __init__(self, text: str, cure: str = "") -> None:
        self.cure = cure
        super().__init__(text)


@frozen
class PluginRegistry:
    """All backends of this process. A spawned worker has the same.

    backends: by name, in order of names.
    failures: plugins and backends that cannot be used, in an undefined order.
    """

    backends: Mapping[str, Registered] = field(factory=dict)
    failures: tuple[PluginFailure, ...] = ()

    @classmethod
    def load(
        cls,
        *,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] = (),
        allow_source: str = "plugins.allow",
        deny_source: str = "plugins.deny",
        entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    ) -> PluginRegistry:
        """Load built-in backends and plugins. No failure of a plugin is raised.

        allow: names of entry points or distributions, or shell patterns: only these plugins are loaded. None: all.
        deny: the same for plugins that are not loaded; it wins over `allow`. Neither list concerns built-in backends.
        allow_source, deny_source: where the lists come from, for messages.
        entry_points: those of plugins; None: those of this Python environment.
        """
        built_in = [_Source(name, _HOME, "", _built_in(name), built_in=True) for name in BUILT_IN]
        plugins = [_source_of(point) for point in (_discovered() if entry_points is None else entry_points)]
        plugins.sort(key=lambda source: (source.distribution, source.plugin, source.version))
        failures = [
            *_entries_without_effect(allow or (), allow_source, plugins, denied=False),
            *_entries_without_effect(deny, deny_source, plugins, denied=True),
        ]
        offers: dict[str, list[tuple[_Source, BackendInfo]]] = defaultdict(list)
        for source in built_in + plugins:
            refusal = None if source.built_in else _refusal(source, allow, deny, allow_source, deny_source)
            if refusal:
                failures.append(source.failed("denied", *refusal))
                continue
            for info in _offers(source, failures):
                offers[info.name].append((source, info))
        winners = {name: _resolve_duplicates(name, offers[name], failures) for name in sorted(offers)}
        backends = {name: winner for name, winner in winners.items() if winner is not None}
        failures.sort(key=lambda failure: (failure.distribution, failure.plugin, failure.stage, failure.error))
        return cls(backends, tuple(failures))


def first_line(error: BaseException) -> str:
    """Type and message of an exception on one line, for any exception of a plugin."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS:
        text = "<a message that cannot be printed>"
    return f"{type(error).__name__}: {(text.strip().splitlines() or ['(no message)'])[0]}"


def _offers(source: _Source, failures: list[PluginFailure]) -> list[BackendInfo]:
    """The descriptors of one plugin that can be used. Its failures are added to the list."""
    stage = "load"
    try:
        with nullcontext() if source.built_in else _watched(source):
            module = source.load()
            stage = "hooks"
            hooks = _hooks_of(module, f"{source.distribution}:{source.plugin}")
            stage = "call"
            results = _call(getattr(hooks, _HOOK)) or [None]
        stage = "descriptor"
        return [info for offered in results for info in _checked(source, offered, failures)]
    except _UnfitError as error:
        failures.append(source.failed(stage, str(error), error.cure, trace_of(error.__cause__)))
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        failures.append(source.failed(stage, first_line(error), trace=trace_of(error)))
    return []


@contextmanager
def _watched(source: _Source) -> Iterator[None]:
    """Log the name and the time of a plugin that is slow to load; name it in the KeyboardInterrupt of a Ctrl-C.

    Where logging is not configured, its warnings go to stderr. An extension that holds the GIL delays the first line.
    """
    activity, start = f"loading {source.described}", time.perf_counter()
    timer = threading.Timer(SLOW_S, _log.warning, ["dsv4attn: %s ...", activity])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while {activity}") from error
    finally:
        timer.cancel()
        seconds = time.perf_counter() - start
        if seconds >= SLOW_S:
            cure = f"if you do not use it, {leave_out(source.plugin)}"
            _log.warning("dsv4attn: %s ... %.1f s -> %s", activity, seconds, cure)


def _call(hook: Callable[..., list[object]]) -> list[object]:
    """Call a hook with all arguments of this minor version of the contract."""
    return hook()


def trace_of(error: BaseException | None) -> str:
    """The traceback of a plugin's exception, from the first line of the plugin's own code."""
    if error is None:
        return ""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _hooks_of(module: object, name: str) -> pluggy.HookRelay:
    """The hooks of one plugin, in a plugin manager of its own, so that plugins cannot affect each other."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(_functions_of(module), name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        text = " ".join(str(error).split())
        if unknown := re.match(r"unknown hook '(\w+)'", text):
            raise _UnfitError(f"unknown hook {unknown[1]!r}{did_you_mean(unknown[1], [_HOOK])}") from error
        text = text.rpartition("hookimpl definition: ")[2]
        raise _UnfitError(text, f"install a release of it for contract {API_VERSION}, or a newer dsv4attn") from error
    if not getattr(manager.hook, _HOOK).get_hookimpls():
        raise _UnfitError("it implements no hook", f"mark {_HOOK} with dsv4attn.hookspecs.hookimpl")
    return manager.hook


def _functions_of(module: object) -> ModuleType:
    """A module that has the functions of a plugin alone.

    pluggy reads all attributes of a module, which may run code of any object, also in `isinstance`, or import lazy
    names.
    """
    if not issubclass(type(module), ModuleType):
        is_class = issubclass(type(module), type)
        name = type.__getattribute__(module if is_class else type(module), "__name__")
        kind = "the class" if is_class else "an object of type"
        raise _UnfitError(f"expected a module, got {kind} {name}", "let the entry point name the module itself")
    members = ModuleType.__getattribute__(module, "__dict__")
    functions = ModuleType(members.get("__name__", "plugin"))
    for name, value in members.items():
        # not `__dir__` and `__getattr__`: they can produce lazy names
        if issubclass(type(value), (FunctionType, BuiltinFunctionType)) and not name.startswith("__"):
            vars(functions)[name] = value
    return functions


def _checked(source: _Source, offered: object, failures: list[PluginFailure]) -> list[BackendInfo]:
    """The descriptors in the result of a hook that can be used. A failure is added for each of the others."""
    if not issubclass(type(offered), (list, tuple)):
        raise _UnfitError(f"{_HOOK}: expected a list of BackendInfo, got {_kind(offered)}")
    accepted = []
    major, minor = map(int, API_VERSION.split("."))
    for info in list(offered):  # type: ignore[call-overload]
        if not issubclass(type(info), BackendInfo):
            failures.append(source.failed("descriptor", f"{_HOOK}: expected a BackendInfo, got {_kind(info)}"))
        elif (written_for := _contract(info.api)) is None or written_for[0] != major or written_for[1] > minor:
            why = f"backend {info.name!r} is written for contract {info.api}, this is {API_VERSION}"
            cure = f"install a release of it for contract {major}"
            if written_for is not None and written_for[0] == major:
                cure = f"install a newer dsv4attn, or a release of it for contract {API_VERSION}"
            failures.append(source.failed("version", why, cure))
        elif not _NAME.fullmatch(info.name) or info.name == AUTO:
            cure = f"use a-z 0-9 . _ - and not {AUTO!r}"
            failures.append(source.failed("name", f"a backend cannot be called {info.name!r}", cure))
        else:
            accepted.append(info)
    return accepted


def _contract(version: str) -> tuple[int, int] | None:
    """Major and minor version of a contract; (1, 0) for "1"; None for text that is no version."""
    numbers = re.fullmatch(r"(\d+)(?:\.(\d+))?", version)
    return (int(numbers[1]), int(numbers[2] or 0)) if numbers else None


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _resolve_duplicates(
    name: str, offers: list[tuple[_Source, BackendInfo]], failures: list[PluginFailure]
) -> Registered | None:
    """The backend that gets a name. A built-in backend has precedence; of two plugins neither gets the name."""
    built_in = next((offer for offer in offers if offer[0].built_in), None)
    winner = offers[0] if len(offers) == 1 else built_in
    owners = sorted({f"plugin {source.plugin} of {source.distribution}" for source, _ in offers})
    text, cure = f"{name!r} is claimed by {' and by '.join(owners)}", ""
    if built_in is not None:
        text, cure = f"{name!r} is the name of a built-in backend", "call it something else"
    elif len(owners) == 1:
        text, cure = f"{name!r} is given to two backends", "give each its own"
    for source, info in offers:
        if (source, info) != winner:
            failures.append(
                source.failed("name", text, cure or f"uninstall one, or {leave_out(source.plugin)}", name=name)
            )
    return None if winner is None else Registered(winner[1], winner[0].distribution, winner[0].version)


def _refusal(
    source: _Source, allow: Sequence[str] | None, deny: Sequence[str], allow_source: str, deny_source: str
) -> tuple[str, str] | None:
    """Why a plugin is not loaded, and the cure."""
    if any(source.answers_to(pattern) for pattern in deny):
        return f"denied by {deny_source}", "take it off that list to use it"
    if allow is not None and not any(source.answers_to(pattern) for pattern in allow):
        return f"not allowed by {allow_source}", "add it to that list to use it"
    return None


def _entries_without_effect(
    names: Sequence[str], where: str, plugins: Sequence[_Source], *, denied: bool
) -> Iterator[PluginFailure]:
    """A failure for each entry of a list that has no effect: a misspelt entry would not be noticed otherwise."""
    known_names = {name for source in plugins for name in (source.plugin, source.distribution)}
    for name in names:
        if name in BUILT_IN and denied:
            cure = "ask for another backend by name"
            yield PluginFailure(_HOME, name, "built-in", f"built in, named by {where}", cure)
        elif name not in ("*", *BUILT_IN) and not any(source.answers_to(name) for source in plugins):
            error = f"named by {where}{did_you_mean(name, known_names)}"
            yield PluginFailure("", name, "absent", error, "correct it, or take it off the list")


def _discovered() -> list[importlib.metadata.EntryPoint]:
    """Entry points of our group. Distributions with unreadable metadata are skipped."""
    try:
        return list(importlib.metadata.entry_points(group=hookspecs.GROUP))
    except Exception:  # noqa: BLE001 - one malformed entry_points.txt on the path makes this fail for all distributions
        by_distribution: dict[str, list[importlib.metadata.EntryPoint]] = {}
        for distribution in importlib.metadata.distributions():
            try:
                points = [point for point in distribution.entry_points if point.group == hookspecs.GROUP]
                # the first distribution on the path hides later ones of the same name, as in imports
                by_distribution.setdefault(_normal(distribution.metadata["Name"]), points)
            except Exception:  # noqa: BLE001, S112 - metadata of another package
                continue
        return [point for points in by_distribution.values() for point in points]


def _source_of(point: importlib.metadata.EntryPoint) -> _Source:
    try:
        distribution, version = str(point.dist.name), str(point.dist.version)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001 - metadata without a name, or none at all
        distribution, version = "unknown", ""
    return _Source(point.name, distribution, version, point.load)


def _built_in(name: str) -> Callable[[], object]:
    return lambda: importlib.import_module(f"dsv4attn.backends.{name}")


def _normal(name: str) -> str:
    """The name of a distribution as packaging tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
