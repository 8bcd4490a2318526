"""What rows of one request share: a check of what `RequestRows` promises."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.cache.selected_keys import DenseIndices, RequestRows
from dsv4attn.errors import ArgumentError

__all__ = ["check_request_rows"]

_FARTHEST = 8
"""Rows of one request are compared with each other up to this distance."""


def check_request_rows(request_rows: RequestRows, window: DenseIndices, entries: DenseIndices | None = None) -> None:
    """Raise ArgumentError unless the rows of each request share keys as `RequestRows` promises. Reads values.

    request_rows: rows of a decode, or of a chunk of a prompt.
    window: slots of the window of each row.
    entries: slots of all visible entries of each row; None where nothing is promised of them.
    """
    request, most = request_rows.token_to_req, min(request_rows.max_tokens, _FARTHEST)
    has_window = window.lens[: request.shape[0]] > 0
    for distance in range(1, min(most, request.shape[0])):
        same = (request[distance:] == request[:-distance]) & (request[distance:] >= 0)
        same &= has_window[distance:] == has_window[:-distance]
        later = same.nonzero()[:, 0] + distance
        if not later.numel():
            continue
        broken = _window_differs(window, later - distance, later)
        _raise("the later row's window ends with the keys of both, and begins no earlier", broken, later, distance)
        if entries is not None:
            broken = _entries_differ(entries, later - distance, later)
            _raise("the earlier row's entries are the first of the later row", broken, later, distance)


def _raise(expected: str, broken: Tensor, later: Tensor, distance: int) -> None:
    if bool(broken.any()):
        row = int(later[broken][0])
        actual = f"rows {row - distance} and {row}, which do not share their keys so"
        hint = "give request_rows None where rows list other keys"
        raise ArgumentError("request_rows", expected=f"that {expected}", actual=actual, hint=hint)


def _clipped(rows: DenseIndices, chosen: Tensor) -> Tensor:
    """[n, 1] int64 columns that count, of chosen rows."""
    return rows.lens[chosen].clamp(0, rows.width).long()[:, None]


def _window_differs(rows: DenseIndices, earlier: Tensor, later: Tensor) -> Tensor:
    """[n] bool - whether windows of pairs of rows, as many tokens apart as rows, are not of one sequence of keys."""
    n, m = _clipped(rows, earlier), _clipped(rows, later)
    # columns of both from the end of the earlier row on
    back = torch.arange(max(rows.width, 1), device=later.device)[None, :]
    mine, its = n - 1 - back, m - 1 - (later - earlier)[:, None] - back
    both = (mine >= 0) & (its >= 0)
    first = rows.indices[earlier].gather(1, mine.clamp(min=0))
    second = rows.indices[later].gather(1, its.clamp(min=0))
    differ = (both & (first != second)).any(1) | (m > n + (later - earlier)[:, None])[:, 0]
    return differ & (n > 0)[:, 0] & (m > 0)[:, 0]


def _entries_differ(rows: DenseIndices, earlier: Tensor, later: Tensor) -> Tensor:
    """[n] bool - whether the earlier row of a pair is not the beginning of the later one."""
    n, m = _clipped(rows, earlier), _clipped(rows, later)
    counts = torch.arange(rows.width, device=later.device)[None, :] < n
    return (counts & (rows.indices[earlier] != rows.indices[later])).any(1) | (n > m)[:, 0]
