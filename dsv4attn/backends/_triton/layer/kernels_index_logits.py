"""The kernel of the indexer's scores: keys on pages, or gathered, against the queries of a few tokens at a time.

A tile is BLOCK keys by TOKENS * HEADS queries: one matrix product, a rectifier, a sum over the heads of each token.
Keys are the rows of the product, so that the sum stays within a quarter of a warp.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.attention.keys import widen
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.kernels_select import power_of
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
def load_rows(row, scale, live, ALIGNED: tl.constexpr, DIM: tl.constexpr, HIGH: tl.constexpr, KIND: tl.constexpr,
              FNUZ: tl.constexpr, DT: tl.constexpr):  # fmt: skip
    """Rows [N, D] in DT, of keys or queries. D is a power of two. Rows that are not `live` are zeros.

    row: [N] pointers. scale: [N] pointers to the scale bytes of e2m1 codes. HIGH: which half of e2m1's bytes.
    """
    bytes_or_values: tl.constexpr = DIM // 2 if KIND == NIBBLES else DIM
    column = tl.arange(0, next_power_of_2(bytes_or_values))
    mask = live[:, None]
    if next_power_of_2(bytes_or_values) != bytes_or_values:
        mask = mask & (column < bytes_or_values)[None, :]
    if KIND == NATIVE:
        # loads of codes as numbers are pipelined
        row = row.to(tl.pointer_type(tl.float8e4b8 if FNUZ else tl.float8e4nv))
    source = tl.multiple_of(row, ALIGNED)[:, None] + column[None, :]
    raw = tl.load(source, mask=mask, other=0.0) if KIND == NATIVE else tl.load(source, mask=mask, other=0)
    if KIND == NATIVE:
        values = raw
    elif KIND == CODES:
        values = value_of_code(raw, FNUZ, DT)
    elif KIND == NIBBLES:
        byte = tl.load(scale[:, None] + (column // 16)[None, :], mask=mask, other=127).to(tl.int32)
        values = value_of_nibble(raw.to(tl.int32) >> (4 * HIGH), byte, DT)
    else:
        values = widen(raw, DT)
    return values


@triton.jit
def product(k, q, low):
    """Keys k [N, D] times q [M, D] transposed, [N, M] fp32, plus `low` if it is not None."""
    return tl.dot(k, tl.trans(q), low, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def page_of(entry, paging):
    """Number of the page of entries, int32, in a request's table, and of the entry in its page."""
    page_size, factor, log = paging
    twice = entry.to(tl.uint32, bitcast=True) << 1
    page = (tl.umulhi(twice, factor.to(tl.uint32, bitcast=True)) >> log.to(tl.uint32)).to(tl.int32)
    return page, entry - page * page_size


@triton.jit
def place_on_pages(entry, ok, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset, scale_stride):
    """Offsets of the records, and of the scales, of a request's entries [N], and which of them have a block."""
    column, of = page_of(entry, paging)
    block = tl.load(table + column, mask=ok & (column < columns), other=-1)
    ok = ok & (block >= 0) & (block < num_blocks)
    page = tl.where(ok, block, 0).to(tl.int64) * page_stride
    of = tl.where(ok, of, 0).to(tl.int64)
    return page + of * data_stride, page + scale_offset + of * scale_stride, ok


@triton.jit
def block_of(start, table, columns, num_blocks, paging, page_stride, STRIDE: tl.constexpr):
    """Offsets of the page and of the record of an entry, a scalar, its number in the page, and if it has a block."""
    column, of = page_of(start, paging)
    # a scalar cannot be masked where kernels are interpreted
    block = tl.load(table + tl.maximum(tl.minimum(column, columns - 1), 0))
    ok = (block >= 0) & (block < num_blocks) & (column < columns)
    page = tl.where(ok, block, 0).to(tl.int64) * page_stride
    return page, page + of * STRIDE, of, ok.to(tl.int32)


@triton.jit
def place_in_page(start, table, columns, num_blocks, paging, page_stride, scale_offset, scale_stride,
                  BLOCK: tl.constexpr, STRIDE: tl.constexpr):  # fmt: skip
    """`place_on_pages` of BLOCK entries from `start` on, on pages that hold whole runs of 64 of them.

    Records are STRIDE apart. `start` is a multiple of 64.
    """
    row = tl.arange(0, BLOCK)
    page, data, of, ok = block_of(start, table, columns, num_blocks, paging, page_stride, STRIDE)
    if BLOCK <= 64:
        return data + row * STRIDE, (page + scale_offset + of * scale_stride) + row * scale_stride, row * 0 + ok > 0
    behind, data_behind, of_behind, ok_behind = block_of(
        start + 64, table, columns, num_blocks, paging, page_stride, STRIDE
    )
    # which half a row is in is known where code is generated
    near = row < 64
    data = tl.where(near, data, data_behind - 64 * STRIDE) + row * STRIDE
    scale = tl.where(near, page + of * scale_stride, behind + (of_behind - 64) * scale_stride) + scale_offset
    return data, scale + row * scale_stride, tl.where(near, ok, ok_behind) > 0


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
def scores_of_tile(
    q, q_high, w, keys, SCALES, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset,
    scale_stride, start, entry, lane, limit,
    ALIGNED: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    KIND: tl.constexpr, FNUZ: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, TOKENS] of the entries from `start` on, and [BLOCK] which of them have a block, else NaN."""
    if table is None:
        ok = entry < limit
        step = STRIDE if STRIDE > 0 else data_stride
        data = start.to(tl.int64) * step + lane * step
        scale = start.to(tl.int64) * scale_stride + lane * scale_stride
    elif STRIDE > 0:
        data, scale, ok = place_in_page(
            start, table, columns, num_blocks, paging, page_stride, scale_offset, scale_stride, BLOCK, STRIDE
        )
    else:
        data, scale, ok = place_on_pages(
            entry, entry < limit, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset,
            scale_stride,
        )  # fmt: skip
    score = scores_at(
        q, q_high, w, keys, SCALES, data, scale, ok, ALIGNED, TOKENS, HEADS, DIM, KIND, FNUZ, BLOCK, DT
    )  # fmt: skip
    return score, ok


@triton.jit
def scores_at(
    q, q_high, w, keys, SCALES, data, scale, ok,
    ALIGNED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, KIND: tl.constexpr,
    FNUZ: tl.constexpr, BLOCK: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, TOKENS] of records at offsets `data`, with scales at offsets `scale`; NaN where not `ok`."""
    k = load_rows(keys + data, keys + scale, ok, ALIGNED, DIM, 0, KIND, FNUZ, DT)
    acc = product(k, q, None)
    if KIND == NIBBLES:
        k = load_rows(keys + data, keys + scale, ok, ALIGNED, DIM, 1, KIND, FNUZ, DT)
        acc = product(k, q_high, acc)
    # a NaN must stay
    acc = tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
    # [BLOCK, TOKENS]
    score = tl.sum(tl.reshape(acc, (BLOCK, TOKENS, HEADS)), 2)
    if KIND <= CODES:
        if SCALES is not None:
            unit = tl.load(SCALES + scale, mask=ok, other=float("nan"))
        else:
            unit = tl.load((keys + scale).to(tl.pointer_type(tl.float32)), mask=ok, other=float("nan"))
        score *= unit[:, None]
    else:
        score = tl.where(ok[:, None], score, float("nan"))
    return score


@triton.jit
def score_keys(
    q, q_high, w, mine, lens, first, row, group,
    keys, SCALES, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset, scale_stride,
    OUT, MAXIMA, begin, end, stop, run, limit,
    ALIGNED: tl.constexpr, STRIDE: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    KIND: tl.constexpr, FNUZ: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, FILL: tl.constexpr,
    STAGES: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Score the entries begin .. end - 1 for the tokens that are `mine`, and store those that each sees.

    q, q_high: [TOKENS * HEADS, D]. w: [TOKENS * HEADS]. lens, first, row: [TOKENS] entries that a token sees, first of
    them or None, and its row in OUT. group: [TOKENS] of the row in MAXIMA. stop: of the entries to fill.
    """
    lane = tl.arange(0, BLOCK)
    if FILL:
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
    for tile in tl.range(tiles, num_stages=STAGES):
        start = begin + tile * BLOCK
        entry = start + lane
        score, ok = scores_of_tile(
            q, q_high, w, keys, SCALES, table, columns, num_blocks, paging, page_stride, data_stride, scale_offset,
            scale_stride, start, entry, lane, limit, ALIGNED, STRIDE, TOKENS, HEADS, DIM, KIND, FNUZ, BLOCK, DT,
        )  # fmt: skip
        sees = mine[None, :] & (entry[:, None] < lens[None, :])
        if first is not None:
            sees = sees & (entry[:, None] >= first[None, :])
        if FILL:
            score = tl.where(ok[:, None] & sees, score, float("-inf"))
            tl.store(OUT + (row[None, :] + entry[:, None]), score, mask=mine[None, :] & (entry < stop)[:, None])
        elif OUT is not None:
            tl.store(OUT + (row[None, :] + entry[:, None]), score, mask=sees)
        if MAXIMA is not None:
            if GROUP > 0:
                # devices differ in the maximum of a number and NaN; and only what has no score is -inf
                score = tl.where(score == score, tl.maximum(score, LOWEST_SCORE), float("-inf"))  # noqa: PLR0124
            best = tl.maximum(best, tl.where(sees, score, float("-inf")))
            left -= 1
            if left == 0:
                store_maxima(MAXIMA, group, number, best, mine, lens, BLOCK, LANES, TOKENS, GROUP)
                best = tl.full([BLOCK, TOKENS], float("-inf"), tl.float32)
                number += 1
                left = run
    if MAXIMA is not None:  # noqa: SIM102 - one is a constant
        if left < run:
            store_maxima(MAXIMA, group, number, best, mine, lens, BLOCK, LANES, TOKENS, GROUP)


@triton.jit
def store_maxima(
    MAXIMA, group, number, best, mine, lens,
    BLOCK: tl.constexpr, LANES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store the largest scores [BLOCK, TOKENS] of the lanes of some tiles, LANES of them a token.

    GROUP: if above 0, a lane is of entries that follow each other, GROUP with those of all tiles. It is stored as a
    finite number, as NaN if there is no score, and as infinity for the newest entry's group.
    """
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
    candidate_stride: tl.int64, table_stride: tl.int64, out_stride: tl.int64, num_candidates: tl.int32,
    max_entries: tl.int32, requests: tl.int32, columns: tl.int32, num_blocks: tl.int32, page_size: tl.int32,
    SIZE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): the candidates of a token that it sees, each once, ascending; and how many entries these blocks have.

    After N numbers of blocks: the number of each block's first record among those of all pages, -1 without a page. It
    is of use if pages have whole blocks. SIZE: entries of a block. N: a power of two, at least num_candidates.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, N)
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
    exists = (request >= 0) & (request < requests)
    page = tl.where(fresh, block, 0) * SIZE // page_size
    known = fresh & (page < tl.where(exists, columns, 0))
    number = tl.load(TABLE + tl.where(exists, request, 0) * table_stride + page, mask=known, other=-1)
    known = known & (number >= 0) & (number < num_blocks)
    first = number * page_size + tl.where(fresh, block, 0) * SIZE % page_size
    tl.store(out + N + place, tl.where(known, first, -1), mask=fresh)
    tl.store(COUNTS + row, tl.sum(fresh.to(tl.int32), 0) * SIZE)


@stable_kernel
def score_blocks_kernel(
    Q,  # [T, HEADS, DIM] codes or values
    Q_SCALES,  # [T, HEADS, DIM / 32] uint8 of e2m1 codes, or None
    W,  # [T, HEADS] fp32
    KEYS,  # pages, `page_stride` elements apart
    TABLE,  # [R, columns] int32
    REQUESTS,  # [T] int32 of each token
    LENS,  # [T] int32 entries that each token sees
    BLOCKS,  # [T, 2 * N] int32 of `order_kernel`
    COUNTS,  # [T] int32 entries that these blocks have
    OUT,  # [T, counts] fp32
    tokens: tl.int32, requests: tl.int32, limit: tl.int32, splits: tl.int32, q_stride: tl.int64,
    q_head_stride: tl.int64, qs_stride: tl.int64, w_stride: tl.int64, table_stride: tl.int64, columns: tl.int32,
    num_blocks: tl.int32, page_size: tl.int32, factor: tl.int32, log: tl.int32, page_stride: tl.int64,
    data_stride: tl.int64, scale_offset: tl.int64, scale_stride: tl.int64, block_stride: tl.int64, out_stride: tl.int64,
    ALIGNED: tl.constexpr, STRIDE: tl.constexpr, Q_ALIGNED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    KIND: tl.constexpr, FNUZ: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DT: tl.constexpr,
    ASM: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Grid: (splits * tokens,): scores of the entries of a token's blocks, in their order; NaN where none is seen.

    WHOLE: whether pages have whole blocks.
    """
    token = tl.program_id(0) % tokens
    count, seen = tl.load(COUNTS + token), tl.minimum(tl.load(LENS + token), limit)
    span = tl.cdiv(tl.cdiv(count, BLOCK), splits) * BLOCK
    begin = tl.program_id(0) // tokens * span
    if begin < count:
        padded: tl.constexpr = next_power_of_2(HEADS) if HEADS > 16 else 16
        head = tl.arange(0, padded)
        at = token.to(tl.int64)
        query = Q + at * q_stride + head * q_head_stride
        q_scale = query
        if KIND == NIBBLES:
            q_scale = Q_SCALES + at * qs_stride + head * (DIM // 32)
        q = load_rows(query, q_scale, head < HEADS, Q_ALIGNED, DIM, 0, KIND, FNUZ, DT)
        q_high = q
        if KIND == NIBBLES:
            q_high = load_rows(query, q_scale, head < HEADS, Q_ALIGNED, DIM, 1, KIND, FNUZ, DT)
        w = tl.load(W + at * w_stride + head, mask=head < HEADS, other=0.0)
        request = tl.load(REQUESTS + token)
        # of a request that does not exist, no entry has a page
        exists = (request >= 0) & (request < requests)
        table = TABLE + tl.where(exists, request, 0) * table_stride
        columns = tl.where(exists, columns, 0)
        paging = page_size, factor, log
        lane, out, blocks = tl.arange(0, BLOCK), OUT + at * out_stride, BLOCKS + at * block_stride
        tiles = uniform(tl.cdiv(tl.minimum(begin + span, count) - begin, BLOCK), ASM)
        if count >= seen:
            # all blocks, so places are entries
            for tile in tl.range(tiles, num_stages=STAGES):
                start = begin + tile * BLOCK
                entry = start + lane
                score, _ = scores_of_tile(
                    q, q_high, w, KEYS, None, table, columns, num_blocks, paging, page_stride, data_stride,
                    scale_offset, scale_stride, start, entry, lane, seen,
                    ALIGNED, STRIDE, 1, padded, DIM, KIND, FNUZ, BLOCK, DT,
                )  # fmt: skip
                score = tl.where(entry < seen, tl.reshape(score, (BLOCK,)), float("nan"))
                tl.store(out + entry, score, mask=entry < count)
        else:
            for tile in tl.range(tiles, num_stages=STAGES):
                place = begin + tile * BLOCK + lane
                live = place < count
                block = tl.load(blocks + place // SIZE, mask=live, other=0)
                entry = tl.where(live, block * SIZE + place % SIZE, seen)
                if WHOLE:
                    first = tl.load(blocks + N + place // SIZE, mask=live, other=-1)
                    ok = (first >= 0) & (entry < seen)
                    page, of = page_of(tl.where(ok, first, 0), paging)
                    page = page.to(tl.int64) * page_stride
                    of = (of + place % SIZE).to(tl.int64)
                    data, scale = page + of * data_stride, page + scale_offset + of * scale_stride
                else:
                    data, scale, ok = place_on_pages(
                        entry, entry < seen, table, columns, num_blocks, paging, page_stride, data_stride,
                        scale_offset, scale_stride,
                    )  # fmt: skip
                score = scores_at(
                    q, q_high, w, KEYS, None, data, scale, ok, ALIGNED, 1, padded, DIM, KIND, FNUZ, BLOCK, DT
                )  # fmt: skip
                tl.store(out + place, tl.reshape(score, (BLOCK,)), mask=live)


@stable_kernel
def score_kernel(
    Q,  # [T, HEADS, DIM] codes or values
    Q_SCALES,  # [T, HEADS, DIM / 32] uint8 of e2m1 codes, or None
    W,  # [T, HEADS] fp32
    KEYS,  # pages, `page_stride` elements apart; or rows [N, DIM], if there is no TABLE
    SCALES,  # [N] fp32 of rows of codes, or None
    TABLE,  # [R, columns] int32, or None
    REQUESTS,  # [T] int32 of each token, or None: `each` tokens after another
    LENS,  # [T] int32 entries that each token sees; or the end of its rows
    FIRST,  # [T] int32 first of a token's rows, or None
    OUT,  # [T, limit] fp32, or None
    MAXIMA,  # [T, groups] fp32, or None
    tokens: tl.int32, requests: tl.int32, each: tl.int32, limit: tl.int32, splits: tl.int32,
    run: tl.int32, groups: tl.int32, alone: tl.int32, q_stride: tl.int64, q_head_stride: tl.int64, qs_stride: tl.int64,
    w_stride: tl.int64, table_stride: tl.int64, columns: tl.int32, num_blocks: tl.int32, page_size: tl.int32,
    factor: tl.int32, log: tl.int32, page_stride: tl.int64, data_stride: tl.int64, scale_offset: tl.int64,
    scale_stride: tl.int64, out_stride: tl.int64, maxima_stride: tl.int64,
    ALIGNED: tl.constexpr, STRIDE: tl.constexpr, Q_ALIGNED: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, KIND: tl.constexpr, FNUZ: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    FILL: tl.constexpr, STAGES: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: (splits * token blocks,): TOKENS tokens against one of `splits` parts of what they see, if they see enough.

    Neighbours share entries. limit: most entries. run: tiles of a group of MAXIMA; if groups is above 0, `power_of` it.
    FILL: whether entries that a token
    does not see are written too, as -inf; otherwise they are not, and a score without a block is NaN. GROUP: see
    `store_maxima`.
    """
    blocks = tl.cdiv(tokens, TOKENS)
    split = tl.program_id(0) // blocks
    token = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    lens = tl.minimum(tl.load(LENS + token, mask=live, other=0), limit)
    first = None if FIRST is None else tl.load(FIRST + token, mask=live, other=0)
    most = tl.max(tl.where(live, lens, 0), 0)
    # of what is there, or is filled
    if groups > 0:
        run = power_of(run * BLOCK, most, groups, alone, LANES) // BLOCK
    step = run * BLOCK
    span = tl.cdiv(tl.cdiv(limit if FILL else tl.maximum(most, 0), step), splits) * step
    begin = split * span
    stop = tl.minimum(begin + span, limit)
    # loaded before it is known whether they are needed
    padded: tl.constexpr = next_power_of_2(HEADS) if HEADS > 16 else 16
    member = tl.arange(0, TOKENS * padded)
    head = member % padded
    own = (tl.program_id(0) % blocks) * TOKENS + member // padded
    there = (own < tokens) & (head < HEADS)
    at = own.to(tl.int64)
    query = Q + at * q_stride + head * q_head_stride
    q_scale = query
    if KIND == NIBBLES:
        q_scale = Q_SCALES + at * qs_stride + head * (DIM // 32)
    q = load_rows(query, q_scale, there, Q_ALIGNED, DIM, 0, KIND, FNUZ, DT)
    q_high = q
    if KIND == NIBBLES:
        q_high = load_rows(query, q_scale, there, Q_ALIGNED, DIM, 1, KIND, FNUZ, DT)
    w = tl.load(W + at * w_stride + head, mask=there, other=0.0)
    if FILL or begin < most:
        row, group = token.to(tl.int64) * out_stride, token.to(tl.int64) * maxima_stride
        paging = page_size, factor, log
        if TABLE is None:
            end = tl.minimum(stop, most)
            score_keys(
                q, q_high, w, live, lens, first, row, group, KEYS, SCALES, None, columns, num_blocks, paging,
                page_stride, data_stride, scale_offset, scale_stride, OUT, MAXIMA, begin, end, stop, run, limit,
                ALIGNED, STRIDE, TOKENS, padded, DIM, KIND, FNUZ, BLOCK, LANES, FILL, STAGES, DT, ASM, GROUP,
            )  # fmt: skip
        else:
            request = token // each if REQUESTS is None else tl.load(REQUESTS + token, mask=live, other=-1)
            # of a request that does not exist, no entry has a block
            request = tl.where((request >= 0) & (request < requests), request, -1)
            known = live if FILL else live & (lens > 0)
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
                        q, q_high, w, mine, lens, first, row, group, KEYS, SCALES,
                        TABLE + tl.maximum(r, 0) * table_stride, tl.where(r < 0, 0, columns), num_blocks, paging,
                        page_stride, data_stride, scale_offset, scale_stride, OUT, MAXIMA, begin, end, stop, run,
                        limit, ALIGNED, STRIDE, TOKENS, padded, DIM, KIND, FNUZ, BLOCK, LANES, FILL, STAGES, DT, ASM,
                        GROUP,
                    )  # fmt: skip
