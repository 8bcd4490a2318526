"""Tile sizes, one row for each chip, with their measurements."""

from __future__ import annotations

from attrs import frozen

from dsv4attn.core.contract.device import DeviceFacts


@frozen
class Row:
    """Tile sizes of a chip.

    archs: architectures, as shell patterns.
    tile_rows: query rows of a tile.
    tile_tokens: keys of a tile.
    measured: machine, date and command of the measurement, or "not measured".
    default: whether unknown chips take this row.
    """

    archs: tuple[str, ...]
    tile_rows: int
    tile_tokens: int
    measured: str
    default: bool = False


ROWS = (
    # begin here: `dsv4attn bench decode prefill --backend acme` measures
    Row(("acme1",), 64, 256, "not measured"),
    Row(("cpu",), 16, 64, "not measured", default=True),
)


def row_for(device: DeviceFacts) -> Row:
    """The chip's own row, or the default."""
    matching = [row for row in ROWS if device.matches(row.archs)]
    return matching[0] if matching else next(row for row in ROWS if row.default)
