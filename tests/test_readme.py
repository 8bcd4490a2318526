"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsv4attn.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_python_example_runs(example: str) -> None:
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102 - our own text
    assert bool(names["out"].isfinite().all())  # type: ignore[attr-defined]


def test_there_is_an_example() -> None:
    assert EXAMPLES


def test_the_table_of_commands_lists_exactly_the_commands_there_are() -> None:
    listed = set(re.findall(r"^\| `dsv4attn (\w+)[^`]*` \|", README, re.MULTILINE))
    shown = CliRunner().invoke(main, ["--help"]).output.partition("Commands:")[2]
    assert listed == set(re.findall(r"^  (\w+)", shown, re.MULTILINE))


def test_every_make_target_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`?make (\w+)", README))
    assert {"run", "test"} <= targets
    assert targets <= set(re.findall(r"^(\w+):", makefile, re.MULTILINE))


def test_every_path_it_names_exists() -> None:
    layout = re.findall(r"^(dsv4attn/\S+|tests/)\s{2,}", README, re.MULTILINE)
    assert len(layout) > 3
    for path in layout:
        assert (ROOT / path).exists(), path
