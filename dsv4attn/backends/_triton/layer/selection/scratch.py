"""Memory of a selection: one buffer for its scores and lists, of the same size for every length of a context.

A caching allocator keeps memory for each size that it was asked for. So a selection asks for a few bytes, or for BYTES.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.torch_modes import is_capturing

BYTES = 240 * 2**20
"""Bytes that a selection holds, if not a few; or the bytes of one token, if these are more."""
CAPTURED = 264 * 2**20
"""Most bytes that it holds in a captured graph: those of 64 tokens that see 1,048,576 entries."""
SMALL = 2**20
"""Bytes that torch's allocator takes from segments which all small requests share."""
_PIECE = 64
"""Columns of a view are a multiple of this number, so that its rows begin at multiples of the widest access."""


def rows_at_once(out: Tensor, *columns: int) -> int:
    """How many rows of out [T, K], at least one, have 4 bytes for each of all these columns."""
    rows, width = out.shape[0], 4 * sum(round_up(count, _PIECE) for count in columns)
    most = CAPTURED if is_capturing(out.device) else BYTES
    return min(rows, max(most // width, 1)) if width else rows


def buffer(like: Tensor, size: int) -> Tensor:
    """[>= size / 4] fp32 on the device of a tensor. size: bytes.

    A captured graph keeps what it was captured with, and a graph for fewer tokens fits into it: its size is exact.
    """
    if SMALL < size < BYTES and not is_capturing(like.device):
        size = BYTES
    return like.new_empty(size // 4, dtype=torch.float32)


def parts(out: Tensor, *columns: int) -> Iterator[tuple[slice, list[Tensor]]]:
    """Rows of out [T, K] that are selected together, and [rows, >= columns] fp32 for each of the columns.

    All parts have the same memory. Views of no columns have none.
    """
    tokens, widths = out.shape[0], [round_up(count, _PIECE) for count in columns]
    rows = rows_at_once(out, *columns)
    if not rows:
        return
    memory = buffer(out, 4 * rows * sum(widths))
    places = [rows * before for before in accumulate(widths, initial=0)]
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        views = [memory[at : at + count * width].view(count, width) for at, width in zip(places, widths, strict=False)]
        yield slice(first, first + count), views
