"""Manners that all commands share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import dsv4attn
from dsv4attn.errors import ArgumentError
from dsv4attn.tools import cli


def invoke(*args: str) -> Any:
    return CliRunner().invoke(cli.main, list(args))


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A command `run` that raises the error of `install`."""

    def install(error: BaseException) -> None:
        @click.command()
        @click.option("--json", "as_json", is_flag=True)
        def run(*, as_json: bool) -> None:
            raise error

        monkeypatch.setattr(cli._Commands, "get_command", lambda *_: run)

    return install


def test_help_names_every_command_and_loads_none() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from dsv4attn.tools.cli import main; "
        "print(CliRunner().invoke(main, ['--help']).output); "
        "heavy = {'torch', 'numpy', 'rich', 'dsv4attn.tools.cli.run', 'dsv4attn.tools.cli.bench'}; "
        "print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip().endswith("[]")
    for name, text in cli._COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert text.split()[0] in done.stdout


WRONG_NAMES = [
    "run --backend nope",
    "run --layers c4b",
    "run --model /nope/config.json",
    "conform nope",
    "parity --backends nope",
    "bench decode --backends nope",
    "compile --target h2000",
    "memory --device 4090",
]


def test_names_are_checked_before_torch_is_imported() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from dsv4attn.tools.cli import main\n"
        f"for words in {WRONG_NAMES}:\n"
        "    print(words, CliRunner().invoke(main, words.split()).exit_code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [f"{words} 2 False" for words in WRONG_NAMES]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is full")
@pytest.mark.parametrize("words", ["explain", "explain --json"])
def test_a_full_disk_is_one_line_and_a_closed_pipe_is_none(words: str) -> None:
    command = [sys.executable, "-m", "dsv4attn", *words.split()]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("words", ["show --plot", "memory --save", "explain --model /", "new-plugin acme --dir"])
def test_a_name_that_is_too_long_is_one_line(words: str) -> None:
    result = CliRunner().invoke(cli.main, f"{words} {'a' * 300}".replace("/ ", "/").split())

    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith("aaa': File name too long")


def test_every_command_can_be_loaded() -> None:
    for name in cli._COMMANDS:
        assert invoke(name, "--help").exit_code == 0
        assert "--json" in invoke(name, "--help").output


def test_the_version_is_that_of_the_package() -> None:
    assert dsv4attn.__version__ in invoke("--version").output


def test_an_unknown_command_is_guessed_at() -> None:
    result = invoke("rnu")

    assert result.exit_code == 2
    assert "unknown command 'rnu'; did you mean 'run'?" in result.stderr


def test_our_errors_are_one_line_and_code_2(failing: Any) -> None:
    failing(ArgumentError("q", expected="this", actual="that", hint="do so"))
    result = invoke("run")

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "Error: q: expected this, got that -> do so\n"


def test_warnings_of_tritons_interpreter_do_not_reach_users(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    command = click.Command("run", callback=_warning_of_a_kernel)
    monkeypatch.setattr(cli._Commands, "get_command", lambda *_: command)
    monkeypatch.setattr(sys, "warnoptions", [])

    assert invoke("run").exit_code == 0
    assert [warning.category for warning in recwarn] == [UserWarning]


def _warning_of_a_kernel() -> None:
    interpreter: Any = {"__name__": "triton.runtime.interpreter"}
    exec("import warnings\nwarnings.warn('overflow', RuntimeWarning)", interpreter)  # noqa: S102 - our own text
    warnings.warn("of other code", stacklevel=1)


@pytest.mark.parametrize(
    "args",
    [
        ("rnu",),
        ("--bad",),
        ("run", "--bakend", "x"),
        ("run", "--block-size", "0"),
        ("run", "--trace", "no.jsonl"),
        ("run", "--html", "no/folder/page.html"),
        ("run", "--device", "tpu"),
        ("bench", "foo"),
        ("bench", "--compare", "no.json"),
        ("compile", "--target", "h200", "--model", "x"),
        ("conform",),
        ("conform", "refernz"),
        ("conform", "reference", "--filter", "x"),
        ("explain", "--device", "tpu"),
        ("new-plugin", "triton"),
    ],
    ids=" ".join,
)
def test_every_error_begins_with_the_same_word(args: tuple[str, ...]) -> None:
    result = invoke(*args)
    lines = result.stderr.splitlines()
    # click puts a line on the usage before an error about the command line
    first = next(i for i, line in enumerate(lines) if not line.startswith(("Usage: ", "Try ")) and line)

    assert (result.exit_code, result.stdout) == (2, "")
    assert lines[first].startswith("Error: ")
    assert [line for line in lines if line.startswith("error")] == []


def test_our_errors_are_one_object_with_json(failing: Any) -> None:
    failing(ArgumentError("q", expected="this", actual="that"))
    result = invoke("run", "--json")

    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "ok": False,
        "error": {"type": "ArgumentError", "message": "q: expected this, got that"},
    }


def test_an_unexpected_error_keeps_its_traceback_and_still_prints_its_object(failing: Any) -> None:
    failing(ZeroDivisionError("oh"))
    result = invoke("run", "--json")

    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)
    assert json.loads(result.stdout) == {"ok": False, "error": {"type": "ZeroDivisionError", "message": "oh"}}
    assert invoke("run").stdout == ""


def test_ctrl_c_is_code_130(failing: Any) -> None:
    failing(KeyboardInterrupt())

    assert invoke("run").exit_code == 130
    assert "interrupted" in invoke("run").stderr
    assert json.loads(invoke("run", "--json").stdout) == {"ok": False, "interrupted": True}


@pytest.mark.parametrize("as_json", [False, True])
def test_misuse_is_code_2_and_json_when_asked_for(as_json: bool) -> None:
    result = invoke("run", "--block-size", "0", *["--json"] * as_json)

    assert result.exit_code == 2
    if as_json:
        assert json.loads(result.stdout)["ok"] is False
        assert "0 is not in the range x>=1" in json.loads(result.stdout)["error"]["message"]
    else:
        assert result.stdout == ""
        assert "0 is not in the range x>=1" in result.stderr


@pytest.mark.parametrize("how", ["missing", "broken"])
@pytest.mark.parametrize(
    "args",
    [
        ("run",),
        ("bench", "decode"),
        ("bench-context",),
        ("conform", "reference"),
        ("parity",),
        ("compile", "--target", "h200"),
    ],
    ids=lambda args: " ".join(args[:2]),
)
def test_without_torch_a_command_is_one_clear_line_and_code_2(tmp_path: Path, args: tuple[str, ...], how: str) -> None:
    hide = "sys.modules['torch'] = None"
    if how == "broken":
        hide = f"sys.path.insert(0, {str(tmp_path)!r})"
        (tmp_path / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open')", encoding="utf-8")
    code = f"import sys; {hide}; from dsv4attn.tools.cli import main; main({[*args]!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    why = "which is not installed" if how == "missing" else "which cannot be imported: libcudnn.so.9: cannot open"

    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("Error: `")
    assert line.endswith(f"{args[0]}` needs torch, {why} -> `dsv4attn doctor` says what to do")
