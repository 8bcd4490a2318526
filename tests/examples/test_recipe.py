"""`docs/writing-a-backend.md` works: its commands are run as they stand, and every name in it exists."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import click
import pytest
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.config import FILE
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import (
    OPTIONAL_MEMBERS,
    REQUIRED_MEMBERS,
    Backend,
    BackendInfo,
    Capabilities,
    IndexForm,
    KeyForm,
    Rank,
)
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from dsv4attn.tools.cli import main
from tests.examples.built_wheels import ACME, OFFLINE, PIP, ROOT, environment

TEXT = (ROOT / "docs" / "writing-a-backend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
SPANS = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [text for text in SPANS + LINES if re.match(r"(\w+=\S+ )?dsv4attn ", text)]
MADE = ("dsv4attn-zephyr.json", FILE, "known.txt")
"""Files that the reader of the recipe makes."""

SHORT = {
    "python -m pytest": "python -m pytest -q -p no:cacheprovider -k lse-decode",
    "dsv4attn conform zephyr": "dsv4attn conform zephyr --filter lse-decode --certificate dsv4attn-zephyr.json",
    "dsv4attn conform zephyr --filter memory": "dsv4attn conform zephyr --filter scratch-swa,stale-swa",
    "dsv4attn run --backend zephyr --layers c4a": (
        "dsv4attn run --backend zephyr --layers c4a --max-requests 1 --max-tokens 40"
    ),
}
"""The long commands, with fewer cases and tokens: others run the whole kit, and serve long requests."""


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_recipe_works_as_it_stands(tmp_path: Path) -> None:
    folder, site, programs = tmp_path / "folder", tmp_path / "site", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    offline = shlex.join([*OFFLINE, "--target", str(site)])
    for name, start, options in (
        ("dsv4attn", [sys.executable, "-m", "dsv4attn"], ""),
        ("python", [sys.executable], ""),
        ("pip", PIP, offline),
    ):
        program = programs / name
        # a folder of its own takes no editable install
        left_out = 'for a; do shift; [ "$a" = -e ] || set -- "$@" "$a"; done\n' if name == "pip" else ""
        program.write_text(f'#!/bin/sh\n{left_out}exec {shlex.join(start)} "$@" {options}\n', encoding="utf-8")
        program.chmod(0o755)
    script = "\n".join(["set -ex", *(SHORT.get(line, line) for line in LINES)])
    env = environment([site])
    env["PATH"] = f"{programs}:{env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],  # noqa: S607 - whichever is there
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    plugin_folder = folder / "dsv4attn-zephyr"

    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert set(SHORT) < set(LINES)
    certificate = json.loads((plugin_folder / "dsv4attn-zephyr.json").read_text(encoding="utf-8"))
    assert (certificate["ok"], certificate["distribution"]) == (True, "dsv4attn-zephyr")
    assert not [path for path in plugin_folder.rglob("*") if "acme" in path.name.lower()]
    for file in (plugin_folder / "README.md", plugin_folder / "pyproject.toml", *plugin_folder.glob("*/*.py")):
        assert "acme" not in file.read_text(encoding="utf-8").lower(), file


def test_every_file_it_names_exists() -> None:
    named = [text for text in SPANS if re.fullmatch(r"[\w./-]+\.(py|md|toml|json)|examples/[\w/-]+", text)]
    assert len(named) > 10
    for name in named:
        candidates = [root / name.replace("zephyr", "acme") for root in (ROOT, ACME, ACME / "dsv4attn_acme")]
        assert name in MADE or any(path.exists() for path in candidates), name


@pytest.mark.parametrize("text", dict.fromkeys(COMMANDS))
def test_every_command_it_names_exists(text: str) -> None:
    words = shlex.split(text.removeprefix("DSV4ATTN_BACKEND=zephyr "))
    command = main.get_command(click.Context(main), words[1])
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
    if "--filter" in words:
        assert chosen(CASES, words[words.index("--filter") + 1])


def test_g22_the_filter_of_the_first_method_judges_it_alone() -> None:
    class OnlyQuantises(Backend):
        name, capabilities, steps = "zephyr", ReferenceBackend().capabilities, indices

        def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
            ReferenceBackend().quantize_and_insert_k_cache(k, cache, slot_mapping)

    (patterns,) = re.findall(r"\| `quantize_and_insert_k_cache` \| `dsv4attn conform zephyr --filter '(.*?)'`", TEXT)
    certificate = conform(
        Subject.of(OnlyQuantises()), [c for c in chosen(CASES, patterns) if c.name != "quantise-1031"]
    )

    assert [(o.case.name, o.message) for o in certificate.outcomes if o.state != "passed"] == []
    assert certificate.executed > 10


def test_every_option_it_names_by_itself_exists() -> None:
    source = (ROOT / "dsv4attn" / "testing" / "plugin.py").read_text(encoding="utf-8")
    for option in re.findall(r"--dsv4-[\w-]+", TEXT):
        assert f'"{option}"' in source
    known = {option for name in ("explain", "conform", "new-plugin") for option in _options(name)}
    assert {text for text in SPANS if re.fullmatch(r"--[\w-]+", text)} <= known


def _options(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts}


def test_every_clause_it_names_exists() -> None:
    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    clauses = [
        clause for group in re.findall(r"\(([A-Z]\d?[^()`]*)\)", TEXT) for clause in re.findall(r"\b[A-Z]\d*\b", group)
    ]
    assert len(clauses) > 8
    for clause in clauses:
        assert re.search(rf"\*\*{clause}\.\*\*" if clause[1:] else rf"^## {clause}\. ", contract, re.MULTILINE), clause


def test_every_name_of_the_contract_in_it_exists() -> None:
    fields = {field.name for kind in (BackendInfo, Capabilities) for field in attrs.fields(kind)}
    named = {
        name
        for names in re.findall(r"^(?:- |\| )((?:`[a-z_0-9]+`(?:, )?)+)", TEXT, re.MULTILINE)
        for name in names[1:-1].split("`, `")
    }

    assert named <= fields | {*REQUIRED_MEMBERS} | {*OPTIONAL_MEMBERS}
    assert {*OPTIONAL_MEMBERS} - {"prepare"} <= named
    assert {field.name for field in attrs.fields(BackendInfo)} <= named | {"support", "summary"}
    assert {*REQUIRED_MEMBERS} <= named | {"capabilities", "name"}
    assert {member.name for kind in (IndexForm, KeyForm) for member in kind} <= set(SPANS)
    assert "Rank.VENDOR" in SPANS
    assert Rank.VENDOR is attrs.fields(BackendInfo).rank.default


def test_every_attribute_and_module_in_it_exists() -> None:
    problem = Problem.of(ModelGeometry.preset("flash"), "c4a")
    for text in SPANS:
        if text.startswith("problem."):
            value: object = problem
            for name in text.split(".")[1:]:
                value = getattr(value, name)
        if re.fullmatch(r"dsv4attn(\.\w+)+", text) and text != FILE:
            importlib.import_module(text)
    for module, name in (
        ("memory.workspace", "simultaneous_bytes"),
        ("cache.layout", "KVCacheLayout"),
        ("contract.problem", "Reason"),
    ):
        assert name in SPANS or f"a `{name}`" in TEXT
        assert name in importlib.import_module(f"dsv4attn.core.{module}").__all__
