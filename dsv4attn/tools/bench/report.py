"""Prints a benchmark run, a run over ranks, and a comparison of two runs, as tables and sentences."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dsv4attn.core.reprs import counted
from dsv4attn.tools.bench.clock import Spread
from dsv4attn.tools.bench.compare import Comparison
from dsv4attn.tools.bench.context import ContextResult, ContextRun
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BEST, FAILED, MEASURED, REFUSED, WRONG, BenchRow, geomeans, pair_means

_STYLES = {WRONG: "bold red", FAILED: "red", REFUSED: "yellow"}
SHOWN = 12
"""Lines of each kind of change that are printed; JSON has all."""
_CASE = 25
"""Letters of a case that fit beside its numbers in 80 columns."""
_EXPOSED = "*: the host's own time is part of it: the call waits for the device, or takes long to enqueue"


def _table(
    title: str,
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    words: int,
    styles: Sequence[str] = (),
    sums: Sequence[str] = (),
) -> Table:
    """A table. A first cell that repeats the one above it is left blank.

    words: number of columns with words, which are aligned to the left. styles: of the lines. sums: the last line.
    """
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_footer=bool(sums),
    )
    for i, heading in enumerate(headings):
        # never cut off: a narrow terminal folds the line instead
        wide = max(len(line[i]) for line in (headings, *lines, sums) if len(line) > i)
        total = sums[i] if sums else ""
        table.add_column(Text(heading), total, justify="left" if i < words else "right", no_wrap=True, min_width=wide)
    first_above = None
    for i, (first, *rest) in enumerate(lines):
        cells = ["" if first == first_above else first, *rest]
        table.add_row(*(Text(cell, style=styles[i] if styles else "") for cell in cells))
        first_above = first
    return table


def _us(seconds: float, *, exposed: bool = False) -> str:
    """Microseconds, with a star if the host's own time is part of them."""
    us = 1e6 * seconds
    return (f"{us:,.1f}" if us < 10_000 else f"{us:,.0f}") + "*" * exposed


def _spread(median: float, p10: float, p90: float) -> str:
    """Half the distance between the 10th and the 90th percentile, relative to the median."""
    return f"±{50 * (p90 - p10) / median:.1f}%"


def run_text(run: Run) -> Group:
    """Head, one table for each kernel, parts of layers, ratios, cliffs."""
    roof = run.roofline
    fp8 = f", {_rate(roof.fp8_flops_s / 1e12)} TFLOP/s (fp8 matrix product)" if roof.fp8_flops_s else ""
    parts: list[RenderableType] = [
        Text(run.title, style="bold"),
        Text(
            f"roofline of this run: {_rate(roof.flops_s / 1e12)} TFLOP/s ({roof.dtype} matrix product), "
            f"{_rate(roof.bytes_s / 1e9)} GB/s (copy, read + written){fp8}; "
            + ("1 round" if run.rounds == 1 else f"medians of {run.rounds} rounds, taken in turn")
        ),
    ]
    if run.ran is not None:
        parts.append(Text(f"interrupted: {run.ran} of {run.asked} cases were measured", style="bold red"))
    if run.machine.threads_from:
        parts.append(Text(f"{run.machine.threads_text} ({run.machine.threads_from})"))
    groups: dict[str, list[BenchRow]] = {}
    for row in run.rows:
        groups.setdefault(row.series or row.kernel, []).append(row)
    for title, rows in groups.items():
        parts.extend(_kernel_tables(title, rows))
    parts.extend(layer_tables(run.layers))
    parts.extend(_lines(run))
    return Group(*parts)


def _kernel_tables(kernel: str, rows: Sequence[BenchRow]) -> Iterator[Table]:
    """Numbers of each row, below its case where several rows have it, then speedups. Reasons are listed elsewhere."""
    title = f"scaling: {kernel}" if rows[0].series else kernel
    by = list(dict.fromkeys(row.by for row in rows))
    # the kernel is in the title
    cases = [row.case.partition(" ")[2] for row in rows]
    nested = len(by) > 1 or max(map(len, cases)) > _CASE
    lines, styles = list[Sequence[str]](), list[str]()
    for i, (case, row) in enumerate(zip(cases, rows, strict=True)):
        if nested and (i == 0 or case != cases[i - 1]):
            names = textwrap.wrap(case, _CASE)
            lines += [[name] for name in names]
            styles += [""] * len(names)
        lines.append([f"  {row.by}" if nested else case, *_numbers(row)])
        styles.append(_STYLES.get(row.state, "dim" if row.is_peer else ""))
    headings = ["case, by" if nested else "case", "time us", "spread", "TFLOP/s", "GB/s", "roofline", "error"]
    yield _table(title if nested else f"{title}, {by[0]}", headings, lines, words=1, styles=styles)

    speedups: dict[tuple[str, str], dict[str, str]] = {}
    for case, row in zip(cases, rows, strict=True):
        over = dict(sorted(row.vs.items(), key=itemgetter(1))) | ({"584/584": row.vs_584} if row.vs_584 else {})
        for name, ratio in over.items():
            speedups.setdefault((case, name), {})[row.by] = f"{ratio:.2f}"
    if speedups:
        ours = [name for name in by if any(name in ratios for ratios in speedups.values())]
        lines = [[*names, *(ratios.get(name, "") for name in ours)] for names, ratios in speedups.items()]
        yield _table(f"{title}: speedup", ["case", "over", *ours], lines, words=2)


def _numbers(row: BenchRow) -> list[str]:
    """Time, spread, rates, error. A row without a time has no rates."""
    error = "-" if row.error is None else f"{row.error:.1e}"
    if not row.median or row.p10 is None or row.p90 is None:
        return [row.state if row.state != MEASURED else "-", "", "", "", "", error]
    return [
        _us(row.median, exposed=row.exposed),
        _spread(row.median, row.p10, row.p90),
        _rate(row.tflops),
        _rate(row.gbytes),
        f"{100 * (row.roofline or 0.0):.0f}%",
        error,
    ]


def _rate(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def _lines(run: Run) -> Iterator[Text]:
    for (kernel, by, peer), ratio in geomeans(run.rows).items():
        rows = [row for row in run.rows if (row.series or row.kernel, row.by) == (kernel, by)]
        count = sum(1 for row in rows if (row.vs if peer == BEST else peer in row.vs))
        yield Text(f"{kernel}: {by} runs at {ratio:.2f} of {peer}'s speed (geometric mean of {counted(count, 'case')})")
    for (kernel, by, records), ratio in pair_means(run.rows).items():
        count = sum(bool(row.vs_584) for row in run.rows if (row.kernel, row.by, row.records) == (kernel, by, records))
        yield Text(
            f"{kernel}: on {records} {by} runs at {ratio:.2f} of its own speed on 584/584 "
            f"(geometric mean of {counted(count, 'case')})"
        )
    if any(row.exposed for row in run.rows):
        yield Text(_EXPOSED)
    for by, note in dict.fromkeys((row.by, row.reason) for row in run.rows if row.state == MEASURED and row.reason):
        yield Text(f"{by}: {note}")
    for cliff in run.cliffs:
        yield Text(f"cliff: {cliff}", style="yellow")
    if not run.cliffs and any(row.series and row.median for row in run.rows):
        yield Text("no cliff: from point to point time never grows by more than 1.3 times what work does")
    for share in (*run.host, *run.layers):
        yield Text(f"{share['by']}, {share['text']}")
    for name, why in run.unavailable.items():
        yield Text(f"not here: {name}: {why}", style="yellow")
    yield from _lost(run.rows)


def _lost(rows: Sequence[BenchRow]) -> Iterator[Text]:
    """Rows without a time and their reasons; of more than two with one reason, the first and the number."""
    lost: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.state != MEASURED:
            lost.setdefault((row.state, row.by, row.reason), []).append(row.case)
    for (state, by, reason), cases in lost.items():
        others = f" and {len(cases) - 1} more cases" if len(cases) > 2 else ""
        for case in cases[:1] if others else cases:
            yield Text(f"{state}: {case}{others}, {by}: {reason}", style=_STYLES.get(state, ""))


def layer_tables(layers: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """A table for each kind of layer and backend, with time, share and launches of each part of its steps."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for time in layers:
        if time.get("parts"):
            groups.setdefault((time["layer"], time["by"]), []).append(time)
    for (kind, by), times in groups.items():
        yield _layer_table(f"parts of layer {kind}, {by}", times)
    shown = [time for times in groups.values() for time in times]
    if shown:
        host = all(part["launches"] is None for time in shown for part in time["parts"])
        what = "the host's time" if host else "time of kernels, without gaps between them, on cold caches"
        yield Text(f"parts: {what}; mHC, around the layer, counts in the sum only")
        for phase, step in dict.fromkeys((time["phase"], time["step"]) for time in shown):
            counts = dict.fromkeys(
                f"{time['completing']:,} on {time['layer']}"
                for time in shown
                if (time["phase"], time["step"]) == ("decode", step) and time.get("completing")
            )
            entries = f"; sequences that complete an entry: {', '.join(counts)}" if counts else ""
            yield Text(f"{phase}: {step}{entries}")
    for time in layers:
        if not time.get("parts", True):
            yield Text(f"no parts of {time['case']}, {time['by']}: the profiler sees no kernels here", style="yellow")


def _layer_table(title: str, times: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(part["name"] for time in times for part in time["parts"]))
    headings, sums, lines = ["part"], ["sum"], {name: [name] for name in names}
    for time in times:
        parts = {part["name"]: part for part in time["parts"]}
        total = sum(part["seconds"] for part in parts.values())
        counts = [part["launches"] for part in parts.values() if part["launches"] is not None]
        columns = {f"{time['phase']} us": _us(total), "share": "100.0%"}
        if counts:
            columns["launches"] = _count(sum(counts))
        headings += columns
        sums += columns.values()
        for name, line in lines.items():
            line.extend(_part_cells(parts[name], total)[: len(columns)] if name in parts else [""] * len(columns))
    return _table(title, headings, [*lines.values()], words=1, sums=sums)


def _part_cells(part: Mapping[str, Any], total: float) -> list[str]:
    """Microseconds, share and launches of a part."""
    return [_us(part["seconds"]), f"{100 * part['seconds'] / (total or 1):.1f}%", _count(part["launches"] or 0.0)]


def _count(launches: float) -> str:
    return f"{launches:,.0f}" if launches == round(launches) else f"{launches:,.1f}"


def context_text(run: ContextRun) -> Group:
    """Head, times of each case, bytes, and what disagrees."""
    rounds = "1 round" if run.rounds == 1 else f"medians of {run.rounds} rounds"
    ranks, how = counted(run.ranks, "rank"), "replays of captured graphs" if run.graph else "eager calls"
    parts: list[RenderableType] = [
        Text(f"{run.machine}, {run.date} UTC", style="bold"),
        Text(f"{ranks}, interleave {run.interleave}, {run.process_group}; {run.backend}, {how}, {rounds}"),
        *(_times(run, result) for result in run.results if result.times),
        _bytes(run),
        _sent(run),
        *_context_lines(run),
    ]
    return Group(*parts)


def _times(run: ContextRun, result: ContextResult) -> Table:
    """A line for each part."""
    headings = "decode", "one rank us", "spread", f"{counted(run.ranks, 'rank')} us", "spread", "x one rank"
    lines = [
        [time.part, *_time_cells(time.one), *_time_cells(time.ranks), f"{time.speed:.2f}"] for time in result.times
    ]
    return _table(_name(result), headings, lines, words=1)


def _bytes(run: ContextRun) -> Table:
    """Bytes of the pages that a rank holds."""
    lines = [
        [_name(result), name, f"{whole:,}", f"{part:,}", f"{part / whole:.3f}"]
        for result in run.results
        for name, whole, part in ((n, whole, result.rank_bytes[n]) for n, whole in result.one_bytes.items())
    ]
    return _table("bytes in a layer's caches", ("case", "", "one rank", f"one of {run.ranks}", "share"), lines, words=2)


def _sent(run: ContextRun) -> Table:
    """Bytes that a rank sends."""
    lines = [
        [_name(result), name, f"{formula:,}", f"{result.sent[name]:,.0f}"]
        for result in run.results
        for name, formula in result.formula.items()
    ]
    title = "bytes that a rank sends for a token and layer"
    return _table(title, ("case", "", "by the formula", "counted"), lines, words=2)


def _context_lines(run: ContextRun) -> Iterator[Text]:
    for result in run.results:
        name = _name(result)
        for line in result.wrong:
            yield Text(f"wrong: {name}: {line}", style="bold red")
        if not result.wrong:
            also = f"; the same {result.selected:,} entries are selected" if result.selected else ""
            yield Text(f"checked: {name}: {result.error:.1e} of the norm from one rank's output{also}")
    if any(spread.exposed for result in run.results for time in result.times for spread in (time.one, time.ranks)):
        yield Text(_EXPOSED)


def _name(result: ContextResult) -> str:
    return f"{result.case.preset.name} {result.case.label}"


def _time_cells(spread: Spread) -> tuple[str, str]:
    return _us(spread.median, exposed=spread.exposed), _spread(spread.median, spread.p10, spread.p90)


def comparison_text(both: Comparison) -> Group:
    """What the old run is, changes beyond noise by name, and what only one run has."""
    lines = [Text(f"compared with {both.old_run}")]
    if not both.comparable:
        text = (
            f"measured on {both.old_machine!r} then and {both.new_machine!r} now: such ratios say nothing of the code"
        )
        lines.append(Text(f"warning: {text}", style="bold yellow"))
    for state, style in (("slower", "red"), ("lost", "red"), ("faster", "green")):
        changes = both.of(state)
        lines += [Text(f"{state}: {change}", style=style) for change in changes[:SHOWN]]
        if rest := len(changes) - SHOWN:
            lines += [Text(f"{state}: and {rest} more", style=style)] if rest > 0 else []
    for title, names in (("only before", both.only_old), ("only now", both.only_new)):
        if names:
            suffix = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(Text(f"{title}: {'; '.join(names[:SHOWN])}{suffix}", style="yellow"))
    if both.changes:
        mean = "" if both.speed is None else f"{both.speed:.3f} of the speed before (geometric mean); "
        lines.append(Text(f"{mean}{len(both.of('same'))} of {len(both.changes)} rows within noise"))
    else:
        lines.append(Text("nothing was measured in both runs", style="yellow"))
    return Group(*lines)
