"""Groups of rows of one request, which are computed together and share their keys: see `keys.RequestRows`.

A group is rows after each other of one request, at most G of them, a power of two; `core.torch_ops.request_rows` is the
definition. It is computed in the place of its first row, which leads it. Its window is the union of its rows' windows:
all columns of the first row, then as many of the last columns of the last row as come after. Its entries are those of
the last row. Row j of the group sees n columns of the union from own + j - n on, if n columns of its own row count.

Functions take a row t, a number or a tensor of them. Called from Gluon they are compiled as Gluon, so no number here is
a Python literal that a loop changes. All loads but two wait for no other one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

Groups = namedtuple("Groups", "requests starts known rows")
"""requests: [rows] int32, request of each row of the call. starts: [known + 1] int32, first rows of requests."""
Group = namedtuple("Group", "leads columns own later last")
"""leads: whether the row leads a group; else the rest means nothing. columns: of the union of windows. own: columns of
the first row. later: columns of the union before those of the last row. last: number of the last row in the group."""


@triton.jit
def columns_in(lens, t, there, width, stride, RAGGED: tl.constexpr):
    """Columns of row t that count, 0 of a row that is not there; see `kernels.columns_of`."""
    n = tl.load(lens + t, mask=there, other=0)
    if RAGGED:
        end = tl.load(lens + t + 1, mask=there, other=0)
        n = tl.minimum(tl.maximum(end, 0).to(tl.int64), stride).to(tl.int32) - tl.maximum(n, 0)
    return tl.minimum(tl.maximum(n, 0), width)


@triton.jit
def leader_at(groups, lens, width, stride, t, there, G: tl.constexpr, RAGGED: tl.constexpr):
    """Whether row t leads a group; its request, whether that is known, its number modulo G in it, and its columns."""
    request = tl.load(groups.requests + t, mask=there, other=-1)
    own = columns_in(lens, t, there, width, stride, RAGGED)
    known = there & (request >= 0) & (request < groups.known)
    start = tl.load(groups.starts + tl.where(known, request, 0), mask=known, other=0)
    within = (t - start) & (G - 1)
    before = known & (t > 0)
    same = tl.load(groups.requests + t - 1, mask=before, other=-1) == request
    same = same & ((columns_in(lens, t - 1, before, width, stride, RAGGED) > 0) == (own > 0))
    return there & ((known & same & (within > 0)) == 0), request, known, within, own


@triton.jit
def group_of(groups, lens, width, stride, t, there, G: tl.constexpr, RAGGED: tl.constexpr):
    """`Group` that row t leads; a row that is not there leads none. lens, width, stride: of the window."""
    leads, request, known, within, own = leader_at(groups, lens, width, stride, t, there, G, RAGGED)
    last, length, runs = t * 0, own, known
    for j in tl.static_range(1, G):
        here = there & (t + j < groups.rows)
        n = columns_in(lens, t + j, here, width, stride, RAGGED)
        same = tl.load(groups.requests + t + j, mask=here, other=-1) == request
        runs = runs & here & same & ((n > 0) == (own > 0)) & (within + j < G)
        last = tl.where(runs, j, last)
        length = tl.where(runs, n, length)
    columns = tl.where(own > 0, own + last, 0)
    return Group(leads, columns, own, columns - length, last)
