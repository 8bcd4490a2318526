"""Completion of values in a shell: by click's own classes, and by a process such as a shell starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete

from dsv4attn.core.contract.devices import DEVICES
from dsv4attn.plugins import BUILT_IN
from dsv4attn.tools.bench.cases import MEASUREMENTS, PEER_NAMES, PRESETS
from dsv4attn.tools.bench.peers import PEERS
from dsv4attn.tools.cli import main
from dsv4attn.tools.cli.complete import several, words
from tests.tools.cli.machine import Machine

VARIABLE = "_DSV4ATTN_COMPLETE"
ARCHITECTURES = [device.arch for device in DEVICES]


def items(*args: str) -> list[CompletionItem]:
    """What completes the last word."""
    return ShellComplete(main, {}, "dsv4attn", VARIABLE).get_completions([*args[:-1]], args[-1])


def values(*args: str) -> list[str]:
    return [item.value for item in items(*args) if item.type == "plain"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("explain", "--device", ""), ARCHITECTURES),
        (("compile", "--target", ""), ["sm_90", "h200", "gfx942", "mi300x"]),
        (("explain", "--device", "mi3"), ["mi300x", "mi355x"]),
        (("conform", ""), BUILT_IN),
        (("conform", "ref"), ["reference"]),
        (("compile", "--backend", ""), BUILT_IN),
        (("run", "--backend", ""), [*BUILT_IN, "auto", "decode=", "prefill="]),
        (("explain", "--backend", "decode=reference,"), ["decode=reference,prefill="]),
        (("explain", "--backend", "decode=reference,prefill=t"), ["decode=reference,prefill=triton"]),
        (("bench", "--backends", "reference,t"), ["reference,triton"]),
        (("parity", "--backends", ""), BUILT_IN),
        (("run", "--layers", "swa,"), ["swa,c4a", "swa,c128a"]),
        (("explain", "--layer", ""), ["swa", "c4a", "c128a"]),
        (("run", "--cache", ""), ["fp8_ds_mla", "bf16", "fp32"]),
        (("run", "--trace", ""), ["short", "long", "-"]),
        (("run", "--option", ""), []),
        (("run", "--backend", "triton", "--option", "det"), ["deterministic="]),
        (("run", "--model", ""), ["flash", "pro", "v4.1-flash", "deepseek-v4-flash"]),
        (("compile", "--model", "p"), ["pro"]),
        (("explain", "--dtype", "e"), ["e4m3fn", "e4m3fnuz"]),
        (("conform", "--device", ""), ["cpu"]),
        (("bench", ""), [*MEASUREMENTS]),
        (("bench", "decode,pre"), ["decode,prefill", "decode,prefill-rows"]),
        (("bench", "decode", ""), ["prefill", "mhc"]),
        (("bench", "--cases", ""), list(PRESETS)),
        (("bench", "--cases", "flash_c4,pro_c1"), ["flash_c4,pro_c128"]),
        (("bench", "--peers", ""), list(PEER_NAMES)),
        (("bench-context", "--cases", "p"), ["pro_c4", "pro_c128"]),
        (("bench-context", "--device", ""), ["cpu", "cuda"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_value_is_completed(machine: Machine, args: tuple[str, ...], expected: list[str]) -> None:
    completed = values(*args)

    assert [value for value in expected if value not in completed] == []
    assert all(value.startswith(args[-1]) for value in completed)
    assert len(completed) == len(set(completed))


def test_words_that_a_command_line_has_already_are_not_offered_again(machine: Machine) -> None:
    assert "swa,swa" not in values("run", "--layers", "swa,")
    assert "decode" not in values("bench", "decode", "")
    assert values("explain", "--backend", "decode=reference,") == ["decode=reference,prefill="]
    assert several(words("a", "b"))(click.Context(main), main.params[0], "a,b,") == []


def test_backends_and_devices_of_plugins_are_completed(machine: Machine) -> None:
    machine.install("acme", native=("acme_1", "acme_2*"))

    assert "acme" in values("conform", "")
    assert values("explain", "--device", "ac") == ["acme_1"]
    [item] = items("conform", "ac")
    assert item.help == "of another vendor"


def test_devices_of_torch_follow_the_nodes_of_the_machine(machine: Machine) -> None:
    for i in range(2):
        node = machine.wheels.folder / "_DEV" / f"nvidia{i}"
        node.parent.mkdir(exist_ok=True)
        node.touch()

    assert values("conform", "--device", "") == ["cpu", "cuda", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    "args",
    [
        ("run", "--trace", "tr"),
        ("run", "--html", ""),
        ("run", "--model", "conf"),
        ("conform", "reference", "--certificate", ""),
        ("parity", "--html", ""),
        ("bench", "--save", "x"),
        ("bench", "--plot", "x"),
        ("bench", "--from", "x"),
    ],
    ids=" ".join,
)
def test_files_are_completed_and_stand_first(machine: Machine, args: tuple[str, ...]) -> None:
    # bash drops the words that stand before a file
    assert [i for i, item in enumerate(items(*args)) if item.type == "file"] == [0]


def test_completion_writes_no_file(machine: Machine) -> None:
    assert values("conform", "--certificate", "new.json", "ref") == ["reference"]
    assert list(Path.cwd().iterdir()) == []


def test_a_broken_plugin_or_setting_leaves_the_rest_to_complete(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.wheels.install("dsv4attn-loud", "print('hello')\nraise ImportError('libloud.so')")
    assert values("conform", "ref") == ["reference"]

    monkeypatch.setenv("DSV4ATTN_BAKEND", "x")
    assert values("conform", "ref") == ["reference"]
    assert values("run", "--backend", "refx", "--option", "") == []
    assert capsys.readouterr() == ("", "")


def test_the_names_of_peers_are_those_of_the_peers() -> None:
    assert [*PEERS] == [*PEER_NAMES]


def complete_in_process(line: str, index: int, *, after: str = "") -> str:
    """Output of the process that bash starts to complete a word. after: code that runs when it ends."""
    code = f"import atexit, sys; from dsv4attn.tools.cli import main; atexit.register(lambda: {after or None}); "
    environ = {**os.environ, VARIABLE: "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(index)}
    command = [sys.executable, "-c", f"{code}main(prog_name='dsv4attn')"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_a_shells_process_gets_the_values() -> None:
    assert complete_in_process("dsv4attn explain --backend 'decode=reference,prefill=tri", 3) == (
        "plain,decode=reference,prefill=triton\n"
    )


@pytest.mark.parametrize(
    ("line", "index"),
    [
        ("dsv4attn conform ", 2),
        ("dsv4attn explain --device ", 3),
        ("dsv4attn bench ", 2),
        ("dsv4attn run --model ", 3),
        ("dsv4attn compile --target ", 3),
    ],
)
def test_completion_imports_nothing_heavy(line: str, index: int) -> None:
    heavy = "{'torch', 'numpy', 'rich', 'triton'} & {*sys.modules}"
    after = f"print(sorted({heavy}), file=sys.stdout, flush=True)"
    *completed, imported = complete_in_process(line, index, after=after).splitlines()

    assert len(completed) > 1
    assert imported == "[]"
