"""Put reports of measure_serving.py on a page: `python measured.py FILE.json PAGE.md REPORT.json ...`.

FILE.json keeps all reports. Reports of one model, machine, day, versions and options are one: a case that was measured
again replaces the earlier one. PAGE.md: a page; the tables between its two marks are replaced.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from on_gpu.measure_serving import rows_of, started
from on_gpu.report import between, markdown

BEGIN, END = "<!-- vllm-measured: begin -->", "<!-- vllm-measured: end -->"
RESULTS = ("ready_s", "failed", "cases")
"""Entries of a report that do not say what was measured, and where."""


def run_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """What a report is of: model, machine, day, versions and options."""
    return {name: value for name, value in report.items() if name not in RESULTS}


def merged(earlier: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reports together with a new one, newest day first. Of engines that failed the names are kept, not the logs."""
    if not report["cases"]:
        raise ValueError("the report has no case")
    reports = {json.dumps(run_of(known), sort_keys=True): dict(known) for known in earlier}
    key = json.dumps(run_of(report), sort_keys=True)
    known = reports.get(key, {"ready_s": {}, "failed": [], "cases": []})
    cases = {(case["requests"], case["prompt"]): case for case in (*known["cases"], *report["cases"])}
    reports[key] = {
        **run_of(report),
        "ready_s": {**known["ready_s"], **report["ready_s"]},
        "failed": sorted(report["failed"]),
        "cases": [cases[case] for case in sorted(cases, key=lambda case: (case[1], case[0]))],
    }
    order = itemgetter("model", "device")
    models = sorted(reports.values(), key=lambda known: (*order(known), known.get("drafts", 0), json.dumps(known)))
    return sorted(models, key=lambda known: known["date"], reverse=True)


def title_of(report: Mapping[str, Any]) -> str:
    """A paragraph: what was measured, where, and how long the engines took to start."""
    layers = report["layers"]
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(layers).items())
    model = f"**{report['model'].capitalize()}'s sizes, {len(layers)} layers** ({kinds})"
    experts = f"{report['experts']} experts in each"
    if ranks := report.get("rank_of"):
        experts += f", with the share of one of {ranks} tensor-parallel ranks (their exchange was not measured)"
    versions = f"torch {report['torch']}, Triton {report['triton']}, vLLM {report['vllm']}"
    parts = f"parts `{report['parts']}`, {report['tokens']} tokens of each answer"
    gpus = report.get("gpus", 1)
    limits = f"at most {report['max_num_batched_tokens']:,} tokens in a step, {report['memory_gib']:g} GiB of caches"
    limits += " on each GPU" * (gpus > 1)
    options = f"options `{json.dumps(report['options'])}`, " if report["options"] else ""
    routing = "tokens spread over experts evenly, " if report["routing"] == "even" else ""
    drafts = f"drafts in a step: {report['drafts']}, half of them accepted by chance, " if "drafts" in report else ""
    machine = f"{gpus} x {report['device']}, {versions}, {report['date']}".removeprefix("1 x ")
    process = "the engine in a process of its own, " if report.get("engine_process") or gpus > 1 else ""
    chosen = f"{routing}{drafts}{options}{process}medians of {report['turns']} turns"
    return f"{model}, {experts}. {machine}; {parts}, {limits}, {chosen}. {started(report)}"


def tables(reports: Sequence[Mapping[str, Any]]) -> str:
    """All reports in Markdown."""
    parts = [f"{title_of(report)}\n\n{markdown(rows_of(report))}" for report in reports]
    return "\n\n".join(parts) or "No figure yet."


def with_tables(page: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The page with the tables between its marks."""
    return between(page, BEGIN, END, f"\n{tables(reports)}\n")


def main(file: str, page: str, *new: str) -> None:
    """See the module."""
    reports = json.loads(Path(file).read_text())["reports"] if Path(file).exists() else []
    for report in new:
        reports = merged(reports, json.loads(Path(report).read_text()))
    Path(file).write_text(json.dumps({"reports": reports}, indent=1) + "\n")
    path = Path(page)
    path.write_text(with_tables(path.read_text(encoding="utf-8"), reports), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
