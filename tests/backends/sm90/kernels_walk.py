"""Kernels around the Hopper room's schedule: what it says, written down for tests."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends.sm90.kernels_schedule import (
    advance,
    enter,
    page_of,
    pairs_of,
    part_of,
    row_slots,
    settle,
    share,
    slots,
    tiles_of,
    told,
)

__all__ = ["pages", "walk"]


@stable_kernel
def walk(
    chunks,
    tiles,
    indices,
    paired,
    rows,
    table,
    rows0,
    lens0,
    rows1,
    lens1,
    width0: tl.int32,
    stride0: tl.int64,
    width1: tl.int32,
    stride1: tl.int64,
    tokens: tl.int32,
    least: tl.int32,
    most: tl.int32,
    SEGMENTS: tl.constexpr,
    BT: tl.constexpr,
):
    """Grid: (programs,). chunks: [P, 3], count, tiles walked, rows walked. tiles: [P, most, 3], row, tile, segment.

    indices: [P, most, 64] of each tile; paired: [P, 2 * most, 64] of each in pairs, where rows have one segment. rows:
    [P, most, 4], row, first tile, one behind the last, part or -1 if whole.
    """
    program, row = tl.program_id(0), tl.arange(0, 64)
    at = tl.arange(0, BT)
    lo, hi, chunk, extra, t, pos, count = share(
        lens0, lens1, tokens, width0, width1, program, tl.num_programs(0), least, at, SEGMENTS, BT
    )
    n0, n1, k, last = enter(lens0, lens1, t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
    u, start, n0, n1, k, last = settle(
        lens0, lens1, t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS
    )
    walked = count * 0
    while u < tokens:
        slot, inside = slots(rows0, rows1, stride0, stride1, u, tokens, k, n0, n1, row, SEGMENTS)
        to = program * most + walked
        tl.store(indices + to * 64 + row, slot)
        tl.store(tiles + to * 3, u)
        tl.store(tiles + to * 3 + 1, k)
        tl.store(tiles + to * 3 + 2, inside)
        walked += 1
        u, start, n0, n1, k, last = advance(
            lens0, lens1, u, start, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS
        )
    written, tile = count * 0, count * 0
    while (pos < hi) & (t < tokens):
        n0, n1, first, last = enter(lens0, lens1, t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
        n = tiles_of(n0, n1)
        to = rows + (program * most + written) * 4
        tl.store(to, t)
        tl.store(to + 1, first)
        tl.store(to + 2, last)
        tl.store(to + 3, tl.where((first == 0) & (last == n), -1, part_of(program, pos, lo)))
        if SEGMENTS == 1:
            for of in range(first, first + 2 * pairs_of(first, last)):
                to = paired + (program * 2 * most + tile) * 64
                tl.store(to + row, row_slots(rows0, stride0, t, n0, last, of, row))
                tile += 1
        if first == 0:
            told(table, t, pos, n, lo, chunk)
        written += 1
        pos += tl.maximum(n, 1) + extra
        t += 1
    tl.store(chunks + program * 3, count)
    tl.store(chunks + program * 3 + 1, walked)
    tl.store(chunks + program * 3 + 2, written)


@stable_kernel
def pages(
    out,
    given,
    cache,
    size: tl.int32,
    factor: tl.int32,
    log: tl.int32,
    pitch: tl.int32,
    count: tl.int32,
    N: tl.constexpr,
):
    """Grid: (1,). out: [3, N] int64, whether each given slot exists, and offsets of its data and of its scales."""
    at = tl.arange(0, N)
    paging = (size, factor, log, pitch, count, size, factor, log, pitch, count)
    ok, data, scale = page_of(tl.load(given + at), 1, cache, cache, paging, 1)
    base = cache.to(tl.int64)
    tl.store(out + at, ok.to(tl.int64))
    tl.store(out + N + at, data.to(tl.int64) - base)
    tl.store(out + 2 * N + at, scale.to(tl.int64) - base)
