"""Collect the figures of a run of these tests: `python report.py RESULTS FILE.json [PAGE.md]`.

RESULTS: the folder of `pytest --results`. FILE.json keeps what it has of scenarios that were not run, if it is of the
same device and day. PAGE.md: a page whose table between the two marks is replaced.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- vllm-serving: begin -->", "<!-- vllm-serving: end -->"
BY_VLLM = "-by-vllm"
KEPT = {
    "rms": "rms",
    "gap": "gap",
    "equal": "equal",
    "backend": "backend",
    "vllm:num_preemptions": "preemptions",
    "vllm:external_prefix_cache_hits": "from_cpu",
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
"""Names of figures in the results, and in the file."""


def collect(folder: Path) -> dict[str, dict[str, Any]]:
    """The figures of each scenario, by its name."""
    found = {}
    for file in sorted(folder.glob("*.figures.json")):
        figures = json.loads(file.read_text())
        found[file.name.removesuffix(".figures.json")] = {
            name: figures[key] for key, name in KEPT.items() if key in figures
        }
    return found


def table(results: Mapping[str, Any]) -> str:
    """The results as a table in Markdown. vLLM's own attention has a column if it was run."""
    scenarios = results["scenarios"]
    heads = ["scenario", "backend", "rms", "tokens equal", "gap"]
    compares = any(name.endswith(BY_VLLM) for name in scenarios)
    heads += ["rms of vLLM's own"] * compares + ["notes"]
    rows = [heads]
    for name, figures in scenarios.items():
        if name.endswith(BY_VLLM):
            continue
        notes = [f"{figures['preemptions']:.0f} preemptions"] if figures.get("preemptions") else []
        if figures.get("from_cpu"):
            notes.append(f"{figures['from_cpu']:.0f} tokens from the CPU")
        if figures.get("drafts"):
            notes.append(f"{figures.get('accepted', 0):.0f} of {figures['drafts']:.0f} drafts accepted")
        chosen = [f"{figures['equal']:.1%}", f"{figures['gap']:.3f}"] if "equal" in figures else ["", ""]
        numbers = [f"{figures['rms']:.4f}", *chosen]
        own = scenarios.get(name + BY_VLLM)
        own_cells = [f"{own['rms']:.4f}" if own else ""] if compares else []
        rows.append([name, ", ".join(figures["backend"]), *numbers, *own_cells, ", ".join(notes)])
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. rows: the first one has the heads."""
    heads, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *others))


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with a text between two marks."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def with_table(page: str, results: Mapping[str, Any]) -> str:
    """The page with the table between its marks."""
    return between(page, BEGIN, END, table(results))


def main(folder: str, file: str, page: str = "") -> None:
    """See the module."""
    import torch
    import triton

    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    earlier = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    if not earlier.items() >= results.items():
        earlier = {}
    scenarios = {**earlier.pop("scenarios", {}), **collect(Path(folder))}
    results = {**earlier, **results, "scenarios": dict(sorted(scenarios.items()))}
    Path(file).write_text(json.dumps(results, indent=1) + "\n")
    if page:
        path = Path(page)
        path.write_text(with_table(path.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
