"""Which program attends which tiles, and where a tile's keys stand: what the Gluon kernels and their twin share.

All rows of a call are laid on one line, tile after tile, and the line is cut into as many chunks as there are programs.
A tile is 64 keys of one segment; a row has the tiles of its window, then those of its compressed segment. A row without
keys has a place of one tile, so that somebody writes it. A row that a cut goes through is written in parts, which
`kernels_parts` adds up: a program has at most two of them, one that began before its chunk and one that goes on behind.

Where rows differ, each takes COST tiles more on the line, for what a program does once for a row. Where they do not,
chunks are whole rows, or equal parts of a row, whenever that is not much longer: then few rows or none have parts.

These are functions of Triton's first language. Called from Gluon they are compiled as Gluon, so vectors come from the
caller, who alone knows their layout; and no number here is a Python literal that a loop changes, since its type would.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "COST",
    "PAGES",
    "ROWS",
    "TILE",
    "TOLERANCE",
    "advance",
    "enter",
    "page_of",
    "pairs_of",
    "part_of",
    "row_of",
    "row_slots",
    "settle",
    "share",
    "slots",
    "tiles_of",
    "told",
]

PAGES = tl.constexpr(0)
"""Keys are records of 448 codes and 64 bf16 values, and scales in the page's footer."""
ROWS = tl.constexpr(1)
"""Keys are rows of 512 bf16 values."""
TILE = tl.constexpr(64)
COST = tl.constexpr(2)
TOLERANCE = tl.constexpr(8.0)
"""How far, in base 2, a row's largest logit may exceed what the weights of gathered keys are relative to."""
_MOST = tl.constexpr(1 << 30)


@triton.jit
def cdiv(a, b):
    """Quotient of positive numbers, rounded up."""
    return (a + b - 1) // b


@triton.jit
def lengths(lens0, lens1, t, there, width0, width1, SEGMENTS: tl.constexpr):
    """Columns of row t that count, in each segment; zeros where the row is not there."""
    n0 = tl.minimum(tl.maximum(tl.load(lens0 + t, mask=there, other=0), 0), width0)
    n1 = n0 * 0
    if SEGMENTS == 2:
        n1 = tl.minimum(tl.maximum(tl.load(lens1 + t, mask=there, other=0), 0), width1)
    return n0, n1


@triton.jit
def tiles_of(n0, n1):
    """Tiles of a row, of which a segment without columns has none."""
    return _tiles(n0) + _tiles(n1)


@triton.jit
def _tiles(n):
    # a shift: whoever divides has to think of negative numbers
    return (n + 63) >> 6


@triton.jit
def share(lens0, lens1, tokens, width0, width1, part, parts, least, at, SEGMENTS: tl.constexpr, BT: tl.constexpr):
    """The chunk of program `part` of `parts`: (lo, hi, chunk, extra, t, pos, count).

    least: tiles of the shortest chunk. at: 0 .. BT. Of the line: the chunk is [lo, hi), all chunks are `chunk` long,
    each row takes `extra` more than its tiles, and the first row with a tile here, t, begins at pos. count: tiles here.
    """
    zero = tokens * 0
    work, longest, shortest = zero, zero, zero + _MOST
    for base in range(0, tokens, BT):
        t = base + at
        there = t < tokens
        n0, n1 = lengths(lens0, lens1, t, there, width0, width1, SEGMENTS)
        m = tl.maximum(tiles_of(n0, n1), 1)
        work += tl.sum(tl.where(there, m, 0), 0)
        longest = tl.maximum(longest, tl.max(tl.where(there, m, 0), 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(there, m, _MOST), 0))
    even = tl.maximum(cdiv(work, parts), least)
    rows = cdiv(even, longest) * longest
    pieces = cdiv(longest, tl.maximum(longest // even, 1))
    aligned = tl.where(even >= longest, rows, pieces)
    uniform = (longest == shortest) & (aligned <= even + even // 16 + COST)
    extra = tl.where(uniform, 0, COST)
    chunk = tl.where(uniform, aligned, tl.maximum(cdiv(work + COST * tokens, parts), least))
    lo = part * chunk
    hi = lo + chunk
    first, pos, before, count = zero, zero, zero, zero
    for base in range(0, tokens, BT):
        t = base + at
        there = t < tokens
        n0, n1 = lengths(lens0, lens1, t, there, width0, width1, SEGMENTS)
        n = tiles_of(n0, n1)
        m = tl.where(there, tl.maximum(n, 1) + extra, 0)
        end = before + tl.cumsum(m, 0)
        start = end - m
        done = there & (end - extra <= lo)
        first += tl.sum(done.to(tl.int32), 0)
        pos += tl.sum(tl.where(done, m, 0), 0)
        mine = tl.maximum(tl.minimum(hi, start + n) - tl.maximum(lo, start), 0)
        count += tl.sum(tl.where(there, mine, 0), 0)
        before += tl.sum(m, 0)
    return lo, hi, chunk, extra, first, pos, count


@triton.jit
def enter(lens0, lens1, t, pos, lo, hi, tokens, width0, width1, SEGMENTS: tl.constexpr):
    """Row t, which begins at pos of the line: its lengths, and its first tile here and the one behind its last.

    Of a row that is not there all are 0.
    """
    n0, n1 = lengths(lens0, lens1, t, t < tokens, width0, width1, SEGMENTS)
    return n0, n1, tl.maximum(lo - pos, 0), tl.minimum(hi - pos, tiles_of(n0, n1))


@triton.jit
def settle(lens0, lens1, t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS: tl.constexpr):
    """Where a walk over tiles stands, once it has left rows that have no tile from k on. Behind all, t is `tokens`.

    What is carried from tile to tile is as little as can be: it takes registers that keys need.
    """
    while (k >= last) & (t < tokens):
        pos += tl.maximum(tiles_of(n0, n1), 1) + extra
        t += 1
        t = tl.where(pos >= hi, tokens, t)
        n0, n1, k, last = enter(lens0, lens1, t, pos, lo, hi, tokens, width0, width1, SEGMENTS)
    return t, pos, n0, n1, k, last


@triton.jit
def advance(lens0, lens1, t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k, last, SEGMENTS: tl.constexpr):
    """The next tile of a walk over a chunk, maybe of a later row."""
    return settle(lens0, lens1, t, pos, lo, hi, extra, tokens, width0, width1, n0, n1, k + 1, last, SEGMENTS)


@triton.jit
def slots(rows0, rows1, stride0, stride1, t, tokens, k, n0, n1, row, SEGMENTS: tl.constexpr):
    """Indices of tile k of row t, and whether (1 or 0) it belongs to the window. row: 0 .. TILE.

    -1 where a column is behind the segment's length, and everywhere if the row is not there.
    """
    before = _tiles(n0)
    inside = (k < before).to(tl.int32)
    at = rows0 + t.to(tl.int64) * stride0
    column = k * TILE + row
    length = n0
    if SEGMENTS == 2:  # noqa: SIM102 - a constant, and a value
        if k >= before:
            at = rows1 + t.to(tl.int64) * stride1
            column = (k - before) * TILE + row
            length = n1
    return tl.load(at + column, mask=column < tl.where(t < tokens, length, 0), other=-1), inside


@triton.jit
def pairs_of(first, last):
    """Pairs in which the tiles of a row are attended that is one segment; the last may be half a pair, or an empty one.

    first: the row's first tile here, last: the one behind its last.
    """
    return tl.maximum((last - first + 1) // 2, 1)


@triton.jit
def row_slots(rows, stride, t, n, last, k, row):
    """Indices of tile k of row t that is one segment, -1 behind its n columns. row: 0 .. TILE.

    -1 too from tile `last` on: that belongs to another program, even where it stands beside an own one in a pair.
    """
    column = k * TILE + row
    return tl.load(rows + t.to(tl.int64) * stride + column, mask=column < tl.minimum(n, last * TILE), other=-1)


@triton.jit
def umulhi(a, b):
    """Upper half of a product of uint32; `tl.umulhi` exists in one of the two languages only."""
    return ((a.to(tl.uint64) * b.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def page_of(slot, inside, cache0, cache1, paging, SEGMENTS: tl.constexpr):
    """Which slots exist, and of each the address of its data, int32 words, and of its eight scale bytes, one int64.

    paging: of both segments, size of a page, factor and log of `attend.divider`, sixteenths of its stride in bytes,
    slots. Of a slot that does not exist the addresses are those of slot 0, and nobody may read them.
    """
    size, factor, log, pitch, count = paging[0], paging[1], paging[2], paging[3], paging[4]
    base = cache0
    if SEGMENTS == 2:  # noqa: SIM102 - a constant, and a value
        if inside == 0:
            size, factor, log, pitch, count = paging[5], paging[6], paging[7], paging[8], paging[9]
            base = cache1
    ok = (slot >= 0) & (slot < count)
    slot = tl.where(ok, slot, 0)
    twice = slot.to(tl.uint32, bitcast=True) << 1
    page = (umulhi(twice, factor.to(tl.uint32, bitcast=True)) >> log.to(tl.uint32)).to(tl.int32)
    of = slot - page * size
    start = page.to(tl.int64) * pitch.to(tl.int64) * 16
    data = base + start + of.to(tl.int64) * 576
    scale = base + start + (size.to(tl.int64) * 576 + of.to(tl.int64) * 8)
    return ok, data.to(tl.pointer_type(tl.int32)), scale.to(tl.pointer_type(tl.int64))


@triton.jit
def row_of(slot, cache, pitch, count):
    """Which rows exist, and the address of each. pitch: eighths of the elements from row to row."""
    ok = (slot >= 0) & (slot < count)
    return ok, cache + tl.where(ok, slot, 0).to(tl.int64) * pitch.to(tl.int64) * 8


@triton.jit
def part_of(program, pos, lo):
    """Place, [program, side], of the part of a row that is not whole; 1: the row begins in the chunk."""
    return program * 2 + (pos >= lo).to(tl.int32)


@triton.jit
def told(table, t, pos, n, lo, chunk):
    """Tell who shares row t: the number of its first program (of those for one block of heads), and how many."""
    own = lo // chunk
    until = (pos + tl.maximum(n, 1) - 1) // chunk
    tl.store(table + t * 2, own)
    tl.store(table + t * 2 + 1, until - own + 1)
