"""Pictures of a run: bars and the roofline for each kernel, and lines of how time grows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench.cases import ATTENTION, LAYER_OPS, PRESETS, WINDOW
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow
from dsv4attn.tools.bench.scaling import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_folder", "draw"]

_OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's colours, which readers with red-green colour blindness can distinguish."""
_PEERS = ("#4D4D4D", "#8C8C8C", "#BFBFBF")
_INK, _FAINT = "#222222", "#777777"
_DPI = 160
_WIDEST = 13.0
"""Inches of bars side by side; more go into a second line."""


def check_folder(folder: Path) -> None:
    """Check before measuring that matplotlib is installed and that the folder can be written."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import matplotlib as mpl  # noqa: F401
    except ImportError as error:
        hint = 'pip install "dsv4attn[plot]", or save with --json FILE and draw it elsewhere with --from FILE'
        raise ArgumentError("--plot", expected="matplotlib", actual="no such package", hint=hint) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".dsv4attn-bench"
        probe.touch()
        probe.unlink()
    except OSError as error:
        actual = f"{folder}: {error.strerror}"
        raise ArgumentError("--plot", expected="a folder that can be written", actual=actual) from error


def draw(run: Run, folder: Path) -> list[Path]:
    """Write a PNG for each kernel that was measured, one for memory steps, one for scaling; return where they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from matplotlib import rc_context

        settings: Any = {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": _FAINT,
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
        with rc_context(settings):
            paths = []
            for name, figure in _figures(run):
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=_DPI, facecolor="white")
                paths.append(path)
            return paths


def _figures(run: Run) -> Iterator[tuple[str, Figure]]:
    timed = [row for row in run.rows if row.median]
    plain = [row for row in timed if not row.series]
    colours = _colours(timed)
    for kernel in (*ATTENTION, "step"):
        rows = [row for row in plain if row.kernel == kernel]
        if rows:
            yield kernel, _bars(run, rows, colours, _TITLES[kernel], _SPEED)
    for name, kernels in {"memory": _MEMORY, **{kernel: (kernel,) for kernel in LAYER_OPS}}.items():
        rows = [row for row in plain if row.kernel in kernels]
        if rows:
            yield name, _bars(run, rows, colours, _TITLES[name], _TRAFFIC)
    compared = [row for row in plain if row.vs.get("flash_mla")]
    if compared:
        yield "speed", _speed(run, compared)
    lines = [row for row in timed if row.series]
    if lines:
        yield "scaling", _scaling(run, lines, colours)


def _speed(run: Run, rows: Sequence[BenchRow]) -> Figure:
    """Bars of each backend's speed as a multiple of FlashMLA's, by kernel and case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in rows))
    backends = list(dict.fromkeys(row.by for row in rows))
    width = 0.8 / len(backends)
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axis = figure.add_subplot()
    for number, name in enumerate(backends):
        speeds = {row.case: row.vs["flash_mla"] for row in rows if row.by == name}
        places = [i + (number - (len(backends) - 1) / 2) * width for i, case in enumerate(cases) if case in speeds]
        heights = [speeds[case] for case in cases if case in speeds]
        axis.bar(places, heights, width * 0.94, color=_OURS[number % len(_OURS)], label=name)
    axis.axhline(1, color=_INK, linewidth=1)
    axis.text(len(cases) - 0.45, 1, " FlashMLA", ha="left", va="bottom", fontsize=8)
    labels = [" ".join(case.split()[1:]) for case in cases]
    axis.set_xticks(range(len(cases)), labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axis.set_xlim(-0.6, len(cases) * 1.07)
    axis.set_ylabel("times FlashMLA's speed")
    axis.set_xlabel(f"{cases[0].split()[0]}: layer, requests of the batch (b) or tokens (t)")
    axis.grid(axis="y", color="#E6E6E6")
    axis.set_axisbelow(True)
    axis.legend(frameon=False, ncols=len(backends), loc="upper right")
    axis.set_title(f"{run.machine.name}, {run.date} UTC", loc="left", fontsize=8, color=_FAINT)
    return figure


_TITLES = {
    "decode": "Decode on fp8 pages",
    "prefill": "Prefill on fp8 pages",
    "prefill-rows": "Prefill on gathered bf16 rows",
    "memory": "Cache steps: insert, quantize, gather",
    "step": "Whole steps of forward_mqa",
    "index": "Index logits",
    "select": "Index logits and selection of 512 entries",
    "compress": "Compressor and index queries",
    "mhc": "Hyper-connections; of DeepGEMM the product of pre alone",
}
_NAMES = {"flash_mla": "FlashMLA", "vllm": "vLLM", "flashinfer": "FlashInfer", "deep_gemm": "DeepGEMM"}
_NAMES |= {"deep_gemm product": "DeepGEMM", "flashinfer_topk": "FlashInfer's top-k"}
"""Peers as their authors write them."""
_SCORED = "requests (b), tokens (t), index keys (k)"
_SPEED = "arithmetic rate (TFLOP/s)"
_TRAFFIC = "memory rate (GB/s)"
_GROWS = {
    "batch": "requests of the batch",
    "context-c128": "context (tokens)",
    "context-c4": "context (tokens)",
    "topk": "compressed keys of a token",
    "requests": "requests of a prefill",
}
_METHOD = "whole calls by `dsv4attn bench`, gaps between their kernels included"
_MEMORY = ("insert", "quantize", "gather")


def _colours(rows: Sequence[BenchRow]) -> dict[str, str]:
    """Blue and orange and so on for ours, greys for peers, whichever kernel they run."""
    ours = dict.fromkeys(row.by for row in rows if not row.is_peer)
    peers = dict.fromkeys(_peer(row.by) for row in rows if row.is_peer)
    colours = {name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)}
    return colours | {name: _PEERS[i % len(_PEERS)] for i, name in enumerate(peers)}


def _peer(by: str) -> str:
    return by.removesuffix(" + gather")


def _figure(run: Run, size: tuple[float, float], title: str, note: str) -> Figure:
    """An empty figure with title, machine and date."""
    from matplotlib.figure import Figure as New

    figure = New(figsize=size)
    figure.text(0.012, 1 - 0.12 / size[1], title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.012, 1 - 0.38 / size[1], note, fontsize=9, color=_INK, va="top")
    # some 17 letters of this size to an inch
    foot = fill(f"{run.machine}, {run.date} UTC; {_METHOD}", int(17 * size[0]))
    figure.text(0.012, 0.06 / size[1], foot, fontsize=7.5, color=_FAINT, va="bottom")
    return figure


def _legend(figure: Figure, colours: dict[str, str], names: Sequence[str], height: float) -> None:
    """Names in their own colours, at the upper right."""
    right = 0.988
    for name in reversed(names):
        text = figure.text(
            right,
            1 - 0.15 / height,
            _named(name),
            color=colours[_peer(name)],
            fontsize=10,
            fontweight="bold",
            ha="right",
            va="top",
        )
        width = text.get_window_extent().width / figure.bbox.width
        right -= width + 0.018


def _bars(run: Run, rows: Sequence[BenchRow], colours: dict[str, str], title: str, unit: str) -> Figure:
    """A panel for each layer or step, a group of bars for each case in it, and a tick where the roofline is."""
    panels: dict[str, dict[str, list[BenchRow]]] = {}
    by_preset, around = rows[0].kernel in ("decode", "step"), rows[0].kernel in LAYER_OPS
    for row in rows:
        kernel, preset, label = row.case.split(" ", 2)
        panel = preset if by_preset or around else kernel if unit == _TRAFFIC else ""
        group = label.replace(" ", "\n") if by_preset or around else f"{preset}\n{label}"
        panels.setdefault(panel, {}).setdefault(group, []).append(row)
    names = list(dict.fromkeys(row.by for row in rows))
    counts = [len(groups) for groups in panels.values()]
    inches = 0.34 * (len(names) + 1)
    columns = len(panels) if inches * sum(counts) < _WIDEST else -(-len(panels) // 2)
    lines = -(-len(panels) // columns)
    # panels of presets have three lines of title, those of steps one, a lone panel none
    head = 1.35 if by_preset else 0.8 if panels.keys() == {""} else 1.0
    foot, height = 0.82 if by_preset else 0.95, 2.6
    size = (max(1.4 + inches * max(counts) * columns, 7.5), head + foot + height * lines + 0.95 * (lines - 1))
    note = f"Higher is better. On bars: time, median of {run.rounds}; speed by another library's. Line: roofline."
    figure = _figure(run, size, title, note)
    _legend(figure, colours, names, size[1])
    ratios = counts if lines == 1 else None
    axes = figure.subplots(lines, columns, sharey=True, squeeze=False, width_ratios=ratios).flatten()
    edges = {"left": 0.62 / size[0], "right": 0.99, "top": 1 - head / size[1], "bottom": foot / size[1]}
    figure.subplots_adjust(**edges, wspace=0.06, hspace=1.2 / height)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for i, (axis, (panel, groups)) in enumerate(zip(axes, panels.items(), strict=False)):
        _panel(axis, groups, names, colours, unit)
        axis.set_title(_described(panel), loc="left", fontsize=8.5, color=_INK)
        if i % columns:
            axis.spines["left"].set_visible(False)
            axis.tick_params(left=False)
        else:
            axis.set_ylabel(unit)
        axis.set_xlabel(_shape(rows[0].kernel))
    return figure


def _shape(kernel: str) -> str:
    """What the groups of a kernel's bars are."""
    if kernel in ("decode", "step"):
        return "requests of the batch (b)"
    if kernel not in LAYER_OPS:
        return "layer and shape of the case"
    return {"index": _SCORED, "select": _SCORED, "mhc": "tokens (t), hidden size (d)"}.get(
        kernel, "requests (b) or tokens (t)"
    )


def _described(panel: str) -> str:
    preset = PRESETS.get(panel)
    if preset is None:
        return panel
    keys = f"{WINDOW} + {preset.topk}" if preset.topk else f"{WINDOW}"
    keys = f"up to {keys}" if preset.kind is LayerKind.HCA else keys
    name = panel.replace("_", r"\_")
    return f"$\\bf{{{name}}}$\n{preset.heads} heads\n{keys} keys"


def _panel(
    axis: Axes, groups: dict[str, list[BenchRow]], names: Sequence[str], colours: dict[str, str], unit: str
) -> None:
    width, highest, longest = 0.84 / len(names), 0.0, 0
    for place, rows in enumerate(groups.values()):
        roof = 0.0
        for row in rows:
            left = place - 0.42 + names.index(row.by) * width
            height = (row.tflops if unit == _SPEED else row.gbytes) or 0.0
            assert row.median
            axis.bar(left, height, width * 0.92, align="edge", color=colours[_peer(row.by)], linewidth=0)
            axis.annotate(
                _label(row),
                (left + 0.46 * width, height),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=6.5,
                rotation=90 if row.vs or len(names) > 3 else 0,
                color=_INK,
            )
            highest, longest = max(highest, height if row.vs else 0.0), max(longest, len(_label(row)))
            roof = max(roof, height / (row.roofline or 1.0))
        axis.plot([place - 0.46, place + 0.46], [roof, roof], color=_INK, linewidth=1.2, solid_capstyle="butt")
    axis.set_xticks(range(len(groups)), list(groups))
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.55, len(groups) - 0.45)
    if highest:
        # below the title, labels on end included
        room = min(1 / max(1 - 0.0205 * longest, 0.1), 2.2)
        axis.set_ylim(0, max(axis.get_ylim()[1], room * highest))
    axis.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    axis.set_axisbelow(True)


def _named(by: str) -> str:
    """A backend, or a peer as its authors write it."""
    return by.replace(_peer(by), _NAMES.get(_peer(by), _peer(by)))


def _label(row: BenchRow) -> str:
    """Time, and speed by that of each peer: the numbers of the table."""
    assert row.median
    ratios = [f"{ratio:.2f}x {_named(peer)}" for peer, ratio in row.vs.items()]
    return ", ".join([f"{_us(row.median)} us", *ratios])


def _us(seconds: float) -> str:
    value = 1e6 * seconds
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def _scaling(run: Run, rows: Sequence[BenchRow], colours: dict[str, str]) -> Figure:
    """Time over the size that grows, both in powers of two. Dashed: time of the roofline. Rings: cliffs."""
    lines = [series for series in SERIES if any(row.series == series for row in rows)]
    columns = min(len(lines), 3)
    height = -(-len(lines) // columns)
    size = (4.3 * columns + 0.4, 3.3 * height + 1.1)
    note = (
        f"Microseconds, median of {run.rounds}, lower is better. Dashed: roofline of this run. Ring: time outgrows work"
    )
    figure = _figure(run, size, "How time grows", note)
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    figure.subplots_adjust(
        left=0.6 / size[0], right=0.98, top=1 - 1.0 / size[1], bottom=0.8 / size[1], wspace=0.28, hspace=0.5
    )
    for axis in axes[len(lines) :]:
        axis.set_visible(False)
    for axis, series in zip(axes, lines, strict=False):
        _line(axis, run, [row for row in rows if row.series == series], colours)
        axis.set_title(SERIES[series], loc="left", fontsize=9, fontweight="bold")
        axis.set_xlabel(_GROWS[series])
        axis.set_ylabel("time (us)")
    names = list(dict.fromkeys(row.by for row in rows))
    _legend(figure, colours, list(dict.fromkeys(_peer(name) for name in names)), size[1])
    return figure


def _line(axis: Axes, run: Run, rows: Sequence[BenchRow], colours: dict[str, str]) -> None:
    for by in dict.fromkeys(row.by for row in rows):
        points = sorted((row.x, 1e6 * (row.median or 0.0)) for row in rows if row.by == by)
        x, y = zip(*points, strict=True)
        axis.plot(x, y, color=colours[_peer(by)], linewidth=1.6, marker="o", markersize=3)
        stops = {cliff.stop for cliff in run.cliffs if (cliff.series, cliff.by) == (rows[0].series, by)}
        marked = [point for point in points if point[0] in stops]
        if marked:
            axis.plot(*zip(*marked, strict=True), "o", markersize=9, fillstyle="none", color=colours[_peer(by)])
    least = sorted({(row.x, 1e6 * row.least) for row in rows})
    axis.plot(*zip(*least, strict=True), color=_FAINT, linewidth=1, linestyle=(0, (4, 3)))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [x for x, _ in least]
    axis.set_xticks(ticks[:: -(-len(ticks) // 6)], [_count(x) for x in ticks[:: -(-len(ticks) // 6)]])
    axis.minorticks_off()
    low, high = axis.get_ylim()
    if high / low < 50:
        from matplotlib.ticker import LogLocator

        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axis.grid(color="#E5E5E5", linewidth=0.6)
    axis.set_axisbelow(True)


def _count(x: int) -> str:
    if x >= 2**20:
        return f"{x // 2**20}M"
    return f"{x // 1024}K" if x >= 1024 else str(x)
