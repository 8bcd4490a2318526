"""Every environment variable and configuration key, in one place. `docs/selection.md` shows the same tables.

A value comes from the first of: argument, environment, configuration file, default. The file is the one that
`DSV4ATTN_CONFIG` names; otherwise the nearest one is looked for in the working directory and its parents:
`dsv4attn.toml`, or the table `[tool.dsv4attn]` of the nearest pyproject.toml.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from dsv4attn.errors import ConfigError, did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["AUTO", "KEYS", "PHASES", "VARIABLES", "Knob", "Setting", "Settings", "load_settings", "parse_request"]

AUTO = "auto"
PHASES = ("decode", "prefill")
FILE = "dsv4attn.toml"


@frozen
class Knob:
    """A variable or a key, as the documentation shows it."""

    default: str
    values: str
    meaning: str


VARIABLES: Mapping[str, Knob] = {
    "DSV4ATTN_BACKEND": Knob("unset", "`NAME`, `auto`, or `decode=NAME,prefill=NAME`", "backend of each phase"),
    "DSV4ATTN_CONFIG": Knob("unset", "path", "configuration file to read instead of looking for one"),
    "DSV4ATTN_PLUGINS_ALLOW": Knob("unset", "comma-separated names", "like `plugins.allow`, and instead of it"),
    "DSV4ATTN_PLUGINS_DENY": Knob("unset", "comma-separated names", "like `plugins.deny`, and instead of it"),
}
"""A variable that is set to nothing counts as unset."""

KEYS: Mapping[str, Knob] = {
    "backend": Knob("`auto`", "`NAME` or `auto`", "backend of both phases"),
    "decode": Knob("`backend`", "`NAME` or `auto`", "backend of decode"),
    "prefill": Knob("`backend`", "`NAME` or `auto`", "backend of prefill"),
    "plugins.allow": Knob("all", "list of names", "plugins or distributions to load; no others are"),
    "plugins.deny": Knob("none", "list of names", "plugins or distributions not to load"),
    "options.NAME": Knob("none", "table", "options for the backend of this name"),
}
"""Names of plugins and distributions may be shell patterns such as `acme-*`; `*` denies all that is not built in."""


@frozen
class Setting:
    """A value and where it comes from, in words for error messages."""

    value: str
    source: str


@frozen
class Settings:
    """What the user asked for."""

    decode: Setting = Setting(AUTO, "default")
    prefill: Setting = Setting(AUTO, "default")
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(factory=dict)
    file: str | None = None
    """The configuration file that was read."""
    sources: Mapping[str, str] = field(factory=dict)
    """Where "plugins.allow" and "plugins.deny" come from, in words; what is not here has its default."""

    def request(self, phase: str) -> Setting:
        """The backend asked for in a phase."""
        return self.decode if phase == "decode" else self.prefill


def load_settings(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> Settings:
    """Read environment and configuration file. Raises ConfigError naming the variable, or the file and line."""
    given = os.environ if environ is None else environ
    for name in sorted(given):
        if name.startswith("DSV4ATTN_") and name not in VARIABLES:
            raise ConfigError(f"environment variable {name}", f"unknown variable{did_you_mean(name, VARIABLES)}")
    variables = {name: given[name].strip() for name in VARIABLES if given.get(name, "").strip()}
    path, table = _read(variables.get("DSV4ATTN_CONFIG"), directory)
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
    )


def parse_request(text: str, where: str) -> dict[str, str]:
    """Backend by phase, from `NAME` or `decode=NAME,prefill=NAME`; phases that are not named are not in it."""
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


def _read(named: str | None, directory: Path | None) -> tuple[Path | None, dict[str, Any]]:
    """The configuration file and the table it holds for us."""
    if named is None:
        return _search(directory)
    path = Path(named).expanduser()
    if not _is_file(path):
        raise ConfigError("environment variable DSV4ATTN_CONFIG", f"{named} is not a file that can be read")
    table = _own_table(path)
    if table is None:
        raise ConfigError("environment variable DSV4ATTN_CONFIG", f"{named} has no table [tool.dsv4attn]")
    return path, table


def _search(directory: Path | None) -> tuple[Path | None, dict[str, Any]]:
    try:
        start = (directory or Path.cwd()).absolute()
    except OSError:
        # the working directory was deleted under this process
        return None, {}
    project = False
    for folder in (start, *start.parents):
        names = [FILE] if project else [FILE, "pyproject.toml"]
        for path in (folder / name for name in names):
            if not _is_file(path):
                continue
            table = _own_table(path)
            if table is not None:
                return path, table
            project = True
    return None, {}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _own_table(path: Path) -> dict[str, Any] | None:
    """All of a file of ours; of a pyproject.toml the part that is ours, if it has one."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        table: Any = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        # what is never closed is noticed at the end
        line = found[1] if found else len(text.splitlines())
        raise ConfigError(f"{path}:{line}", f"not valid TOML: {error}") from error
    if path.name == "pyproject.toml":
        tool = table.get("tool")
        table = tool.get("dsv4attn") if isinstance(tool, dict) else None
        if table is not None and not isinstance(table, dict):
            raise ConfigError(str(path), f"tool.dsv4attn: expected a table, got {table!r}")
    return table  # type: ignore[no-any-return]


def _check(table: Mapping[str, Any], path: str) -> None:
    """Every key known and of the right type."""
    known = {key.partition(".")[0] for key in KEYS}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(path, f"unknown key {key!r}{did_you_mean(key, known)}")
        if key in ("plugins", "options"):
            if not isinstance(value, dict):
                raise ConfigError(path, f"{key}: expected a table, got {value!r}")
        elif not isinstance(value, str) or not value.strip():
            raise ConfigError(path, f"{key}: expected the name of a backend, got {value!r}")
        elif "=" in value or "," in value:
            raise ConfigError(path, f"{key}: expected one name, got {value!r} -> use the keys decode and prefill")
    _check_tables(table, path)


def _check_tables(table: Mapping[str, Any], path: str) -> None:
    for key, value in table.get("plugins", {}).items():
        if key not in ("allow", "deny"):
            raise ConfigError(path, f"unknown key 'plugins.{key}'{did_you_mean(key, ('allow', 'deny'))}")
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ConfigError(path, f"plugins.{key}: expected a list of names, got {value!r}")
    for name, value in table.get("options", {}).items():
        if not isinstance(value, dict):
            raise ConfigError(path, f"options.{name}: expected a table, got {value!r}")
