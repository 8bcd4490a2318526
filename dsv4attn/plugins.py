"""Finds backends: the built-in ones and those of entry points, each plugin loaded and called alone."""

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
"""Folders under `dsv4attn.backends`, plugins like any other. No other file lists them: see `test_built_in_table.py`."""

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
    """A backend that can be chosen. info: its descriptor. distribution, version: of its package; version may be ""."""

    info: BackendInfo
    distribution: str
    version: str = ""

    @property
    def owner(self) -> str:
        """Distribution and version."""
        return f"{self.distribution} {self.version}".strip()


@frozen
class PluginFailure:
    """A plugin, or a backend of it, that cannot be used; or an entry of a list of names that has no effect.

    distribution, version: of its package; both may be "".
    plugin: name of the entry point, of the refused backend, or of the entry in the list.
    stage: load, hooks, call, descriptor, version, name; denied (as configured); absent, built-in (a list entry).
    error: the failure in words. cure: the same text in every command and error. traceback: of its exception, or "".
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
        """Whether it is a failure; a denied plugin is what the user configured."""
        return self.stage != "denied"

    @property
    def what(self) -> str:
        """The failure, on one line without the name."""
        return f"{_STAGES[self.stage]}: {self.error}{f' ({self.owner})' if self.owner else ''}"

    @property
    def summary(self) -> str:
        """The failure and its cure, on one line without the name, for traces."""
        shown = "; `dsv4attn doctor` shows the traceback" if self.traceback else ""
        return f"{self.what}{f' -> {self.cure}{shown}' if self.cure else ''}"

    def __str__(self) -> str:
        """One line for error messages."""
        return f"{self.plugin} {self.summary}"


@frozen
class _Source:
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
        cure = cure or f"repair or remove it, or {leave_out(self.plugin)}"
        return PluginFailure(self.distribution, name or self.plugin, stage, error, cure, trace, self.version)

    def answers_to(self, pattern: str) -> bool:
        names = (self.plugin, _normal(self.plugin), _normal(self.distribution))
        return any(fnmatchcase(name, p) for name in names for p in (pattern, _normal(pattern)))


class _UnfitError(Exception):
    """A plugin that raised nothing but breaks the plugin contract: text and cure for its failure."""

    def __init__(self, text: str, cure: str = "") -> None:
        self.cure = cure
        super().__init__(text)


@frozen
class PluginRegistry:
    """All backends of this process. Building it twice, or in a spawned worker, gives the same content.

    backends: by name, in order of names. failures: plugins and backends that cannot be used, in an undefined order.
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
        """Load built-ins and entry points. Never raises because of a plugin.

        allow, deny: names of entry points or distributions, or shell patterns; with `allow`, only those are loaded,
        and `deny` wins. Built-in backends are subject to neither. *_source: origin of the lists, for messages.
        """
        built_in = [_Source(name, _HOME, "", _built_in(name), built_in=True) for name in BUILT_IN]
        strangers = [_source_of(point) for point in (_discovered() if entry_points is None else entry_points)]
        strangers.sort(key=lambda source: (source.distribution, source.plugin, source.version))
        failures = [
            *_entries_without_effect(allow or (), allow_source, strangers, denied=False),
            *_entries_without_effect(deny, deny_source, strangers, denied=True),
        ]
        offers: dict[str, list[tuple[_Source, BackendInfo]]] = defaultdict(list)
        for source in built_in + strangers:
            refusal = None if source.built_in else _refusal(source, allow, deny, allow_source, deny_source)
            if refusal:
                failures.append(source.failed("denied", *refusal))
                continue
            for info in _offers(source, failures):
                offers[info.name].append((source, info))
        backends = {}
        for name in sorted(offers):
            winner = _resolve_duplicates(name, offers[name], failures)
            if winner is not None:
                backends[name] = winner
        return cls(backends, tuple(sorted(failures, key=lambda f: (f.distribution, f.plugin, f.stage, f.error))))


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
    """The usable descriptors of one plugin; its failures are recorded."""
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
    what, began = f"loading {source.described}", time.perf_counter()
    timer = threading.Timer(SLOW_S, _log.warning, ["dsv4attn: %s ...", what])
    timer.daemon = True
    timer.start()
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"while {what}") from error
    finally:
        timer.cancel()
        seconds = time.perf_counter() - began
        if seconds >= SLOW_S:
            cure = f"if you do not use it, {leave_out(source.plugin)}"
            _log.warning("dsv4attn: %s ... %.1f s -> %s", what, seconds, cure)


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
    """A module with only the functions of a plugin.

    pluggy reads all attributes, which may run code of an arbitrary object, also in `isinstance`, or import lazy names.
    """
    if not issubclass(type(module), ModuleType):
        is_class = issubclass(type(module), type)
        name = type.__getattribute__(module if is_class else type(module), "__name__")
        kind = "the class" if is_class else "an object of type"
        raise _UnfitError(f"expected a module, got {kind} {name}", "let the entry point name the module itself")
    members = ModuleType.__getattribute__(module, "__dict__")
    bare = ModuleType(members.get("__name__", "plugin"))
    for name, value in members.items():
        # not `__dir__` and `__getattr__`: they can produce lazy names
        if issubclass(type(value), (FunctionType, BuiltinFunctionType)) and not name.startswith("__"):
            vars(bare)[name] = value
    return bare


def _checked(source: _Source, offered: object, failures: list[PluginFailure]) -> list[BackendInfo]:
    """The descriptors of a hook's result that can be used; the others are recorded one by one."""
    if not issubclass(type(offered), (list, tuple)):
        raise _UnfitError(f"{_HOOK}: expected a list of BackendInfo, got {_kind(offered)}")
    accepted = []
    ours, text = API_VERSION.partition(".")[0], f"use a-z 0-9 . _ - and not {AUTO!r}"
    for info in list(offered):  # type: ignore[call-overload]
        if not issubclass(type(info), BackendInfo):
            failures.append(source.failed("descriptor", f"{_HOOK}: expected a BackendInfo, got {_kind(info)}"))
        elif info.api.partition(".")[0] != ours:
            why = f"backend {info.name!r} is written for contract {info.api}, this is {API_VERSION}"
            failures.append(source.failed("version", why, f"install a release of it for contract {ours}"))
        elif not _NAME.fullmatch(info.name) or info.name == AUTO:
            failures.append(source.failed("name", f"a backend cannot be called {info.name!r}", text))
        else:
            accepted.append(info)
    return accepted


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _resolve_duplicates(
    name: str, offers: list[tuple[_Source, BackendInfo]], failures: list[PluginFailure]
) -> Registered | None:
    """One backend for each name: a built-in backend has precedence, and of two plugins neither gets the name."""
    ours = next((offer for offer in offers if offer[0].built_in), None)
    winner = offers[0] if len(offers) == 1 else ours
    owners = sorted({f"plugin {source.plugin} of {source.distribution}" for source, _ in offers})
    text, cure = f"{name!r} is claimed by {' and by '.join(owners)}", ""
    if ours is not None:
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
    names: Sequence[str], where: str, strangers: Sequence[_Source], *, denied: bool
) -> Iterator[PluginFailure]:
    """Entries of a list that have no effect. Without this, a misspelt entry would be silent."""
    names_found = {name for source in strangers for name in (source.plugin, source.distribution)}
    for name in names:
        if name in BUILT_IN and denied:
            cure = "ask for another backend by name"
            yield PluginFailure(_HOME, name, "built-in", f"built in, named by {where}", cure)
        elif name not in ("*", *BUILT_IN) and not any(source.answers_to(name) for source in strangers):
            error = f"named by {where}{did_you_mean(name, names_found)}"
            yield PluginFailure("", name, "absent", error, "correct it, or take it off the list")


def _discovered() -> list[importlib.metadata.EntryPoint]:
    """Entry points of our group. Distributions with unreadable metadata are skipped."""
    try:
        return list(importlib.metadata.entry_points(group=hookspecs.GROUP))
    except Exception:  # noqa: BLE001 - one malformed entry_points.txt on the path makes this fail for all distributions
        found: dict[str, list[importlib.metadata.EntryPoint]] = {}
        for distribution in importlib.metadata.distributions():
            try:
                points = [point for point in distribution.entry_points if point.group == hookspecs.GROUP]
                # the first distribution on the path hides later ones of the same name, as in imports
                found.setdefault(_normal(distribution.metadata["Name"]), points)
            except Exception:  # noqa: BLE001, S112 - metadata of another package
                continue
        return [point for points in found.values() for point in points]


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
