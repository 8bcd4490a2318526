"""docs/numerics.py: reports name no machine, differences are found, and the page has the table of the reports."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"
REPORTS = sorted((DOCS / "certificates" / "numerics").glob("*.json"))
KEYS = {"schema", "device", "versions", "answers"}
DEVICE_KEYS = {"kind", "arch", "name"}
VERSIONS = {"python", "torch", "triton", "ml_dtypes"}


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics_script", DOCS / "numerics.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def names_of_the_machine(report: dict[str, Any]) -> list[str]:
    """What of a report may tell whose machine it is: unknown keys, and parts of paths, hosts and users."""
    unknown = [*(set(report) - KEYS), *(set(report["device"]) - DEVICE_KEYS), *(set(report["versions"]) - VERSIONS)]
    answers = [answer for rows in report["answers"].values() for answer in rows.values()]
    texts = [*map(str, report["device"].values()), *report["versions"].values(), *answers]
    personal = {platform.node(), getpass.getuser(), str(Path.home()), os.getcwd()} - {"", "/"}  # noqa: PTH109 - as text
    return unknown + [text for text in texts if "/" in text or "\\" in text or any(part in text for part in personal)]


def test_a_report_names_no_host_path_or_serial_number(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = module()
    monkeypatch.setattr(numerics, "libraries", lambda: {"torch": numerics.torch_probes})

    report = numerics.report()

    assert names_of_the_machine(report) == []
    assert len(report["answers"]["torch"]) > 40
    assert not any(answer.startswith("raises") for answer in report["answers"]["torch"].values())


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_committed_report_names_no_host_path_or_serial_number(path: Path) -> None:
    assert names_of_the_machine(json.loads(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("where", ["serial", "/home/somebody", platform.node()])
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
    assert lines == [f"torch: 500 to float8_e4m3fn: 0x7e in torch {version}, cpu, 0x7f here"]
    assert numerics.differences(committed, [committed]) == []


@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="the answers of a GPU are another column")
def test_the_script_runs_and_writes_a_report(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", str(DOCS / "numerics.py"), "--json", str(tmp_path / "report.json")]

    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert {"torch", "triton interpreter"} <= set(report["answers"])
    assert names_of_the_machine(report) == []
    assert "differences from" in result.stdout.splitlines()[-1]
