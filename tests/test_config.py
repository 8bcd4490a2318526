"""Environment variables and configuration files: which value counts, and the errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dsv4attn.config import (
    KEYS,
    Knob,
    Setting,
    Settings,
    known_variables,
    load_settings,
    parse_request,
    register_variables,
)
from dsv4attn.errors import ArgumentError, ConfigError

DOCS = Path(__file__).resolve().parents[1] / "docs" / "selection.md"


def settings_of(folder: Path, text: str | None = None, *, name: str = "dsv4attn.toml", **environ: str) -> Settings:
    """Settings of a folder with one configuration file in it, and of some variables."""
    if text is not None:
        (folder / name).write_text(text, encoding="utf-8")
    return load_settings(environ, folder)


def test_without_anything_everything_is_automatic(tmp_path: Path) -> None:
    assert settings_of(tmp_path) == Settings()
    assert Settings().decode == Settings().prefill == Setting("auto", "default")


# which value counts


def test_a_file_names_both_phases_or_each(tmp_path: Path) -> None:
    settings, path = settings_of(tmp_path, 'backend = "acme"'), tmp_path / "dsv4attn.toml"
    assert settings.decode == settings.prefill == Setting("acme", f"backend in {path}")
    assert settings.file == str(path)

    settings = settings_of(tmp_path, 'backend = "acme"\nprefill = "reference"')
    assert settings.decode == Setting("acme", f"backend in {path}")
    assert settings.prefill == Setting("reference", f"prefill in {path}")
    assert (settings.request("decode"), settings.request("prefill")) == (settings.decode, settings.prefill)


def test_every_call_reads_the_file_and_gives_its_own_tables(tmp_path: Path) -> None:
    text = "[options.acme]\nlevels = [1, 2]"
    options: Any = settings_of(tmp_path, text).options
    options["acme"]["levels"].append(3)

    assert settings_of(tmp_path, text).options == {"acme": {"levels": [1, 2]}}
    assert settings_of(tmp_path, text.replace("2", "4")).options == {"acme": {"levels": [1, 4]}}


@pytest.mark.parametrize(("name", "head"), [("dsv4attn.toml", ""), ("pyproject.toml", "[tool.dsv4attn]\n")])
def test_tables_that_are_nested_too_deeply_are_an_error(tmp_path: Path, name: str, head: str) -> None:
    """Dotted keys are parsed without recursion, so they get past the parser."""
    with pytest.raises(ConfigError, match=r"toml: tables are nested too deeply$"):
        settings_of(tmp_path, f"{head}{'.'.join('a' * 2000)} = 1", name=name)


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 'backend = "acme"', DSV4ATTN_BACKEND="reference")

    assert settings.decode == settings.prefill == Setting("reference", "environment variable DSV4ATTN_BACKEND")


def test_the_environment_can_name_one_phase_and_leave_the_other_to_the_file(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, 'backend = "acme"', DSV4ATTN_BACKEND="prefill=reference")

    assert (settings.decode.value, settings.prefill.value) == ("acme", "reference")


def test_auto_in_the_environment_undoes_the_file(tmp_path: Path) -> None:
    assert settings_of(tmp_path, 'backend = "acme"', DSV4ATTN_BACKEND="auto").decode.value == "auto"


@pytest.mark.parametrize("empty", ["", "  "])
def test_a_variable_set_to_nothing_is_unset(tmp_path: Path, empty: str) -> None:
    text = 'backend = "acme"\nplugins.allow = ["acme"]'
    settings = settings_of(tmp_path, text, **dict.fromkeys(known_variables(), empty))

    assert settings == settings_of(tmp_path)
    assert settings.allow == ("acme",)


def test_lists_come_from_the_environment_or_the_file_with_their_source(tmp_path: Path) -> None:
    text = '[plugins]\nallow = ["acme", "bolt"]\ndeny = ["zinc"]'
    settings = settings_of(tmp_path, text, DSV4ATTN_PLUGINS_DENY=" one, two ,")

    assert settings.allow == ("acme", "bolt")
    assert settings.deny == ("one", "two")
    assert settings.sources == {
        "plugins.allow": f"plugins.allow in {tmp_path / 'dsv4attn.toml'}",
        "plugins.deny": "DSV4ATTN_PLUGINS_DENY",
    }


def test_no_list_and_an_empty_list_are_different(tmp_path: Path) -> None:
    assert settings_of(tmp_path).allow is None
    assert settings_of(tmp_path, "plugins.allow = []").allow == ()


def test_options_are_kept_by_backend(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "[options.acme]\nsplits = 4\n[options.reference]\nprefill_keys = 'paged'")

    assert settings.options == {"acme": {"splits": 4}, "reference": {"prefill_keys": "paged"}}


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("", {}),
        (" acme ", {"decode": "acme", "prefill": "acme"}),
        ("decode=a", {"decode": "a"}),
        ("prefill = b , decode=a", {"decode": "a", "prefill": "b"}),
    ],
)
def test_a_request_names_both_phases_or_each(text: str, requests: dict[str, str]) -> None:
    assert parse_request(text, "here") == requests


@pytest.mark.parametrize(
    "text", ["decode=", "=a", "decoding=a", "decode=a,", "decode=a,decode=b", "a=b=c", "a,prefill=b"]
)
def test_a_request_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: expected NAME or decode=NAME,prefill=NAME, got "):
        parse_request(text, "here")


# which file


OURS, TABLE = "dsv4attn.toml", "[tool.dsv4attn]\n"
FILES: dict[str, dict[str, str]] = {
    "the nearest file": {OURS: 'backend = "far"', f"a/{OURS}": 'backend = "chosen"'},
    "a pyproject.toml with our table": {"a/b/pyproject.toml": f'{TABLE}backend = "chosen"'},
    "a nearer pyproject.toml": {OURS: 'backend = "far"', "a/b/pyproject.toml": f'{TABLE}backend = "chosen"'},
    "our file in the folder of a pyproject.toml": {
        "a/pyproject.toml": f'{TABLE}backend = "project"',
        f"a/{OURS}": 'backend = "chosen"',
    },
    "a pyproject.toml above one without our table": {
        "pyproject.toml": f'{TABLE}backend = "chosen"',
        "a/b/pyproject.toml": "[project]\nname = 'inner'",
    },
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
def test_the_file_that_counts(tmp_path: Path, files: dict[str, str]) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (path,) = (tmp_path / name for name, text in files.items() if '"chosen"' in text)

    assert load_settings({}, below).decode == Setting("chosen", f"backend in {path}")


@pytest.mark.parametrize("root", [".git", ".hg"])
def test_above_the_root_of_the_project_only_a_file_of_ours_counts(tmp_path: Path, root: str) -> None:
    below = tmp_path / "project" / "a"
    below.mkdir(parents=True)
    (tmp_path / "project" / root).mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.dsv4attn]\nbackend = "outer"', encoding="utf-8")

    assert load_settings({}, below) == Settings()
    (tmp_path / "dsv4attn.toml").write_text('backend = "ours"', encoding="utf-8")
    assert load_settings({}, below).decode.value == "ours"
    (below.parent / "pyproject.toml").write_text('[tool.dsv4attn]\nbackend = "root"', encoding="utf-8")
    assert load_settings({}, below).decode.value == "root"


def test_a_pyproject_above_the_home_directory_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "a"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "pyproject.toml").write_text('[tool.dsv4attn]\nbackend = "outer"', encoding="utf-8")

    assert load_settings({}, home) == Settings()
    assert load_settings({}, home.parent).decode.value == "outer"


# broken files of other projects

BROKEN: dict[str, tuple[bytes, str]] = {
    "not TOML": (b'[project]\nname = = "x"\n', r":2: not valid TOML: "),
    "never closed": (b'[project]\ndependencies = [\n  "dsv4attn",\n', r":3: not valid TOML: "),
    "nested too deeply": (b"a = " + b"[" * 100_000, r":1: not valid TOML: "),
    "Latin-1": (b'[project]\nauthors = ["Andr\xe9"]\n', r": cannot be read: "),
    "UTF-16": ('[project]\nname = "x"\n'.encode("utf-16"), r": cannot be read: "),
    "a neighbour's table": (b"[tool.dsv4attn-acme]\nx = = 1\n", r":2: not valid TOML: "),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_pyproject_of_another_project_is_skipped_and_listed(tmp_path: Path, kind: str) -> None:
    below = tmp_path / "a"
    below.mkdir()
    data, problem = BROKEN[kind]
    (below / "pyproject.toml").write_bytes(data)
    settings = load_settings({}, below)

    assert (settings.decode, settings.file) == (Setting("auto", "default"), None)
    assert len(settings.ignored) == 1
    assert re.match(rf"{re.escape(str(below / 'pyproject.toml'))}{problem}", settings.ignored[0])
    (tmp_path / "dsv4attn.toml").write_text('backend = "acme"', encoding="utf-8")
    assert load_settings({}, below).decode.value == "acme"
    assert load_settings({}, below).ignored == settings.ignored


HEADS = [
    "[tool.dsv4attn]\n",
    '[tool."dsv4attn"]\n',
    "[ tool . dsv4attn.options.acme ]\n",
    "tool.dsv4attn.backend = 'x'\n",
]


@pytest.mark.parametrize("head", HEADS)
def test_a_broken_pyproject_with_our_table_is_an_error(tmp_path: Path, head: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path / 'pyproject.toml'))}:\d: not valid TOML: "):
        settings_of(tmp_path, f"{head}backend = = 3", name="pyproject.toml")
    (tmp_path / "pyproject.toml").write_bytes(f"{head}backend = 'é'".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"pyproject.toml: cannot be read: "):
        load_settings({}, tmp_path)


def test_a_broken_pyproject_that_the_variable_names_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text("name = = 3", encoding="utf-8")

    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}:1: not valid TOML: "):
        load_settings({"DSV4ATTN_CONFIG": str(path)}, tmp_path / "nowhere")


def test_a_folder_of_that_name_is_an_error_and_a_pyproject_that_is_one_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").mkdir()
    assert settings_of(tmp_path) == Settings()

    (tmp_path / "dsv4attn.toml").mkdir()
    with pytest.raises(ConfigError, match=r"dsv4attn.toml: expected a file, got a folder -> rename it, or name the"):
        settings_of(tmp_path)


@pytest.mark.parametrize(("name", "ours"), [("dsv4attn.toml", True), ("pyproject.toml", False)])
def test_a_file_without_permission_is_an_error_only_if_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, ours: bool
) -> None:
    def refused(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / name).touch()
    monkeypatch.setattr(Path, "read_bytes", refused)

    if ours:
        with pytest.raises(ConfigError, match=r"dsv4attn.toml: cannot be read: .*Permission denied"):
            load_settings({}, tmp_path)
    else:
        (ignored,) = load_settings({}, tmp_path).ignored
        assert "pyproject.toml: cannot be read: [Errno 13] Permission denied" in ignored


def test_the_variable_names_another_file(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere.toml"
    other.write_text('backend = "other"', encoding="utf-8")

    assert settings_of(tmp_path, 'backend = "own"', DSV4ATTN_CONFIG=str(other)).decode.value == "other"


def test_the_variable_may_name_a_pyproject(tmp_path: Path) -> None:
    other = tmp_path / "pyproject.toml"
    other.write_text('tool.dsv4attn.backend = "other"', encoding="utf-8")

    assert load_settings({"DSV4ATTN_CONFIG": str(other)}, tmp_path / "nowhere").decode.value == "other"


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "dsv4attn.toml").write_bytes(b'\xef\xbb\xbfbackend = "acme"')

    assert settings_of(tmp_path).decode.value == "acme"


def test_a_deleted_working_directory_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> Path:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "cwd", gone)

    assert load_settings({}) == Settings()


# mistakes


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("DSV4ATTN_BACKENDS", "DSV4ATTN_BACKEND"),
        ("DSV4ATTN_CONFG", "DSV4ATTN_CONFIG"),
        ("DSV4ATTN_PLUGINS", "DSV4ATTN_PLUGINS_ALLOW' or 'DSV4ATTN_PLUGINS_DENY"),
    ],
)
def test_g9_an_unknown_variable_is_an_error_with_a_suggestion(tmp_path: Path, name: str, suggestion: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^environment variable {name}: unknown variable; did you mean '{suggestion}'\? \(known: DSV4ATTN_B",
    ):
        settings_of(tmp_path, **{name: "1"})


def test_malformed_toml_names_file_and_line(tmp_path: Path) -> None:
    path = re.escape(str(tmp_path / "dsv4attn.toml"))

    with pytest.raises(ConfigError, match=rf"^{path}:2: not valid TOML: .*\(at line 2, column"):
        settings_of(tmp_path, 'backend = "acme"\nplugins = = 3')
    for unclosed in ('plugins.deny = [\n"acme",\n', 'decode = "acme"\nbackend = """\nacme'):
        with pytest.raises(ConfigError, match=rf"^{path}:[23]: not valid TOML: .* \(at end of document"):
            settings_of(tmp_path, unclosed)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('bakend = "acme"', "unknown key 'bakend'; did you mean 'backend'?"),
        ("quantum = 1", "unknown key 'quantum'"),
        ('plugins.alloww = ["a"]', "unknown key 'plugins.alloww'; did you mean 'allow'?"),
        ("backend = 3", "backend: expected the name of a backend, got 3"),
        ('decode = ""', "decode: expected the name of a backend, got ''"),
        ('backend = "decode=a,prefill=b"', "-> use the keys decode and prefill"),
        ('plugins = "acme"', "plugins: expected a table, got 'acme'"),
        ('plugins.deny = "acme"', "plugins.deny: expected a list of names, got 'acme'"),
        ("plugins.deny = [1]", "plugins.deny: expected a list of names, got [1]"),
        ("options = 3", "options: expected a table, got 3"),
        ("options.acme = 3", "options.acme: expected a table, got 3"),
    ],
)
@pytest.mark.parametrize("name", ["dsv4attn.toml", "pyproject.toml"])
def test_g9_a_wrong_key_or_value_is_an_error_that_names_the_file(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    text = text if name == "dsv4attn.toml" else f"[tool.dsv4attn]\n{text}"

    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        settings_of(tmp_path, text, name=name)
    assert str(caught.value).startswith(str(tmp_path / name))


@pytest.mark.parametrize("text", ["tool = 3", "[tool]\ndsv4attn = 3", ""])
def test_tables_of_a_pyproject_that_are_none(tmp_path: Path, text: str) -> None:
    if "dsv4attn" in text:
        with pytest.raises(ConfigError, match=r"tool.dsv4attn: expected a table, got 3"):
            settings_of(tmp_path, text, name="pyproject.toml")
    else:
        assert settings_of(tmp_path, text, name="pyproject.toml") == Settings()


def test_the_variable_must_name_a_file_with_our_table(tmp_path: Path) -> None:
    empty = tmp_path / "pyproject.toml"
    empty.write_text("[project]", encoding="utf-8")
    for path, problem in (
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "no.toml", "is not a file"),
        (empty, "has no table"),
    ):
        with pytest.raises(
            ConfigError, match=rf"^environment variable DSV4ATTN_CONFIG: {re.escape(str(path))} {problem}"
        ):
            settings_of(tmp_path, DSV4ATTN_CONFIG=str(path))


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "dsv4attn.toml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigError, match=r"dsv4attn.toml: cannot be read: "):
        settings_of(tmp_path)


# documentation


def rows_of(heading: str) -> dict[str, tuple[str, ...]]:
    """The rows of the table under a heading of docs/selection.md, by the first cell without its backticks."""
    section = DOCS.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return {name.strip("`"): tuple(rest) for name, *rest in cells[2:]}


@pytest.mark.parametrize(("heading", "knobs"), [("Variables", known_variables()), ("Keys", KEYS)])
def test_the_documentation_shows_every_variable_and_key_as_the_code_has_them(heading: str, knobs: object) -> None:
    assert isinstance(knobs, dict)
    assert rows_of(heading) == {name: (knob.default, knob.values, knob.meaning) for name, knob in knobs.items()}


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("ACME", "ACME"),
        ("DSV4ATTN_ACME", "DSV4ATTN_ACM"),
        ("DSV4ATTN_", "DSV4ATTN_X"),
        ("DSV4ATTN_PLUGINS", "DSV4ATTN_PLUGINS_X"),
    ],
)
def test_an_adapter_registers_variables_of_its_own_prefix_alone(prefix: str, name: str) -> None:
    with pytest.raises(ArgumentError, match="variable of an adapter"):
        register_variables(prefix, {name: Knob("0", "`0` or `1`", "nothing")})


def test_a_variable_that_an_adapter_registers_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.config._adapter_variables", dict(known_variables()))
    with pytest.raises(ConfigError, match="DSV4ATTN_ACME_SPEED: unknown variable"):
        settings_of(tmp_path, DSV4ATTN_ACME_SPEED="1")

    register_variables("DSV4ATTN_ACME", {"DSV4ATTN_ACME_SPEED": Knob("0", "a number", "how fast")})

    settings_of(tmp_path, DSV4ATTN_ACME_SPEED="1")
