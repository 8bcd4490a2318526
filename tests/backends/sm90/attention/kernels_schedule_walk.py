"""Kernels that store what the schedule of the sm90 backend says, for tests."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends.sm90.attention.kernels_schedule import (
    Keys,
    Segment,
    advance,
    begin,
    clear_split,
    enter,
    page_of,
    pairs_of,
    part_of,
    powers_of,
    room_of,
    row_slots,
    share,
    slots,
    store_split,
    tiles_of,
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
    window_rows,
    window_lens,
    compressed_rows,
    compressed_lens,
    width0: tl.int32,
    stride0: tl.int64,
    width1: tl.int32,
    stride1: tl.int64,
    tokens: tl.int32,
    least: tl.int32,
    most: tl.int32,
    SEGMENTS: tl.constexpr,
    BT: tl.constexpr,
    PAIRED: tl.constexpr,
    ONCE: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):
    """Grid: (programs,). chunks: [P, 3], count, tiles walked, rows walked. tiles: [P, most, 3], row, tile, segment.

    indices: [P, most, 64] of each tile; paired: [P, 2 * most, 64] of each in pairs, where PAIRED. rows:
    [P, most, 4], row, first tile, one after the last, part or -1 if whole.
    """
    program, row = tl.program_id(0), tl.arange(0, 64)
    at = tl.arange(0, BT)
    none = tokens * 0
    first = Segment(chunks, window_rows, window_lens, width0, stride0, none, none, none, none, none)
    second = None
    if SEGMENTS == 2:
        second = Segment(chunks, compressed_rows, compressed_lens, width1, stride1, none, none, none, none, none)
    keys = Keys(first, second, PAIRED)
    chunk, t, pos, count = share(keys, tokens, program, tl.num_programs(0), least, at, BT, ONCE, WHOLE_ROWS)
    step = begin(keys, chunk, t, pos)
    clear_split(table, chunk)
    walked = count * 0
    while step[0] < tokens:
        slot, inside = slots(keys, chunk, step, row)
        to = program * most + walked
        tl.store(indices + to * 64 + row, slot)
        tl.store(tiles + to * 3, step[0])
        tl.store(tiles + to * 3 + 1, step[4])
        tl.store(tiles + to * 3 + 2, inside)
        walked += 1
        step = advance(keys, chunk, step)
    written, tile = count * 0, count * 0
    while (pos < chunk.hi) & (t < tokens):
        n0, n1, begun, last = enter(keys, chunk, t, pos)
        n = tiles_of(keys, n0, n1)
        to = rows + (program * most + written) * 4
        tl.store(to, t)
        tl.store(to + 1, begun)
        tl.store(to + 2, last)
        tl.store(to + 3, tl.where((begun == 0) & (last == n), -1, part_of(chunk, program, pos)))
        if PAIRED:
            for of in range(begun, begun + 2 * pairs_of(begun, last)):
                to = paired + (program * 2 * most + tile) * 64
                tl.store(to + row, row_slots(first, t, n0, of, row))
                tile += 1
        if begun == 0:
            store_split(table, chunk, t, pos, n)
        written += 1
        pos += room_of(keys, n) + chunk.extra
        t += 1
    tl.store(chunks + program * 3, count)
    tl.store(chunks + program * 3 + 1, walked)
    tl.store(chunks + program * 3 + 2, written)


@stable_kernel
def powers(out, given, N: tl.constexpr):
    """Grid: (1,). out: [2, N] fp32, exponent and inverse for each of the given magnitudes."""
    at = tl.arange(0, N)
    exponent, inverse = powers_of(tl.load(given + at))
    tl.store(out + at, exponent.to(tl.float32))
    tl.store(out + N + at, inverse)


@stable_kernel
def pages(
    out,
    given,
    cache,
    size: tl.int32,
    factor: tl.int32,
    log: tl.int32,
    pitch: tl.int32,
    last_slot: tl.int32,
    N: tl.constexpr,
    KIND: tl.constexpr,
):
    """Grid: (1,). out: [3, N] int64, whether each given slot exists, and offsets of its data and of its scales."""
    at = tl.arange(0, N)
    keys = Keys(Segment(cache, cache, cache, size, size, size, factor, log, pitch, last_slot), None, False)
    ok, data, scale = page_of(keys, tl.load(given + at), 1, KIND)
    base = cache.to(tl.int64)
    tl.store(out + at, ok.to(tl.int64))
    tl.store(out + N + at, data.to(tl.int64) - base)
    tl.store(out + 2 * N + at, scale.to(tl.int64) - base)
