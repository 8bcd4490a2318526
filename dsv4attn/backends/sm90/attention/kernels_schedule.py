"""What the Gluon kernels and their twin share: bundles of arguments, the tile scheduler, addresses, and row sums.

All rows of a call form one line of tiles, and the line is cut into as many chunks as there are programs. A tile is 64
keys of one segment; a row has the tiles of its window, then those of its compressed segment. A row without keys takes
the place of one tile, so that one program writes it. A row in more than one chunk is split: each of its programs
writes a part, and `kernels_combine` combines the parts. A program has at most two parts: of a row that began before its
chunk, and of a row that continues after it. A kernel that attends tiles in pairs has whole pairs on the line.

Where rows differ, each takes some tiles more on the line, for the work that a program does once for a row. Where they
do not, chunks are whole rows, or equal parts of a row, whenever that is not much longer: then few rows or none split.
Where there are enough programs, each row has chunks of its own: one as long as the longest row, unless that is longer
than the chunks of split rows and what their parts cost; or as many for each as there are, if they are no longer.

Rows of one request may be groups (`_triton.attention.kernels_groups`). A group then takes the place of a row, in all
that this says of rows: `kernels_groups.list_groups` lists them first.

Where bits must not depend on the batch, rows are not split: a row belongs to the program in whose chunk it begins.

These are functions of plain Triton. Called from Gluon they are compiled as Gluon, so vectors come from the caller,
which alone knows their layout; and no number here is a Python literal that a loop changes, since its type would.

Bundles of arguments are named tuples. Triton's cache key covers the functions that build and read them, and not their
fields: these only change together with those functions.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from dsv4attn.backends._triton.numerics import LN2

FP8_PAGES = tl.constexpr(0)
"""Keys are records of 448 codes and 64 bf16 values, and scales in the page's footer."""
BF16_ROWS = tl.constexpr(1)
"""Keys are rows of 512 bf16 values."""
CODE_PAGES = tl.constexpr(2)
"""Keys are records of V4.1: 512 codes e4m3, and 16 scale bytes."""
NIBBLE_PAGES = tl.constexpr(3)
"""As CODE_PAGES in the first segment. In the second, 512 codes e2m1, two in a byte, and 32 scales e4m3."""
NVFP4_PAGES = tl.constexpr(4)
"""Keys are V4's records of 448 codes e2m1, two in a byte, and 64 bf16 values; 28 scales e4m3 in the page's footer."""
TILE = tl.constexpr(64)
SHORT = tl.constexpr(128)
"""Most rows of a call whose lengths a program reads without a loop."""
COST = tl.constexpr(2)
"""Tiles that take as long as what a program does once for a row."""
PAIR_COST = tl.constexpr(4)
"""The same where tiles come in pairs; even, so that chunks are whole pairs."""
SPLIT = tl.constexpr(4)
"""Tiles that take as long as the parts of all rows, if rows are as many as programs: those who write and read parts
share the memory."""
TOLERANCE = tl.constexpr(8.0)
"""How far, in base 2, a row's largest logit may exceed the reference of its weights."""
_MOST_TILES = tl.constexpr(1 << 29)


Query = namedtuple("Query", "q token head scale head0 positions table stride count eps")
"""The queries of a block of heads.

q: [T, H, 512] bf16; token, head: its strides. scale: of logits. head0: first of the block's 64 heads.
positions: [T] int64, if q is to be normalised and rotated; else None, and the rest is not read. table: [count, 64]
fp32, cosines before sines, rows `stride` apart. eps: of the norm.
"""
Segment = namedtuple("Segment", "cache rows lens width stride size factor log pitch last_slot")
"""Keys of one segment, and which of them each row attends.

cache: pages of records, or [N, 512] bf16. rows: [T, width] int32, slots; stride: from row to row of them. lens: [T]
int32, columns that count. size: slots of a page; factor, log: its `divider`. pitch: units of 16 bytes from page
to page, or from key to key of bf16 rows. last_slot: the number of the last slot, -1 without slots.
"""
Entries = namedtuple("Entries", "requests table stride known columns")
"""How the second segment's rows are turned into slots, where they are numbers of entries, see `keys.EntryIndices`.

requests: [T] int32. table: [known, columns] int32, rows `stride` apart.
"""
Keys = namedtuple("Keys", "first second paired groups", defaults=(None,))
"""Both segments of a row; the second may be None. paired, a constant: tiles are attended in pairs, of one segment.

groups: the list of `list_groups`, or None, and each row is by itself.
"""
Group = namedtuple("Group", "row both")
"""row: the group's first row. both: 8 `later` + `last` of `_triton.attention.kernels_groups.Group`."""
Chunk = namedtuple("Chunk", "tokens parts lo hi length extra")
"""A program's chunk of the line, [lo, hi).

tokens: rows of the call, or groups of them. parts: chunks of the line. length: tiles of every chunk. extra: tiles
that a row takes besides its own; _MOST_TILES where each row has chunks of its own, so that no row follows.
"""
Results = namedtuple(
    "Results",
    "out lse max_logits sink part part_powers part_lse part_max table "
    "out_token out_head lse_token lse_head max_token max_head empty_lse",
)
"""Where a program writes. lse, max_logits, sink and part_max may be None.

out: [T, H, 512] bf16. lse, max_logits: [T, H] fp32, natural units. sink: [H] fp32, an input. part: [programs, 2, 64,
512] fp16, in the order of `place_in_part`, in units of powers of two, whose exponents are bytes in part_powers:
[programs, 2, 64 * 128] uint8, see `power_of_part`. part_lse, part_max: [programs, 2, 64] fp32, base
2. table: [lines, 2] int32, see `store_split`. Strides of out, lse and max_logits, by token and by
head. empty_lse: lse of a row without keys.
"""


@triton.jit
def cdiv(a, b):
    """Quotient of positive numbers, rounded up."""
    return (a + b - 1) // b


@triton.jit
def lengths(keys, t, there):
    """Columns of row t that count, in each segment; zeros where not there. Of a group: those of all its rows."""
    first = keys.first
    if keys.groups is not None:
        n0 = tl.load(keys.groups + t * 4 + 1, mask=there, other=0)
        n1 = tl.load(keys.groups + t * 4 + 2, mask=there, other=0)
    else:
        n0 = tl.minimum(tl.maximum(tl.load(first.lens + t, mask=there, other=0), 0), first.width)
        n1 = entries_of(keys, t, there)
    return n0, n1


@triton.jit
def group_at(keys, t, there):
    """`Group` t of the list; row t where rows are by themselves."""
    row, both = t, t * 0
    if keys.groups is not None:
        row = tl.load(keys.groups + t * 4, mask=there, other=0)
        both = tl.load(keys.groups + t * 4 + 3, mask=there, other=0)
    return Group(row, both)


@triton.jit
def last_of(group):
    """Number of the last row in a group."""
    return group.both & 7


@triton.jit
def own_of(group, n0):
    """Columns of the first row's window, of n0 columns of all windows."""
    return tl.maximum(n0 - last_of(group), 0)


@triton.jit
def entries_of(keys, t, there):
    """Columns of row t of the call that count in the second segment, 0 where not there."""
    second = keys.second
    n = t * 0
    if second is not None:
        n = tl.minimum(tl.maximum(tl.load(second.lens + t, mask=there, other=0), 0), second.width)
    return n


@triton.jit
def exists(group, row, H: tl.constexpr, HEADS: tl.constexpr):
    """Which rows of products a group has. row: [64], heads of a row of the call after each other, HEADS of each."""
    return (row // HEADS <= last_of(group)) & (row % HEADS < H)


@triton.jit
def seen_by(keys, group, n0, row, H: tl.constexpr, HEADS: tl.constexpr):
    """What rows of products see of a group, as (sees, entries, begun, least).

    n0: columns of the group's windows. row: as of `exists`. They see `sees` columns of the window, and the first
    `entries` entries. All see the window from column `begun` to that of the first row's last key, and `least` entries.
    """
    number, live = row // HEADS, exists(group, row, H, HEADS)
    first, at = keys.first, group.row + number
    sees = tl.minimum(tl.maximum(tl.load(first.lens + at, mask=live, other=0), 0), first.width)
    entries = entries_of(keys, at, live)
    begun = tl.max(tl.where(live, own_of(group, n0) + number - sees, 0), 0)
    return sees, entries, begun, tl.min(tl.where(live, entries, _MOST_TILES), 0)


@triton.jit
def differs(k, n0, group, begun, least):
    """Whether rows of products may differ in the keys of tile k of a group that they see; see `seen_by`."""
    before = _tiles(n0)
    of_window = (k * TILE < begun) | (k * TILE + TILE > own_of(group, n0))
    return ((k < before) & of_window) | ((k >= before) & ((k - before) * TILE + TILE > least))


@triton.jit
def visible(column, k, n0, group, row, sees, entries, HEADS: tl.constexpr):
    """[64, 64] bool: which keys of tile k of a group its rows of products see; see `seen_by`. column: 0 .. 64."""
    before = _tiles(n0)
    inside = k < before
    first = tl.where(inside, own_of(group, n0) + row // HEADS - sees - k * TILE, (before - k) * TILE)
    since = tl.expand_dims(column, 0) - tl.expand_dims(first, 1)
    return (since >= 0) & (since < tl.expand_dims(tl.where(inside, sees, entries), 1))


@triton.jit
def tiles_of(keys, n0, n1):
    """Tiles of a row, of which a segment without columns has none. The last of a pair may be without columns."""
    n = _tiles(n0) + _tiles(n1)
    if keys.paired:
        n += n & 1
    return n


@triton.jit
def room_of(keys, n):
    """What a row of n tiles takes of the line, besides `Chunk.extra`."""
    least: tl.constexpr = 2 if keys.paired else 1
    return tl.maximum(n, least)


@triton.jit
def _tiles(n):
    # a shift: a division would have to consider negative numbers
    return (n + 63) >> 6


@triton.jit
def share(
    keys, tokens, part, parts, least, at, BT: tl.constexpr, ONCE: tl.constexpr, WHOLE_ROWS: tl.constexpr
):  # fmt: skip
    """The chunk of program `part` of `parts`: (Chunk, t, pos, count).

    least: tiles of the shortest chunk. at: 0 .. BT. t: the first row with a tile in the chunk; pos: where on the line
    that row begins. count: tiles of the chunk. ONCE: whether there are at most BT rows. WHOLE_ROWS: whether the chunk
    has all tiles of the rows that begin in it, and no others.
    """
    end_of_rows = BT if ONCE else tokens
    zero = tokens * 0
    odd: tl.constexpr = 1 if keys.paired else 0
    cost: tl.constexpr = PAIR_COST if keys.paired else COST
    work, longest, shortest = zero, zero, zero + _MOST_TILES
    for base in range(0, end_of_rows, BT):
        t = base + at
        there = t < tokens
        n0, n1 = lengths(keys, t, there)
        m = room_of(keys, tiles_of(keys, n0, n1))
        work += tl.sum(tl.where(there, m, 0), 0)
        longest = tl.maximum(longest, tl.max(tl.where(there, m, 0), 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(there, m, _MOST_TILES), 0))
    even = tl.maximum(cdiv(work, parts), least)
    rows = cdiv(even, longest) * longest
    pieces = cdiv(longest, tl.maximum(longest // even, 1))
    pieces += pieces & odd
    aligned = tl.where(even >= longest, rows, pieces)
    uniform = (longest == shortest) & (aligned <= even + even // 16 + cost)
    extra = tl.where(uniform, 0, cost)
    length = tl.maximum(cdiv(work + cost * tokens, parts), least)
    length = tl.where(uniform, aligned, length + (length & odd))
    owned = tokens <= parts
    own = longest
    if not WHOLE_ROWS:
        # least is never 0: its maximum with 1 keeps ptxas of Triton 3.9 from spilling in every role of short calls
        each = tl.minimum(parts // tl.maximum(tokens, 1), longest // tl.maximum(least, 1))
        own = cdiv(longest, tl.maximum(each, 1))
        own += own & odd
        whole = (longest - length) * parts <= SPLIT * tokens
        owned = owned & (whole | (own <= length))
        own = tl.where(whole, longest, own)
    length = tl.where(owned, own, length)
    lo = part * length
    hi = lo + length
    first, pos, before, count, of_chunk = zero, zero, zero, zero, zero
    for base in range(0, end_of_rows, BT):
        t = base + at
        there = t < tokens
        n0, n1 = lengths(keys, t, there)
        n = tiles_of(keys, n0, n1)
        m = room_of(keys, n)
        m = tl.where(there, tl.where(owned, cdiv(m, length) * length, m + extra), 0)
        end = before + tl.cumsum(m, 0)
        start = end - m
        done = there & (start < lo) if WHOLE_ROWS else there & (end - tl.where(owned, 0, extra) <= lo)
        first += tl.sum(done.to(tl.int32), 0)
        pos += tl.sum(tl.where(done, m, 0), 0)
        if WHOLE_ROWS:
            begins = (start >= lo) & (start < hi)
            mine = tl.where(begins, n, 0)
            of_chunk += tl.sum(tl.where(there & begins, m, 0), 0)
        else:
            mine = tl.maximum(tl.minimum(hi, start + n) - tl.maximum(lo, start), 0)
        count += tl.sum(tl.where(there, mine, 0), 0)
        before += tl.sum(m, 0)
    if WHOLE_ROWS:
        lo, hi = pos, pos + of_chunk
    chunk = Chunk(tokens, parts, lo, hi, length, tl.where(owned, _MOST_TILES, extra))
    return chunk, first, pos, count


@triton.jit
def enter(keys, chunk, t, pos):
    """Row t, which begins at pos of the line: its lengths, its first tile in the chunk and the one after its last.

    Of a row that is not there all are 0.
    """
    n0, n1 = lengths(keys, t, t < chunk.tokens)
    return n0, n1, tl.maximum(chunk.lo - pos, 0), tl.minimum(chunk.hi - pos, tiles_of(keys, n0, n1))


@triton.jit
def begin(keys, chunk, t, pos):
    """The first tile of a chunk, whose first row is t, as a walk: (t, pos, n0, n1, k, last).

    k: a tile of row t, which begins at pos of the line and has lengths n0 and n1. last: one after its last tile here.
    Where rows are groups there is also the `Group`.
    """
    n0, n1, k, last = enter(keys, chunk, t, pos)
    if keys.groups is not None:
        walk = t, pos, n0, n1, k, last, group_at(keys, t, t < chunk.tokens)
    else:
        walk = t, pos, n0, n1, k, last  # type: ignore[assignment]
    return _settle(keys, chunk, walk)


@triton.jit
def advance(keys, chunk, walk):
    """The next tile of a walk over a chunk, maybe of a later row."""
    if keys.groups is not None:
        t, pos, n0, n1, k, last, group = walk
        walk = t, pos, n0, n1, k + 1, last, group
    else:
        t, pos, n0, n1, k, last = walk
        walk = t, pos, n0, n1, k + 1, last
    return _settle(keys, chunk, walk)


@triton.jit
def _settle(keys, chunk, walk):
    """A walk, once it has left rows that have no tile from k on. Past all rows, t is `tokens`.

    As little as possible is carried from tile to tile: it takes registers that keys need.
    """
    if keys.groups is not None:
        t, pos, n0, n1, k, last, group = walk
        while (k >= last) & (t < chunk.tokens):
            pos += room_of(keys, tiles_of(keys, n0, n1)) + chunk.extra
            t += 1
            t = tl.where(pos >= chunk.hi, chunk.tokens, t)
            n0, n1, k, last = enter(keys, chunk, t, pos)
            group = group_at(keys, t, t < chunk.tokens)
        walk = t, pos, n0, n1, k, last, group
    else:
        t, pos, n0, n1, k, last = walk
        while (k >= last) & (t < chunk.tokens):
            pos += room_of(keys, tiles_of(keys, n0, n1)) + chunk.extra
            t += 1
            t = tl.where(pos >= chunk.hi, chunk.tokens, t)
            n0, n1, k, last = enter(keys, chunk, t, pos)
        walk = t, pos, n0, n1, k, last
    return walk


@triton.jit
def columns(keys, chunk, walk):
    """Columns of a walk's tile as (at, column, end, inside, own, skipped): 64 from `column` on, of an index row `at`.

    end: after the last column of the row that counts, 0 if the row is not there. inside: whether (1 or 0) the tile
    belongs to the window. Of a group, columns from `own` on lie `skipped` numbers further, in its last row.
    """
    t, n0, n1, k = walk[0], walk[2], walk[3], walk[4]
    first, second = keys.first, keys.second
    before = _tiles(n0)
    inside = (k < before).to(tl.int32)
    row, other, own, skipped = t, t, n0, t.to(tl.int64) * 0
    if keys.groups is not None:
        group = walk[6]
        last = last_of(group)
        own = tl.where(inside != 0, own_of(group, n0), n1)
        skipped = last.to(tl.int64) * first.stride - (group.both >> 3)
        row, other = group.row, group.row + last
    at = first.rows + row.to(tl.int64) * first.stride
    column = k * TILE
    length = n0
    if second is not None:  # noqa: SIM102 - a constant, and a value
        if k >= before:
            at = second.rows + other.to(tl.int64) * second.stride
            column = (k - before) * TILE
            length = n1
    return at, column, tl.where(t < chunk.tokens, length, 0), inside, own, skipped


@triton.jit
def spread_over(keys, at, column, own, skipped):
    """Addresses of columns, as `columns` describes them."""
    to = at + column
    if keys.groups is not None:
        to += tl.where(column >= own, skipped, 0)
    return to


@triton.jit
def slots(keys, chunk, walk, row):
    """Indices of a walk's tile, -1 in columns that do not count, and `inside` of `columns`. row: 0 .. TILE."""
    at, begins, end, inside, own, skipped = columns(keys, chunk, walk)
    column = begins + row
    return tl.load(spread_over(keys, at, column, own, skipped), mask=column < end, other=-1), inside


@triton.jit
def pairs_of(first, last):
    """Pairs in which the tiles of a row are attended; a row without keys has an empty one.

    first: the row's first tile here, last: the one after its last; both are even.
    """
    return tl.maximum((last - first) // 2, 1)


@triton.jit
def row_slots(segment, t, n, k, row):
    """Indices of tile k of row t of one segment, -1 after its n columns. row: 0 .. TILE."""
    column = k * TILE + row
    at = segment.rows + t.to(tl.int64) * segment.stride
    return tl.load(at + column, mask=column < n, other=-1)


@triton.jit
def umulhi(a, b):
    """Upper half of a product of uint32; `tl.umulhi` exists in one of the two languages only."""
    return ((a.to(tl.uint64) * b.to(tl.uint64)) >> 32).to(tl.uint32)


@triton.jit
def divided(n, factor, log):
    """Quotient of n, of 0 or more, by the number of which these are the `attention.launch.divider`."""
    twice = n.to(tl.uint32, bitcast=True) << 1
    return (umulhi(twice, factor.to(tl.uint32, bitcast=True)) >> log.to(tl.uint32)).to(tl.int32)


@triton.jit
def entry_slots(entries, second, t, entry):
    """Slots of entries of row t, -1 where there is none; `core.torch_ops.index_ops` is the definition.

    second: their segment, with the number of entries that each row may see for lengths.
    """
    request, visible = tl.load(entries.requests + t), tl.load(second.lens + t)
    visible = tl.where((request >= 0) & (request < entries.known), visible, 0)
    there = (entry >= 0) & (entry < visible)
    entry = tl.where(there, entry, 0)
    column = divided(entry, second.factor, second.log)
    blocks = entries.table + request.to(tl.int64) * entries.stride
    block = tl.load(blocks + column, mask=there & (column < entries.columns), other=-1)
    # in 64 bits: a garbage block times the block size may wrap around to a slot that exists
    slot = block.to(tl.int64) * second.size + (entry - column * second.size)
    return tl.where((block >= 0) & (slot <= 0x7FFFFFFF), slot, -1).to(tl.int32)


@triton.jit
def page_of(keys, slot, inside, KIND: tl.constexpr = FP8_PAGES):
    """Which slots exist, and of each the address of its data, int32 words, and of its scale bytes, eight in an int64.

    inside: whether the slots are of the first segment. The addresses of a slot that does not exist are those of slot 0,
    and must not be read. KIND: of V4's records, FP8_PAGES or NVFP4_PAGES.
    """
    DATA: tl.constexpr = 576 if KIND == FP8_PAGES else 352
    SCALES: tl.constexpr = 8 if KIND == FP8_PAGES else 32
    first, second = keys.first, keys.second
    size, factor, log, pitch = first.size, first.factor, first.log, first.pitch
    last_slot, base = first.last_slot, first.cache
    if second is not None:  # noqa: SIM102 - a constant, and a value
        if inside == 0:
            size, factor, log, pitch = second.size, second.factor, second.log, second.pitch
            last_slot, base = second.last_slot, second.cache
    ok = (slot >= 0) & (slot <= last_slot)
    slot = tl.where(ok, slot, 0)
    page = divided(slot, factor, log)
    at = slot - page * size
    start = page.to(tl.int64) * pitch.to(tl.int64) * 16
    data = base + start + at.to(tl.int64) * DATA
    scale = base + start + (size.to(tl.int64) * DATA + at.to(tl.int64) * SCALES)
    return ok, data.to(tl.pointer_type(tl.int32)), scale.to(tl.pointer_type(tl.int64))


@triton.jit
def coded_page_of(keys, slot, inside, KIND: tl.constexpr, INTERLEAVED: tl.constexpr):
    """As `page_of`, of V4.1's records: addresses of data and scales, both int32 words.

    KIND: CODE_PAGES or NIBBLE_PAGES. INTERLEAVED: scales are after each record's data, and not after the page's.
    """
    first, second = keys.first, keys.second
    size, factor, log, pitch = first.size, first.factor, first.log, first.pitch
    last_slot, base = first.last_slot, first.cache
    data_bytes, scale_bytes = inside * 0 + 512, inside * 0 + 16
    if second is not None:  # noqa: SIM102 - a constant, and a value
        if inside == 0:
            size, factor, log, pitch = second.size, second.factor, second.log, second.pitch
            last_slot, base = second.last_slot, second.cache
            if KIND == NIBBLE_PAGES:
                data_bytes, scale_bytes = inside + 256, inside + 32
    ok = (slot >= 0) & (slot <= last_slot)
    slot = tl.where(ok, slot, 0)
    page = divided(slot, factor, log)
    at = (slot - page * size).to(tl.int64)
    start = base + page.to(tl.int64) * pitch.to(tl.int64) * 16
    data = start + at * data_bytes
    if INTERLEAVED:
        data += at * scale_bytes
        scale = data + data_bytes
    else:
        scale = start + (size.to(tl.int64) * data_bytes + at * scale_bytes)
    return ok, data.to(tl.pointer_type(tl.int32)), scale.to(tl.pointer_type(tl.int32))


@triton.jit
def row_of(segment, slot):
    """Which rows exist, and the address of each."""
    ok = (slot >= 0) & (slot <= segment.last_slot)
    return ok, segment.cache + tl.where(ok, slot, 0).to(tl.int64) * segment.pitch.to(tl.int64) * 8


@triton.jit
def own_tile(keys, t, tile, least, N: tl.constexpr):
    """Where tile `tile` of row t is, of N keys of one segment: (inside, begin, n, width, at).

    A row's tiles are those that its index rows have room for, however long the row is. inside: whether (1 or 0) the
    segment is the first. begin: the tile's first column. n: columns that count, of width. at: the address of column 0.
    least: columns of the second segment that count, whatever its lengths say.
    """
    first, second = keys.first, keys.second
    before = cdiv(first.width, N)
    inside = (tile < before).to(tl.int32)
    at = first.rows + t.to(tl.int64) * first.stride
    begin, width, n = tile * N, first.width, tl.load(first.lens + t)
    if second is not None:
        other = tl.maximum(tl.load(second.lens + t), least)
        if inside == 0:
            at = second.rows + t.to(tl.int64) * second.stride
            begin, width, n = (tile - before) * N, second.width, other
    n = tl.minimum(tl.maximum(n, 0), width)
    return inside, begin, n, width, at


@triton.jit
def tile_with_keys(i, of_first, before):
    """Index of the row's i-th non-empty tile; the first `of_first` lie in segment 0."""
    return tl.where(i < of_first, i, i - of_first + before)


@triton.jit
def part_of(chunk, program, pos):
    """Place, [program, side], of the part of a row that is split; side 1: the row begins in the chunk."""
    return program * 2 + (pos >= chunk.lo).to(tl.int32)


@triton.jit
def place_in_part(head, column):
    """Where a part, [64, 512], has a column of one of its 64 heads.

    As the matrix unit leaves them: of 16 heads and 16 columns, 256 numbers in a row, and of those the eight in a row
    that a thread has, four columns of a head and of the eighth one after it.
    """
    within = column % 16 // 8 * 4 + head % 16 // 8 * 2 + column % 2
    return head // 16 * 8192 + column // 16 * 256 + head % 8 * 32 + column % 8 // 2 * 8 + within


@triton.jit
def power_of_part(head, column):
    """Where the powers of a part, [64 * 128], have that of a column of a head: four columns of a thread share one."""
    within = column % 8 // 2 * 2 + head % 16 // 8
    return head // 16 * 2048 + column // 16 * 64 + head % 8 * 8 + within


@triton.jit
def powers_of(largest):
    """Powers of two, as (exponent, inverse): what is at most `largest`, times the inverse, is below 2^15.

    largest: 0 or more, or NaN. With its eleven bits a part is as exact as the products that it is a sum of, which are
    of bf16; below 2^-29 of `largest` it has fewer.
    """
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15) - 14
    return exponent, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_split(table, chunk, t, pos, n):
    """Store the first program that shares row t of n tiles, which is this one, and the number of programs that do.

    Programs are counted among those for one block of heads.

    The table has a line for each row, which names its first program; or, if rows are more than programs, a line for
    each program, which names the row. Of the rows that begin in a chunk only the last may be split: it overwrites those
    before it.
    """
    own = chunk.lo // chunk.length
    until = (pos + tl.maximum(n, 1) - 1) // chunk.length
    by_program = chunk.tokens > chunk.parts
    to = table + tl.where(by_program, own, t) * 2
    tl.store(to, tl.where(by_program, t, own))
    tl.store(to + 1, until - own + 1)


@triton.jit
def clear_split(table, chunk):
    """Store that no row begins in this program's chunk; `store_split` overwrites it."""
    if chunk.tokens > chunk.parts:
        tl.store(table + chunk.lo // chunk.length * 2 + 1, 0)


@triton.jit
def write_sums(
    results, t, whole, side, total, reference, largest, head0, within, H: tl.constexpr, ROWS: tl.constexpr = 64,
    live=None,
):  # fmt: skip
    """Write lse and the largest logit of row t of 64 heads; of a row that is split, those of its part at `side`.

    total: [64], sum of the weights relative to `reference`, which is of base 2, as `largest` is. within: 0 .. 64.
    ROWS, live: of a group, heads of a row, and which of the 64 exist.
    """
    empty = total == 0.0
    if whole:
        head = head0 + within
        token, there = t.to(tl.int64), head < H
        if live is not None:
            head, token, there = within % ROWS, (t + within // ROWS).to(tl.int64), live
        if results.lse is not None:
            at = token * results.lse_token + head.to(tl.int64) * results.lse_head
            lse = results.lse + at
            tl.store(lse, tl.where(empty, results.empty_lse, (reference + tl.log2(total)) * LN2), mask=there)
        if results.max_logits is not None:
            at = token * results.max_token + head.to(tl.int64) * results.max_head
            top = results.max_logits + at
            # maxima pass over a NaN among logits, and the total of weights does not; a finite one adds nothing
            tl.store(top, tl.where(empty, -float("inf"), largest * LN2 + total * 0.0), mask=there)
    else:
        aside = side * 64 + within
        tl.store(results.part_lse + aside, tl.where(empty, -float("inf"), reference + tl.log2(total)))
        if results.max_logits is not None:
            tl.store(results.part_max + aside, tl.where(empty, -float("inf"), largest))
