"""The kernel of the indexer's scores: keys on pages, or gathered, against the queries of a few tokens at a time.

A tile is some keys by all heads of a few tokens: one matrix product, a rectifier, a sum over the heads of each token.
Keys are the rows of the product, so that the sum stays within a quarter of a warp.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.attention.keys import widen
from dsv4attn.backends._triton.cache.forms import TableNumbers
from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, launch_dependents_of_few, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.indexer.forms import KeyNumbers, QueryStrides
from dsv4attn.backends._triton.layer.selection.kernels import power_of
from dsv4attn.backends._triton.numerics import scale_of_byte
from dsv4attn.backends._triton.sizes import next_power_of_2

NATIVE = tl.constexpr(0)
"""e4m3 codes, multiplied by a matrix unit that takes them."""
CODES = tl.constexpr(1)
"""e4m3 codes, decoded to fp16."""
NIBBLES = tl.constexpr(2)
"""e2m1 codes, two to a byte, a scale byte for 32 of them."""
ROWS = tl.constexpr(3)
"""bf16 or fp32 values."""
LOWEST_SCORE = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite number."""


@triton.jit
def value_of_code(code, FNUZ: tl.constexpr, DT: tl.constexpr):
    """e4m3 codes, uint8, as exact values in DT, NaN where a code is.

    The seven low bits, put where fp16 has exponent and mantissa, are the value times 2^-8 (2^-7 in FNUZ), subnormal
    codes included.
    """
    bits = code.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    half = tl.where(((bits & 0xFF) == 0x80) if FNUZ else ((bits & 0x7F) == 0x7F), 0x7E00, half)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(DT) * (128.0 if FNUZ else 256.0)


@triton.jit
def value_of_nibble(code, byte, DT: tl.constexpr):
    """e2m1 codes, int32 of four bits, under E8M0 scale bytes as exact values in DT; NaN under byte 255.

    The three low bits, put where fp32 has exponent and mantissa, are the value times 2^-126.
    """
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    unit = tl.full((), 0x7E800000, tl.int32).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * unit * scale_of_byte(byte)).to(DT)


@triton.jit
def load_rows(row, scale, live, ALIGNED: tl.constexpr, HIGH: tl.constexpr, FORM: tl.constexpr):
    """Rows [N, D], of keys or queries, as they are multiplied. D is a power of two. Rows that are not `live` are zeros.

    row: [N] pointers. scale: [N] pointers to the scale bytes of e2m1 codes. HIGH: which half of e2m1's bytes. FORM: a
    `ScoreForm`.
    """
    bytes_or_values: tl.constexpr = FORM.dim // 2 if FORM.kind == NIBBLES else FORM.dim
    column = tl.arange(0, next_power_of_2(bytes_or_values))
    mask = live[:, None]
    if next_power_of_2(bytes_or_values) != bytes_or_values:
        mask = mask & (column < bytes_or_values)[None, :]
    if FORM.kind == NATIVE:
        # loads of codes as numbers are pipelined
        row = row.to(tl.pointer_type(tl.float8e4b8 if FORM.fnuz else tl.float8e4nv))
    source = tl.multiple_of(row, ALIGNED)[:, None] + column[None, :]
    raw = tl.load(source, mask=mask, other=0.0) if FORM.kind == NATIVE else tl.load(source, mask=mask, other=0)
    if FORM.kind == NATIVE:
        values = raw
    elif FORM.kind == CODES:
        values = value_of_code(raw, FORM.fnuz, FORM.dtype)
    elif FORM.kind == NIBBLES:
        byte = tl.load(scale[:, None] + (column // 16)[None, :], mask=mask, other=127).to(tl.int32)
        values = value_of_nibble(raw.to(tl.int32) >> (4 * HIGH), byte, FORM.dtype)
    else:
        values = widen(raw, FORM.dtype)
    return values


@triton.jit
def load_query(Q, Q_SCALES, W, strides, token, head, live, FORM: tl.constexpr):
    """(values [N, D], those of the upper halves of e2m1's bytes, weights [N]) of heads of tokens; 0 where not `live`.

    strides: `QueryStrides`. token: one, or [N].
    """
    Q_ALIGNED: tl.constexpr = FORM.q_aligned
    at = token.to(tl.int64)
    query = Q + at * strides.token + head * strides.head
    scale = query
    if FORM.kind == NIBBLES:
        scale = Q_SCALES + at * strides.scale + head * (FORM.dim // 32)
    q = load_rows(query, scale, live, Q_ALIGNED, 0, FORM)
    q_high = q
    if FORM.kind == NIBBLES:
        q_high = load_rows(query, scale, live, Q_ALIGNED, 1, FORM)
    return q, q_high, tl.load(W + at * strides.weight + head, mask=live, other=0.0)


@triton.jit
def product(k, q, low):
    """Keys k [N, D] times q [M, D] transposed, [N, M] fp32, plus `low` if it is not None."""
    return tl.dot(k, tl.trans(q), low, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def page_of(entry, pages):
    """Number of the page of entries, int32, in a request's table, and of the entry in its page. pages: `KeyNumbers`."""
    twice = entry.to(tl.uint32, bitcast=True) << 1
    page = (tl.umulhi(twice, pages.factor.to(tl.uint32, bitcast=True)) >> pages.log.to(tl.uint32)).to(tl.int32)
    return page, entry - page * pages.page_size


@triton.jit
def place_on_pages(entry, ok, table, columns, pages):
    """Offsets of the records, and of the scales, of a request's entries [N], and which of them have a block."""
    column, of = page_of(entry, pages)
    block = tl.load(table + column, mask=ok & (column < columns), other=-1)
    ok = ok & (block >= 0) & (block < pages.num_blocks)
    page = tl.where(ok, block, 0).to(tl.int64) * pages.page_stride
    of = tl.where(ok, of, 0).to(tl.int64)
    return page + of * pages.data_stride, page + pages.scale_offset + of * pages.scale_stride, ok


@triton.jit
def block_of(start, table, columns, pages, STRIDE: tl.constexpr):
    """Offsets of the page and of the record of an entry, a scalar, its number in the page, and if it has a block."""
    column, of = page_of(start, pages)
    # a scalar cannot be masked where kernels are interpreted
    block = tl.load(table + tl.maximum(tl.minimum(column, columns - 1), 0))
    ok = (block >= 0) & (block < pages.num_blocks) & (column < columns)
    page = tl.where(ok, block, 0).to(tl.int64) * pages.page_stride
    return page, page + of * STRIDE, of, ok.to(tl.int32)


@triton.jit
def place_in_page(start, table, columns, pages, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """`place_on_pages` of BLOCK entries from `start` on, on pages that hold whole runs of 64 of them.

    Records are STRIDE apart. `start` is a multiple of 64.
    """
    row = tl.arange(0, BLOCK)
    page, data, of, ok = block_of(start, table, columns, pages, STRIDE)
    if BLOCK <= 64:
        scale = page + pages.scale_offset + of * pages.scale_stride
        return data + row * STRIDE, scale + row * pages.scale_stride, row * 0 + ok > 0
    behind, data_behind, of_behind, ok_behind = block_of(start + 64, table, columns, pages, STRIDE)
    # which half a row is in is known where code is generated
    near = row < 64
    data = tl.where(near, data, data_behind - 64 * STRIDE) + row * STRIDE
    scale = tl.where(near, page + of * pages.scale_stride, behind + (of_behind - 64) * pages.scale_stride)
    return data, scale + pages.scale_offset + row * pages.scale_stride, tl.where(near, ok, ok_behind) > 0


@triton.jit
def uniform(x, ASM: tl.constexpr):
    """A scalar that is equal in all threads. NVIDIA's assembler keeps the result in a uniform register."""
    if ASM:
        x = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return x


@triton.jit
def fill_rows(OUT, row, mine, begin, end, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Fill columns begin .. end - 1 of the rows that are `mine` with -inf."""
    for start in range(begin, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        place = OUT + (row[None, :] + entry[:, None])
        nothing = tl.full([BLOCK, TOKENS], float("-inf"), tl.float32)
        tl.store(place, nothing, mask=mine[None, :] & (entry < end)[:, None])


@triton.jit
def scores_of_tile(query, KEYS, SCALES, table, columns, pages, start, entry, lane, limit, FORM: tl.constexpr):
    """Scores [BLOCK, TOKENS] of the entries from `start` on, and [BLOCK] which of them have a block, else NaN.

    query: of `load_query`. table: of a request, which has `columns`; None for gathered keys.
    """
    if table is None:
        ok = entry < limit
        step = FORM.stride if FORM.stride > 0 else pages.data_stride
        data = start.to(tl.int64) * step + lane * step
        scale = start.to(tl.int64) * pages.scale_stride + lane * pages.scale_stride
    elif FORM.stride > 0:
        data, scale, ok = place_in_page(start, table, columns, pages, FORM.block, FORM.stride)
    else:
        data, scale, ok = place_on_pages(entry, entry < limit, table, columns, pages)
    return scores_at(query, KEYS, SCALES, data, scale, ok, FORM), ok


@triton.jit
def scores_at(query, KEYS, SCALES, data, scale, ok, FORM: tl.constexpr):
    """Scores [BLOCK, TOKENS] of records at offsets `data`, with scales at offsets `scale`; NaN where not `ok`."""
    ALIGNED: tl.constexpr = FORM.aligned
    q, q_high, w = query
    k = load_rows(KEYS + data, KEYS + scale, ok, ALIGNED, 0, FORM)
    acc = product(k, q, None)
    if FORM.kind == NIBBLES:
        k = load_rows(KEYS + data, KEYS + scale, ok, ALIGNED, 1, FORM)
        acc = product(k, q_high, acc)
    # a NaN must stay
    acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
    # [BLOCK, TOKENS]
    score = tl.sum(tl.reshape(acc, (FORM.block, FORM.tokens, FORM.padded)), 2)
    if FORM.kind <= CODES:
        if SCALES is not None:
            unit = tl.load(SCALES + scale, mask=ok, other=float("nan"))
        else:
            unit = tl.load((KEYS + scale).to(tl.pointer_type(tl.float32)), mask=ok, other=float("nan"))
        score *= unit[:, None]
    else:
        score = tl.where(ok[:, None], score, float("nan"))
    return score


@triton.jit
def score_keys(
    query, mine, lens, first, row, group, KEYS, SCALES, table, columns, pages, OUT, MAXIMA, begin, end, stop, run,
    limit, FORM: tl.constexpr,
):  # fmt: skip
    """Score the entries begin .. end - 1 for the tokens that are `mine`, and store those that each sees.

    lens, first, row: [TOKENS] entries that a token sees, first of them or None, and its row in OUT. group: [TOKENS] of
    the row in MAXIMA. stop: of the entries to fill. Others: as of `scores_of_tile`.
    """
    ASM: tl.constexpr = FORM.assembly
    BLOCK: tl.constexpr = FORM.block
    TOKENS: tl.constexpr = FORM.tokens
    lane = tl.arange(0, BLOCK)
    if FORM.fill:
        # tiles that no token sees are not computed
        if first is not None:
            from_here = tl.min(tl.where(mine, tl.maximum(first, begin), end), 0)
            skipped = uniform((tl.maximum(from_here, begin) - begin) // BLOCK, ASM)
            fill_rows(OUT, row, mine, begin, tl.minimum(begin + skipped * BLOCK, stop), BLOCK, TOKENS)
            begin += skipped * BLOCK
        tiles = uniform(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), ASM)
        fill_rows(OUT, row, mine, begin + tiles * BLOCK, stop, BLOCK, TOKENS)
    best = tl.full([BLOCK, TOKENS], float("-inf"), tl.float32)
    tiles = uniform(tl.cdiv(tl.maximum(end - begin, 0), BLOCK), ASM)
    number = begin // (BLOCK * run)
    left = run
    for tile in tl.range(tiles, num_stages=FORM.stages):
        start = begin + tile * BLOCK
        entry = start + lane
        score, ok = scores_of_tile(query, KEYS, SCALES, table, columns, pages, start, entry, lane, limit, FORM)
        sees = mine[None, :] & (entry[:, None] < lens[None, :])
        if first is not None:
            sees = sees & (entry[:, None] >= first[None, :])
        if FORM.fill:
            score = tl.where(ok[:, None] & sees, score, float("-inf"))
            tl.store(OUT + (row[None, :] + entry[:, None]), score, mask=mine[None, :] & (entry < stop)[:, None])
        elif OUT is not None:
            tl.store(OUT + (row[None, :] + entry[:, None]), score, mask=sees)
        if MAXIMA is not None:
            if FORM.group > 0:
                # devices differ in the maximum of a number and NaN; and only what has no score is -inf
                score = tl.where(score == score, tl.maximum(score, LOWEST_SCORE), float("-inf"))  # noqa: PLR0124
            best = tl.maximum(best, tl.where(sees, score, float("-inf")))
            left -= 1
            if left == 0:
                store_maxima(MAXIMA, group, number, best, mine, lens, FORM)
                best = tl.full([BLOCK, TOKENS], float("-inf"), tl.float32)
                number += 1
                left = run
    if MAXIMA is not None:  # noqa: SIM102 - one is a constant
        if left < run:
            store_maxima(MAXIMA, group, number, best, mine, lens, FORM)


@triton.jit
def store_maxima(MAXIMA, group, number, best, mine, lens, FORM: tl.constexpr):
    """Store the largest scores [BLOCK, TOKENS] of the lanes of some tiles, FORM.lanes of them a token.

    If FORM.group is above 0, a lane is of entries that follow each other, as many with those of all tiles. It is stored
    as a finite number, as NaN if there is no score, and as infinity for the newest entry's group.
    """
    BLOCK: tl.constexpr = FORM.block
    LANES: tl.constexpr = FORM.lanes
    TOKENS: tl.constexpr = FORM.tokens
    GROUP: tl.constexpr = FORM.group
    lane = number * LANES + tl.arange(0, LANES)
    live = mine[None, :]
    if GROUP > 0:
        if LANES < BLOCK:
            best = tl.max(tl.reshape(best, (LANES, BLOCK // LANES, TOKENS)), 1)
        best = tl.where(best == float("-inf"), float("nan"), tl.minimum(best, -LOWEST_SCORE))
        best = tl.where(lane[:, None] == ((lens - 1) // GROUP)[None, :], float("inf"), best)
        live = live & (lane[:, None] * GROUP < lens[None, :])
    elif LANES < BLOCK:
        best = tl.max(tl.reshape(best, (BLOCK // LANES, LANES, TOKENS)), 0)
    tl.store(MAXIMA + (group[None, :] + lane[:, None]), best, mask=live)


@stable_kernel
def order_kernel(
    CANDIDATES,  # [n, num_candidates] int32: numbers of blocks, in any order; others are none
    LENS,  # [n] int32: entries that each token sees
    TABLE,  # [R, columns] int32
    REQUESTS,  # [n] int32 of each token
    OUT,  # [n, 2 * N] int32
    COUNTS,  # [n] int32
    candidate_stride: tl.int64, out_stride: tl.int64, num_candidates: tl.int32, max_entries: tl.int32,
    table: TableNumbers, num_blocks: tl.int32, page_size: tl.int32,
    SIZE: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): the candidates of a token that it sees, each once, ascending; and how many entries these blocks have.

    After N numbers of blocks: the number of each block's first record among those of all pages, -1 without a page. It
    is of use if pages have whole blocks. SIZE: entries of a block. N: a power of two, at least num_candidates.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, N)
    wait_prior_grid(PDL)
    launch_dependents_of_few(tl.num_programs(0), 0, PDL)
    seen = tl.minimum(tl.maximum(tl.load(LENS + row), 0), max_entries)
    block = tl.load(CANDIDATES + row * candidate_stride + column, mask=column < num_candidates, other=-1)
    none: tl.constexpr = 0x7FFFFFFF
    block = tl.where((block >= 0) & (block < tl.cdiv(seen, SIZE)), block, none)
    out = OUT + row * out_stride
    tl.store(out + column, block)
    tl.debug_barrier()
    before = tl.load(out + column - 1, mask=column > 0, other=-1)
    tl.debug_barrier()
    if tl.max((block < before).to(tl.int32), 0) > 0:
        block = tl.sort(block)
        tl.store(out + column, block)
        tl.debug_barrier()
        before = tl.load(out + column - 1, mask=column > 0, other=-1)
        tl.debug_barrier()
    fresh = (block != none) & (block != before)
    place = tl.cumsum(fresh.to(tl.int32), 0) - 1
    tl.store(out + place, block, mask=fresh)
    request = tl.load(REQUESTS + row)
    # of a request that does not exist, no entry has a page
    exists = (request >= 0) & (request < table.requests)
    page = tl.where(fresh, block, 0) * SIZE // page_size
    known = fresh & (page < tl.where(exists, table.columns, 0))
    number = tl.load(TABLE + tl.where(exists, request, 0) * table.stride + page, mask=known, other=-1)
    known = known & (number >= 0) & (number < num_blocks)
    first = number * page_size + tl.where(fresh, block, 0) * SIZE % page_size
    tl.store(out + N + place, tl.where(known, first, -1), mask=fresh)
    tl.store(COUNTS + row, tl.sum(fresh.to(tl.int32), 0) * SIZE)
    launch_dependents(PDL)


@stable_kernel
def score_blocks_kernel(
    Q,  # [T, heads, dim] codes or values
    Q_SCALES,  # [T, heads, dim / 32] uint8 of e2m1 codes, or None
    W,  # [T, heads] fp32
    KEYS,  # pages
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    BLOCKS,  # [T, 2 * N] int32 of `order_kernel`
    COUNTS,  # [T] int32 entries that these blocks have
    OUT,  # [T, counts] fp32
    tokens: tl.int32, limit: tl.int32, splits: tl.int32, strides: QueryStrides, table: TableNumbers, pages: KeyNumbers,
    block_stride: tl.int64, out_stride: tl.int64,
    FORM: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (splits * tokens,): scores of the entries of a token's blocks, in their order; NaN where none is seen.

    WHOLE: whether pages have whole blocks.
    """
    BLOCK: tl.constexpr = FORM.block
    wait_prior_grid(PDL)
    token = tl.program_id(0) % tokens
    count, seen = tl.load(COUNTS + token), tl.minimum(tl.load(LENS + token), limit)
    launch_dependents_of_few(tokens, seen, PDL)
    span = tl.cdiv(tl.cdiv(count, BLOCK), splits) * BLOCK
    begin = tl.program_id(0) // tokens * span
    if begin < count:
        head = tl.arange(0, FORM.padded)
        query = load_query(Q, Q_SCALES, W, strides, token, head, head < FORM.heads, FORM)
        request, at = tl.load(REQUESTS + token), token.to(tl.int64)
        # of a request that does not exist, no entry has a page
        exists = (request >= 0) & (request < table.requests)
        row = TABLE + tl.where(exists, request, 0) * table.stride
        columns = tl.where(exists, table.columns, 0)
        lane, out, blocks = tl.arange(0, BLOCK), OUT + at * out_stride, BLOCKS + at * block_stride
        tiles = uniform(tl.cdiv(tl.minimum(begin + span, count) - begin, BLOCK), FORM.assembly)
        if count >= seen:
            # all blocks, so places are entries
            for tile in tl.range(tiles, num_stages=FORM.stages):
                start = begin + tile * BLOCK
                entry = start + lane
                score, _ = scores_of_tile(query, KEYS, None, row, columns, pages, start, entry, lane, seen, FORM)
                score = tl.where(entry < seen, tl.reshape(score, (BLOCK,)), float("nan"))
                tl.store(out + entry, score, mask=entry < count)
        else:
            for tile in tl.range(tiles, num_stages=FORM.stages):
                place = begin + tile * BLOCK + lane
                live = place < count
                block = tl.load(blocks + place // SIZE, mask=live, other=0)
                entry = tl.where(live, block * SIZE + place % SIZE, seen)
                if WHOLE:
                    first = tl.load(blocks + N + place // SIZE, mask=live, other=-1)
                    ok = (first >= 0) & (entry < seen)
                    page, of = page_of(tl.where(ok, first, 0), pages)
                    page = page.to(tl.int64) * pages.page_stride
                    of = (of + place % SIZE).to(tl.int64)
                    data, scale = page + of * pages.data_stride, page + pages.scale_offset + of * pages.scale_stride
                else:
                    data, scale, ok = place_on_pages(entry, entry < seen, row, columns, pages)
                score = scores_at(query, KEYS, None, data, scale, ok, FORM)
                tl.store(out + place, tl.reshape(score, (BLOCK,)), mask=live)
    launch_dependents(PDL)


@stable_kernel
def score_kernel(
    Q,  # [T, heads, dim] codes or values
    Q_SCALES,  # [T, heads, dim / 32] uint8 of e2m1 codes, or None
    W,  # [T, heads] fp32
    KEYS,  # pages; or rows [N, dim], if there is no TABLE
    SCALES,  # [N] fp32 of rows of codes, or None
    TABLE,  # [R, columns] int32, or None
    REQUESTS,  # [T] int32 of each token, or None: `each` tokens after another
    LENS,  # [T] int32 entries that each token sees; or the end of its rows
    FIRST,  # [T] int32 first of a token's rows, or None
    OUT,  # [T, limit] fp32, or None
    MAXIMA,  # [T, groups] fp32, or None
    tokens: tl.int32, each: tl.int32, limit: tl.int32, splits: tl.int32, run: tl.int32, groups: tl.int32,
    alone: tl.int32, strides: QueryStrides, table: TableNumbers, pages: KeyNumbers, out_stride: tl.int64,
    maxima_stride: tl.int64, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (splits * token blocks,): some tokens against one of `splits` parts of what they see, if they see enough.

    Neighbours share entries. limit: most entries. run: tiles of a group of MAXIMA; if groups is above 0, `power_of` it.
    Entries that a token does not see are not written, unless all are filled, and a score without a block is NaN.
    """
    ASM: tl.constexpr = FORM.assembly
    BLOCK: tl.constexpr = FORM.block
    TOKENS: tl.constexpr = FORM.tokens
    blocks = tl.cdiv(tokens, TOKENS)
    split = tl.program_id(0) // blocks
    token = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    wait_prior_grid(PDL)
    lens = tl.minimum(tl.load(LENS + token, mask=live, other=0), limit)
    first = None if FIRST is None else tl.load(FIRST + token, mask=live, other=0)
    most = tl.max(tl.where(live, lens, 0), 0)
    launch_dependents_of_few(tokens, most, PDL)
    # of what is there, or is filled
    if groups > 0:
        run = power_of(run * BLOCK, most, groups, alone, FORM.lanes) // BLOCK
    step = run * BLOCK
    span = tl.cdiv(tl.cdiv(limit if FORM.fill else tl.maximum(most, 0), step), splits) * step
    begin = split * span
    stop = tl.minimum(begin + span, limit)
    # loaded before it is known whether they are needed
    member = tl.arange(0, TOKENS * FORM.padded)
    head = member % FORM.padded
    own = (tl.program_id(0) % blocks) * TOKENS + member // FORM.padded
    query = load_query(Q, Q_SCALES, W, strides, own, head, (own < tokens) & (head < FORM.heads), FORM)
    if FORM.fill or begin < most:
        row, group = token.to(tl.int64) * out_stride, token.to(tl.int64) * maxima_stride
        if TABLE is None:
            end = tl.minimum(stop, most)
            score_keys(
                query, live, lens, first, row, group, KEYS, SCALES, None, table.columns, pages, OUT, MAXIMA, begin, end,
                stop, run, limit, FORM,
            )  # fmt: skip
        else:
            request = token // each if REQUESTS is None else tl.load(REQUESTS + token, mask=live, other=-1)
            # of a request that does not exist, no entry has a block
            request = tl.where((request >= 0) & (request < table.requests), request, -1)
            known = live if FORM.fill else live & (lens > 0)
            if TOKENS == 1:
                lowest, highest = tl.min(request, 0), tl.min(request, 0)
            else:
                lowest = tl.min(tl.where(known, request, 0x7FFFFFFF), 0)
                highest = tl.max(tl.where(known, request, -1), 0)
            for r in range(uniform(lowest, ASM), uniform(highest + 1, ASM)):
                mine = known & (request == r)
                seen = tl.max(tl.where(mine, lens, 0), 0)
                end = tl.minimum(stop, seen)
                if tl.max(mine.to(tl.int32), 0) > 0:
                    score_keys(
                        query, mine, lens, first, row, group, KEYS, SCALES,
                        TABLE + tl.maximum(r, 0) * table.stride, tl.where(r < 0, 0, table.columns), pages, OUT, MAXIMA,
                        begin, end, stop, run, limit, FORM,
                    )  # fmt: skip
    launch_dependents(PDL)
