"""Summaries of certificates, their table, and that docs/testing.md has the one of docs/certificates."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from dsv4attn.errors import ArgumentError
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.certificates import (
    BEGIN,
    END,
    certificate_text,
    main,
    summary_text,
    table_of_certificates,
    with_table,
)
from dsv4attn.testing.conform import Subject, conform

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two certificates: of a part of the kit, and of a run that Ctrl-C ended."""
    folder = tmp_path / "certificates"
    folder.mkdir()
    reference = Subject.named("reference", options={"prefill_keys": "paged"})
    values = conform(reference, chosen(CASES, "gather-ocp-2,lse-decode"), chosen="gather-ocp-2,lse-decode").as_json()
    values["date"] = "2026-11-27T10:11:26+00:00"
    values["versions"] |= {"torch": "2.11", "triton": "3.6"}
    values["device"] |= {"name": "H100", "interpreted": False}
    other = {**values, "backend": "acme", "options": {}, "filter": None, "complete": False, "asked": 9}
    for name, certificate in (("b-reference", values), ("a-acme", other)):
        (folder / f"{name}.json").write_text(json.dumps(certificate), encoding="utf-8")
    return folder


def test_a_summary_has_what_failed_and_what_did_not_run_and_the_digest_of_the_rest(folder: Path) -> None:
    text = (folder / "b-reference.json").read_text(encoding="utf-8")
    whole = json.loads(text)
    whole["cases"][0] |= {"state": "failed", "message": "out: error 3.00"}
    whole["failures"] = [{"message": "out: error 3.00", "count": 1, "first": "lse-decode", "cases": ["lse-decode"]}]
    summary = json.loads(summary_text(whole))

    assert summary["failures"] == whole["failures"]
    reason = "does not apply: this backend reads pages in prefill and gathers nothing"
    assert summary["not_run"] == {"refused": {}, "skipped": {reason: ["gather-ocp-2"]}}
    assert summary["clauses"]["L"]["L1"] == [1, 0, 0, 0]
    assert summary["sha256"] == hashlib.sha256(certificate_text(whole).encode()).hexdigest()
    assert {"cases", "layouts"} == whole.keys() - summary.keys()
    assert all(summary[key] == whole[key] for key in whole.keys() & summary.keys() - {"clauses"})


def test_a_summary_has_the_row_of_its_certificate(folder: Path) -> None:
    table = table_of_certificates(folder)
    for file in folder.glob("*.json"):
        file.write_text(summary_text(json.loads(file.read_text(encoding="utf-8"))), encoding="utf-8")

    assert table_of_certificates(folder) == table


def test_each_certificate_is_a_row_of_the_table(folder: Path) -> None:
    assert table_of_certificates(folder).splitlines() == [
        "| backend | device | torch | Triton | date | passed | failed | refused | skipped |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        "| [`acme`](certificates/a-acme.json), incomplete: 2 of 9 | H100 | 2.11 | 3.6 | 2026-11-27 | 1 | 0 | 0 | 1 |",
        (
            "| [`reference:prefill_keys=paged`](certificates/b-reference.json), filter gather-ocp-2,lse-decode"
            " | H100 | 2.11 | 3.6 | 2026-11-27 | 1 | 0 | 0 | 1 |"
        ),
    ]


def test_the_table_is_written_between_the_marks_of_a_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder.parent / "page.md"
    page.write_text(f"before\n{BEGIN}\nan old table\n{END}\nafter\n", encoding="utf-8")
    main([str(folder), str(page)])
    main([str(folder)])

    table = capsys.readouterr().out
    assert table == table_of_certificates(folder)
    assert page.read_text(encoding="utf-8") == f"before\n{BEGIN}\n\n{table}\n{END}\nafter\n"
    with pytest.raises(ArgumentError, match="a page without them"):
        with_table("no marks", table)


def test_the_page_of_tests_has_the_table_of_the_certificates_in_the_repository() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")

    assert with_table(page, table_of_certificates(DOCS / "certificates")) == page


@pytest.mark.parametrize("file", sorted((DOCS / "certificates").glob("*.json")), ids=lambda file: file.stem)
def test_a_summary_of_the_repository_is_short_and_of_a_whole_run_without_a_failure(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    certificate = json.loads(text)

    assert len(text.splitlines()) <= 100
    assert certificate["ok"]
    assert certificate["complete"]
    assert certificate["filter"] is None
    assert not certificate["device"]["interpreted"]
