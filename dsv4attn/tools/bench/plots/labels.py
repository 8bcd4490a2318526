"""Labels on bars, which cover no line and no other label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from dsv4attn.tools.bench.plots.sheet import DPI, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

LABEL_POINTS = 6.5
"""Size of the labels."""
_GAP = 3 / 72
"""Inches between a label and the bar or the line below it."""


@frozen
class Mark:
    """A label that needs a place on its bar.

    text: the label.
    height: of the bar.
    line: height of the line that runs over the bar.
    """

    text: Text
    height: float
    line: float

    @classmethod
    def on_bar(cls, axis: Axes, x: float, text: str, height: float, line: float) -> Mark:
        """Make a label at the middle of a bar. `place` moves it to its height."""
        label = axis.text(x, 0, text, ha="center", va="bottom", fontsize=LABEL_POINTS, color=INK)
        label.set_in_layout(False)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.2})
        return cls(label, height, line)

    def base(self, size: float) -> float:
        """Where the label begins: on its bar, or on the line if it would cover that. size: height of the label."""
        return self.line if self.height <= self.line < self.height + size else self.height


def place(figure: Figure, axis: Axes, marks: Sequence[Mark], width: float) -> None:
    """Put each label on its bar, and let the axis reach above all bars, lines and labels.

    Labels are turned if one of them is wider than its bar. axis: one of those that share the vertical axis of the
    labels. width: of a bar, in units of the horizontal axis.
    """
    figure.draw_without_rendering()
    box = axis.get_window_extent()
    low, high = axis.get_xlim()
    pixels = width * box.width / (high - low)
    upright = any(mark.text.get_window_extent().width > 0.96 * pixels for mark in marks)
    for mark in marks:
        mark.text.set_rotation(90 if upright else 0)
    # shares of the height of the axis, which do not change when its limits do
    shares = [(mark.text.get_window_extent().height / DPI + 2 * _GAP) / (box.height / DPI) for mark in marks]
    top, last, bases = 1.03 * max(max(mark.height, mark.line) for mark in marks), 0.0, [0.0]
    while top > last:
        last = top
        bases = [mark.base(share * top) for mark, share in zip(marks, shares, strict=True)]
        top = max([top, *(base / (1 - share) for base, share in zip(bases, shares, strict=True))])
    axis.set_ylim(0, top)
    for mark, base in zip(marks, bases, strict=True):
        mark.text.set_y(base + _GAP * DPI * top / box.height)
