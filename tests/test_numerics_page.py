"""Scripts of docs/numerics.md: reports name no machine, differences are found, and the page has their table."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.programs import import_file

DOCS = Path(__file__).resolve().parents[1] / "docs"
REPORTS = sorted((DOCS / "certificates" / "numerics").glob("*.json"))
KEYS = {"schema", "device", "versions", "settings", "answers"}
DEVICE_KEYS = {"kind", "arch", "name", "cpu_capability"}
PERSONAL = re.compile(
    r"[/\\~@]|\b[\w-]+\.(?:local|lan|internal|com|net|org|io)\b|\d+(?:\.\d+){3}|GPU-|[0-9a-fA-F-]{12,}|\d{8,}"
)
"""Paths, hosts, addresses, and what looks like a serial number."""
VERSIONS = {"python", "torch", "triton", "ml_dtypes"}


def module(name: str = "numerics") -> ModuleType:
    return import_file(DOCS / f"{name}.py")


def names_of_the_machine(report: dict[str, Any]) -> list[str]:
    """What of a report may tell whose machine it is: unknown keys, and texts that match PERSONAL."""
    unknown = [*(set(report) - KEYS), *(set(report["device"]) - DEVICE_KEYS), *(set(report["versions"]) - VERSIONS)]
    answers = [answer for rows in report["answers"].values() for answer in rows.values()]
    return (
        unknown
        + [text for text in [*report["device"].values(), *report["versions"].values()] if PERSONAL.search(text)]
        + [answer for answer in answers if re.search(r"[/\\]", answer)]
    )


def test_a_report_names_no_host_path_or_serial_number(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = module()
    monkeypatch.setattr(numerics, "libraries", lambda: {"torch": numerics.torch_probes})
    monkeypatch.setattr(platform, "node", lambda: "planted-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "planted-user")
    monkeypatch.setenv("HOME", "/planted-home")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "planted-value")

    report = numerics.report()

    assert names_of_the_machine(report) == []
    assert "planted" not in json.dumps(report)
    assert len(report["answers"]["torch"]) > 40
    assert not any(answer.startswith("raises") for answer in report["answers"]["torch"].values())


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_committed_report_names_no_host_path_or_serial_number(path: Path) -> None:
    assert names_of_the_machine(json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("where", ["serial", "/home/somebody", "box.internal", "GPU-1b2c3d4e", "1322621062345"])
def test_a_report_that_names_its_machine_is_found(where: str) -> None:
    report = json.loads(REPORTS[0].read_text(encoding="utf-8"))
    report["device"]["serial" if where == "serial" else "name"] = where

    assert names_of_the_machine(report) == [where]


def test_the_page_has_the_table_of_the_reports() -> None:
    numerics, page = module(), (DOCS / "numerics.md").read_text(encoding="utf-8")

    assert numerics.with_table(page, numerics.committed()) == page


def test_an_answer_that_differs_is_named_with_both() -> None:
    numerics = module()
    [committed] = [report for report in numerics.committed() if report["device"]["arch"] == "cpu"]
    here = json.loads(json.dumps(committed))
    here["answers"]["torch"]["500 to float8_e4m3fn"] = "0x7f"

    lines = numerics.differences(here, [committed])

    version = committed["versions"]["torch"].split("+")[0]
    assert lines == [f"torch: 500 to float8_e4m3fn: 0x7e in torch {version}, cpu (x86_64), 0x7f here"]
    assert numerics.differences(committed, [committed]) == []


def test_reports_of_one_architecture_keep_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    numerics = module()
    [first] = [report for report in numerics.committed() if report["device"]["arch"] == "sm_90"]
    second = json.loads(json.dumps(first))
    second["device"]["name"] = "NVIDIA H100"
    second["answers"]["torch"]["500 to float8_e4m3fn"] = "0x7e"

    head = numerics.table([first, second]).splitlines()[0]

    version = first["versions"]["torch"].split("+")[0]
    assert f"| torch {version}, sm_90 |" in head
    assert f"| torch {version}, sm_90, NVIDIA H100 |" in head
    third = json.loads(json.dumps(second))
    third["answers"]["torch"]["500 to float8_e4m3fn"] = "0x00"
    with pytest.raises(SystemExit):
        numerics.table([first, second, third])
    assert "'torch 2.11.0, sm_90, NVIDIA H100'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--table {folder}/none.md", "none.md cannot be read"),
        ("--table {folder}/plain.md", "plain.md does not have the lines"),
        ("--json {folder}", "cannot be written"),
        ("--json {folder}/none/report.json", "none/report.json cannot be written"),
        ("", "bad.json cannot be read"),
        ("", "bad.json is no report of schema 1"),
        ("--table {folder}/marked.md", "has no reports"),
    ],
)
def test_input_that_cannot_be_used_is_named_before_anything_is_asked(
    command: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numerics = module()
    reports = tmp_path / "reports"
    reports.mkdir()
    if said.startswith("bad"):
        (reports / "bad.json").write_text('{"schema": 1' if "read" in said else '{"schema": 1}', encoding="utf-8")
    (tmp_path / "plain.md").write_text("text", encoding="utf-8")
    (tmp_path / "marked.md").write_text(f"{numerics.BEGIN}{numerics.END}", encoding="utf-8")
    monkeypatch.setattr(numerics, "REPORTS", reports)
    monkeypatch.setattr(numerics, "report", lambda: pytest.fail("probes ran"))
    monkeypatch.setattr(sys, "argv", ["numerics.py", *command.format(folder=tmp_path).split()])

    with pytest.raises(SystemExit) as stopped:
        numerics.main()

    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_library_that_raises_everywhere_is_called_broken(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> str:
        raise RuntimeError("no compiler\nmore")

    assert module().answers_of("triton", {"a": broken, "b": broken}) == dict.fromkeys("ab", "raises RuntimeError")
    assert capsys.readouterr().err.endswith("the first one is RuntimeError: no compiler\n")


@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="the answers of a GPU are another column")
def test_the_script_runs_and_writes_a_report(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "true"}
    command = [sys.executable, str(DOCS / "numerics.py"), "--json", str(tmp_path / "report.json")]

    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {"torch", "triton interpreter"} <= set(report["answers"])
    assert names_of_the_machine(report) == []
    assert "differences from" in result.stdout.splitlines()[-1]


def test_errors_of_a_sum_that_is_cut_off_have_a_sign() -> None:
    script = module("numerics_of_backends")
    exact = 1 + torch.rand(4, 8, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact[:, ::2] *= -1

    rounded, cut = script.attention_errors(exact.bfloat16(), exact), script.attention_errors(exact * (1 - 2**-9), exact)

    assert abs(rounded["of sizes"]) < 4 * rounded["uncertain by"]
    assert cut["of sizes"] < -0.25
    assert abs(cut["mean ulps"]) < 0.05


def test_logits_that_are_cut_off_have_a_bias_and_select_other_entries() -> None:
    script = module("numerics_of_backends")
    [numbers] = [numbers for numbers in script.INDEX_NUMBERS if numbers.mean == 2 and numbers.positive]
    inputs, raw_q, raw_k = script.index_inputs(numbers, 2, 256)
    exact = script.ExactLogits.of(inputs, (64,))

    def whole(inputs: Any) -> torch.Tensor:
        total: torch.Tensor = script.sum_of_heads(inputs, lambda head: script.exact_of_head(inputs, head))
        return total

    def cut(inputs: Any) -> torch.Tensor:
        return (whole(inputs).float().view(torch.int32) & -65536).view(torch.float32)

    right, wrong = script.head_sums(exact, whole), script.head_sums(exact, cut)
    logits = cut(inputs)
    selected = script.select(script.reference(), inputs, 64)

    assert exact.errors(whole(inputs))["mean error"] == right["error of a head"] == 0
    assert exact.errors(logits)["mean error"] < -1e-3
    assert wrong["error of a head"] < -1e-3
    assert exact.selections("top", lambda _: selected)["top 64 differ"] == 0
    assert exact.selections("top", lambda k: logits.topk(k).indices)["top 64 differ"] > 0
    assert 0 < script.before_rounding(exact, raw_q, raw_k)["top 64 differ"] < 0.25


@pytest.mark.parametrize(("form", "graphs", "calls"), [("graph", 1, 0), ("cuts", 3, 0), ("eager", 2, 2)])
def test_a_step_is_cut_into_graphs_and_eager_calls(
    form: str, graphs: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, log = module("numerics_of_backends"), list[str]()

    class Graph:
        def capture_begin(self, pool: object) -> None:
            log.append("begin")

        def capture_end(self) -> None:
            log.append("end")

        def replay(self) -> None:
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    pieces = script.Pieces()
    first: Callable[[], object]
    second: Callable[[], object]
    first, second = (lambda: log.append("call") for _ in range(2))
    if form == "cuts":
        first, second = pieces.then_cut(first), pieces.then_cut(second)
    if form == "eager":
        first, second = pieces.eagerly(first), pieces.eagerly(second, last=True)

    pieces.begin()
    first()
    second()
    pieces.end()

    assert log.count("begin") == log.count("end") == graphs
    log.clear()
    pieces.run()
    assert (log.count("replay"), log.count("call")) == (graphs, calls)
