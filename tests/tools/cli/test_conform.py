"""`dsv4attn conform`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.tools.cli import main
from tests.tools.cli.machine import Machine, machine, plugin

FEW = "sink-none-*,quantise-ocp-64,lse-decode,heads-3-decode"
WRONG = """
import attrs
from dsv4attn.backends.reference.launch import ReferenceBackend

class Wrong(ReferenceBackend):
    def decode(self, call):
        super().decode(attrs.evolve(call, q=-call.q))

    def quantize_and_insert_k_cache(self, k, cache, slot_mapping):
        raise RuntimeError("no kernel [image]")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with machine(tmp_path, monkeypatch) as made:
        yield made


def heads(here: Machine) -> None:
    """Install a backend that takes multiples of 8 heads, and no lse."""
    support = "return [Reason('HEADS', problem.layer.num_heads, 'a multiple of 8', 'pad q')]"
    support += " * bool(problem.layer.num_heads % 8) + [Reason('LSE', 'asked for', 'none')] * problem.lse"
    here.wheels.install("dsv4attn-acme", plugin(support=support))


def wrong(here: Machine) -> None:
    """Install a backend that is wrong."""
    here.wheels.install("dsv4attn-bad", plugin("bad", factory="dsv4attn_bad_kernels:Wrong"))
    (here.wheels.folder / "dsv4attn_bad_kernels.py").write_text(WRONG, encoding="utf-8")
    here.wheels.modules.append("dsv4attn_bad_kernels")


def test_a_backend_that_passes_on_80_columns(here: Machine) -> None:
    heads(here)
    code, lines = here.run("conform", "acme", "--filter", FEW)

    assert code == 0
    assert max(map(len, lines)) <= 80
    assert lines[0] == "  backend  acme  (dsv4attn-acme 0.2)"
    assert lines[1].startswith('  device   cpu: cpu "CPU"')
    text = [" ".join(line.split()) for line in lines]
    assert "C cache bytes 1 - - - same bits" in text
    assert "L lse - - 1 -" in text
    refused = {"1 x HEADS: 3, needs a multiple of 8 -> pad q", "1 x LSE: asked for, needs none"}
    assert {line.removeprefix("refused ") for line in text if " x " in line} == refused
    assert f"acme keeps the contract: all 3 cases of the filter '{FEW}' passed" in " ".join(text)
    assert not list(Path.cwd().glob("*.json")), "a part of the kit makes no certificate unasked"
    assert lines[-1] == "  no certificate with --filter; --output FILE writes one"


def test_what_is_told_to_programs(here: Machine) -> None:
    heads(here)
    code, told = here.json("conform", "acme", "--filter", FEW)

    assert code == 0
    assert (told["backend"], told["distribution"], told["version"]) == ("acme", "dsv4attn-acme", "0.2")
    assert told["counts"] == {"executed": 3, "passed": 3, "failed": 0, "refused": 2, "skipped": 0}
    states = {case["name"]: (case["state"], case["without_lse"]) for case in told["cases"]}
    assert states["sink-none-decode"] == ("passed", True)
    assert states["lse-decode"] == ("refused", False)


def test_the_certificate_is_written_where_it_is_asked_for(here: Machine) -> None:
    code, told = here.json("conform", "reference", "--filter", "sink-none-*", "--output", "c.json")

    assert code == 0
    assert json.loads(Path("c.json").read_text(encoding="utf-8")) == told
    _, lines = here.run("conform", "reference", "--filter", "sink-none-*", "--output", "c.json")
    assert lines[-1] == "  certificate: c.json"


def test_a_whole_run_writes_its_certificate_unasked(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.testing import cases

    monkeypatch.setattr(cases, "CASES", [case for case in cases.CASES if case.name == "million"])
    code, lines = here.run("conform", "reference")

    assert code == 0
    assert lines[-1] == "  certificate: dsv4attn-reference.json"
    assert json.loads(Path("dsv4attn-reference.json").read_text(encoding="utf-8"))["ok"] is True


def test_a_backend_that_is_wrong_ends_with_1_and_its_failures(here: Machine) -> None:
    wrong(here)
    code, lines = here.run("conform", "bad", "--filter", FEW)

    assert code == 1
    assert max(map(len, lines)) <= 80
    assert "  failed  F5-heads-3-decode" in lines
    text = " ".join(" ".join(lines).split())
    assert "raised RuntimeError: no kernel [image] (in quantize_and_insert_k_cache, dsv4attn_bad_kernels.py:10)" in text
    assert text.count("no kernel [image]") == 1, "equal failures are one group"
    assert "4 cases fail alike: also sink-none-decode, " in text
    assert lines[-2].startswith("  bad breaks the contract: ")
    assert here.json("conform", "bad", "--filter", FEW)[0] == 1


def test_many_failures_are_grouped_and_no_more_than_eight_groups_are_shown_in_full(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(here)
    _, lines = here.run("conform", "bad", "--filter", "A1,S3")
    failed = [line for line in lines if line.startswith("  failed  ")]
    _, told = here.json("conform", "bad", "--filter", "A1,S3")

    assert 1 < len(failed) == len(told["failures"]) <= 8
    assert told["counts"]["failed"] == sum(group["count"] for group in told["failures"])
    assert failed[0].endswith(f"-{told['failures'][0]['first']}")
    assert told["failures"][0]["cases"][0] == told["failures"][0]["first"]
    monkeypatch.setattr("dsv4attn.tools.cli.conform.SHOWN", 1)
    _, lines = here.run("conform", "bad", "--filter", "A1,S3")
    assert [line for line in lines if line.startswith("  failed  ")] == failed[:1]
    assert any(line.startswith("  and ") and " other kinds: " in line for line in lines)


STOPS = """
from dsv4attn.backends.reference.launch import ReferenceBackend

class Stops(ReferenceBackend):
    calls = 0

    def decode(self, call):
        self.calls += 1
        if self.calls == 5:
            raise KeyboardInterrupt
        super().decode(call)
"""


def stops(here: Machine) -> None:
    """Install a backend that behaves as if Ctrl-C were pressed in its fifth attention."""
    here.wheels.install("dsv4attn-stop", plugin("stop", factory="dsv4attn_stop_kernels:Stops"))
    (here.wheels.folder / "dsv4attn_stop_kernels.py").write_text(STOPS, encoding="utf-8")
    here.wheels.modules.append("dsv4attn_stop_kernels")


def test_g22_ctrl_c_keeps_what_ran_in_a_certificate_that_is_marked_incomplete(here: Machine) -> None:
    stops(here)
    code, lines = here.run("conform", "stop", "--filter", "call-*-decode", "--output", "c.json")
    told = json.loads(Path("c.json").read_text(encoding="utf-8"))

    assert code == 130
    asked = len(chosen(CASES, "call-*-decode"))
    assert f"4 of {asked} cases ran" in " ".join(" ".join(lines).split())
    assert (told["ok"], told["complete"], told["asked"]) == (False, False, asked)
    assert len(told["cases"]) == told["counts"]["passed"] == 4
    assert told["verdict"] == f"stop: interrupted, which proves nothing: 4 of {asked} cases ran, none of them failed"


def test_an_incomplete_certificate_replaces_no_complete_one(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.testing import cases

    stops(here)
    few = [case for case in cases.CASES if case.name.startswith("call-plain-") or case.name == "sink-none-decode"]
    monkeypatch.setattr(cases, "CASES", few)
    Path("dsv4attn-stop.json").write_text("of yesterday", encoding="utf-8")
    code, lines = here.run("conform", "stop")

    assert code == 130
    assert lines[-1] == "  certificate: dsv4attn-stop.incomplete.json"
    assert Path("dsv4attn-stop.json").read_text(encoding="utf-8") == "of yesterday"


def test_a_backend_that_refuses_everything_ends_with_1(here: Machine) -> None:
    here.wheels.install("dsv4attn-no", plugin("no", support="return [Reason('DEVICE', device.arch, 'sm_90')]"))
    code, lines = here.run("conform", "no", "--filter", "S")

    assert code == 1
    assert "refused 19 x DEVICE: cpu, needs sm_90" in [" ".join(line.split()) for line in lines]
    assert lines[-2].startswith("  no proves nothing: none of 19 cases was executed")


def test_a_support_that_raises_fails_every_case(here: Machine) -> None:
    here.wheels.install("dsv4attn-boom", plugin("boom", support="raise KeyError('boom')"))
    code, told = here.json("conform", "boom", "--filter", "S1")

    assert code == 1
    assert {case["state"] for case in told["cases"]} == {"failed"}
    assert "its support raised KeyError: 'boom'" in told["cases"][0]["message"]


def test_a_backend_that_cannot_be_made_ends_with_1(here: Machine) -> None:
    here.wheels.install("dsv4attn-lib", plugin("lib", factory="dsv4attn_lib_missing:Make"))
    code, told = here.json("conform", "lib")

    assert code == 1
    assert told["error"]["message"].startswith("backend 'lib' is broken: dsv4attn_lib_missing:Make: ModuleNotFound")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["referen"], "did you mean 'reference'?"),
        (["reference", "--device", "cuda:99"], "device: expected a device of this machine, got 'cuda:99'"),
        (["reference", "--option", "fast=1"], "option 'fast' of backend reference"),
        (["reference", "--option", "fast"], "expected key=value"),
        (["reference", "--filter", "S1,sinc"], "'sinc', which none has"),
        (["reference", "--output", "nowhere/c.json"], "expected a file in a folder that exists"),
        (["reference", "--output", "."], "expected a file in a folder that exists"),
        ([], "Missing argument 'BACKEND'"),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(here: Machine, args: list[str], said: str) -> None:
    code, lines = here.run("conform", *args)
    told_code, told = here.json("conform", *args)

    assert code == told_code == 2
    assert said in " ".join(" ".join(lines).split())
    assert said in told["error"]["message"]


def test_the_kit_runs_without_pytest() -> None:
    code = (
        "import sys; from dsv4attn.testing import cases, conform, parity; "
        "print([m for m in sys.modules if m.split('.')[0] in ('pytest', '_pytest', 'transformers', 'triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_help_says_what_the_exit_codes_are(here: Machine) -> None:
    code, lines = here.run("conform", "--help")
    text: Any = " ".join(" ".join(lines).split())

    assert code == 0
    assert (
        "Exit code 0: every case that was executed passed; 1: one failed, or none was executed; 2: bad input;"
        " 130: interrupted by Ctrl-C" in text
    )


def test_without_a_terminal_progress_is_plain_lines_on_stderr(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.cli.progress.LINE_SECONDS", 0.0, raising=False)
    result = CliRunner().invoke(main, ["conform", "reference", "--filter", "lse-decode"])

    assert result.stderr == "1/1 cases, 0 failed, lse-decode, 0 s\n"
    assert CliRunner().invoke(main, ["conform", "reference", "--filter", "lse-decode", "--json"]).stderr == ""


def test_the_table_says_what_its_columns_count(here: Machine) -> None:
    said = " ".join(" ".join(here.run("conform", "reference", "--filter", "lse-decode")[1]).split())

    assert "A case counts under each of its clauses. Nearest: largest error as a fraction of its budget" in said
