"""Prints a benchmark run, and a comparison of two runs, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dsv4attn.tools.bench.compare import Comparison
from dsv4attn.tools.bench.report_layer import layer_tables
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import FAILED, MEASURED, REFUSED, WRONG, BenchRow, geomeans, pair_means

__all__ = ["comparison_text", "run_text"]

_STYLES = {WRONG: "bold red", FAILED: "red", REFUSED: "yellow"}
SHOWN = 12
"""Lines of each kind of change that are printed; JSON has all."""


def run_text(run: Run) -> Group:
    """Head, one table for each kernel, parts of layers, ratios, cliffs."""
    roof = run.roofline
    fp8 = f", {roof.fp8_flops_s / 1e12:.3g} TFLOP/s (fp8 matrix product)" if roof.fp8_flops_s else ""
    parts: list[RenderableType] = [
        Text(f"{run.machine}, {run.date} UTC", style="bold"),
        Text(
            f"roofline of this run: {roof.flops_s / 1e12:.3g} TFLOP/s ({roof.dtype} matrix product), "
            f"{roof.bytes_s / 1e9:.4g} GB/s (copy, read + written){fp8}; "
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
        parts.append(_table(title, rows))
    parts.extend(layer_tables(run.layers))
    parts.extend(_lines(run))
    return Group(*parts)


def _table(title: str, rows: list[BenchRow]) -> Table:
    """One line for each row with a time. Other rows are listed below the tables, with their reasons."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.vs))
    headings = ["case", "by", "time us", "spread", "TFLOP/s", "GB/s", "roofline", "error", *(f"x {p}" for p in peers)]
    paired = any(row.records for row in rows)
    headings += ["x 584/584"] if paired else []
    lines, before = [], ""
    for row in rows:
        # the kernel is in the title
        case = row.case.partition(" ")[2]
        ratios = [f"{row.vs[peer]:.2f}" if peer in row.vs else "" for peer in peers]
        ratios += [f"{row.vs_584:.2f}" if row.vs_584 else ""] if paired else []
        lines.append([case if case != before else "", row.by, *_numbers(row), *ratios])
        before = case
    heading = f"scaling: {title}" if rows[0].series else title
    table = Table(
        title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for i, name in enumerate(headings):
        # never cut off: a narrow terminal folds the line instead
        wide = max(len(name), *(len(line[i]) for line in lines))
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True, min_width=wide)
    for row, line in zip(rows, lines, strict=True):
        style = _STYLES.get(row.state, "dim" if row.is_peer else "")
        table.add_row(*(Text(cell, style=style) for cell in line))
    return table


def _numbers(row: BenchRow) -> list[str]:
    """Time, spread, rates, error. A row without a time has no rates."""
    error = "-" if row.error is None else f"{row.error:.1e}"
    if not row.median or row.p10 is None or row.p90 is None:
        return [row.state if row.state != MEASURED else "-", "", "", "", "", error]
    us = 1e6 * row.median
    spread = 50 * (row.p90 - row.p10) / row.median
    return [
        (f"{us:,.1f}" if us < 10_000 else f"{us:,.0f}") + "*" * row.exposed,
        f"±{spread:.1f}%",
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
        count = sum(1 for row in run.rows if (row.series or row.kernel, row.by) == (kernel, by) and peer in row.vs)
        yield Text(f"{kernel}: {by} runs at {ratio:.2f} of {peer}'s speed (geometric mean of {count} cases)")
    for (kernel, by, records), ratio in pair_means(run.rows).items():
        count = sum(bool(row.vs_584) for row in run.rows if (row.kernel, row.by, row.records) == (kernel, by, records))
        yield Text(
            f"{kernel}: on {records} {by} runs at {ratio:.2f} of its own speed on 584/584 "
            f"(geometric mean of {count} cases)"
        )
    if any(row.exposed for row in run.rows):
        yield Text("*: the host's own time is part of it: the call waits for the device, or takes long to enqueue")
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
        more = f" and {len(cases) - 1} more cases" if len(cases) > 2 else ""
        for case in cases[:1] if more else cases:
            yield Text(f"{state}: {case}{more}, {by}: {reason}", style=_STYLES[state])


def comparison_text(both: Comparison) -> Group:
    """Changes beyond noise by name, and what only one run has."""
    lines = []
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
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            lines.append(Text(f"{title}: {'; '.join(names[:SHOWN])}{more}", style="yellow"))
    if both.speed is None:
        lines.append(Text("nothing was measured in both runs", style="yellow"))
    else:
        same = len(both.of("same"))
        lines.append(Text(f"{both.speed:.3f} of the speed before (geometric mean); {same} rows within noise"))
    return Group(*lines)
