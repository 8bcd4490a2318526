"""Reads the settings: environment variables and configuration keys. `docs/selection.md` shows the same tables.

A value comes from the first of: argument, environment, configuration file, default. The file is the one that
`DSV4ATTN_CONFIG` names; otherwise the nearest of these in the working directory and its parents: a `dsv4attn.toml`, or,
up to the root of the project (the folder with `.git` or `.hg`) or the home directory, a pyproject.toml with a table
`[tool.dsv4attn]`. Any other pyproject.toml belongs to another project and is skipped. If it cannot be read,
`Settings.ignored` names it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from attrs import field, frozen

from dsv4attn.core.argument_checks import known_fields, shown
from dsv4attn.core.contract.op_names import ALL, GROUPS, known_names
from dsv4attn.errors import ArgumentError, ConfigError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "AUTO",
    "KEYS",
    "PHASES",
    "VARIABLES",
    "Knob",
    "Setting",
    "Settings",
    "known_variables",
    "load_settings",
    "parse_request",
    "register_variables",
    "switched_on",
]

AUTO = "auto"
PREFIX = "DSV4ATTN_"
"""The first letters of all environment variables of this package."""
PHASES = ("decode", "prefill")
FILE = "dsv4attn.toml"
_PROJECT_FILE = "pyproject.toml"
_ROOTS = (".git", ".hg")
"""Folders in the root of a project."""
_OURS = re.compile(r"""^\s*\[?\s*["']?tool["']?\s*\.\s*["']?dsv4attn["']?\s*[].=]""", re.MULTILINE)
"""Finds the head or a key of the table [tool.dsv4attn] in a pyproject.toml that cannot be parsed."""


@frozen
class Knob:
    """A variable or a key, as the documentation shows it.

    default: value if it is not set.
    values: allowed values.
    meaning: one phrase.
    """

    default: str
    values: str
    meaning: str


VARIABLES: Mapping[str, Knob] = {
    "DSV4ATTN_BACKEND": Knob("unset", "`NAME`, `auto`, or `decode=NAME,prefill=NAME`", "backend of each phase"),
    "DSV4ATTN_CONFIG": Knob("unset", "path", "configuration file to read instead of looking for one"),
    "DSV4ATTN_PLUGINS_ALLOW": Knob("unset", "comma-separated names", "like `plugins.allow`, and instead of it"),
    "DSV4ATTN_PLUGINS_DENY": Knob("unset", "comma-separated names", "like `plugins.deny`, and instead of it"),
    "DSV4ATTN_REFERENCE_OPS": Knob("unset", "comma-separated ops, or groups of ops", "ops that the reference computes"),
    "DSV4ATTN_TRACE": Knob("0", "`0`, `1` or a path", "1: a line for each call of an op on stderr; path: into a file"),
}
"""A variable with an empty value counts as unset. Adapters register theirs, and `known_variables` has both."""
_ADAPTERS = "dsv4attn.integrations.variables"
"""The module that registers the variables of this package's adapters. An unknown variable makes it be imported."""
_adapter_variables: dict[str, Knob] = {}

KEYS: Mapping[str, Knob] = {
    "backend": Knob("`auto`", "`NAME` or `auto`", "backend of both phases"),
    "decode": Knob("`backend`", "`NAME` or `auto`", "backend of decode"),
    "prefill": Knob("`backend`", "`NAME` or `auto`", "backend of prefill"),
    "plugins.allow": Knob("all", "list of names", "plugins or distributions to load; no others are"),
    "plugins.deny": Knob("none", "list of names", "plugins or distributions not to load"),
    "options.NAME": Knob("none", "table", "options for the backend of this name"),
}
"""Names of plugins and distributions may be shell patterns such as `acme-*`; `*` denies everything but built-ins."""


@frozen
class Setting:
    """A value and its origin.

    value: the value.
    source: where it comes from, in words for error messages.
    """

    value: str
    source: str


def _setting(value: object) -> Setting:
    if isinstance(value, str):
        return Setting(value, "settings")
    if not isinstance(value, Setting):
        raise ArgumentError("Settings", expected="the name of a backend, or a Setting", actual=shown(value))
    return value


def _names(value: object) -> tuple[str, ...] | None:
    """Names as a tuple, which is hashable: registries are cached by it. None stays None."""
    if value is None:
        return None
    names = sorted(value) if isinstance(value, (set, frozenset)) and all(isinstance(v, str) for v in value) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        actual = shown(value) if isinstance(value, str) else repr(value)
        hint = f"pass [{value!r}]" if isinstance(value, str) else ""
        raise ArgumentError("Settings.allow or deny", expected="a list of names", actual=actual, hint=hint)
    return tuple(names)


def _denied(value: object) -> tuple[str, ...]:
    return _names(value) or ()


def _options(value: object) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(table, Mapping) for table in value.values()):
        expected = "a dict of options by the name of the backend"
        raise ArgumentError("Settings.options", expected=expected, actual=repr(value))
    return value


def _reference_ops(value: object) -> tuple[str, ...]:
    names = _names(value) or ()
    problem = _unknown_op(names)
    if problem:
        raise ArgumentError("Settings.reference_ops", expected="names of ops", actual=problem)
    return names


def _unknown_op(names: Sequence[str]) -> str:
    """What is wrong with the first name that is no op and no group of ops; "" if all names are known."""
    unknown = next((name for name in names if name not in known_names()), None)
    if unknown is None:
        return ""
    groups = f"groups: {', '.join([ALL, *GROUPS])}"
    ops = f"ops: {', '.join(op for of_group in GROUPS.values() for op in of_group)}"
    return f"unknown op {unknown!r}{did_you_mean(unknown, known_names())} ({groups}; {ops})"


@known_fields
@frozen
class Settings:
    """Settings of the user.

    decode: backend of decode, a `Setting` or a name.
    prefill: backend of prefill, likewise.
    allow: plugins or distributions to load, or None for all.
    deny: plugins or distributions not to load.
    options: options by name of the backend.
    file: configuration file that was read, or None.
    sources: origin of "plugins.allow" and "plugins.deny", in words; a key that is missing has its default.
    ignored: a line for each pyproject.toml that was skipped because it cannot be read: file, line and problem.
    reference_ops: ops, and groups of ops, that the reference computes instead of the chosen backend.
    trace: "1": every call of an op is written to stderr. Other text: to the file of this path. Empty: to nowhere.
    """

    decode: Setting = field(default=Setting(AUTO, "default"), converter=_setting)
    prefill: Setting = field(default=Setting(AUTO, "default"), converter=_setting)
    allow: tuple[str, ...] | None = field(default=None, converter=_names)
    deny: tuple[str, ...] = field(default=(), converter=_denied)
    options: Mapping[str, Mapping[str, Any]] = field(factory=dict, converter=_options)
    file: str | None = None
    sources: Mapping[str, str] = field(factory=dict)
    ignored: tuple[str, ...] = ()
    reference_ops: tuple[str, ...] = field(default=(), converter=_reference_ops)
    trace: str = ""

    def request(self, phase: str) -> Setting:
        """The requested backend of a phase."""
        return self.decode if phase == "decode" else self.prefill


def register_variables(prefix: str, variables: Mapping[str, Knob]) -> None:
    """Make the environment variables of an engine's adapter known. The adapter reads them itself.

    prefix: "DSV4ATTN_" and the adapter's name. Each variable has this name, or begins with it and an underscore.
    Raises ArgumentError for a variable of another name.
    """
    for name in (prefix, *variables):
        is_below = name == prefix or name.startswith(f"{prefix}_")
        if not prefix.startswith(PREFIX) or not is_below or any(known.startswith(name) for known in VARIABLES):
            expected = f"{PREFIX} and a name, and variables that begin so, none of them dsv4attn's own"
            raise ArgumentError("variable of an adapter", expected=expected, actual=name)
    _adapter_variables.update(variables)


def known_variables() -> Mapping[str, Knob]:
    """All environment variables: those of dsv4attn, and those of adapters."""
    import_module(_ADAPTERS)
    return {**VARIABLES, **_adapter_variables}


def load_settings(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> Settings:
    """Read environment and configuration file. Raises ConfigError, which names the variable, or the file and line."""
    environ = os.environ if environ is None else environ
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and name not in known_variables():
            raise ConfigError(f"environment variable {name}", f"unknown variable{_meant(name, known_variables())}")
    variables = {name: environ[name].strip() for name in VARIABLES if environ.get(name, "").strip()}
    path, table, ignored = _read(variables.get("DSV4ATTN_CONFIG"), directory)
    _check(table, str(path))

    requests = {phase: Setting(AUTO, "default") for phase in PHASES}
    for phase in PHASES:
        key = phase if phase in table else "backend"
        if key in table:
            requests[phase] = Setting(table[key].strip(), f"{key} in {path}")
    where = "environment variable DSV4ATTN_BACKEND"
    for phase, name in parse_request(variables.get("DSV4ATTN_BACKEND", ""), where).items():
        requests[phase] = Setting(name, where)

    lists: dict[str, tuple[str, ...]] = {}
    sources: dict[str, str] = {}
    for key in ("allow", "deny"):
        variable = f"DSV4ATTN_PLUGINS_{key.upper()}"
        if variable in variables:
            lists[key] = tuple(name.strip() for name in variables[variable].split(",") if name.strip())
            sources[f"plugins.{key}"] = variable
        elif key in table.get("plugins", {}):
            lists[key] = tuple(table["plugins"][key])
            sources[f"plugins.{key}"] = f"plugins.{key} in {path}"
    return Settings(
        requests["decode"],
        requests["prefill"],
        lists.get("allow"),
        lists.get("deny", ()),
        table.get("options", {}),
        None if path is None else str(path),
        sources,
        ignored,
        _ops_of(variables.get("DSV4ATTN_REFERENCE_OPS", "")),
        "" if variables.get("DSV4ATTN_TRACE", "0") == "0" else variables["DSV4ATTN_TRACE"],
    )


def _ops_of(text: str) -> tuple[str, ...]:
    """The names in DSV4ATTN_REFERENCE_OPS, each once. Raises ConfigError for an unknown name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    problem = _unknown_op(names)
    if problem:
        raise ConfigError("environment variable DSV4ATTN_REFERENCE_OPS", problem)
    return names


def switched_on(name: str) -> bool:
    """Whether an environment variable is 1. Raises ConfigError unless it is 0, 1, or not set."""
    value = os.environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(f"environment variable {name}", f"expected 0 or 1, got {value!r}")
    return value == "1"


def parse_request(text: str, where: str) -> dict[str, str]:
    """The backends by phase in `NAME` or `decode=NAME,prefill=NAME`. It has the phases that the text names."""
    text = text.strip()
    if not text:
        return {}
    if "=" not in text:
        return dict.fromkeys(PHASES, text)
    requests: dict[str, str] = {}
    for part in text.split(","):
        phase, _, name = (piece.strip() for piece in part.partition("="))
        if phase not in PHASES or not name or phase in requests:
            raise ConfigError(where, f"expected NAME or decode=NAME,prefill=NAME, got {text!r}")
        requests[phase] = name
    return requests


_ReadFile = tuple["Path | None", dict[str, Any], tuple[str, ...]]


def _read(named: str | None, directory: Path | None) -> _ReadFile:
    """The configuration file, its table for this package, and the files that were ignored."""
    if named is None:
        return _search(directory)
    path = Path(named).expanduser()
    if not _is_file(path):
        what = "is a folder, not a file" if _is_folder(path) else "is not a file that can be read"
        raise ConfigError("environment variable DSV4ATTN_CONFIG", f"{named} {what}")
    table = _own_table(path, asked_for=True)
    if table is None:
        raise ConfigError("environment variable DSV4ATTN_CONFIG", f"{named} has no table [tool.dsv4attn]")
    return path, table, ()


def _search(directory: Path | None) -> _ReadFile:
    try:
        start = (directory or Path.cwd()).absolute()
    except OSError:
        # the working directory was deleted under this process
        return None, {}, ()
    outside, home, ignored = False, _home(), []
    for folder in (start, *start.parents):
        for path in (folder / name for name in ((FILE,) if outside else (FILE, _PROJECT_FILE))):
            if path.name == FILE and _is_folder(path):
                raise ConfigError(
                    str(path), "expected a file, got a folder -> rename it, or name the file in DSV4ATTN_CONFIG"
                )
            if not _is_file(path):
                continue
            try:
                table = _own_table(path)
            except _ForeignError as error:
                ignored.append(str(error))
                continue
            if table is not None:
                return path, table, tuple(ignored)
        outside = outside or folder == home or any(_exists(folder / root) for root in _ROOTS)
    return None, {}, tuple(ignored)


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        # the user of a container may have neither a passwd entry nor HOME
        return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


class _ForeignError(Exception):
    """A pyproject.toml without a table of this package cannot be read."""


def _own_table(path: Path, *, asked_for: bool = False) -> dict[str, Any] | None:
    """The table of a dsv4attn.toml, or the table [tool.dsv4attn] of a pyproject.toml if it has one.

    Raises ConfigError if the file cannot be read, or _ForeignError if it is a pyproject.toml without that table which
    the user did not name (`asked_for`).
    """
    text, foreign = "", path.name == _PROJECT_FILE and not asked_for
    try:
        data = path.read_bytes()
        # letters of any encoding: without the zeros and the byte order mark of UTF-16
        letters = data.lstrip(b"\xff\xfe\xef\xbb\xbf").replace(b"\0", b"").decode("latin-1")
        foreign = foreign and not _OURS.search(letters)
        text = data.decode("utf-8-sig")
        table: Any = _parsed(text)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), f"cannot be read: {error}", foreign=foreign) from error
    except (ValueError, RecursionError) as error:
        number = re.search(r"at line (\d+)", str(error))
        # a bracket or string that is never closed is reported at the end of the file
        line = number[1] if number else len(text.splitlines())
        raise _unreadable(f"{path}:{line}", f"not valid TOML: {error}", foreign=foreign) from error
    if path.name == _PROJECT_FILE:
        tool = table.get("tool")
        table = tool.get("dsv4attn") if isinstance(tool, dict) else None
        if table is not None and not isinstance(table, dict):
            raise ConfigError(str(path), f"tool.dsv4attn: expected a table, got {table!r}")
    try:
        return deepcopy(table)  # type: ignore[no-any-return]
    except RecursionError:
        # tables of dotted keys, which are parsed without recursion
        raise ConfigError(str(path), "tables are nested too deeply") from None


@lru_cache(maxsize=8)
def _parsed(text: str) -> dict[str, Any]:
    """The table of a file with this text, not to be changed. A file is read for each backend, and seldom changes."""
    parsed: dict[str, Any] = tomllib.loads(text)
    return parsed


def _unreadable(where: str, problem: str, *, foreign: bool) -> Exception:
    return _ForeignError(f"{where}: {problem}") if foreign else ConfigError(where, problem)


def _check(table: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for an unknown key or a value of the wrong type."""
    names = {key.partition(".")[0] for key in KEYS}
    for key, value in table.items():
        if key not in names:
            raise ConfigError(path, f"unknown key {key!r}{_meant(key, names)}")
        if key in ("plugins", "options"):
            if not isinstance(value, dict):
                raise ConfigError(path, f"{key}: expected a table, got {value!r}")
        elif not isinstance(value, str) or not value.strip():
            raise ConfigError(path, f"{key}: expected the name of a backend, got {value!r}")
        elif "=" in value or "," in value:
            raise ConfigError(path, f"{key}: expected one name, got {value!r} -> use the keys decode and prefill")
    _check_tables(table, path)


def _meant(name: str, allowed: Iterable[str]) -> str:
    """The nearest allowed name, and all allowed names."""
    names = sorted(allowed)
    return f"{did_you_mean(name, names)} (known: {', '.join(names)})"


def _check_tables(table: Mapping[str, Any], path: str) -> None:
    for key, value in table.get("plugins", {}).items():
        if key not in ("allow", "deny"):
            raise ConfigError(path, f"unknown key 'plugins.{key}'{_meant(key, ('allow', 'deny'))}")
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(path, f"plugins.{key}: expected a list of names, got {value!r}")
    for name, value in table.get("options", {}).items():
        if not isinstance(value, dict):
            raise ConfigError(path, f"options.{name}: expected a table, got {value!r}")
