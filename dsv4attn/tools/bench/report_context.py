"""`ContextRun`: what `dsv4attn bench context` has measured, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import asdict, frozen
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dsv4attn.tools.bench.clock import Spread
from dsv4attn.tools.bench.context import ContextResult
from dsv4attn.tools.bench.result import Machine

__all__ = ["SCHEMA", "ContextRun", "context_text"]

SCHEMA = "dsv4attn-bench-context/1"
"""Version of the JSON. It changes when a field changes its meaning or is removed."""


@frozen
class ContextRun:
    """Everything that one command measured, the same on all ranks but for the machine.

    machine: machine and versions of the rank.
    date: date and minute, UTC.
    command: the command line, without torchrun.
    backend: name of the backend.
    process_group: backend of the process group, gloo or nccl.
    ranks: ranks of the group.
    interleave: consecutive entries of one rank.
    rounds: rounds of each median.
    graph: whether replays of captured graphs were timed.
    results: one for each case.
    """

    machine: Machine
    date: str
    command: str
    backend: str
    process_group: str
    ranks: int
    interleave: int
    rounds: int
    graph: bool
    results: tuple[ContextResult, ...]

    @property
    def ok(self) -> bool:
        """Whether all ranks agree with one rank in all cases."""
        return not any(result.wrong for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        names = "date", "command", "backend", "process_group", "ranks", "interleave", "rounds", "graph"
        facts = {name: getattr(self, name) for name in names}
        results = [result.as_json() for result in self.results]
        return {"ok": self.ok, "schema": SCHEMA, "machine": asdict(self.machine), **facts, "results": results}


def context_text(run: ContextRun) -> Group:
    """Head, times of each case, bytes, and what disagrees."""
    rounds = "1 round" if run.rounds == 1 else f"medians of {run.rounds} rounds"
    how = "replays of captured graphs" if run.graph else "eager calls"
    parts: list[RenderableType] = [
        Text(f"{run.machine}, {run.date} UTC", style="bold"),
        Text(f"{_ranks(run)}, interleave {run.interleave}, {run.process_group}; {run.backend}, {how}, {rounds}"),
        *(_times(run, result) for result in run.results if result.times),
        _bytes(run),
        _sent(run),
        *_lines(run),
    ]
    return Group(*parts)


def _times(run: ContextRun, result: ContextResult) -> Table:
    """A line for each part."""
    headings = "decode", "one rank us", "spread", f"{_ranks(run)} us", "spread", "x one rank"
    lines = [[time.part, *_cells(time.one), *_cells(time.ranks), f"{time.speed:.2f}"] for time in result.times]
    return _table(_name(result), headings, lines, left=1)


def _bytes(run: ContextRun) -> Table:
    """Bytes of the pages that a rank holds."""
    lines = [
        [_name(result), name, f"{whole:,}", f"{part:,}", f"{part / whole:.3f}"]
        for result in run.results
        for name, whole, part in ((n, whole, result.rank_bytes[n]) for n, whole in result.one_bytes.items())
    ]
    return _table("bytes in a layer's caches", ("case", "", "one rank", f"one of {run.ranks}", "share"), lines, left=2)


def _sent(run: ContextRun) -> Table:
    """Bytes that a rank sends."""
    lines = [
        [_name(result), name, f"{formula:,}", f"{result.sent[name]:,.0f}"]
        for result in run.results
        for name, formula in result.formula.items()
    ]
    title = "bytes that a rank sends for a token and layer"
    return _table(title, ("case", "", "by the formula", "counted"), lines, left=2)


def _lines(run: ContextRun) -> Iterator[Text]:
    for result in run.results:
        name = _name(result)
        for line in result.wrong:
            yield Text(f"wrong: {name}: {line}", style="bold red")
        if not result.wrong:
            also = f"; the same {result.selected:,} entries are selected" if result.selected else ""
            yield Text(f"checked: {name}: {result.error:.1e} of the norm from one rank's output{also}")
    if any(spread.exposed for result in run.results for time in result.times for spread in (time.one, time.ranks)):
        yield Text("*: the host's own time is part of it: the call waits for the device, or takes long to enqueue")


def _name(result: ContextResult) -> str:
    return f"{result.case.preset.name} {result.case.label}"


def _ranks(run: ContextRun) -> str:
    return f"{run.ranks} rank{'s' * (run.ranks != 1)}"


def _table(title: str, headings: Sequence[str], lines: Sequence[Sequence[str]], *, left: int) -> Table:
    """A table. left: number of columns with words."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    before = ""
    for i, name in enumerate(headings):
        # never cut off: a narrow terminal folds the line instead
        wide = max(len(name), *(len(line[i]) for line in lines))
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True, min_width=wide)
    for first, *rest in lines:
        table.add_row("" if first == before else first, *rest)
        before = first
    return table


def _cells(spread: Spread) -> tuple[str, str]:
    """Microseconds, and half the distance between the 10th and the 90th percentile."""
    us = 1e6 * spread.median
    return (
        (f"{us:,.1f}" if us < 10_000 else f"{us:,.0f}") + "*" * spread.exposed,
        f"±{50 * (spread.p90 - spread.p10) / spread.median:.1f}%",
    )
