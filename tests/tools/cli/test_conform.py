"""`dsv4attn conform`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.tools.cli import main
from tests.forked_programs import run_forked
from tests.tools.cli.machine import Machine

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


WARNS = """
import warnings
from dsv4attn.backends.reference.launch import ReferenceBackend

class Warns(ReferenceBackend):
    def decode(self, call):
        super().decode(call)
        exec("import warnings; warnings.warn('overflow', RuntimeWarning)", {"__name__": "triton.runtime.interpreter"})
        warnings.warn("of other code", RuntimeWarning)
"""


def heads(machine: Machine) -> None:
    """Install a backend that takes multiples of 8 heads, and no lse."""
    support = "return [Reason('HEADS', problem.layer.num_heads, 'a multiple of 8', 'pad q')]"
    support += " * bool(problem.layer.num_heads % 8) + [Reason('LSE', 'asked for', 'none')] * problem.lse"
    machine.install("acme", support=support)


def wrong(machine: Machine) -> None:
    """Install a backend that is wrong."""
    machine.install("bad", WRONG, factory="bad_kernels:Wrong")


def test_a_backend_that_passes_on_80_columns(machine: Machine) -> None:
    heads(machine)
    code, lines = machine.run("conform", "acme", "--filter", FEW)

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
    assert lines[-1] == "  no certificate with --filter; --certificate FILE writes one"


def test_the_json_object(machine: Machine) -> None:
    heads(machine)
    code, values = machine.json("conform", "acme", "--filter", FEW)

    assert code == 0
    assert (values["backend"], values["distribution"], values["version"]) == ("acme", "dsv4attn-acme", "0.2")
    assert values["counts"] == {"executed": 3, "passed": 3, "failed": 0, "refused": 2, "skipped": 0}
    states = {case["name"]: (case["state"], case["without_lse"]) for case in values["cases"]}
    assert states["sink-none-decode"] == ("passed", True)
    assert states["lse-decode"] == ("refused", False)


def test_the_certificate_is_written_where_it_is_asked_for(machine: Machine) -> None:
    code, values = machine.json("conform", "reference", "--filter", "sink-none-*", "--certificate", "c.json")

    assert code == 0
    assert json.loads(Path("c.json").read_text(encoding="utf-8")) == values
    options = "--certificate", "c.json", "--summary", "s.json"
    _, lines = machine.run("conform", "reference", "--filter", "sink-none-*", *options)
    assert lines[-1] == "  certificate: c.json"
    summary = json.loads(Path("s.json").read_text(encoding="utf-8"))
    assert summary["counts"] == values["counts"]
    assert summary["sha256"] == hashlib.sha256(Path("c.json").read_bytes()).hexdigest()


@pytest.mark.matrix
def test_a_whole_run_writes_its_certificate_unasked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.testing.cases import table as cases

    monkeypatch.setattr(cases, "CASES", [case for case in cases.CASES if case.name == "million"])
    code, lines = machine.run("conform", "reference")

    assert code == 0
    assert lines[-1] == "  certificate: dsv4attn-reference.json"
    assert json.loads(Path("dsv4attn-reference.json").read_text(encoding="utf-8"))["ok"] is True


def test_a_certificate_with_ops_of_the_reference_is_not_written_as_a_complete_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsv4attn.testing.cases import table as cases

    heads(machine)
    monkeypatch.setattr(cases, "CASES", [case for case in cases.CASES if case.name == "sink-none-decode"])
    code, lines = machine.run("conform", "acme", width=120, DSV4ATTN_REFERENCE_OPS="attend")

    assert code == 0
    assert "  acme, with attend of the reference, proves nothing of its own: the only case passed" in lines[-2]
    assert lines[-1] == "  certificate: dsv4attn-acme.incomplete.json"
    values = json.loads(Path("dsv4attn-acme.incomplete.json").read_text(encoding="utf-8"))
    assert (values["reference_ops"], values["complete"]) == (["attend"], False)


def test_a_backend_that_is_wrong_ends_with_1_and_its_failures(machine: Machine) -> None:
    wrong(machine)
    code, lines = machine.run("conform", "bad", "--filter", FEW)

    assert code == 1
    assert max(map(len, lines)) <= 80
    assert "  failed  F5-heads-3-decode" in lines
    text = " ".join(" ".join(lines).split())
    assert "raised RuntimeError: no kernel [image] (in quantize_and_insert_k_cache, bad_kernels.py:10)" in text
    assert text.count("no kernel [image]") == 1, "equal failures are one group"
    assert "4 cases fail alike: also sink-none-decode, " in text
    assert lines[-2].startswith("  bad breaks the contract: ")
    assert machine.json("conform", "bad", "--filter", FEW)[0] == 1


def test_many_failures_are_grouped_and_no_more_than_eight_groups_are_shown_in_full(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(machine)
    _, lines = machine.run("conform", "bad", "--filter", "A1,S3")
    failed = [line for line in lines if line.startswith("  failed  ")]
    _, values = machine.json("conform", "bad", "--filter", "A1,S3")

    assert 1 < len(failed) == len(values["failures"]) <= 8
    assert values["counts"]["failed"] == sum(group["count"] for group in values["failures"])
    assert failed[0].endswith(f"-{values['failures'][0]['first']}")
    assert values["failures"][0]["cases"][0] == values["failures"][0]["first"]
    monkeypatch.setattr("dsv4attn.tools.cli.conform.SHOWN", 1)
    _, lines = machine.run("conform", "bad", "--filter", "A1,S3")
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


def stops(machine: Machine) -> None:
    """Install a backend that behaves as if Ctrl-C were pressed in its fifth attention."""
    machine.install("stop", STOPS, factory="stop_kernels:Stops")


def test_g22_ctrl_c_keeps_what_ran_in_a_certificate_that_is_marked_incomplete(machine: Machine) -> None:
    stops(machine)
    code, lines = machine.run("conform", "stop", "--filter", "call-*-decode", "--certificate", "c.json")
    values = json.loads(Path("c.json").read_text(encoding="utf-8"))

    assert code == 130
    asked = len(chosen(CASES, "call-*-decode"))
    assert f"4 of {asked} cases ran" in " ".join(" ".join(lines).split())
    assert (values["ok"], values["complete"], values["asked"]) == (False, False, asked)
    assert len(values["cases"]) == values["counts"]["passed"] == 4
    assert values["verdict"] == f"stop: interrupted, which proves nothing: 4 of {asked} cases ran, none of them failed"


def test_an_incomplete_certificate_replaces_no_complete_one(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsv4attn.testing.cases import table as cases

    stops(machine)
    few = [case for case in cases.CASES if case.name.startswith("call-plain-") or case.name == "sink-none-decode"]
    monkeypatch.setattr(cases, "CASES", few)
    Path("dsv4attn-stop.json").write_text("of yesterday", encoding="utf-8")
    code, lines = machine.run("conform", "stop")

    assert code == 130
    assert lines[-1] == "  certificate: dsv4attn-stop.incomplete.json"
    assert Path("dsv4attn-stop.json").read_text(encoding="utf-8") == "of yesterday"


def test_the_first_failure_ends_a_run_with_fail_fast(machine: Machine) -> None:
    wrong(machine)
    code, values = machine.json("conform", "bad", "--filter", FEW, "--fail-fast")
    _, lines = machine.run("conform", "bad", "--filter", FEW, "--fail-fast", "--html", "p.html")
    page = Path("p.html").read_text(encoding="utf-8")

    assert code == 1
    assert lines[-1] == "  report: p.html"
    assert "<title>dsv4attn conform: 1 backend, 1 of 5 cases</title>" in page
    assert "BREAKS the contract" in page
    assert (values["complete"], values["asked"], len(values["cases"])) == (False, 5, 1)
    assert "the run ended there, after 1 of 5 cases" in " ".join(" ".join(lines).split())


@pytest.fixture
def _new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes start anew, as on a machine with an accelerator."""
    monkeypatch.setattr("dsv4attn.testing.processes.may_have_accelerator", lambda: True)


@pytest.mark.matrix
@pytest.mark.usefixtures("_new_processes")
def test_cases_are_run_by_several_processes_of_a_backend_with_options(machine: Machine) -> None:
    code, values = machine.json(
        "conform", "reference", "--jobs", "2", "--option", "prefill_keys=paged", "--filter", "lse-decode,gather-ocp-2"
    )

    assert code == 0
    assert {case["name"]: case["state"] for case in values["cases"]} == {
        "lse-decode": "passed",
        "gather-ocp-2": "skipped",
    }


@pytest.mark.matrix
@pytest.mark.usefixtures("_new_processes")
def test_warnings_of_tritons_interpreter_do_not_reach_users_from_other_processes(
    machine: Machine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install("warns", WARNS, factory="warns_kernels:Warns")
    monkeypatch.setattr(sys, "warnoptions", [])
    code, values = machine.json("conform", "warns", "--jobs", "2", "--filter", "lse-decode")

    assert (code, values["counts"]["passed"]) == (0, 1)
    shown = capfd.readouterr().err
    assert "overflow" not in shown
    assert "of other code" in shown


KILLED = """
import os, signal
from dsv4attn.backends.reference.launch import ReferenceBackend

class Killed(ReferenceBackend):
    calls = 0

    def decode(self, call):
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().decode(call)
"""


@pytest.mark.matrix
@pytest.mark.usefixtures("_new_processes")
def test_a_case_that_ends_a_process_that_started_anew_has_failed_and_the_others_run(machine: Machine) -> None:
    machine.install("killed", KILLED, factory="killed_kernels:Killed")
    code, values = machine.json("conform", "killed", "--filter", "call-plain-*-decode,lse-decode")

    assert code == 1
    assert [case["ended"] for case in values["cases"]] == ["", "SIGKILL", ""]


def test_a_list_has_a_line_for_each_case_and_runs_nothing(machine: Machine) -> None:
    code, lines = machine.run("conform", "--list")
    names = [line.split()[0] for line in lines]

    assert code == 0
    assert names == [case.name for case in CASES]
    assert [line.split()[1:] for line in lines] == [list(case.clauses) for case in CASES]
    assert max(map(len, lines)) <= 80
    assert not list(Path.cwd().glob("*.json"))


def test_a_list_takes_a_filter_and_json(machine: Machine) -> None:
    code, values = machine.json("conform", "--list", "--filter", "quantise-*,!quantise-ocp-*")
    expected = chosen(CASES, "quantise-*,!quantise-ocp-*")

    assert code == 0
    assert [(case["name"], case["says"]) for case in values["cases"]] == [(case.name, case.says) for case in expected]
    assert not any(case["name"].startswith("quantise-ocp-") for case in values["cases"])


def test_a_backend_that_refuses_everything_ends_with_1(machine: Machine) -> None:
    machine.install("no", support="return [Reason('DEVICE', device.arch, 'sm_90')]")
    code, lines = machine.run("conform", "no", "--filter", "S")

    assert code == 1
    assert "refused 19 x DEVICE: cpu, needs sm_90" in [" ".join(line.split()) for line in lines]
    assert lines[-2].startswith("  no proves nothing: none of 19 cases was executed")


def test_a_support_that_raises_fails_every_case(machine: Machine) -> None:
    machine.install("boom", support="raise KeyError('boom')")
    code, values = machine.json("conform", "boom", "--filter", "S1")

    assert code == 1
    assert {case["state"] for case in values["cases"]} == {"failed"}
    assert "its support raised KeyError: 'boom'" in values["cases"][0]["message"]


def test_a_backend_that_cannot_be_made_ends_with_1(machine: Machine) -> None:
    machine.install("lib", factory="dsv4attn_lib_missing:Make")
    code, values = machine.json("conform", "lib")

    assert code == 1
    assert values["error"]["message"].startswith("backend 'lib' is broken: dsv4attn_lib_missing:Make: ModuleNotFound")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["referen"], "did you mean 'reference'?"),
        (["reference", "--device", "cuda:99"], "device: expected a device of this machine, got 'cuda:99'"),
        (["reference", "--device", "xpuu"], "got 'xpuu' -> give a name of torch; this machine has cpu; did you mean"),
        (["reference", "--device", ""], "device: expected a device of this machine, got '' -> give a name of torch"),
        (["reference", "--option", "fast=1"], "option 'fast' of backend reference"),
        (["reference", "--option", "fast"], "expected key=value"),
        (["reference", "--filter", "S1,sinc"], "'sinc', which none has"),
        (["reference", "--filter", ""], "'': expected names; leave it out for all"),
        (["reference", "--certificate", "nowhere/c.json"], "expected a file in a folder that exists"),
        (["reference", "--certificate", "."], "expected a file in a folder that exists"),
        (["reference", "--filter", "A6,!call-plain-*"], "expected patterns that leave a case"),
        (["reference", "--jobs", "0"], "--jobs"),
        (["reference", "--timeout", "0"], "--timeout"),
        ([], "Missing argument 'BACKEND'"),
    ],
)
def test_bad_input_ends_with_2_before_anything_runs(machine: Machine, args: list[str], said: str) -> None:
    code, lines = machine.run("conform", *args)
    told_code, values = machine.json("conform", *args)

    assert code == told_code == 2
    assert said in " ".join(" ".join(lines).split())
    assert said in values["error"]["message"]


def test_the_kit_runs_without_pytest() -> None:
    code = (
        "import sys; from dsv4attn.testing import conform, parity; "
        "print([m for m in sys.modules if m.split('.')[0] in ('pytest', '_pytest', 'transformers', 'triton')])"
    )
    done = run_forked(["-c", code])

    assert done.stdout.strip() == "[]"


def test_help_says_what_the_exit_codes_are_and_how_long_a_run_takes(machine: Machine) -> None:
    code, lines = machine.run("conform", "--help")
    text: Any = " ".join(" ".join(lines).split())

    assert code == 0
    assert "All cases take about 40 seconds with the reference on one quiet core" in text
    assert "Exit codes: 0 every case that ran has passed 1 a case has failed, or no case has run 2 bad input" in text
    assert "130 interrupted; the certificate has what has run" in text


def test_without_a_terminal_progress_is_plain_lines_on_stderr(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsv4attn.tools.cli.progress.LINE_SECONDS", 0.0, raising=False)
    result = CliRunner().invoke(main, ["conform", "reference", "--filter", "lse-decode"])

    assert re.fullmatch(r"1/1 cases, 0 failed, lse-decode, \d+ s\n", result.stderr)
    assert CliRunner().invoke(main, ["conform", "reference", "--filter", "lse-decode", "--json"]).stderr == ""


def test_the_table_says_what_its_columns_count(machine: Machine) -> None:
    said = " ".join(" ".join(machine.run("conform", "reference", "--filter", "lse-decode")[1]).split())

    assert "A case counts under each of its clauses. Nearest: largest error as a fraction of its budget" in said
