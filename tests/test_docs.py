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

import pytest

import dsv4attn

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
PUBLIC = ("dsv4attn", "dsv4attn.core.contract.backend", "dsv4attn.errors", "dsv4attn.compat.flash_mla")


def first_sentence(page: str) -> str:
    """The paragraph after the title of a page, on one line."""
    return " ".join(page.split("\n\n")[1].split())


def unnamed(function: Callable[..., object], docstring: str) -> list[str]:
    """Arguments of a function that its docstring does not name."""
    names = [name for name in inspect.signature(function).parameters if name not in {"args", "kwargs"}]
    return [name for name in names if not re.search(rf"\b{name}\b", docstring)]


def public_functions() -> Iterable[tuple[str, Callable[..., object]]]:
    """Functions among the public names, each once."""
    seen = set()
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) and value not in seen:
                seen.add(value)
                yield name, value


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_who_it_is_for(page: str) -> None:
    assert re.match(r"For [^.:]+: ", first_sentence((DOCS / page).read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_in_the_navigation_of_the_site(page: str) -> None:
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", API)
def test_the_api_page_has_every_public_name(page: str) -> None:
    shown = re.findall(r"^::: (\S+)$", (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
    elsewhere = {"__version__", "Dsv4AttnError", "SCHEMA"}
    if page != "dsv4attn":
        elsewhere |= set(dsv4attn.__all__) - {"Dsv4AttnError"}
    names = {f"{module}.{name}" for module in API[page] for name in importlib.import_module(module).__all__}

    assert len(shown) == len(set(shown))
    assert {name for name in names if name.rpartition(".")[2] not in elsewhere} <= set(shown)
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_docstring_of_a_public_function_names_each_argument() -> None:
    functions = dict(public_functions())

    assert len(functions) > 25
    assert {name: args for name, f in functions.items() if (args := unnamed(f, f.__doc__ or ""))} == {}


def test_an_argument_that_loses_its_line_is_found() -> None:
    lines = (dsv4attn.cos_sin_cache.__doc__ or "").splitlines()
    without = "\n".join(line for line in lines if not line.strip().startswith("max_position:"))

    assert unnamed(dsv4attn.cos_sin_cache, without.replace("[max_position", "[N")) == ["max_position"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for_each_shell_of_the_page(shell: str) -> None:
    command = f"_DSV4ATTN_COMPLETE={shell}_source dsv4attn"
    assert command in (DOCS / "command-line.md").read_text(encoding="utf-8")

    words = {"bash": ("dsv4attn con", "1"), "zsh": ("dsv4attn con", "1"), "fish": ("dsv4attn con", "con")}[shell]
    values = {"_DSV4ATTN_COMPLETE": f"{shell}_complete", "COMP_WORDS": words[0], "COMP_CWORD": words[1]}
    dsv4attn_command = [shutil.which("dsv4attn", path=str(Path(sys.executable).parent)) or "dsv4attn"]
    done = subprocess.run(dsv4attn_command, env={**os.environ, **values}, capture_output=True, text=True, check=True)

    assert "conform" in done.stdout
