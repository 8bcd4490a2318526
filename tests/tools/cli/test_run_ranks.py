"""`dsv4attn run --context-parallel`: what is refused before a process group is made, and a run under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import main
from dsv4attn.tools.cli.ranks import check_ranks
from tests.ranks import torchrun
from tests.tools.replay.small import CONFIG, GEOMETRY

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def invoke(*args: str, **env: str | None) -> Any:
    return CliRunner().invoke(main, ["run", "--context-parallel", *args], env=env)


@pytest.mark.parametrize("absent", LAUNCHED)
def test_without_torchrun_the_error_has_the_command(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dsv4attn", "run", "--trace", "a b.jsonl", "--context-parallel", "2"])
    result = invoke("2", **{**LAUNCHED, absent: None})

    assert result.exit_code == 2
    assert "--context-parallel: expected 2 processes that torchrun has started, got one process" in result.stderr
    command = "torchrun --standalone --nproc-per-node 2 -m dsv4attn run --trace 'a b.jsonl' --context-parallel 2"
    assert f"-> type: {command}" in result.stderr


def test_another_number_of_processes_is_refused() -> None:
    result = invoke("2", **LAUNCHED)

    assert result.exit_code == 2
    assert "expected 2 processes that torchrun has started, got 3 processes -> type: torchrun" in result.stderr
    for wrong in ("1", "0", "two"):
        assert "--context-parallel" in invoke(wrong, **LAUNCHED).stderr


def test_the_number_of_processes_that_torchrun_has_started_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    check_ranks(3, GEOMETRY)
    with pytest.raises(ArgumentError, match=r"expected a model of DeepSeek-V4, got deepseek-v4.1-flash -> leave out"):
        check_ranks(3, ModelGeometry.preset("v4.1-flash"))


def test_v41_is_refused_before_torchrun_is_asked_for() -> None:
    result = invoke("2", "--model", "v4.1-flash")

    assert result.exit_code == 2
    assert "share caches and selections, which ranks cannot divide yet" in result.stderr


def test_an_interleave_needs_ranks() -> None:
    result = CliRunner().invoke(main, ["run", "--interleave", "2"])

    assert result.exit_code == 2
    assert "--interleave: expected several ranks, got one process -> add --context-parallel" in result.stderr


@pytest.mark.slow
def test_two_ranks_under_torchrun_print_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    options = [
        "--context-parallel",
        "2",
        "--model",
        str(tmp_path),
        "--max-requests",
        "2",
        "--interleave",
        "2",
        "--json",
    ]
    done = torchrun(tmp_path, "-m", "dsv4attn", "run", *options, "--json")

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert report["ranks"]["interleave"] == 2
    assert [rank["rank"] for rank in report["ranks"]["ranks"]] == [0, 1]
