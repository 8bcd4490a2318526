"""Scaling lines: cases in which one size grows, and cliffs, where time grows faster than work."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from attrs import frozen

from dsv4attn.tools.bench.cases import PRESETS, KernelCase, decodes, with_topk
from dsv4attn.tools.bench.runner import BenchRow

CLIFF = 1.3
"""Largest ratio of the growth of time to the growth of work from one point to the next without a cliff."""

SERIES = {
    "batch": "decode, requests",
    "context-c128": "decode, tokens of context, c128a",
    "context-c4": "decode, tokens of context, c4a",
    "topk": "decode, compressed keys of a token",
    "requests": "prefill, ragged requests",
}
"""Scaling lines, and the size that grows along each."""


@frozen
class Cliff:
    """Two neighbouring points between which time grew by more than CLIFF times the growth of work.

    series: scaling line.
    by: name of the backend.
    start: size at the first point.
    stop: size at the second point.
    time_ratio: growth of time.
    work_ratio: growth of work.
    """

    series: str
    by: str
    start: int
    stop: int
    time_ratio: float
    work_ratio: float

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.series}, {self.by}: from {self.start} to {self.stop} time grows x{self.time_ratio:.2f}, "
            f"work x{self.work_ratio:.2f}"
        )


def scaling_cases(*, small: bool) -> list[KernelCase]:
    """All lines; small: for a CPU, with few points and short ones."""
    return [case for series in SERIES for case in _line(series, small=small)]


def _line(series: str, *, small: bool) -> Iterator[KernelCase]:
    c4, c128 = PRESETS["flash_c4"], PRESETS["flash_c128"]
    requests = 2 if small else 16
    if series == "batch":
        for batch in (1, 2, 4) if small else (2**i for i in range(11)):
            yield KernelCase("decode", c4, f"b={batch}", decodes(c4, batch), series, batch)
    elif series == "context-c128":
        for context in (1024, 4096) if small else (2**i for i in range(10, 21)):
            preset = with_topk(c128, context // 128)
            yield KernelCase("decode", preset, f"n={context}", decodes(preset, requests, context), series, context)
    elif series == "context-c4":
        for context in (1024, 4096) if small else (2**i for i in range(10, 21)):
            yield KernelCase("decode", c4, f"n={context}", decodes(c4, requests, context), series, context)
    elif series == "topk":
        for topk in (128, 256) if small else (2**i for i in range(7, 14)):
            preset = with_topk(c4, topk)
            count = requests if small else 64
            yield KernelCase("decode", preset, f"k={topk}", decodes(preset, count, 4 * max(topk, 2048)), series, topk)
    else:
        longest, context = (8, 256) if small else (128, 8192)
        draw = random.Random(0)  # noqa: S311 - lengths, not secrets
        pool = [(draw.randrange(context), draw.randint(1, longest)) for _ in range(64)]
        for count in (1, 2) if small else (2**i for i in range(7)):
            yield KernelCase("prefill", c4, f"r={count}", tuple(pool[:count]), series, count)


def cliffs(rows: Sequence[BenchRow]) -> list[Cliff]:
    """Cliffs of some rows. Work is the time that the roofline allows: the larger of products and bytes."""
    steep = []
    for series, by in dict.fromkeys((row.series, row.by) for row in rows if row.series):
        line = sorted((row for row in rows if (row.series, row.by) == (series, by) and row.median), key=lambda r: r.x)
        for first, second in pairwise(line):
            assert first.median
            assert second.median
            time_ratio, work_ratio = second.median / first.median, second.least / first.least
            if time_ratio > CLIFF * work_ratio:
                steep.append(Cliff(series, by, first.x, second.x, time_ratio, work_ratio))
    return steep
