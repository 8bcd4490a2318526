"""Prints the parts of layers: a table for each kind of layer and backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["layer_tables"]


def layer_tables(layers: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """A table for each kind of layer and backend, with time, share and launches of each part of its steps."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for time in layers:
        if time.get("parts"):
            groups.setdefault((time["layer"], time["by"]), []).append(time)
    for (kind, by), times in groups.items():
        yield _table(f"parts of layer {kind}, {by}", times)
    shown = [time for times in groups.values() for time in times]
    if shown:
        host = all(part["launches"] is None for time in shown for part in time["parts"])
        what = "the host's time" if host else "time of kernels, without gaps between them, on cold caches"
        yield Text(f"parts: {what}; mHC is around the layer, and in no other time here")
        for phase, step in dict.fromkeys((time["phase"], time["step"]) for time in shown):
            made = dict.fromkeys(
                f"{time['completing']:,} on {time['layer']}"
                for time in shown
                if (time["phase"], time["step"]) == ("decode", step) and time.get("completing")
            )
            entries = f"; sequences that complete an entry: {', '.join(made)}" if made else ""
            yield Text(f"{phase}: {step}{entries}")
    for time in layers:
        if not time.get("parts", True):
            yield Text(f"no parts of {time['case']}, {time['by']}: the profiler sees no kernels here", style="yellow")


def _table(title: str, times: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        show_footer=True,
    )
    names = list(dict.fromkeys(part["name"] for time in times for part in time["parts"]))
    lines = {name: [name] for name in names}
    table.add_column("part", "sum", no_wrap=True)
    for time in times:
        parts = {part["name"]: part for part in time["parts"]}
        total = sum(part["seconds"] for part in parts.values())
        counts = [part["launches"] for part in parts.values() if part["launches"] is not None]
        columns = {f"{time['phase']} us": _us(total), "share": "100.0%"}
        if counts:
            columns["launches"] = _count(sum(counts))
        for heading, foot in columns.items():
            table.add_column(heading, foot, justify="right", no_wrap=True)
        for name, line in lines.items():
            line.extend(_cells(parts[name], total)[: len(columns)] if name in parts else [""] * len(columns))
    for line in lines.values():
        table.add_row(*line)
    return table


def _cells(part: Mapping[str, Any], total: float) -> list[str]:
    """Microseconds, share and launches of a part."""
    return [_us(part["seconds"]), f"{100 * part['seconds'] / (total or 1):.1f}%", _count(part["launches"] or 0.0)]


def _us(seconds: float) -> str:
    us = 1e6 * seconds
    return f"{us:,.1f}" if us < 10_000 else f"{us:,.0f}"


def _count(launches: float) -> str:
    return f"{launches:,.0f}" if launches == round(launches) else f"{launches:,.1f}"
