"""Kernels that score one token's entries and select the largest scores by groups. Exact, whatever the scores are.

A group is some entries that follow each other, and has the largest of their scores. The K groups that come first in the
rule of selection - the larger maximum, of equal ones the lower number - have all K entries that are selected. So a row
is selected in two steps of fixed size: groups by their maxima, then entries of the chosen groups. Both
numbers of what is chosen from fit into the registers of a program.

Scores are compared as numbers: a NaN and what is absent become -inf first, and -inf the lowest finite number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, launch_dependents_of_few, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.indexer.forms import KeyNumbers, ScoreForm
from dsv4attn.backends._triton.layer.indexer.kernels import load_rows, scores_of_tile, uniform
from dsv4attn.backends._triton.layer.selection.kernels import LOWEST, choose_long, count_of, narrowed, ordered, score_of

MOST = tl.constexpr(1024)
"""Entries that can be selected in a row."""
EACH = tl.constexpr(8)
"""Entries of a group whose maximum comes with the scores; twice as many in the longest rows."""
FEW = tl.constexpr(2048)
"""Numbers that are so few that a step of a search takes longer to guess than to count: one guess a step, not two."""
SUB = tl.constexpr(4)
"""Scores that follow each other, of whose largest a first bound is found."""
HEADS, DIM = tl.constexpr(64), tl.constexpr(128)
"""Heads and dims of a query."""
WIDE = tl.constexpr(16)
"""Bytes that divide the address of a row of a query, and of an index key."""
LOWEST_SCORE = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite number, for which -inf counts."""


@triton.jit
def known_of(x, live):
    """Scores as they are compared: -inf where they are NaN or not live."""
    # which of a NaN and a number is the larger one differs from device to device
    return tl.where(live & (x == x), tl.maximum(x, LOWEST_SCORE), float("-inf"))  # noqa: PLR0124 - NaN is not


@triton.jit
def log2_of(x, ASM: tl.constexpr):
    """The binary logarithm of x, about."""
    if ASM:
        x = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        x = tl.log2(x)
    return x


@triton.jit
def probe_at(low, high, most, fewest, target, ASM: tl.constexpr):
    """A key between two keys that `most` and `fewest` scores reach, for `target` scores.

    The logarithm of counts is taken to fall evenly from one to the other.
    """
    lowest, of_most = score_of(low), log2_of(most, ASM)
    share = (of_most - log2_of(target, ASM)) / (of_most - log2_of(fewest, ASM))
    # a NaN, if there are infinite scores or equal counts, is a key too
    guess, _ = ordered(lowest + (score_of(high) - lowest) * share)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def kth_score(x, low, at_low, high, at_high, wanted, slack, TWICE: tl.constexpr, ASM: tl.constexpr):
    """(key, how many reach it, a higher key, how many reach that): of the wanted-th largest of scores as compared.

    low: a key that at_low scores reach; if these are no more than wanted + slack, it is the result. high: a key that
    at_high scores reach, fewer than wanted. It stops early: at a key that up to `slack` more reach. If more do, the
    higher key is the next one, and all these scores are equal. TWICE: whether every second step has two guesses.
    """
    step = 0
    while (at_low > wanted + slack) & (high > low + 1):
        if step % 8 == 7:
            # to the nearest scores: between equal ones a step would be needed for each bit
            reaches_high = x >= score_of(high)
            low, _ = ordered(tl.min(tl.where(x >= score_of(low), x, float("inf")), 0))
            high, _ = ordered(tl.max(tl.where(reaches_high, float("-inf"), x), 0))
            high += 1
        step += 1
        most, fewest = at_low.to(tl.float32), tl.maximum(at_high.to(tl.float32), 0.5)
        target = (wanted + slack // 2).to(tl.float32)
        # half of the sum of both, which may not be an int32
        second = (low & high) + ((low ^ high) >> 1)
        if TWICE:
            # every second step has a guess on either side, about as far from the wanted one as that is wrong by chance
            apart = tl.maximum(0.6 * tl.sqrt((most - target) * (target - fewest) / (most - fewest)), 0.3)
            unbounded = at_high == 0  # little is known above the wanted one
            further = tl.where(unbounded, target / 4, target - apart)
            apart = tl.where(unbounded | (step % 2 == 0), 0.0, apart)
            first = probe_at(low, high, most, fewest, target + apart, ASM)
            second = tl.where(step % 2 == 1, probe_at(low, high, most, fewest, further, ASM), second)
        else:
            first = probe_at(low, high, most, fewest, target, ASM)
        reached = reach_both(x, first, second)
        low, at_low, high, at_high = narrowed(low, at_low, high, at_high, first, reached & 0xFFFF, wanted)
        low, at_low, high, at_high = narrowed(low, at_low, high, at_high, second, reached >> 16, wanted)
    return low, at_low, high, at_high


@triton.jit
def reach_both(x, first, second):
    """How many scores reach a key, and in the upper half how many reach another."""
    return tl.sum((x >= score_of(first)).to(tl.int32) + ((x >= score_of(second)).to(tl.int32) << 16), 0)


@triton.jit
def put(source, at, numbers, ASM: tl.constexpr):
    """Store numbers at places `at` [N] from `source` on, those with places below 0 nowhere.

    ASM: for NVIDIA. The compiler's own store would first bring neighbours into one thread, through shared memory.
    """
    if ASM:
        text: tl.constexpr = """{
            .reg .pred p; .reg .b64 a;
            setp.ge.s32 p, $2, 0;
            mad.wide.s32 a, $2, 4, $1;
            @p st.global.b32 [a], $3;
            mov.u32 $0, 0;
        }"""
        tl.inline_asm_elementwise(
            text, "=r,l,r,r", [source.to(tl.int64), at, numbers], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        tl.store(source + at, numbers, mask=at >= 0)


@triton.jit
def entries_of(LIST, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """[SIZE / GROUP, GROUP] entries of groups, which are listed; all of them, if LIST is None."""
    group = tl.arange(0, SIZE // GROUP)
    if LIST is not None:
        group = tl.load(LIST + group)
    return group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def fewer_than(low, at_low, high, at_high, wanted, ASM: tl.constexpr):
    """A key that about four fifths of `wanted` maxima of groups reach, and so maybe not quite `wanted` scores."""
    most, fewest, target = at_low.to(tl.float32), tl.maximum(at_high.to(tl.float32), 0.5), 0.8 * wanted.to(tl.float32)
    return tl.where(fewest < target, probe_at(low, high, most, fewest, target, ASM), high)


@triton.jit
def write_chosen(
    x, LIST, place, low, guess, wanted, slack, SIZE: tl.constexpr, GROUP: tl.constexpr,
    BOUNDED: tl.constexpr, TWICE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write the numbers of the `wanted` largest scores in their order; (key of the last, how many there are, a guess).

    Of equal scores the first are chosen. Up to `slack` more may be. low: a key; what does not reach it is not chosen.
    BOUNDED: whether `low` is a good bound, and `guess` a key that somewhat fewer than `wanted` may reach. The guess
    that comes back is for all scores, if x has the largest of each group of them. LIST: numbers of the groups, of GROUP
    scores each, that x [SIZE] has; None: x has all, and the numbers are 0 and on.
    """
    largest = x if BOUNDED else tl.max(tl.reshape(x, (SIZE // SUB, SUB)), 1)
    high, _ = ordered(tl.max(largest, 0))
    high += 1
    if not BOUNDED:
        # as many groups, so at least as many scores. NaN reach no key, so groups are counted
        at_low = tl.sum((largest >= score_of(low)).to(tl.int32), 0)
        least, _ = ordered(tl.min(tl.where(largest >= score_of(low), largest, float("inf")), 0))
        low = tl.where(at_low >= wanted, least, low)
        low, at_low, upper, at_upper = kth_score(
            largest, low, at_low, high, at_low * 0, wanted, wanted // 8, TWICE, ASM
        )
        guess = fewer_than(low, at_low, upper, at_upper, wanted, ASM)
    reached = reach_both(x, low, guess)
    low, reached, high, above = narrowed(low, reached & 0xFFFF, high, reached * 0, guess, reached >> 16, wanted)
    key, reached, high, above = kth_score(x, low, reached, high, above, wanted, slack, TWICE, ASM)
    bound = score_of(key)
    chosen = tl.minimum(reached, wanted + slack)
    if reached > chosen:
        # of equal scores those after the first are left out
        chosen = wanted
        tied = tl.cumsum((x == bound).to(tl.int32), 0)
        x = tl.where((x == bound) & (tied > wanted - above), float("-inf"), x)
    reaches = x >= bound
    at = tl.where(reaches, tl.cumsum(reaches.to(tl.int32), 0) - 1, -1)
    # not held before
    numbers = tl.arange(0, SIZE) if LIST is None else tl.reshape(entries_of(LIST, SIZE, GROUP), (SIZE,))
    put(place, at, numbers, ASM)
    return key, chosen, fewer_than(key, reached, high, above, wanted, ASM)


@triton.jit
def store_maxima(scores, maxima, count, GROUP: tl.constexpr, READ: tl.constexpr):
    """Write the largest score of each group among the first `count` entries of a row."""
    lane = tl.arange(0, READ // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    for start in range(0, count, READ):
        entry = start + lane
        x = tl.load(scores + entry, mask=entry // 4 < (count + 3) // 4, other=0.0)
        tl.store(maxima + start // GROUP + tl.arange(0, READ // GROUP), tl.max(known_of(x, entry < count), 1))


@triton.jit
def select_row(
    scores, MAXIMA, LIST, out, count, max_entries, wanted, slack,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    READ: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Select in a row of which the first `count` entries are seen. See `choose_groups_kernel`."""
    TWICE: tl.constexpr = GROUPS == 0 and SIZE > FEW
    low = tl.full((), LOWEST, tl.int32)
    guess = low
    if GROUPS > 0:
        place = tl.arange(0, SIZE // GROUP)
        if count > SIZE:
            if READ > 0:
                store_maxima(scores, MAXIMA, count, GROUP, READ)
                tl.debug_barrier()
            number = tl.arange(0, GROUPS)
            groups = (count + (GROUP - 1)) // GROUP
            largest = tl.load(MAXIMA + number, mask=number < groups, other=float("-inf"))
            low, listed, guess = write_chosen(
                largest, None, LIST, low, guess, wanted, slack, GROUPS, 1, False, TWICE, ASM
            )  # fmt: skip
            # past the last, a group that no row has
            tl.store(LIST + place, max_entries // GROUP + 1, mask=place >= listed)
        else:
            tl.store(LIST + place, place)
        # groups were written by all threads
        tl.debug_barrier()
    entry = entries_of(LIST if GROUPS > 0 else None, SIZE, GROUP)
    # a mask that is constant in each group of four lets four numbers be one access
    x = tl.load(scores + entry, mask=entry // 4 < (count + 3) // 4, other=0.0)
    x = tl.reshape(known_of(x, entry < count), (SIZE,))
    # the last chosen group's key is a good bound
    _, chosen, _ = write_chosen(
        x, LIST if GROUPS > 0 else None, out, low, guess, wanted, wanted * 0, SIZE, GROUP, GROUPS > 0, TWICE, ASM
    )  # fmt: skip
    if chosen < wanted:
        column = tl.arange(0, MOST)
        tl.store(out + column, -1, mask=(column >= chosen) & (column < wanted))


@stable_kernel
def choose_groups_kernel(
    SCORES,  # [T, max_entries], rows `score_stride` apart, at multiples of 16 bytes
    MAXIMA,  # [T, groups]: the largest score of each group, or memory for it; not used if GROUPS is 0
    LENS,  # [T] int32
    LISTS,  # [T, list_stride] int32, memory for numbers of groups, or lists of `list_kernel`; anything if GROUPS is 0
    OUT,  # [T, wanted] int32
    score_stride: tl.int64, group_stride: tl.int64, list_stride: tl.int64, out_stride: tl.int64,
    max_entries: tl.int32, wanted: tl.int32, slack: tl.int32, least: tl.int32, parts: tl.int32,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, READ: tl.constexpr,
    SHORT: tl.constexpr, DIRECT: tl.constexpr, MIDDLE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, UNROLL: tl.constexpr, SPLITS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T,): select in one row.

    SIZE: entries in registers. GROUPS: groups in registers, of GROUP entries each; 0 if no row has more than
    SIZE entries. slack: how many groups more than `wanted` may be chosen; both together at most SIZE / GROUP.
    READ: entries that are read together to find the maxima of groups; 0 if these are known.
    SHORT, DIRECT, MIDDLE: sizes for rows that are shorter than the longest, 0 where there are none: up to SHORT
    entries, up to DIRECT, and up to MIDDLE groups of EACH. BLOCK: if above 0, longer rows were listed in parts, and are
    selected as by `choose_kernel`, with its BLOCK, TILE, UNROLL and SPLITS.
    Up to three entries past those that a row sees are read.
    """
    row = tl.program_id(0).to(tl.int64)
    scores = tl.multiple_of(SCORES + row * score_stride, 16)
    maxima, lists, out = MAXIMA + row * group_stride, LISTS + row * list_stride, OUT + row * out_stride
    wait_prior_grid(PDL)
    launch_dependents_of_few(tl.num_programs(0), 0, PDL)
    count = tl.maximum(count_of(LENS, row, max_entries, 1), 0)
    last: tl.constexpr = MIDDLE * EACH if MIDDLE > 0 else DIRECT if DIRECT > 0 else SHORT if SHORT > 0 else -1
    if SHORT > 0:  # noqa: SIM102 - one is a constant
        if count <= SHORT:
            select_row(scores, maxima, lists, out, count, max_entries, wanted, slack, SHORT, 0, EACH, 0, ASM)
    if DIRECT > 0:  # noqa: SIM102 - as above
        if (count > SHORT) & (count <= DIRECT):
            select_row(scores, maxima, lists, out, count, max_entries, wanted, slack, DIRECT, 0, EACH, 0, ASM)
    if MIDDLE > 0:  # noqa: SIM102 - as above
        if (count > DIRECT) & (count <= MIDDLE * EACH):
            select_row(
                scores, maxima, lists, out, count, max_entries, wanted, DIRECT // EACH - wanted, DIRECT, MIDDLE, EACH,
                READ, ASM,
            )  # fmt: skip
    if count > last:
        if BLOCK > 0:
            choose_long(
                scores, maxima, lists, out, count, wanted, slack, GROUP, least, parts, BLOCK, last, 1, BLOCK, TILE,
                UNROLL, SPLITS, 16,
            )  # fmt: skip
        else:
            select_row(
                scores, maxima, lists, out, count, max_entries, wanted, slack, SIZE, GROUPS, GROUP, READ, ASM
            )  # fmt: skip
    launch_dependents(PDL)


@stable_kernel
def score_groups_kernel(
    Q,  # [T, HEADS, DIM] codes
    W,  # [T, HEADS] fp32
    KEYS,  # pages, `page_stride` bytes apart
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    OUT,  # [T, limit] fp32
    MAXIMA,  # [T, groups] fp32, or None
    tokens: tl.int32, requests: tl.int32, limit: tl.int32, splits: tl.int32, coarse: tl.int32, q_stride: tl.int64,
    q_head_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64, columns: tl.int32, num_blocks: tl.int32,
    page_size: tl.int32, factor: tl.int32, log: tl.int32, page_stride: tl.int64, scale_offset: tl.int64,
    out_stride: tl.int64,
    group_stride: tl.int64, KIND: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DT: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (splits * tokens,): one token against one of `splits` parts of what it sees. Neighbours share entries.

    Pages have whole runs of 64 records, DIM bytes apart, and fp32 scales after them. Scores of entries that a token
    sees are written, NaN without a block; and the largest of each EACH entries, in rows of more than `coarse` of each
    2 * EACH, of those that are seen and no NaN, -inf if none is.
    """
    wait_prior_grid(PDL)
    token = tl.program_id(0) % tokens
    count = count_of(LENS, token, limit, 1)
    launch_dependents_of_few(tokens, count, PDL)
    span = tl.cdiv(tl.cdiv(tl.maximum(count, 0), BLOCK), splits) * BLOCK
    begin = tl.program_id(0) // tokens * span
    head = tl.arange(0, HEADS)
    at = token.to(tl.int64)
    query = Q + at * q_stride + head * q_head_stride
    FORM: tl.constexpr = ScoreForm(KIND, False, HEADS, HEADS, DIM, 1, BLOCK, DT, WIDE, WIDE, DIM)
    pages = KeyNumbers(num_blocks, page_size, factor, log, page_stride, 0, scale_offset, 4)
    # loaded before it is known whether they are needed
    q = load_rows(query, query, head < HEADS, WIDE, 0, FORM)
    w = tl.load(W + at * w_stride + head)
    request = tl.load(REQUESTS + token)
    # of a request that does not exist, no entry has a block
    exists = (request >= 0) & (request < requests)
    table = TABLE + tl.where(exists, request, 0) * table_stride
    columns = tl.where(exists, columns, 0)
    end = tl.minimum(begin + span, count)
    scores, groups = OUT + at * out_stride, MAXIMA
    if MAXIMA is not None:
        groups = MAXIMA + at * group_stride
    lane = tl.arange(0, BLOCK)
    tiles = uniform(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), ASM)
    for tile in tl.range(tiles, num_stages=STAGES):
        start = begin + tile * BLOCK
        entry = start + lane
        score, _ = scores_of_tile((q, q, w), KEYS, None, table, columns, pages, start, entry, lane, limit, FORM)
        score = tl.reshape(score, (BLOCK,))
        tl.store(scores + entry, score, mask=entry < count)
        if MAXIMA is not None:
            known = known_of(score, entry < count)
            if count > coarse:
                of_two = tl.max(tl.reshape(known, (BLOCK // (2 * EACH), 2 * EACH)), 1)
                tl.store(groups + start // (2 * EACH) + tl.arange(0, BLOCK // (2 * EACH)), of_two)
            else:
                largest = tl.max(tl.reshape(known, (BLOCK // EACH, EACH)), 1)
                tl.store(groups + start // EACH + tl.arange(0, BLOCK // EACH), largest)
    launch_dependents(PDL)
