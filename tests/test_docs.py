"""Pages of docs/ say who they are for, are in the navigation, and the API pages show every public name and argument."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import attrs
import click
import pytest
from click.testing import CliRunner

import dsv4attn
from dsv4attn.tools import cli

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])
API = {
    "dsv4attn": ("dsv4attn",),
    "contract": ("dsv4attn.core.contract.backend",),
    "testing": ("dsv4attn.testing.suite", "dsv4attn.testing.plugin", "dsv4attn.testing.conform"),
    "compat": tuple(
        f"dsv4attn.compat.{path.stem}"
        for path in sorted((ROOT / "dsv4attn" / "compat").glob("*.py"))
        if path.stem not in {"__init__", "arguments", "direct", "flash_mla_arguments", "flashinfer_sm120_memory"}
    ),
    "errors": ("dsv4attn.errors",),
}
"""Modules whose public names each API page has."""


def first_sentence(page: str) -> str:
    """The paragraph after the title of a page, on one line."""
    return " ".join(page.split("\n\n")[1].split())


def shown(page: str) -> list[str]:
    """Names that an API page shows."""
    text = (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def explained(docstring: str, names: Iterable[str]) -> set[str]:
    """Names that a docstring explains by "name: meaning", or several of them by "name, name: meaning"."""
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    begins = rf"(?<![\w.])(?:{known})(?:(?:, | and )(?:{known}))*: "
    found = re.findall(begins, " ".join(docstring.split())) if known else []
    return {name for item in found for name in re.findall(r"\w+", item)}


def unexplained(function: Callable[..., object], docstring: str) -> list[str]:
    """Arguments of a function that its docstring does not explain."""
    parameters = inspect.signature(function).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [item.name for item in parameters if item.kind not in variadic and item.name not in {"self", "cls"}]
    return [name for name in names if name not in explained(docstring, names)]


def callables(name: str) -> Iterable[tuple[str, Callable[..., object], str]]:
    """(name, function, docstring) of a function of an API page, or of the constructor and public methods of a class."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if inspect.isfunction(value):
        yield name, value, value.__doc__ or ""
    elif inspect.isclass(value):
        if "__init__" in vars(value) and not attrs.has(value):
            yield name, value.__init__, f"{value.__doc__}\n\n{value.__init__.__doc__}"
        for member, method in vars(value).items():
            function = getattr(method, "__func__", method)
            if not member.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{member}", function, function.__doc__ or ""


def unexplained_fields(name: str) -> list[str]:
    """Public fields of an attrs class of an API page that its docstring does not explain."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    if not (inspect.isclass(value) and attrs.has(value)):
        return []
    names = [field.name for field in attrs.fields(value) if not field.name.startswith("_")]
    return [field for field in names if field not in explained(value.__doc__ or "", names)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_who_it_is_for(page: str) -> None:
    assert re.match(r"For [^.:]+: ", first_sentence((DOCS / page).read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_navigation_of_the_site(page: str) -> None:
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", API)
def test_the_api_page_has_every_public_name(page: str) -> None:
    names_of_page = shown(page)
    elsewhere = {"__version__", "Dsv4AttnError", "SCHEMA"}
    if page != "dsv4attn":
        elsewhere |= set(dsv4attn.__all__) - {"Dsv4AttnError"}
    names = {f"{module}.{name}" for module in API[page] for name in importlib.import_module(module).__all__}

    assert len(names_of_page) == len(set(names_of_page))
    assert {name for name in names if name.rpartition(".")[2] not in elsewhere} <= set(names_of_page)
    for name in names_of_page:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("page", API)
def test_a_docstring_that_the_api_page_shows_explains_each_argument_and_field(page: str) -> None:
    missing = {
        called: arguments
        for name in shown(page)
        for called, function, docstring in callables(name)
        if (arguments := unexplained(function, docstring))
    }
    fields = {name: names for name in shown(page) if (names := unexplained_fields(name))}

    assert missing == {}
    assert fields == {}


def test_functions_and_methods_of_all_api_pages_are_held() -> None:
    held = {called for page in API for name in shown(page) for called, _, _ in callables(name)}

    assert len(held) > 225
    assert {"dsv4attn.forward_mqa", "dsv4attn.CacheManager", "dsv4attn.CacheManager.reserve"} <= held


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (dsv4attn.cos_sin_cache, "max_position"),
        (dsv4attn.CacheManager.fork, "length"),
        (dsv4attn.Backend.scratch, "width"),
    ],
    ids=lambda value: getattr(value, "__qualname__", value),
)
def test_an_argument_that_loses_its_line_is_found(function: Callable[..., object], argument: str) -> None:
    lines = (function.__doc__ or "").splitlines()
    without = [line for line in lines if not line.strip().startswith(f"{argument}:")]

    assert len(without) == len(lines) - 1
    assert unexplained(function, "\n".join(without)) == [argument]


def command_named(name: str) -> click.Command:
    """A command of `dsv4attn`."""
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command is not None
    return command


def options_of(command: click.Command) -> set[str]:
    """The long options of a command."""
    return {name for item in command.params for name in item.opts if name.startswith("--")}


def options_in(title: str) -> set[str]:
    """The options that the page of commands has between a heading and the next one."""
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    return set(re.findall(r"`(--[a-z-]+)", text.split(f"# {title}\n")[1].split("\n#")[0]))


COMMANDS = cli.main.list_commands(click.Context(cli.main))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_commands_has_every_option(command: str) -> None:
    assert options_of(command_named(command)) <= options_in(f"dsv4attn {command}")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_exit_codes_and_says_a_sentence_for_each_option(command: str) -> None:
    text = CliRunner().invoke(cli.main, [command, "--help"]).output
    options = [item for item in command_named(command).params if isinstance(item, click.Option)]
    sentences = [re.sub(r"\s*\[default: .*\]$", "", item.help or "") for item in options]

    assert "Exit codes:\n    0 " in text
    assert [sentence for sentence in sentences if not sentence.endswith(".")] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for_each_shell_of_the_page(shell: str) -> None:
    command = f"_DSV4ATTN_COMPLETE={shell}_source dsv4attn"
    assert command in (DOCS / "command-line.md").read_text(encoding="utf-8")

    words = {"bash": ("dsv4attn con", "1"), "zsh": ("dsv4attn con", "1"), "fish": ("dsv4attn con", "con")}[shell]
    values = {"_DSV4ATTN_COMPLETE": f"{shell}_complete", "COMP_WORDS": words[0], "COMP_CWORD": words[1]}
    dsv4attn_command = [shutil.which("dsv4attn", path=str(Path(sys.executable).parent)) or "dsv4attn"]
    done = subprocess.run(dsv4attn_command, env={**os.environ, **values}, capture_output=True, text=True, check=True)

    assert "conform" in done.stdout
