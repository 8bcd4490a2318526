"""Pictures of runs: bars and the roofline for each kernel, speeds relative to FlashMLA's, lines of how time grows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench.cases import ATTENTION
from dsv4attn.tools.bench.plots.bars import SPEED, TRAFFIC, bars
from dsv4attn.tools.bench.plots.scaling import scaling
from dsv4attn.tools.bench.plots.sheet import DPI, FAINT, INK, colours_of
from dsv4attn.tools.bench.plots.speed import PEER, speed
from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import BenchRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_together", "draw"]

_TITLES = {
    "decode": "Decode on fp8 pages",
    "prefill": "Prefill on fp8 pages",
    "prefill-rows": "Prefill on gathered bf16 rows",
    "step": "Whole steps of forward_mqa",
    "memory": "Cache steps: insert, quantize, gather",
    "index": "Index logits",
    "select": "Index logits and selection of 512 entries",
    "compress": "Compressor and index queries",
    "mhc": "Hyper-connections; of DeepGEMM the product of pre alone",
    "products": "Products with the weights of deterministic layers",
}
"""Titles of pictures of bars, by their names and in their order."""
_MEMORY = ("insert", "quantize", "gather")


def check_together(runs: Sequence[Run]) -> None:
    """Check that some runs can be drawn into one folder: of one machine, and each into pictures of its own."""
    machines = {str(run.machine): None for run in runs}
    if len(machines) > 1:
        raise ArgumentError("--from", expected="files of one machine", actual="; ".join(machines))
    seen: set[str] = set()
    for run in runs:
        pictures = {_picture(row) for row in run.rows}
        if pictures & seen:
            actual = f"two for {', '.join(f'{name}.png' for name in sorted(pictures & seen))}"
            raise ArgumentError("--from", expected="files that --plot draws into different pictures", actual=actual)
        seen |= pictures


def _picture(row: BenchRow) -> str:
    """The name of the picture of a row's kernel."""
    if row.series:
        return "scaling"
    return "memory" if row.kernel in _MEMORY else row.kernel


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write a PNG for each kernel that was measured, one for memory steps, one for scaling; return where they are.

    One more has the speeds relative to FlashMLA's of all runs together.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from matplotlib import rc_context

        settings: Any = {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": FAINT,
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
        with rc_context(settings):
            paths = []
            for name, figure in _figures(runs):
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}.png"
                figure.savefig(path, dpi=DPI, facecolor="white")
                paths.append(path)
            return paths


def _figures(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    for run in runs:
        yield from _of_run(run)
    compared = [(run, [row for row in run.rows if row.median and not row.series and PEER in row.vs]) for run in runs]
    compared = [(run, rows) for run, rows in compared if rows]
    if compared:
        yield "speed", speed(compared)


def _of_run(run: Run) -> Iterator[tuple[str, Figure]]:
    timed = [row for row in run.rows if row.median]
    colours = colours_of(timed)
    for name, title in _TITLES.items():
        rows = [row for row in timed if _picture(row) == name]
        if rows:
            yield name, bars(run, rows, colours, title, SPEED if name in (*ATTENTION, "step") else TRAFFIC)
    lines = [row for row in timed if row.series]
    if lines:
        yield "scaling", scaling(run, lines, colours)
