"""What commands share: how a model is named, and how facts and reasons are shown and told to programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict

from dsv4attn.core.geometry import ModelGeometry
from dsv4attn.errors import UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dsv4attn.core.device import DeviceFacts
    from dsv4attn.core.problem import Reason
    from dsv4attn.plugins import PluginFailure

__all__ = ["console", "device_json", "failure_json", "geometry_of", "grid", "reason_json"]


def geometry_of(model: str) -> ModelGeometry:
    """The model of a preset's name, or of a config.json or the folder that holds it."""
    path = Path(model)
    try:
        return ModelGeometry.preset(model)
    except UnknownNameError:
        if path.exists() or path.suffix == ".json" or len(path.parts) > 1:
            return ModelGeometry.from_config(path)
        raise


def console() -> Console:
    """Standard output, in which nothing but what we style is styled: brackets in an error message are no markup."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def grid(rows: Sequence[tuple[str, Sequence[str]]], styles: Sequence[str] = (), *, wide: int = 0) -> Table:
    """Names and their lines, aligned; a line that is too long goes on under itself.

    styles: of each row's lines. wide: least width of the names.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=wide + 2)
    table.add_column(overflow="fold")
    for i, (name, lines) in enumerate(rows):
        style = styles[i] if i < len(styles) else ""
        for j, line in enumerate(lines):
            table.add_row(Text("" if j else f"  {name}", style="bold"), Text(line, style=style))
    return table


def device_json(device: DeviceFacts) -> dict[str, Any]:
    """Facts of a device."""
    return asdict(device)


def reason_json(reason: Reason) -> dict[str, str]:
    """A reason, in parts and as one line."""
    return {**asdict(reason), "text": reason.text}


def failure_json(failure: PluginFailure) -> dict[str, str]:
    """A plugin that cannot be used."""
    return asdict(failure)
