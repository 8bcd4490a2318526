"""A figure with title, legend, remark and foot, measured so that none of them is cut or covers another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 200
THOUSANDS = "{x:,.10g}"
"""Format of the label of a tick."""
INK, FAINT, GRID = "#222222", "#777777", "#E5E5E5"
_OURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe and Ito's colours, which readers with red-green colour blindness can distinguish."""
_PEERS = ("#4D4D4D", "#8C8C8C", "#BFBFBF")
_NAMES = {"flash_mla": "FlashMLA", "vllm": "vLLM", "flashinfer": "FlashInfer", "deep_gemm": "DeepGEMM"}
_NAMES |= {"deep_gemm product": "DeepGEMM", "flashinfer_topk": "FlashInfer's top-k"}
"""Peers as their authors write them."""
_METHOD = "whole calls by `dsv4attn bench`, gaps between their kernels included"
_EDGE = 0.1
"""Inches that stay free at the edges of a figure."""
_TITLE, _LEGEND, _NOTE, _FOOT = 13.0, 10.0, 9.0, 7.5
"""Sizes of the text, in points."""
_BETWEEN = 0.2
"""Inches between the names of the legend."""


def colours_of(rows: Sequence[BenchRow]) -> dict[str, str]:
    """Blue and orange and so on for ours, greys for peers, whichever kernel they run."""
    ours = dict.fromkeys(row.by for row in rows if not row.is_peer)
    peers = dict.fromkeys(peer_of(row.by) for row in rows if row.is_peer)
    colours = {name: _OURS[i % len(_OURS)] for i, name in enumerate(ours)}
    return colours | {name: _PEERS[i % len(_PEERS)] for i, name in enumerate(peers)}


def peer_of(by: str) -> str:
    """The peer of a row, which has the same colour with and without its gather."""
    return by.removesuffix(" + gather")


def named(by: str) -> str:
    """A backend, or a peer as its authors write it."""
    return by.replace(peer_of(by), _NAMES.get(peer_of(by), peer_of(by)))


def days(runs: Sequence[Run]) -> str:
    """The days of some runs, each once."""
    return " and ".join(sorted({run.date.partition(" ")[0] for run in runs}))


def text_width(text: str, points: float, weight: str = "normal") -> float:
    """Inches of a line of text in the fonts of matplotlib's settings."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, prop=FontProperties(weight=weight, size=points)).get_extents().x1) / 72


def _wrapped(text: str, points: float, inches: float) -> list[str]:
    """Lines of at most this width."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", points) <= inches:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def sheet(
    runs: Sequence[Run], width: float, height: float, title: str, note: str, colours: Mapping[str, str]
) -> Figure:
    """An empty figure with title, machine and date, and a legend: names in their own colours.

    width, height: of the part in which axes are, in inches; the figure is higher by the text. A layout engine keeps all
    that belongs to the axes in that part.
    """
    from matplotlib.figure import Figure as New
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    inner = width - 2 * _EDGE
    names = {name: text_width(name, _LEGEND, "bold") for name in colours}
    of_legend = sum(names.values()) + _BETWEEN * (len(names) - 1)
    own_line = text_width(title, _TITLE, "bold") + 2 * _BETWEEN + of_legend > inner
    notes = _wrapped(note, _NOTE, inner)
    dates = " and ".join(dict.fromkeys(run.date for run in runs))
    feet = _wrapped(f"{runs[0].machine}, {dates} UTC; {_METHOD}", _FOOT, inner)
    head = 0.36 + 0.165 * len(notes) + (0.24 if own_line else 0.0) + _EDGE
    foot = 0.14 * len(feet) + 2 * _EDGE
    total = head + height + foot
    figure = New(figsize=(width, total), dpi=DPI)

    def put(x: float, y: float, text: str, points: float, colour: str, weight: str = "normal") -> None:
        """A line of text whose top is y inches below that of the figure."""
        figure.text(
            x / width, 1 - y / total, text, fontsize=points, color=colour, fontweight=weight, va="top", in_layout=False
        )

    put(_EDGE, _EDGE, title, _TITLE, INK, "bold")
    for i, line in enumerate(notes):
        put(_EDGE, 0.36 + 0.165 * i, line, _NOTE, INK)
    left = _EDGE if own_line else width - _EDGE - of_legend
    for name, colour in colours.items():
        put(left, head - _EDGE - 0.2 if own_line else 0.13, name, _LEGEND, colour, "bold")
        left += names[name] + _BETWEEN
    for i, line in enumerate(feet):
        put(_EDGE, total - foot + _EDGE + 0.14 * i, line, _FOOT, FAINT)
    rect = (_EDGE / width, foot / total, inner / width, height / total)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.05, h_pad=0.08))
    return figure
