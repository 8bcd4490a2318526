"""Whether the engines of this installation run DeepSeek-V4 on dsv4attn, from metadata alone: no engine is imported.

A wheel's module `guard` says which versions it was tested with, and refuses in the words that the engine's log would
have. Its module `internals` has the table of the engine's names that it relies on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen, validators

from dsv4attn.integrations.engine_internals import listed
from dsv4attn.integrations.engines import ENGINES, Engine, Guard, RefusedError
from dsv4attn.plugins import PLUGIN_ERRORS, first_line, trace_of

STATES = ("absent", "no wheel", "off", "left out", "broken", "refused", "untested", "active")
"""Of an engine and its wheel; `docs/engines.md` says what each means."""


@frozen
class EngineState:
    """An engine, its wheel, and whether DeepSeek-V4 layers will be served by dsv4attn.

    engine: its name. package, wheel: the two distributions.
    installed: whether the engine is installed. version: its version, or None.
    wheel_version: None if the wheel is not installed.
    tested: versions of the engine that the wheel was tested with. is_tested: None if it cannot be said.
    state: one of STATES.
    served: whether its DeepSeek-V4 layers run on dsv4attn. scope: where they do, as `Engine.scope`, or "".
    why: one phrase. cure: what to do if that is not wanted, or "". traceback: of the wheel's exception, or "".
    internals: the names of the engine's code that the wheel relies on, see `engine_internals.listed`.
    """

    engine: str
    package: str
    wheel: str
    state: str = field(validator=validators.in_(STATES))
    why: str
    installed: bool = True
    version: str | None = None
    wheel_version: str | None = None
    tested: tuple[str, ...] = ()
    is_tested: bool | None = None
    served: bool = False
    scope: str = ""
    cure: str = ""
    traceback: str = ""
    internals: Sequence[Mapping[str, Any]] = ()

    @property
    def is_problem(self) -> bool:
        """Whether something is wrong; a wheel that is off or left out is what the user configured."""
        return self.state in ("broken", "refused") or (self.state == "absent" and self.wheel_version is not None)

    @property
    def verdict(self) -> str:
        """One line without the cure."""
        name = f"{self.engine} {self.version}" if self.version else self.engine
        if not self.installed:
            return f"{name}: {self.why}"
        if self.state == "refused":
            return f"{name}: refuses to load DeepSeek-V4: {self.why}"
        how = f"on dsv4attn, {self.scope}" if self.served else "without dsv4attn"
        return f"{name}: serves DeepSeek-V4 {how}: {self.why}"

    @property
    def relies_on(self) -> str:
        """How many names of the engine's code the wheel relies on, by what it does with them; or ""."""
        counts = Counter[str]()
        for row in self.internals:
            counts[row["use"]] += len(row["names"])
        if not counts:
            return ""
        uses = ", ".join(f"{use} {counts[use]}" for use in sorted(counts))
        return f"{self.wheel} {uses} names of {self.engine}'s code, which `dsv4attn doctor --json` lists"

    def __str__(self) -> str:
        """The verdict and its cure."""
        return f"{self.verdict}{f' -> {self.cure}' if self.cure else ''}"


def examine() -> list[EngineState]:
    """The state of every engine in this environment. Never raises because of a wheel or of strange metadata.

    TokenSpeed and the module `flash_mla` are in the list where they, or their wheels, are installed.
    """
    others = [_tokenspeed(), _flash_mla()]
    return [*map(_examined, ENGINES), *(state for state in others if state.installed or state.wheel_version)]


def as_json(state: EngineState) -> dict[str, Any]:
    """All facts, and the line that is shown."""
    return {**asdict(state), "text": str(state)}


def related() -> tuple[str, ...]:
    """Variables of the engines that affect whether a wheel is loaded."""
    return tuple(engine.allowed for engine in ENGINES)


def _examined(engine: Engine) -> EngineState:
    state, wheel = _found(engine.name, engine.package, engine.wheel), _distribution(engine.wheel)
    if state.state != "broken" or wheel is None:
        return state
    named = _named(engine.wheel, wheel)
    try:
        point = _point(engine, wheel)
        guard = importlib.import_module(f"{point.module}.guard").GUARD
        table = importlib.import_module(f"{point.module}.internals").TABLE
        return _judged(evolve(state, internals=listed(table)), named, point.name, guard)
    except KeyboardInterrupt:
        raise
    except PLUGIN_ERRORS as error:
        why, cure = f"{named} is broken: {first_line(error)}", f"reinstall {engine.wheel}, or uninstall it"
        return evolve(state, why=why, cure=cure, traceback=trace_of(error))


def _judged(state: EngineState, named: str, point: str, guard: Guard) -> EngineState:
    """The state of an engine with its wheel. named: the wheel with its version. point: name of the entry point."""
    engine, tested = guard.engine, guard.tested
    is_tested = None if state.version is None else state.version.partition("+")[0] in tested
    state = evolve(state, tested=tested, is_tested=is_tested)
    if guard.is_off():
        why = f"{engine.switch}={os.environ.get(engine.switch, '')} switches {named} off"
        return evolve(state, state="off", why=why, cure=f"unset {engine.switch}")
    if engine.leaves_out(point):
        allowed = os.environ[engine.allowed]
        why = f"{engine.allowed}={allowed!r} leaves out {point!r}, the plugin of {named}"
        names = [name.strip() for name in allowed.split(",") if name.strip() not in ("", point)]
        return evolve(state, state="left out", why=why, cure=f"{engine.allowed}={','.join([*names, point])}")
    if state.version is None and _distribution(engine.package):
        why = f"{engine.name} is broken: its metadata names no version"
        return evolve(state, state="broken", why=why, cure=f"reinstall {engine.package}")
    try:
        guard.check()
    except RefusedError as error:
        why, _, cure = str(error).partition(" -> ")
        return evolve(state, state="refused", why=why, cure=cure)
    state = evolve(state, served=True, scope=engine.scope)
    if is_tested:
        return evolve(state, state="active", why=f"{named} was tested with this version")
    why = f"{named} was tested with {' and '.join(tested)} only; {engine.any_version}=1 lets it try this one"
    return evolve(state, state="untested", why=why, cure=f"if it fails, {guard.install}")


def _found(name: str, package: str, wheel_name: str) -> EngineState:
    """The state of an engine from versions alone; "broken" where both are installed, as only the wheel can say more."""
    wheel, installed = _distribution(wheel_name), _distribution(package)
    state = EngineState(name, package, wheel_name, "absent", "not installed", version=_version(installed))
    state = evolve(state, wheel_version=(_version(wheel) or "unknown") if wheel else None)
    # a source tree on the path has no metadata, and a folder of that name has no origin
    if installed is None and _origin(package) is None:
        state = evolve(state, installed=False)
        if wheel is None:
            return state
        why = f"not installed, but {_named(wheel_name, wheel)} is"
        return evolve(state, why=why, cure=f"install {package}, or uninstall {wheel_name}")
    if wheel is None:
        cure = f"to change that, install integrations/{wheel_name} of dsv4attn's sources"
        return evolve(state, state="no wheel", why=f"{wheel_name} is not installed", cure=cure)
    return evolve(state, state="broken")


def _named(wheel_name: str, wheel: importlib.metadata.Distribution) -> str:
    """A wheel with its version."""
    return f"{wheel_name} {_version(wheel) or 'of unknown version'}"


def _tokenspeed() -> EngineState:
    """Whether TokenSpeed's ops have kernels of dsv4attn. If its wheel refuses, TokenSpeed warns and runs its own."""
    state = _found("TokenSpeed", "tokenspeed_kernel", "dsv4attn-tokenspeed")
    named, variable = f"{state.wheel} {state.wheel_version}", "DSV4ATTN_TOKENSPEED"
    if state.state != "broken":
        return state
    try:
        tested = str(importlib.import_module("dsv4attn_tokenspeed").TESTED)
    except PLUGIN_ERRORS as error:
        why, cure = f"{named} is broken: {first_line(error)}", f"reinstall {state.wheel}, or uninstall it"
        return evolve(state, why=why, cure=cure, traceback=trace_of(error))
    state = evolve(state, tested=(tested,), is_tested=state.version == tested)
    flags = {name: os.environ.get(name, "").strip() for name in (variable, f"{variable}_ANY_VERSION")}
    wrong = [name for name, value in flags.items() if value not in ("", "0", "1")]
    if flags[variable] == "0" and not wrong:
        return evolve(state, state="off", why=f"{variable}=0 switches {named} off", cure=f"unset {variable}")
    why = f"{named} was tested with {tested} only"
    if wrong or (not state.is_tested and flags[f"{variable}_ANY_VERSION"] != "1"):
        cure = f"install {state.package}=={tested}, or set {variable}_ANY_VERSION=1 to try this version"
        said = (f"environment variable {wrong[0]}: expected 0 or 1", "correct it") if wrong else (why, cure)
        return evolve(state, why=said[0], cure=said[1])
    state = evolve(state, served=True, scope="in every op that has a kernel of the wheel")
    if state.is_tested:
        return evolve(state, state="active", why=f"{named} was tested with this version")
    why, cure = (
        f"{why}; {variable}_ANY_VERSION=1 lets it try this one",
        f"if it fails, install {state.package}=={tested}",
    )
    return evolve(state, state="untested", why=why, cure=cure)


def _flash_mla() -> EngineState:
    """Which module an engine gets that imports `flash_mla`. Nothing is imported: Python says where it would look."""
    state, variable = _found("flash_mla", "flash_mla", "dsv4attn-flash-mla"), "DSV4ATTN_FLASH_MLA"
    if not state.wheel_version:
        return state
    named, found = f"{state.wheel} {state.wheel_version}", _origin("flash_mla")
    state = evolve(state, state="broken", installed=True)
    if found and "dsv4attn_flash_mla" in Path(found).parts:
        why, scope = f"{named} offers the module", "in engines that import flash_mla"
        return evolve(state, state="active", served=True, scope=scope, why=why)
    if os.environ.get(variable, "").strip() == "0":
        return evolve(state, state="off", why=f"{variable}=0 switches {named} off", cure=f"unset {variable}")
    if found:
        why = f"FlashMLA is installed too, and {variable} is not set: {found} is imported"
        return evolve(state, state="left out", why=why, cure=f"{variable}=1")
    why = f"{named} offers no module: Python has not read its .pth file, or {variable} is neither 0 nor 1"
    cure = f"start Python without -S and -I, set {variable}=1, or reinstall {state.wheel}"
    return evolve(state, state="broken", why=why, cure=cure)


def _origin(name: str) -> str | None:
    """The file that an import would load, or None."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    """An installed distribution, or None."""
    try:
        return importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _version(distribution: importlib.metadata.Distribution | None) -> str | None:
    """Its version; None if its metadata has none or cannot be read."""
    try:
        return next(iter((distribution.metadata.get_all("Version") if distribution else None) or []), "") or None
    except Exception:  # noqa: BLE001 - metadata of another package
        return None


def _point(engine: Engine, wheel: importlib.metadata.Distribution) -> importlib.metadata.EntryPoint:
    """The entry point of a wheel that the engine loads."""
    for point in wheel.entry_points:
        if point.group == engine.group:
            return point
    raise LookupError(f"it has no entry point in {engine.group}")
