"""Bars of a kernel's rates, with the roofline of each case, the times, and the speed relative to other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.tools.bench.cases import LAYER_OPS, PRESETS, WINDOW
from dsv4attn.tools.bench.plots.labels import LABEL_POINTS, Mark, place
from dsv4attn.tools.bench.plots.sheet import GRID, INK, THOUSANDS, named, peer_of, sheet, text_width
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEED = "arithmetic rate (TFLOP/s)"
TRAFFIC = "memory rate (GB/s)"
_SCORED = "requests (b), tokens (t), index keys (k)"
_WIDEST = 13.7
"""Inches of bars side by side; more panels go into a second line."""
_NARROWEST = 7.5
"""Inches of a figure at least."""
_GROUP = 0.84
"""The share of a group's place that its bars take."""
Panels = dict[str, dict[str, list[BenchRow]]]
"""Rows by panel and by group of bars."""


def bars(run: Run, rows: Sequence[BenchRow], colours: dict[str, str], title: str, unit: str) -> Figure:
    """A panel for each layer or step, a group of bars for each case in it, and a line where the roofline is.

    The axis reaches above every roofline, and no label covers one.
    """
    panels, names = _panels(rows, unit), list(dict.fromkeys(row.by for row in rows))
    peers = list(dict.fromkeys(peer for row in rows for peer in row.vs))
    longest = text_width(max((_label(row, peers) for row in rows), key=len), LABEL_POINTS)
    shape = _shape(rows[0].kernel)
    lines_below = [line for groups in panels.values() for group in groups for line in group.split("\n")]
    group_inches = max(0.34 * (len(names) + 1), text_width(max(lines_below, key=len), 9) + 0.12)
    least = ceil((text_width(shape, 9) + 0.3) / group_inches)
    spans = [max(len(groups), least) for groups in panels.values()]
    lines, columns = _lines(spans, int(_WIDEST / group_inches))
    speeds = f" and how many times the speed of {named(peers[0])}" if len(peers) == 1 else ""
    speeds = " and speed relative to other libraries" if len(peers) > 1 else speeds
    note = f"Higher is better. On bars: time (median of {run.rounds}){speeds}. Line: roofline."
    used = {named(name): colours[peer_of(name)] for name in names}
    width = max(1.4 + group_inches * columns, _NARROWEST)
    figure = sheet([run], width, (1.5 + max(2.1, 0.9 + longest)) * (1 + lines[-1][0]), title, note, used)
    grid = figure.add_gridspec(1 + lines[-1][0], columns)
    first, marks = None, []
    for (panel, groups), (line, left), span in zip(panels.items(), lines, spans, strict=True):
        axis = figure.add_subplot(grid[line, left : left + span], sharey=first)
        first = first or axis
        marks += _panel(axis, groups, names, colours, unit, peers)
        axis.set_xlim(-0.55, span - 0.45)
        axis.set_title(_described(panel), loc="left", fontsize=8.5, color=INK)
        axis.set_xlabel(shape, loc="left")
        if left:
            axis.spines["left"].set_visible(False)
            axis.tick_params(axis="y", left=False, labelleft=False)
        else:
            axis.set_ylabel(unit)
    assert first
    place(figure, first, marks, _GROUP / len(names))
    return figure


def _lines(spans: Sequence[int], room: int) -> tuple[list[tuple[int, int]], int]:
    """Line and column of each panel, and the number of columns. spans: columns of each panel. room: in a line."""
    places, line, end, columns = list[tuple[int, int]](), 0, 0, max(spans)
    for span in spans:
        if end and end + span > room:
            line, end = line + 1, 0
        places.append((line, end))
        end += span
        columns = max(columns, end)
    return places, columns


def _panels(rows: Sequence[BenchRow], unit: str) -> Panels:
    panels: Panels = {}
    by_preset, around = rows[0].kernel in ("decode", "step"), rows[0].kernel in LAYER_OPS
    for row in rows:
        kernel, preset, label = row.case.split(" ", 2)
        panel = preset if by_preset or around else kernel if unit == TRAFFIC else ""
        group = label.replace(" ", "\n") if by_preset or around else f"{preset}\n{label}".replace(" ", "\n")
        panels.setdefault(panel, {}).setdefault(group, []).append(row)
    return panels


def _shape(kernel: str) -> str:
    """What the groups of a kernel's bars are."""
    if kernel in ("decode", "step"):
        return "requests of the batch (b)" + (", tokens (t) after a context (n)" if kernel == "step" else "")
    if kernel not in LAYER_OPS:
        return "layer and shape of the case"
    return {
        "index": _SCORED,
        "select": _SCORED,
        "mhc": "tokens (t), hidden size (d)",
        "products": "tokens (t), weight",
    }.get(kernel, "requests (b) or tokens (t)")


def _described(panel: str) -> str:
    preset = PRESETS.get(panel)
    if preset is None:
        return panel
    keys = f"{WINDOW} + {preset.topk}" if preset.topk else f"{WINDOW}"
    keys = f"up to {keys}" if preset.kind is LayerKind.HCA else keys
    name = panel.replace("_", r"\_")
    return f"$\\bf{{{name}}}$\n{preset.heads} heads\n{keys} keys"


def _panel(
    axis: Axes,
    groups: dict[str, list[BenchRow]],
    names: Sequence[str],
    colours: dict[str, str],
    unit: str,
    peers: Sequence[str],
) -> list[Mark]:
    """Draw the bars and rooflines of a panel; return labels that have no place yet."""
    width, marks = _GROUP / len(names), []
    # a library that has nothing in this panel leaves no room free
    present = [name for name in names if any(row.by == name for rows in groups.values() for row in rows)]
    for i, rows in enumerate(groups.values()):
        heights = [(row.tflops if unit == SPEED else row.gbytes) or 0.0 for row in rows]
        roof = max(height / (row.roofline or 1.0) for row, height in zip(rows, heights, strict=True))
        for row, height in zip(rows, heights, strict=True):
            left = i + (present.index(row.by) - len(present) / 2) * width
            axis.bar(left, height, width * 0.92, align="edge", color=colours[peer_of(row.by)], linewidth=0)
            marks.append(Mark.on_bar(axis, left + 0.46 * width, _label(row, peers), height, roof))
        axis.plot([i - 0.46, i + 0.46], [roof, roof], color=INK, linewidth=1.2, solid_capstyle="butt")
    axis.set_xticks(range(len(groups)), list(groups))
    axis.tick_params(axis="x", length=0)
    axis.yaxis.set_major_formatter(THOUSANDS)
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    return marks


def _label(row: BenchRow, peers: Sequence[str]) -> str:
    """Time, and speed relative to that of each peer: the numbers of the table. A lone peer's name is in the remark."""
    assert row.median
    ratios = [f"{ratio:.2f}x" + (f" {named(peer)}" if len(peers) > 1 else "") for peer, ratio in row.vs.items()]
    return ", ".join([f"{_us(row.median)} us", *ratios])


def _us(seconds: float) -> str:
    value = 1e6 * seconds
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"
