"""Kernels that select the largest scores of each row: exact, whatever the scores are.

Scores become keys: int32 of the same order, in which -0 is 0, -inf is the lowest finite number, and ABSENT is what can
not be selected. Counting how many keys reach a probe narrows the interval that holds the K-th largest key.

A row that does not fit into registers is folded first: of all entries whose numbers are equal modulo BLOCK the largest
score is taken, and the K-th largest of those is a lower bound of the K-th largest score. Few entries are above it, and
they are listed in ascending order, together with the first K that are equal to it. If fewer than K are above, the bound
is the K-th largest score itself. If the list is still too long, it is folded again. At most K groups of BLOCK have
a member above the bound, and BLOCK is at least 4 K, so each round leaves about a quarter of a list at most. Lists have
a fixed number of places, whatever the length of a row. If more is above a bound, a closer one is found by counting.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, launch_dependents_of_few, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_kernel

INFINITE = tl.constexpr(0x7F800000)
"""Key of infinity, and the largest of all."""
LOWEST = tl.constexpr(-0x7F7FFFFF)
"""Key of the lowest finite number."""
RUN = tl.constexpr(512)
"""Entries of a run of maxima, at least."""
ABSENT = tl.constexpr(-0x7F800000)
"""Key of an entry that can not be selected."""


@triton.jit
def count_of(LENS, row, most, unit):
    """Units of entries in what a row sees, at most `most`. The last may be seen in part. None if it is negative."""
    return (tl.minimum(tl.load(LENS + row), most * unit) + (unit - 1)) // unit


@triton.jit
def chunk_of(count, parts, least):
    """Entries of each part of a row: `parts` times as many are `count` or more. A multiple of `least`."""
    each = (count + parts - 1) // parts
    return tl.maximum((each + least - 1) // least, 1) * least


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
def score_of(key):
    """The score that has a key; NaN for a key above INFINITE."""
    return tl.where(key < 0, -0x80000000 - key, key).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(keys, low, at_low, high, at_high, wanted, slack, OF_SCORES: tl.constexpr = False):
    """(key, how many keys reach it, how many are above it): of the wanted-th largest key, if `wanted` keys reach `low`.

    It stops early: the key that comes back is one that `wanted` keys or up to `slack` more reach, and then the last
    number is only a lower bound. If at most wanted + slack reach `low`, it is `low`. high: above `low`, and `wanted`
    keys do not reach it. at_low, at_high: how many keys reach each. OF_SCORES: whether a probe is where the wanted key
    is if scores, not keys, are spread evenly. Of scores on both sides of zero that takes half of the steps.
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
        if OF_SCORES:
            lowest = score_of(low)
            # a NaN, if there are infinite scores, is a key too
            guess, _ = ordered(lowest + (score_of(high) - lowest) * share)
            first = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        else:
            guess = tl.minimum(tl.maximum((span.to(tl.float32) * share).to(tl.int64), 1), span - 1)
            first = (low + guess).to(tl.int32)
        second = (low + span // 2).to(tl.int32)
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
def closer_bound(scores, count, low, wanted, capacity, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """A key that at least `wanted` of a row's keys reach, and at most `capacity`; or else the wanted-th largest key.

    low: a key that `wanted` keys reach. The row is read once for each of up to 31 steps.
    """
    lane = tl.arange(0, TILE)
    high, reached = low * 0 + (INFINITE + 1), low * 0 + capacity + 1
    while (reached > capacity) & (high > low + 1):
        # half of the sum of both, which may not be an int32
        middle = (low & high) + ((low ^ high) >> 1)
        at_middle = low * 0
        for start in range(0, count, TILE):
            keys = keys_of(read(scores, start + lane, count, ALIGNED), start + lane < count)
            at_middle += tl.sum((keys >= middle).to(tl.int32), 0)
        enough = at_middle >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        reached = tl.where(enough, at_middle, reached)
    return low


@triton.jit
def listed_entries(LIST, at, listed, starts, places, SPLITS: tl.constexpr):
    """Entries at places `at` of the lists of all parts one after the other; 0 past the last.

    LIST: the list of each part, `places` apart. starts: [SPLITS] - place of the first of each part. If SPLITS is 1,
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
        place = part * places + at - start
    return tl.load(LIST + place, mask=at < listed, other=0)


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
def power_of(least, most, groups, alone, LANES: tl.constexpr):
    """Entries of a run: a power of two with which `most` entries have at most about `groups` maxima.

    At least `least`, and RUN for rows of more than `alone` entries; the maxima of shorter ones are not used.
    """
    run = least
    if most > alone:
        run = tl.maximum(run, RUN)
        while most * LANES > groups * run:
            run *= 2
    return run


@triton.jit
def run_of(LENS, row, rows, max_entries, unit, run, together, groups, alone, LANES: tl.constexpr):
    """Entries of a run of a row's maxima: `run`; or, if together is above 0, `power_of` it.

    together: rows whose scores were computed together, and whose runs are as long. groups: see `power_of`.
    """
    if together > 0:
        first = row // together * together
        most = count_of(LENS, first, max_entries, unit)
        for further in range(first + 1, tl.minimum(first + together, rows)):
            most = tl.maximum(most, count_of(LENS, further, max_entries, unit))
        run = power_of(run, most, groups, alone, LANES)
    return run


@triton.jit
def is_hinted(count, run, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Whether there are enough maxima of a row's groups to be folded. run: 0 if there are none at all."""
    return (run > 0) & ((count + run - 1) // tl.maximum(run, 1) * LANES >= BLOCK)


@triton.jit
def choose_long(
    scores, maxima, LIST, out, count, wanted, slack, run, least, parts, places, alone,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Select in a row of `count` entries, more than BLOCK. Arguments: see `choose_kernel`."""
    hinted = is_hinted(count, run, LANES, BLOCK) & (count > alone)
    head: tl.constexpr = 2 * SPLITS + 2 if SPLITS > 1 else 0
    LIST += head
    infinite = tl.full((), INFINITE + 1, tl.int32)
    capacity = parts * places
    part = tl.arange(0, SPLITS)
    one_list = tl.where(part > 0, 0x7FFFFFFF, 0)
    starts, above, listed = one_list, count * 0, count * 0
    bound = count * 0 + LOWEST
    again = count > 0
    if SPLITS > 1:  # noqa: SIM102 - one is a constant
        if count > alone:
            live = part * chunk_of(count, parts, least) < count
            larger = tl.load(LIST - head + part, mask=live, other=0)
            ties = tl.load(LIST - head + SPLITS + part, mask=live, other=0)
            bound = tl.load(LIST - head + 2 * SPLITS)
            above, tied = tl.sum(larger, 0), tl.sum(ties, 0)
            lists = larger + tl.minimum(ties, wanted)
            starts, listed = tl.cumsum(lists, 0) - lists, tl.sum(lists, 0)
            few = hinted & (above + tied < wanted) & (bound > LOWEST)
            again = few | (tl.max(lists, 0) > places)
    # a second time with the scores, if the maxima are not those of these scores, which costs time only; and once more
    # if the list is too short for these scores
    closer = count < 0
    for _ in range(3):
        if again:
            if closer:
                bound = closer_bound(scores, count, bound, wanted, capacity, TILE, ALIGNED)
            else:
                bound = first_bound(scores, maxima, count, run, hinted, wanted, slack, LANES, BLOCK, UNROLL, ALIGNED)
            above, tied = list_part(scores, count * 0, count, bound, wanted, LIST, capacity, TILE, ALIGNED)
            tl.debug_barrier()
            starts, listed = one_list, above + tl.minimum(tied, wanted)
            again = (listed > capacity) | (hinted & (above + tied < wanted) & (bound > LOWEST))
            closer = again & (not hinted)
            hinted = hinted & (count < 0)

    while listed > BLOCK:
        enough = above >= wanted
        if enough:
            bound += 1
            keys = tl.full([BLOCK], ABSENT, tl.int32)
            for start in range(0, listed, BLOCK):
                at = start + tl.arange(0, BLOCK)
                entries = listed_entries(LIST, at, listed, starts, places, SPLITS)
                x = tl.load(scores + entries, mask=at < listed, other=0.0)
                keys = tl.maximum(keys, keys_of(x, at < listed))
            bound = bound_of(keys, bound, wanted, slack)
        above, tied = above * 0, above * 0
        for start in range(0, listed, TILE):
            at = start + tl.arange(0, TILE)
            entries = listed_entries(LIST, at, listed, starts, places, SPLITS)
            keys = keys_of(tl.load(scores + entries, mask=at < listed, other=0.0), at < listed)
            # the list is written where it has been read
            tl.debug_barrier()
            above, tied = append(keys, entries, bound, above, tied, wanted, LIST, capacity)
        tl.debug_barrier()
        starts, listed = one_list, above + tl.minimum(tied, wanted)

    low, at_low, high, at_high = bound, listed, bound + 1, above
    if above >= wanted:
        low, at_low, high, at_high = bound + 1, above, infinite, count * 0
    at = tl.arange(0, BLOCK)
    entries = listed_entries(LIST, at, listed, starts, places, SPLITS)
    keys = keys_of(tl.load(scores + entries, mask=at < listed, other=0.0), at < listed)
    choose(keys, entries, at, low, at_low, high, at_high, out, wanted, BLOCK)


@triton.jit
def choose_short(scores, out, count, wanted, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Select in a row of `count` entries, at most BLOCK."""
    entries = tl.arange(0, BLOCK)
    keys = keys_of(read(scores, entries, count, ALIGNED), entries < count)
    reached = tl.sum((keys > ABSENT).to(tl.int32), 0)
    lowest, infinite = tl.full((), LOWEST, tl.int32), tl.full((), INFINITE + 1, tl.int32)
    choose(keys, entries, entries, lowest, reached, infinite, reached * 0, out, wanted, BLOCK)


@stable_kernel
def list_kernel(
    SCORES,  # [T, max_entries], rows `score_stride` apart
    MAXIMA,  # [T, runs * LANES]: the first `LANES` of the first `run` entries, and so on
    LENS,  # [T] int32
    LISTS,  # [T, list_stride] int32: counts above, counts tied, the bound; and from 2 * SPLITS + 2 on lists of parts
    score_stride: tl.int64, group_stride: tl.int64, list_stride: tl.int64,
    max_entries: tl.int32, unit: tl.int32, wanted: tl.int32, slack: tl.int32, run: tl.int32, least: tl.int32,
    together: tl.int32, groups: tl.int32, parts: tl.int32, places: tl.int32, alone: tl.int32,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T * parts,): list what may be selected among the entries of one part of a row.

    least: entries of a part, of which a part has a multiple; itself a multiple of TILE. places: of a part's list. More
    entries are counted, but not listed. alone: length of the longest rows without lists, at least BLOCK.
    """
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    wait_prior_grid(PDL)
    launch_dependents_of_few(tl.num_programs(0) // parts, 0, PDL)
    count = count_of(LENS, row, max_entries, unit)
    chunk = chunk_of(count, parts, least)
    begin = part * chunk
    if (count > alone) & (begin < count):
        scores = tl.multiple_of(SCORES + row * score_stride, ALIGNED)
        maxima = tl.multiple_of(MAXIMA + row * group_stride, ALIGNED)
        run = run_of(LENS, row, tl.num_programs(0) // parts, max_entries, unit, run, together, groups, alone, LANES)
        hinted = is_hinted(count, run, LANES, BLOCK)
        bound = first_bound(scores, maxima, count, run, hinted, wanted, slack, LANES, BLOCK, UNROLL, ALIGNED)
        head = LISTS + row * list_stride
        lists = head + (2 * SPLITS + 2)
        end = tl.minimum(begin + chunk, count)
        above, tied = list_part(scores, begin, end, bound, wanted, lists + part * places, places, TILE, ALIGNED)
        tl.store(head + part, above)
        tl.store(head + SPLITS + part, tied)
        # every part finds the same
        tl.store(head + 2 * SPLITS, bound, mask=part == 0)
    launch_dependents(PDL)


@stable_kernel
def choose_kernel(
    SCORES,  # [T, max_entries], rows `score_stride` apart
    MAXIMA,  # [T, runs * LANES]: the first `LANES` of the first `run` entries, and so on
    LENS,  # [T] int32
    LISTS,  # [T, list_stride] int32: of `list_kernel` if SPLITS is above 1; otherwise a list of each row
    OUT,  # [T, wanted] int32
    SENT,  # [T, wanted] fp32: scores of what is selected, -inf for none; or None
    BLOCKS,  # [T, blocks] int32: numbers of the blocks that a row consists of; or None: of all, in their order
    score_stride: tl.int64, group_stride: tl.int64, list_stride: tl.int64, out_stride: tl.int64, sent_stride: tl.int64,
    block_stride: tl.int64, max_entries: tl.int32, unit: tl.int32, wanted: tl.int32, slack: tl.int32, run: tl.int32,
    least: tl.int32, together: tl.int32, groups: tl.int32, parts: tl.int32, places: tl.int32, alone: tl.int32,
    size: tl.int32, rank: tl.int32, ranks: tl.int32, interleave: tl.int32,
    LANES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, SPLITS: tl.constexpr,
    LONG: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T,): select in one row. LONG: whether a row may have more than BLOCK entries.

    SPLITS: parts of a row that were listed before, at most, if it has more than `alone` entries; 1 if nothing was.
    rank, ranks, interleave: with SENT, whose entries these are; their numbers in whole sequences are written to OUT.
    size: entries of each of BLOCKS.
    """
    row = tl.program_id(0).to(tl.int64)
    scores = tl.multiple_of(SCORES + row * score_stride, ALIGNED)
    out = OUT + row * out_stride
    wait_prior_grid(PDL)
    launch_dependents_of_few(tl.num_programs(0), 0, PDL)
    count = count_of(LENS, row, max_entries, unit)
    if LONG:
        if count <= BLOCK:
            choose_short(scores, out, count, wanted, BLOCK, ALIGNED)
        else:
            run = run_of(LENS, row, tl.num_programs(0), max_entries, unit, run, together, groups, alone, LANES)
            maxima = tl.multiple_of(MAXIMA + row * group_stride, ALIGNED)
            choose_long(
                scores, maxima, LISTS + row * list_stride, out, count, wanted, slack, run, least, parts, places,
                alone, LANES, BLOCK, TILE, UNROLL, SPLITS, ALIGNED,
            )  # fmt: skip
    else:
        choose_short(scores, out, count, wanted, BLOCK, ALIGNED)
    if SENT is not None:
        # what is proposed was written by all threads
        tl.debug_barrier()
        propose(scores, out, SENT + row * sent_stride, wanted, rank, ranks, interleave, BLOCK // 4)
    if BLOCKS is not None:
        # as above
        tl.debug_barrier()
        column = tl.arange(0, BLOCK // 4)
        at = tl.load(out + column, mask=column < wanted, other=-1)
        block = tl.load(BLOCKS + row * block_stride + at // size, mask=at >= 0, other=0)
        tl.store(out + column, block * size + at % size, mask=at >= 0)
    launch_dependents(PDL)
