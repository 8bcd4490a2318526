"""Kernels that select the largest scores of each row: exact, whatever the scores are.

Scores become keys: int32 of the same order, in which -0 is 0, -inf is the lowest finite number, and ABSENT is what can
not be selected. Counting how many keys reach a probe narrows the interval that holds the K-th largest key.

A row that does not fit into registers is folded first: of all entries whose numbers are equal modulo BLOCK the largest
score is taken, and the K-th largest of those is a lower bound of the K-th largest score. Few entries are above it, and
they are listed in ascending order, together with the first K that are equal to it. If fewer than K are above, the bound
is the K-th largest score itself. If the list is still too long, it is folded again. At most K groups of BLOCK have
a member above the bound, and BLOCK is at least 4 K, so each round leaves about a quarter of a list at most.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel

INFINITE = tl.constexpr(0x7F800000)
"""Key of infinity, and the largest of all."""
LOWEST = tl.constexpr(-0x7F7FFFFF)
"""Key of the lowest finite number."""
ABSENT = tl.constexpr(-0x7F800000)
"""Key of an entry that can not be selected."""


@triton.jit
def visible_count(LENS, row, max_entries):
    """Entries that a row sees, at most max_entries; none if it is negative."""
    return tl.minimum(tl.load(LENS + row), max_entries)


@triton.jit
def read(source, at, count, ALIGNED: tl.constexpr):
    """Numbers at places `at`, in ascending order, of fp32 numbers. Those past the first count are anything.

    ALIGNED: bytes that divide the address of the first; with 16, up to three numbers past the count are read.
    """
    # a mask that is constant in each group of four lets four numbers be one access
    live = at // 4 < (count + 3) // 4 if ALIGNED >= 16 else at < count
    return tl.load(source + at, mask=live, other=float("-inf"))


@triton.jit
def ordered(x):
    """int32 of the order of fp32 x, and the bits of its size. -0 is 0, and -inf is ABSENT."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return tl.where(bits < 0, -size, size), size


@triton.jit
def keys_of(x, live):
    """Keys of scores; those of NaN and of what is not live are ABSENT."""
    order, size = ordered(x)
    return tl.where(live & (size <= INFINITE), tl.maximum(order, LOWEST), ABSENT)


@triton.jit
def kth_largest(keys, low, at_low, high, at_high, wanted, slack):
    """(key, how many keys reach it, how many are above it): of the wanted-th largest key, if `wanted` keys reach `low`.

    It stops early: the key that comes back is one that `wanted` keys or up to `slack` more reach, and then the last
    number is only a lower bound. If at most wanted + slack reach `low`, it is `low`. high: above `low`, and `wanted`
    keys do not reach it. at_low, at_high: how many keys reach each.
    """
    step = 0
    while (at_low > wanted + slack) & (high > low + 1):
        if step % 4 == 0:
            # to the nearest keys, because between equal keys a probe a bit would be needed
            low = tl.min(tl.where(keys >= low, keys, INFINITE), 0)
            high = tl.max(tl.where(keys < high, keys, ABSENT), 0) + 1
        step += 1
        # a probe where the wanted key is if keys are spread evenly, and one in the middle
        span = high.to(tl.int64) - low
        share = (at_low - wanted - slack // 2) / (at_low - at_high)
        guess = tl.minimum(tl.maximum((span.to(tl.float32) * share).to(tl.int64), 1), span - 1)
        first, second = (low + guess).to(tl.int32), (low + span // 2).to(tl.int32)
        reached = tl.sum((keys >= first).to(tl.int32) + ((keys >= second).to(tl.int32) << 16), 0)
        low, at_low, high, at_high = narrowed(low, at_low, high, at_high, first, reached & 0xFFFF, wanted)
        low, at_low, high, at_high = narrowed(low, at_low, high, at_high, second, reached >> 16, wanted)
    return low, at_low, at_high


@triton.jit
def narrowed(low, at_low, high, at_high, probe, reached, wanted):
    """The interval with a probe as its new end. `reached` keys reach the probe."""
    enough = reached >= wanted
    at_low = tl.where(enough, tl.minimum(at_low, reached), at_low)
    at_high = tl.where(enough, at_high, tl.maximum(at_high, reached))
    low = tl.where(enough, tl.maximum(low, probe), low)
    high = tl.where(enough, high, tl.minimum(high, probe))
    return low, at_low, high, at_high


@triton.jit
def choose(keys, entries, column, low, at_low, high, at_high, out, wanted, SIZE: tl.constexpr):
    """Write the entries [SIZE], ascending, of the `wanted` largest keys, and -1 after them. Of equal keys the first.

    column: 0 .. SIZE - 1. low, at_low, high, at_high: as of `kth_largest`. Keys below `low` are not chosen.
    """
    key, reached, above = kth_largest(keys, low, at_low, high, at_high, wanted, 0)
    ties = tl.where(reached > wanted, wanted - above, SIZE)
    is_above, is_tied = keys > key, keys == key
    # both counts in one running sum
    seen = tl.cumsum(is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16), 0)
    tied = seen >> 16
    place = (seen & 0xFFFF) + tl.minimum(tied, ties) - 1
    tl.store(out + place, entries, mask=is_above | (is_tied & (tied <= ties)))
    tl.store(out + column, -1, mask=(column >= tl.minimum(reached, wanted)) & (column < wanted))


@triton.jit
def fold(source, count, BLOCK: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr):
    """[BLOCK] keys of the largest of all numbers whose places are equal modulo BLOCK; ABSENT where that is -inf."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, count, BLOCK * UNROLL):
        for part in tl.static_range(UNROLL):
            at = start + part * BLOCK + tl.arange(0, BLOCK)
            x = read(source, at, count, ALIGNED)
            # devices differ in the maximum of a number and NaN
            x = tl.where((at < count) & (x == x), x, float("-inf"))  # noqa: PLR0124 - NaN is not
            largest = tl.maximum(largest, x)
    keys, _ = ordered(largest)
    return keys


@triton.jit
def first_bound(
    scores, maxima, count, run, hinted, wanted, slack,
    LANES: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A key that the wanted-th largest of a row's keys reaches.

    hinted: whether maxima of groups are folded in place of the scores. run: entries that LANES groups share.
    """
    # not one call with one pointer or the other, which a compiler for AMD fails on
    if hinted:
        keys = fold(maxima, (count + run - 1) // run * LANES, BLOCK, UNROLL, ALIGNED)
    else:
        keys = fold(scores, count, BLOCK, UNROLL, ALIGNED)
    return bound_of(keys, tl.full((), LOWEST, tl.int32), wanted, slack)


@triton.jit
def bound_of(keys, low, wanted, slack):
    """The wanted-th largest key, or one that up to `slack` more reach; `low` if fewer keys than wanted reach it."""
    reached = tl.sum((keys >= low).to(tl.int32), 0)
    key, _, _ = kth_largest(keys, low, reached, tl.full((), INFINITE + 1, tl.int32), reached * 0, wanted, slack)
    return key


@triton.jit
def append(keys, entries, bound, above, tied, wanted, LIST, capacity):
    """List the entries above a bound, and those tied with it, of which `wanted` at most; (above, tied) so far.

    above, tied: how many there were before. Only the first `capacity` places are written.
    """
    is_above, is_tied = keys > bound, keys == bound
    one = is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16)
    seen = tl.cumsum(one, 0)
    tie = tied + (seen >> 16)
    place = above + (seen & 0xFFFF) + tl.minimum(tie, wanted) - 1
    tl.store(LIST + place, entries, mask=(is_above | (is_tied & (tie <= wanted))) & (place < capacity))
    both = tl.sum(one, 0)
    return above + (both & 0xFFFF), tied + (both >> 16)


@triton.jit
def list_part(
    scores, begin, end, bound, wanted, LIST, capacity, TILE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """`append` of all entries from begin to end of a row, begin being a multiple of TILE."""
    lane = tl.arange(0, TILE)
    begin = tl.multiple_of(begin, TILE)
    above, tied = begin * 0, begin * 0
    # the next tile is on its way while one is listed
    coming = read(scores, begin + lane, end, ALIGNED)
    for start in range(begin, end, TILE):
        at = start + lane
        x = coming
        coming = read(scores, at + TILE, end, ALIGNED)
        above, tied = append(keys_of(x, at < end), at, bound, above, tied, wanted, LIST, capacity)
    return above, tied


@triton.jit
def listed_entries(LIST, at, listed, starts, chunk, SPLITS: tl.constexpr):
    """Entries at places `at` of the lists of all parts one after the other; 0 past the last.

    LIST: the list of each part, chunk places apart. starts: [SPLITS] - place of the first of each part. If SPLITS is 1,
    there is one list.
    """
    place = at
    if SPLITS > 1:
        # the last part that starts at this place or before it
        part, start = at * 0, at * 0
        width: tl.constexpr = SPLITS.bit_length() - 1
        for bit in tl.static_range(width):
            further = part + (SPLITS >> (bit + 1))
            begin = tl.gather(starts, further, 0)
            start = tl.where(begin <= at, begin, start)
            part = tl.where(begin <= at, further, part)
        place = part * chunk + at - start
    return tl.load(LIST + place, mask=at < listed, other=0)


@triton.jit
def finish(
    scores, LIST, listed, direct, starts, chunk, low, at_low, high, at_high, out, wanted,
    SIZE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """`choose` among listed entries, or, if direct, among the first `listed` of a row."""
    at = tl.arange(0, SIZE)
    live = at < listed
    entries = at
    if not direct:
        entries = listed_entries(LIST, at, listed, starts, chunk, SPLITS)
    keys = keys_of(tl.load(scores + entries, mask=live, other=0.0), live)
    if direct:
        at_low = tl.sum((keys > ABSENT).to(tl.int32), 0)
    choose(keys, entries, at, low, at_low, high, at_high, out, wanted, SIZE)


@triton.jit
def propose(scores, out, sent, wanted, rank, ranks, interleave, SIZE: tl.constexpr):
    """Write the scores of the entries in a row of `out` as they were compared, and their numbers in whole sequences.

    SIZE: at least `wanted`. Past the last entry, where -1 is, the score is -inf.
    """
    column = tl.arange(0, SIZE)
    local = tl.load(out + column, mask=column < wanted, other=-1)
    score = tl.load(scores + local, mask=local >= 0, other=float("-inf"))
    # -0 is 0, and -inf the lowest finite number
    score = tl.where(score == 0.0, 0.0, tl.maximum(score, -3.4028234663852886e38))
    number = (local // interleave * ranks + rank) * interleave + local % interleave
    tl.store(sent + column, tl.where(local >= 0, score, float("-inf")), mask=column < wanted)
    tl.store(out + column, number, mask=local >= 0)


@triton.jit
def is_hinted(count, run, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Whether there are enough maxima of a row's groups to be folded. run: 0 if there are none at all."""
    return (run > 0) & ((count + run - 1) // tl.maximum(run, 1) * LANES >= BLOCK)


@stable_kernel
def maxima_kernel(
    SCORES,  # [T, max_entries], rows `score_stride` apart
    LENS,  # [T] int32
    MAXIMA,  # [T, runs * LANES]
    score_stride: tl.int64, group_stride: tl.int64, max_entries: tl.int32, run: tl.int32, runs: tl.int32,
    LANES: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (T * runs,): the largest scores of one run of entries in each lane; entry e is in lane e % LANES.

    run: a multiple of BLOCK.
    """
    row, part = (tl.program_id(0) // runs).to(tl.int64), tl.program_id(0) % runs
    count, begin = visible_count(LENS, row, max_entries), part * run
    if begin < count:
        scores = tl.multiple_of(SCORES + row * score_stride, ALIGNED) + tl.multiple_of(begin, BLOCK)
        count = tl.minimum(count - begin, run)
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = read(scores, at, count, ALIGNED)
            x = tl.where((at < count) & (x == x), x, float("-inf"))  # noqa: PLR0124 - NaN is not
            largest = tl.maximum(largest, x)
        largest = tl.max(tl.reshape(largest, (BLOCK // LANES, LANES)), 0)
        tl.store(MAXIMA + row * group_stride + part * LANES + tl.arange(0, LANES), largest)


@stable_kernel
def list_kernel(
    SCORES,  # [T, max_entries], rows `score_stride` apart
    MAXIMA,  # [T, runs * LANES]: the first `LANES` of the first `run` entries, and so on
    LENS,  # [T] int32
    LISTS,  # [T, list_stride] int32: counts above, counts tied, the bound; and from 2 * SPLITS + 2 on lists of parts
    score_stride: tl.int64, group_stride: tl.int64, list_stride: tl.int64,
    max_entries: tl.int32, wanted: tl.int32, slack: tl.int32, run: tl.int32, chunk: tl.int32, parts: tl.int32,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (T * parts,): list what may be selected among `chunk` entries of a row. chunk: a multiple of TILE.

    Rows of at most BLOCK entries are left to `choose_kernel`.
    """
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    count, begin = visible_count(LENS, row, max_entries), part * chunk
    if (count > BLOCK) & (begin < count):
        scores = tl.multiple_of(SCORES + row * score_stride, ALIGNED)
        maxima = tl.multiple_of(MAXIMA + row * group_stride, ALIGNED)
        hinted = is_hinted(count, run, LANES, BLOCK)
        bound = first_bound(scores, maxima, count, run, hinted, wanted, slack, LANES, BLOCK, UNROLL, ALIGNED)
        head = LISTS + row * list_stride
        lists = head + (2 * SPLITS + 2)
        end = tl.minimum(begin + chunk, count)
        above, tied = list_part(scores, begin, end, bound, wanted, lists + begin, chunk, TILE, ALIGNED)
        tl.store(head + part, above)
        tl.store(head + SPLITS + part, tied)
        # every part finds the same
        tl.store(head + 2 * SPLITS, bound, mask=part == 0)


@stable_kernel
def choose_kernel(
    SCORES,  # [T, max_entries], rows `score_stride` apart
    MAXIMA,  # [T, runs * LANES]: the first `LANES` of the first `run` entries, and so on
    LENS,  # [T] int32
    LISTS,  # [T, list_stride] int32: of `list_kernel` if SPLITS is above 1; otherwise a list of each row
    OUT,  # [T, wanted] int32
    SENT,  # [T, wanted] fp32: scores of what is selected, -inf for none; or None
    score_stride: tl.int64, group_stride: tl.int64, list_stride: tl.int64, out_stride: tl.int64, sent_stride: tl.int64,
    max_entries: tl.int32, wanted: tl.int32, slack: tl.int32, run: tl.int32, chunk: tl.int32,
    rank: tl.int32, ranks: tl.int32, interleave: tl.int32,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, SPLITS: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (T,): select in one row. LONG: whether a row may have more than BLOCK entries.

    SPLITS: parts of a row that were listed before, at most; 1 if nothing was. rank, ranks, interleave: with SENT, whose
    entries these are; their numbers in whole sequences are written to OUT.
    """
    row = tl.program_id(0).to(tl.int64)
    scores = tl.multiple_of(SCORES + row * score_stride, ALIGNED)
    out = OUT + row * out_stride
    count = visible_count(LENS, row, max_entries)
    lowest, infinite = tl.full((), LOWEST, tl.int32), tl.full((), INFINITE + 1, tl.int32)
    if not LONG:
        entries = tl.arange(0, BLOCK)
        keys = keys_of(read(scores, entries, count, ALIGNED), entries < count)
        reached = tl.sum((keys > ABSENT).to(tl.int32), 0)
        choose(keys, entries, entries, lowest, reached, infinite, reached * 0, out, wanted, BLOCK)
    else:
        maxima = tl.multiple_of(MAXIMA + row * group_stride, ALIGNED)
        direct = count <= BLOCK
        hinted = is_hinted(count, run, LANES, BLOCK)
        head: tl.constexpr = 2 * SPLITS + 2 if SPLITS > 1 else 0
        LIST = LISTS + row * list_stride + head
        capacity = (list_stride - head).to(tl.int32)
        part = tl.arange(0, SPLITS)
        one_list = tl.where(part > 0, 0x7FFFFFFF, 0)
        starts, bound, above, listed = one_list, lowest, count * 0, count * 0
        again = count > BLOCK
        if SPLITS > 1:
            live = part * chunk < tl.where(direct, 0, count)
            larger = tl.load(LIST - head + part, mask=live, other=0)
            ties = tl.load(LIST - head + SPLITS + part, mask=live, other=0)
            bound = tl.load(LIST - head + 2 * SPLITS, mask=count > BLOCK, other=0)
            above, tied = tl.sum(larger, 0), tl.sum(ties, 0)
            lists = larger + tl.minimum(ties, wanted)
            starts, listed = tl.cumsum(lists, 0) - lists, tl.sum(lists, 0)
            again = hinted & (count > BLOCK) & (above + tied < wanted) & (bound > LOWEST)
        # a second time with the scores, if the maxima are not those of these scores, which costs time only
        for _ in range(2):
            if again:
                bound = first_bound(scores, maxima, count, run, hinted, wanted, slack, LANES, BLOCK, UNROLL, ALIGNED)
                above, tied = list_part(scores, count * 0, count, bound, wanted, LIST, capacity, TILE, ALIGNED)
                tl.debug_barrier()
                starts, listed = one_list, above + tl.minimum(tied, wanted)
                again = hinted & ((listed > capacity) | ((above + tied < wanted) & (bound > LOWEST)))
                hinted = hinted & (count < 0)

        while listed > BLOCK:
            enough = above >= wanted
            if enough:
                bound += 1
                keys = tl.full([BLOCK], ABSENT, tl.int32)
                for start in range(0, listed, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    entries = listed_entries(LIST, at, listed, starts, chunk, SPLITS)
                    x = tl.load(scores + entries, mask=at < listed, other=0.0)
                    keys = tl.maximum(keys, keys_of(x, at < listed))
                bound = bound_of(keys, bound, wanted, slack)
            above, tied = above * 0, above * 0
            for start in range(0, listed, TILE):
                at = start + tl.arange(0, TILE)
                entries = listed_entries(LIST, at, listed, starts, chunk, SPLITS)
                keys = keys_of(tl.load(scores + entries, mask=at < listed, other=0.0), at < listed)
                # the list is written where it has been read
                tl.debug_barrier()
                above, tied = append(keys, entries, bound, above, tied, wanted, LIST, capacity)
            tl.debug_barrier()
            starts, listed = one_list, above + tl.minimum(tied, wanted)

        low, at_low, high, at_high = lowest, count * 0, infinite, count * 0
        if not direct:
            if above >= wanted:
                low, at_low = bound + 1, above
            else:
                low, at_low, high, at_high = bound, listed, bound + 1, above
        else:
            listed = count
        finish(
            scores, LIST, listed, direct, starts, chunk, low, at_low, high, at_high, out, wanted, BLOCK, SPLITS
        )  # fmt: skip
    if SENT is not None:
        # what is proposed was written by all threads
        tl.debug_barrier()
        propose(scores, out, SENT + row * sent_stride, wanted, rank, ranks, interleave, BLOCK // 4)
