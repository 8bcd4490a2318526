"""The kernel that lists groups of rows for the Gluon kernel on pages: see `_triton.attention.kernels_groups`.

A group found by who needs it costs a chain of loads, each of which waits for the one before. The list costs one load.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.attention.kernels_groups import Groups, columns_in, group_of, leader_at
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel

__all__ = ["COUNTED", "LISTED", "list_groups"]

LISTED = tl.constexpr(512)
"""Rows of a program of `list_groups`."""
COUNTED = tl.constexpr(2048)
"""Earlier rows whose groups it counts together."""


@stable_kernel
def list_groups(
    groups,  # [rows + 1, 4] int32
    requests,  # [rows] int32
    starts,  # [known + 1] int32
    window_lens,  # [rows] int32
    compressed_lens,  # [rows] int32, or None
    known: tl.int32, rows: tl.int32, width0: tl.int32, width1: tl.int32,
    G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs of LISTED rows,). Arguments are as of `kernels_groups.Groups`; G: most rows of a group.

    groups: written with a line for each group, in order: its first row; columns of the union of its windows; columns of
    its last row in the second segment; and 8 `later` + `last`, as of `kernels_groups.Group`. The number of groups is
    written to the line after those of all rows.
    """
    wait_then_launch_dependents(PDL)
    found = Groups(requests, starts, known, rows)
    first = tl.program_id(0) * LISTED
    before = first * 0
    for base in range(0, first, COUNTED):
        t = base + tl.arange(0, COUNTED)
        leads, _, _, _, _ = leader_at(found, window_lens, width0, 0, t, t < first, G, False)
        before += tl.sum(leads.to(tl.int32), 0)
    t = first + tl.arange(0, LISTED)
    group = group_of(found, window_lens, width0, 0, t, t < rows, G, False)
    leads = group.leads.to(tl.int32)
    line = groups + (before + tl.cumsum(leads, 0) - leads) * 4
    entries = t * 0
    if compressed_lens is not None:
        entries = columns_in(compressed_lens, t + group.last, group.leads, width1, 0, False)
    tl.store(line, t, mask=group.leads)
    tl.store(line + 1, group.columns, mask=group.leads)
    tl.store(line + 2, entries, mask=group.leads)
    tl.store(line + 3, group.later * 8 + group.last, mask=group.leads)
    if first + LISTED >= rows:
        tl.store(groups + rows * 4, before + tl.sum(leads, 0))
