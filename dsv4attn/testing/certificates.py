"""Summaries of certificates, and a table of them.

`dsv4attn conform NAME --certificate FILE` writes a whole certificate: about 10,000 lines. `--summary FILE` writes what
is worth keeping in a repository, about 90 lines.

python -m dsv4attn.testing.certificates docs/certificates                 # prints the table
python -m dsv4attn.testing.certificates docs/certificates docs/testing.md # writes it between the page's two marks
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4attn.errors import ArgumentError

BEGIN, END = "<!-- certificates: begin -->", "<!-- certificates: end -->"
"""Marks of a page, between which the table is."""
COLUMNS = ("backend", "device", "torch", "Triton", "date", "passed", "failed", "refused", "skipped")


def certificate_text(certificate: Mapping[str, Any]) -> str:
    """The text of a certificate's file.

    certificate: what `Certificate.as_json` returns.
    """
    return json.dumps(certificate, indent=1, allow_nan=False) + "\n"


def summary_text(certificate: Mapping[str, Any]) -> str:
    """The text of a summary: a JSON object without the cases that passed, one line for each of its parts.

    `counts`, `worst` and `failures` are those of the certificate. `clauses` has the numbers of cases that passed,
    failed, were refused and were skipped, by clause. `not_run` has the names of cases that were refused or skipped, by
    reason. `sha256` is the digest of the whole certificate's file, so that the two can be matched.

    certificate: what `Certificate.as_json` returns.
    """
    not_run: dict[str, dict[str, list[str]]] = {"refused": defaultdict(list), "skipped": defaultdict(list)}
    for case in certificate["cases"]:
        if case["state"] in not_run:
            not_run[case["state"]][case["message"]].append(case["name"])
    clauses: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for clause, counts in certificate["clauses"].items():
        clauses[clause[0]][clause] = [counts[state] for state in ("passed", "failed", "refused", "skipped")]
    summary = {key: value for key, value in certificate.items() if key not in ("cases", "clauses", "layouts")}
    summary |= {"clauses": clauses, "not_run": not_run}
    summary["sha256"] = hashlib.sha256(certificate_text(certificate).encode()).hexdigest()
    return _lines(summary, depth=2) + "\n"


def _lines(value: object, depth: int, indent: str = "") -> str:
    """JSON with a line for each entry of the objects in the first `depth` levels."""
    if not isinstance(value, dict) or not value or not depth:
        return json.dumps(value, allow_nan=False)
    inner = indent + " "
    entries = (f"{inner}{json.dumps(key)}: {_lines(entry, depth - 1, inner)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _row(name: str, certificate: Mapping[str, Any]) -> list[str]:
    device, versions, counts = certificate["device"], certificate["versions"], certificate["counts"]
    options = [f"{key}={value}" for key, value in certificate["options"].items()]
    replaced, asked = certificate.get("reference_ops", []), certificate["asked"]
    ran = sum(counts[state] for state in ("executed", "refused", "skipped"))
    notes = [f"with {' and '.join(replaced)} of the reference"] if replaced else []
    notes += [f"incomplete: {ran} of {asked}"] if not certificate["complete"] and (ran < asked or not replaced) else []
    notes += [f"filter {certificate['filter']}"] if certificate["filter"] else []
    notes += ["interpreted"] if device["interpreted"] else []
    return [
        ", ".join([f"[`{':'.join([certificate['backend'], *options])}`]({name})", *notes]),
        device["name"],
        versions["torch"],
        versions["triton"],
        certificate["date"].partition("T")[0],
        *(str(counts[state]) for state in ("passed", "failed", "refused", "skipped")),
    ]


def table_of_certificates(folder: Path) -> str:
    """A Markdown table with one row for each JSON file of a folder, in the order of the files' names.

    folder: folder of summaries or certificates. The links of the table begin with its name.
    """
    rows = [
        _row(f"{folder.name}/{file.name}", json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(folder.glob("*.json"))
    ]
    lines = [COLUMNS, ("---",) * 5 + ("---:",) * 4, *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_table(page: str, table: str) -> str:
    """The text of a page with the table between its two marks. Raises ArgumentError if the marks are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArgumentError("page", expected=f"a page with the lines {BEGIN} and {END}", actual="a page without them")
    return f"{before}{begin}\n\n{table}\n{end}{after}"


def main(arguments: list[str]) -> None:
    """Print the table, or write it into a page."""
    if len(arguments) not in (1, 2):
        sys.exit(str(__doc__))
    table = table_of_certificates(Path(arguments[0]))
    if len(arguments) == 1:
        sys.stdout.write(table)
        return
    page = Path(arguments[1])
    page.write_text(with_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
