"""Tables in a pipe or a file: nothing is cut, COLUMNS folds, and without it every row is one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.tools.cli import main
from tests.tools.bench.sample_runs import ROOF
from tests.tools.cli.machine import Machine
from tests.tools.replay.small import CONFIG
from tests.vendor_wheel import plugin

LONG = "a-distribution-of-a-vendor-with-a-rather-long-name-for-its-many-products"
COMMANDS = {
    "backends": (["backends"], f"{LONG} 0.2"),
    "explain": (["explain", "--backend", "acme"], f"({LONG} 0.2)"),
    "doctor": (["doctor"], "decode and prefill: reference: the only backend native to cpu that can run this call"),
    "run": (["run", "--max-requests", "1", "--max-tokens", "4", "--verbose"], "temporaries in addition, at most"),
    "show": (["show", "--length", "101"], "attends to tokens"),
    "bench": (["bench", "decode", "--cases", "flash_swa", "--batches", "1", "--rounds", "1"], "flash_swa"),
    "conform": (["conform", "reference", "--filter", "lse-decode"], "lse-decode"),
    "parity": (
        ["parity", "--backends", "reference,reference:prefill_keys=paged", "--filter", "scratch-swa"],
        "scratch-swa",
    ),
}


@pytest.fixture
def vendor(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a backend whose distribution has a long name, where every model is a small one."""
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)
    monkeypatch.setattr(ModelGeometry, "preset", lambda _: ModelGeometry.from_config(CONFIG))
    machine.wheels.install(LONG, plugin(support="raise KeyError('boom')"), point="acme")
    return machine


def piped(args: list[str], columns: str | None) -> list[str]:
    """Lines of a command whose standard output is no terminal."""
    result = CliRunner().invoke(main, args, env={"COLUMNS": columns, "OMP_NUM_THREADS": "1"})
    assert result.exit_code in (0, 1), result.output
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_gets_whole_lines(vendor: Machine, name: str) -> None:
    args, whole = COMMANDS[name]
    lines = piped(args, None)

    assert any(whole in line for line in lines), "\n".join(lines)
    assert "…" not in "".join(lines)
    assert lines == [line.rstrip() for line in lines]


# COLUMNS folds the lines before they are encoded, in every encoding the same
@pytest.mark.parametrize(
    ("name", "signs", "encodings"),
    [
        ("run", ("(≤", "(<="), [("ascii", "80"), ("latin-1", None)]),
        ("bench", ("±", "+-"), [("ascii", None), ("ascii", "80"), ("latin-1", None), ("cp437", None)]),
    ],
)
def test_what_an_encoding_lacks_is_written_in_others(
    vendor: Machine, name: str, signs: tuple[str, str], encodings: list[tuple[str, str | None]]
) -> None:
    def run(charset: str, columns: str | None) -> str:
        environ = {"COLUMNS": columns, "OMP_NUM_THREADS": "1"}
        result = CliRunner(charset=charset).invoke(main, COMMANDS[name][0], env=environ)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert signs[0] in run("utf-8", None)
    for charset, columns in encodings:
        plain = run(charset, columns)
        assert plain.isascii(), charset
        assert signs[1] in plain, charset


def test_letters_that_an_encoding_lacks_are_escaped(vendor: Machine) -> None:
    vendor.wheels.install("dsv4attn-é", "raise ImportError('ü')", point="odd")
    result = CliRunner(charset="ascii").invoke(main, ["backends"], env={"COLUMNS": "200"})

    assert result.exit_code == 0, result.output
    assert "ImportError: \\xfc" in result.stdout


def test_bytes_of_a_folder_that_are_no_letters_are_escaped(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("dsv4attn.toml").write_text('backend = "reference"\n', encoding="utf-8")

    assert any("\\udce9/dsv4attn.toml" in line for line in piped(["backends"], None))


@pytest.mark.parametrize("name", ["backends", "explain", "run", "show", "conform", "parity"])
def test_columns_fold_a_pipe_and_cut_nothing(vendor: Machine, name: str) -> None:
    args, _ = COMMANDS[name]
    folded = piped(args, "60")

    assert "…" not in "".join(folded)
    assert max(len(line.rstrip()) for line in folded) <= 60
