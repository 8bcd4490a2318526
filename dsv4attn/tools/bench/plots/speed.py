"""Bars of speeds as multiples of FlashMLA's: decodes above prompts, from one run or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dsv4attn.tools.bench.cases import PRESETS
from dsv4attn.tools.bench.plots.labels import Mark, place
from dsv4attn.tools.bench.plots.sheet import GRID, INK, colours_of, days, sheet, text_width
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PEER = "flash_mla"
_WIDTH, _HEIGHTS = 6.4, (2.8, 2.1)
"""Inches of the figure, whose text can be read on a telephone, and of its panels, labels included."""
_WIDEST_BAR = 0.45
"""Inches."""
_GROUP = 0.86
"""The share of a shape's place that its bars take."""
_KEYS = {"prefill": "fp8 pages", "prefill-rows": "bf16 rows"}
"""Where the keys of a prefill are."""
_SHAPES = {
    "Decode": "requests of the batch, by kind of layer",
    "Prefill": "where the keys are, tokens of the prompt (t), by kind of layer",
}
"""Names of the horizontal axes."""
Clusters = dict[str, dict[str, dict[str, float]]]
"""Speeds by layer, shape and backend."""


def speed(compared: Sequence[tuple[Run, Sequence[BenchRow]]]) -> Figure:
    """A panel for decodes and one for prompts, and a line where FlashMLA is. compared: runs, and their rows to draw."""
    runs, rows = [run for run, _ in compared], [row for _, rows in compared for row in rows]
    decodes = [row for row in rows if row.kernel == "decode"]
    prompts = [row for row in rows if row.kernel != "decode"]
    names = colours_of(rows)
    panels = [(title, part) for title, part in (("Decode", decodes), ("Prefill", prompts)) if part]
    heights = _HEIGHTS[-len(panels) :]
    note = f"{runs[0].machine.name}, {days(runs)}. Higher is better."
    width = max(_WIDTH, *(1.1 + _inches(_clusters(part), len(names)) for _, part in panels))
    figure = sheet(runs, width, sum(heights), "Speed relative to FlashMLA's", note, names)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights).flatten()
    drawn = []
    for axis, (title, part) in zip(axes, panels, strict=True):
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.set_ylabel("times FlashMLA's speed")
        axis.set_xlabel(_SHAPES[title], labelpad=28)
        drawn.append(_panel(axis, _clusters(part), names))
    for axis, (marks, width) in zip(axes, drawn, strict=True):
        place(figure, axis, marks, width)
    return figure


def _clusters(rows: Sequence[BenchRow]) -> Clusters:
    clusters: Clusters = {}
    for row in rows:
        kernel, name, label = row.case.split(" ", 2)
        preset = PRESETS.get(name)
        layer = name if preset is None or preset.v41 else f"{preset.kind.value}\n{preset.heads} heads"
        lines = label.removeprefix("b=").split() if kernel == "decode" else [_KEYS.get(kernel, kernel), *label.split()]
        of_layer = clusters.setdefault(layer, {})
        of_layer.setdefault("\n".join(lines), {})[row.by] = row.vs[PEER]
    return clusters


def _places(clusters: Clusters) -> list[tuple[float, dict[str, float]]]:
    """Where each shape is on the axis, and its speeds by backend; half a place is free between layers."""
    places, x = [], 0.0
    for shapes in clusters.values():
        for speeds in shapes.values():
            places.append((x, speeds))
            x += 1
        x += 0.5
    return places


def _inches(clusters: Clusters, bars: int) -> float:
    """Inches that names of shapes and layers, and turned labels, take. bars: of a shape."""
    of_place = bars * 0.095 / _GROUP
    for layer, shapes in clusters.items():
        of_shape = max(text_width(line, 8) for shape in shapes for line in shape.split("\n")) + 0.02
        of_layer = max(text_width(line, 8, "bold") for line in layer.split("\n")) + 0.05
        of_place = max(of_place, of_shape, of_layer / (len(shapes) + 0.5))
    return of_place * sum(len(shapes) + 0.5 for shapes in clusters.values())


def _panel(axis: Axes, clusters: Clusters, colours: Mapping[str, str]) -> tuple[list[Mark], float]:
    """Draw bars, and names of layers below those of shapes; return labels that have no place yet, and a bar's width."""
    from matplotlib.ticker import MultipleLocator

    places, names = _places(clusters), list(colours)
    high = places[-1][0] + 0.6
    width = min(_GROUP / len(names), _WIDEST_BAR * (high + 0.6) / _WIDTH)
    marks = []
    for x, speeds in places:
        # a backend that was not measured leaves no room free
        for i, (name, value) in enumerate(speeds.items()):
            middle = x + (i - (len(speeds) - 1) / 2) * width
            axis.bar(middle, value, width * 0.94, color=colours[name])
            marks.append(Mark.on_bar(axis, middle, f"{value:.2f}", value, 1.0))
    axis.axhline(1, color=INK, linewidth=1)
    axis.annotate(
        "FlashMLA", (1, 1), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center"
    )
    shapes = [shape for of_layer in clusters.values() for shape in of_layer]
    axis.set_xticks([x for x, _ in places], shapes, fontsize=8)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.6, high)
    axis.yaxis.set_major_locator(MultipleLocator(0.5))
    axis.grid(axis="y", color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    below, left = -6 - 10 * max(1 + shape.count("\n") for shape in shapes), 0.0
    for layer, of_layer in clusters.items():
        middle, left = left + (len(of_layer) - 1) / 2, left + len(of_layer) + 0.5
        axis.annotate(
            layer,
            (middle, 0),
            (0, below),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            fontweight="bold",
        )
    return marks, width
