"""The names of the engines' code that the wheels rely on, as tables of docs/adoption.md.

`python integrations/internals_table.py` writes them there, from the tables that the wheels check; it imports no engine.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adoption.md"
WHEELS = ("dsv4attn_vllm", "dsv4attn_sglang")


def table(wheel: str) -> str:
    """The table of a wheel in Markdown: a row for each part and module or class, with its names by use."""
    engine_internals = import_module("dsv4attn.integrations.engine_internals")
    names_by_use: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in engine_internals.listed(import_module(f"{wheel}.internals").TABLE):
        uses = names_by_use.setdefault((row["part"], row["owner"]), {})
        uses.setdefault(row["use"], []).extend(row["names"])
    lines = ["| part | module or class | names |", "|---|---|---|"]
    for (part, owner), uses in names_by_use.items():
        texts = (f"{use} {' '.join(f'`{name}`' for name in dict.fromkeys(names))}" for use, names in uses.items())
        lines.append(f"| {part} | `{owner}` | {'; '.join(texts)} |")
    return "\n".join(lines)


def written(page: str, wheels: tuple[str, ...] = WHEELS) -> str:
    """The page with the tables of these wheels between their marks."""
    for wheel in wheels:
        begin, end = f"<!-- {wheel}: begin -->", f"<!-- {wheel}: end -->"
        before, found, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise ValueError(f"{PAGE.name} has no place for {wheel}: {begin} and {end}")
        page = f"{before}{begin}\n\n{table(wheel)}\n\n{end}{after}"
    return page


def main() -> None:
    """Write the page."""
    sys.path[:0] = [str(ROOT), *(str(ROOT / "integrations" / wheel.replace("_", "-")) for wheel in WHEELS)]
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
