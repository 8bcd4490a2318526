"""Lines of how time grows with one size, next to the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsv4attn.tools.bench.plots.sheet import FAINT, GRID, THOUSANDS, named, peer_of, sheet
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow
from dsv4attn.tools.bench.scaling import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GROWS = {
    "batch": "requests of the batch",
    "context-c128": "context (tokens)",
    "context-c4": "context (tokens)",
    "topk": "compressed keys of a token",
    "requests": "requests of a prefill",
}
_DECADES = 2.5
"""An axis that spans less has ticks between powers of ten."""


def scaling(run: Run, rows: Sequence[BenchRow], colours: dict[str, str]) -> Figure:
    """Time over the size that grows, both in powers. Dashed: time of the roofline. Rings: cliffs."""
    lines = [series for series in SERIES if any(row.series == series for row in rows)]
    columns = min(len(lines), 3)
    height = -(-len(lines) // columns)
    note = f"Lower is better. Time: median of {run.rounds}. Dashed: roofline of this run. Ring: time outgrows work."
    peers = dict.fromkeys(peer_of(row.by) for row in rows)
    used = {named(name): colours[name] for name in peers}
    figure = sheet([run], max(4.3 * columns + 0.4, 6.0), 3.1 * height, "How time grows", note, used)
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    for axis in axes[len(lines) :]:
        axis.set_visible(False)
    for axis, series in zip(axes, lines, strict=False):
        _line(axis, run, [row for row in rows if row.series == series], colours)
        axis.set_title(SERIES[series], loc="left", fontsize=9, fontweight="bold")
        axis.set_xlabel(_GROWS[series])
        axis.set_ylabel("time (us)")
    return figure


def _line(axis: Axes, run: Run, rows: Sequence[BenchRow], colours: dict[str, str]) -> None:
    for by in dict.fromkeys(row.by for row in rows):
        points = sorted((row.x, 1e6 * (row.median or 0.0)) for row in rows if row.by == by)
        x, y = zip(*points, strict=True)
        axis.plot(x, y, color=colours[peer_of(by)], linewidth=1.6, marker="o", markersize=3)
        stops = {cliff.stop for cliff in run.cliffs if (cliff.series, cliff.by) == (rows[0].series, by)}
        marked = [point for point in points if point[0] in stops]
        if marked:
            axis.plot(*zip(*marked, strict=True), "o", markersize=9, fillstyle="none", color=colours[peer_of(by)])
    least = sorted({(row.x, 1e6 * row.least) for row in rows})
    axis.plot(*zip(*least, strict=True), color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [x for x, _ in least]
    axis.set_xticks(ticks[:: -(-len(ticks) // 6)], [_count(x) for x in ticks[:: -(-len(ticks) // 6)]])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    if high / low < 10**_DECADES:
        from matplotlib.ticker import LogLocator

        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(THOUSANDS)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)


def _count(x: int) -> str:
    if x >= 2**20:
        return f"{x // 2**20}M"
    return f"{x // 1024}K" if x >= 1024 else str(x)
