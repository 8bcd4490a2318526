"""Makes a table of certificates that `dsv4attn conform NAME --certificate FILE` wrote.

python -m dsv4attn.testing.certificates docs/certificates                 # prints the table
python -m dsv4attn.testing.certificates docs/certificates docs/testing.md # writes it between the page's two marks
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4attn.errors import ArgumentError

__all__ = ["BEGIN", "END", "main", "table_of_certificates", "with_table"]

BEGIN, END = "<!-- certificates: begin -->", "<!-- certificates: end -->"
"""Marks of a page, between which the table is."""
COLUMNS = ("backend", "device", "torch", "Triton", "date", "passed", "failed", "refused", "skipped")


def _row(name: str, certificate: Mapping[str, Any]) -> list[str]:
    device, versions, counts = certificate["device"], certificate["versions"], certificate["counts"]
    options = [f"{key}={value}" for key, value in certificate["options"].items()]
    replaced, ran, asked = certificate.get("reference_ops", []), len(certificate["cases"]), certificate["asked"]
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

    folder: folder of the certificates. The links of the table begin with its name.
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
