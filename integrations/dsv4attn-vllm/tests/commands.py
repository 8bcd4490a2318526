"""Commands that measure an engine, with options that they refuse."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner


def refusal(command: click.Command, options: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command says that refuses its options. It runs in a folder with a file named "file", which it leaves."""
    monkeypatch.chdir(folder)
    Path("file").touch()

    result = CliRunner().invoke(command, options, env={"COLUMNS": "200"})

    assert result.exit_code == 2, result.exception
    assert [entry.name for entry in folder.iterdir()] == ["file"]
    return " ".join(result.output.replace("│", " ").split())
