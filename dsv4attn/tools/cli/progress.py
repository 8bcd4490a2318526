"""Progress of a command on stderr: a bar on a terminal, elsewhere a line every few seconds or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import click

LINE_SECONDS = 4.0
"""Seconds between lines of progress where stderr is no terminal."""


class Advance(Protocol):
    """Moves a bar."""

    def __call__(self, completed: float, **shown: Any) -> None:  # noqa: ANN401 - fields of the bar's columns
        """completed: how much is done. shown: values of the fields."""


@contextmanager
def progress_bar(
    total: float,
    *columns: str | tuple[str, str],
    shown: bool,
    counted: bool = True,
    between_calls: bool = False,
    line: Callable[[float, float, dict[str, Any]], str] | None = None,
    **fields: Any,  # noqa: ANN401 - any value
) -> Iterator[Advance]:
    """A bar with a field or a text in each column.

    columns: rich's formats, or formats with their styles. shown: False shows nothing. counted: whether a column has
    `completed/total`. between_calls: draw the bar only when it moves, because a drawing thread would be part of a
    measurement. line: text of a line where stderr is no terminal, from what is completed, the seconds since the start
    and the fields; None: no lines. fields: first values of the fields.
    """
    from rich import progress as bars
    from rich.console import Console

    out = Console(stderr=True)
    styled = [(column, "none") if isinstance(column, str) else column for column in columns]
    bar = bars.Progress(
        bars.BarColumn(bar_width=None),
        *([bars.MofNCompleteColumn()] if counted else []),
        *(bars.TextColumn(text, style=style, markup=False) for text, style in styled),
        bars.TimeElapsedColumn(),
        console=out,
        transient=True,
        auto_refresh=not between_calls,
        disable=not (shown and out.is_terminal),
    )
    task = bar.add_task("", total=total, **fields)
    began = last_line = time.perf_counter()

    def advance(completed: float, **values: Any) -> None:  # noqa: ANN401 - fields of the columns
        nonlocal last_line
        now = time.perf_counter()
        bar.update(task, completed=completed, refresh=between_calls, **values)
        if line and shown and not out.is_terminal and now - last_line >= LINE_SECONDS:
            last_line = now
            click.echo(line(completed, now - began, values), err=True)

    with bar:
        yield advance


@contextmanager
def working(what: str, *, shown: bool) -> Iterator[None]:
    """What a command is doing, while it does it, on a terminal. shown: False shows nothing."""
    from rich.console import Console

    out = Console(stderr=True)
    if not (shown and out.is_terminal):
        yield
        return
    with out.status(what):
        yield
