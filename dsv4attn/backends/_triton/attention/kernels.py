"""The attention kernel that all Triton backends share: selected keys read from pages or rows inside the loop.

One program attends a block of heads of one token over a run of tiles of N keys, window first, then the compressed
segment, in one softmax. Few tokens would leave a device idle, so their rows are split; a second kernel then combines
the splits in their order, so that the same split gives the same bits.

Where rows of a decode belong to one request (`keys.RequestRows`), a program attends a block of heads of a group of
them, see `kernels_groups`: a row of its products is a head of one token, and the keys are those of all tokens.

Where bits must not depend on the batch, every split has the same number of tiles. A row of one split is written as a
row that is not split, and only longer rows are combined. So a row's own number of tiles decides how it is computed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention import keys
from dsv4attn.backends._triton.attention.kernels_groups import Groups, columns_in, group_of
from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING


@triton.jit
def columns_of(rows, lens, token, width, stride, RAGGED: tl.constexpr):
    """Address of a token's first index, and how many of its columns count.

    rows, lens: [T, width] int32, rows `stride` apart, and [T] int32; RAGGED: flat [stride] and [T + 1], both int32.
    """
    if RAGGED:
        # for any values of indptr, nothing outside the list is read
        start = tl.maximum(tl.load(lens + token), 0)
        end = tl.minimum(tl.maximum(tl.load(lens + token + 1), 0).to(tl.int64), stride).to(tl.int32)
        row, count = rows + start.to(tl.int64), end - start
    else:
        row, count = rows + token * stride, tl.load(lens + token)
    return row, tl.minimum(tl.maximum(count, 0), width)


@triton.jit
def chosen(inside, a, b, SEGMENTS: tl.constexpr):
    """The number of the tile's segment: a of segment 0 (inside), b of segment 1."""
    if SEGMENTS == 2:
        a = tl.where(inside, a, b)
    return a


@triton.jit
def address(inside, a, b, SEGMENTS: tl.constexpr):
    """The pointer of the tile's segment, as `chosen`."""
    if SEGMENTS == 2:
        a = tl.where(inside, a.to(tl.int64), b.to(tl.int64)).to(a.dtype)
    return a


@triton.jit
def paging(inside, a, b, SEGMENTS: tl.constexpr):
    """The page size, factor and log of the tile's segment, as `chosen`."""
    return (
        chosen(inside, a[0], b[0], SEGMENTS),
        chosen(inside, a[1], b[1], SEGMENTS),
        chosen(inside, a[2], b[2], SEGMENTS),
    )


@triton.jit
def load_slots(
    tile, last, first_tiles, row0, row1, len0, len1, own, skipped, N: tl.constexpr, SEGMENTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Indices of a tile's N columns, -1 past its segment's length and in tiles past the last.

    row0, row1: pointers to [len0] and [len1] int32, as `columns_of` returns them. own, skipped: of a GROUP of several
    rows, columns of the window from `own` on lie `skipped` elements further.
    """
    column = tl.arange(0, N)
    inside = tile < first_tiles
    # one address, chosen: a loop body for each segment would double the code
    row = address(inside, row0, row1, SEGMENTS)
    column += chosen(inside, tile, tile - first_tiles, SEGMENTS) * N
    length = tl.where(tile < last, chosen(inside, len0, len1, SEGMENTS), 0)
    at = row + column
    if GROUP > 1:
        at += tl.where(column >= tl.where(inside, own, length), skipped, 0)
    return tl.load(at, mask=column < length, other=-1)


@triton.jit
def fetch(tile, slot, first_tiles, segment0, segment1, nothing, INTERLEAVED: tl.constexpr, SEGMENTS: tl.constexpr):
    """Which of a tile's slots exist, and the raw words of their records.

    segment0, segment1: pointer to a cache's uint8 pages, paging of `page_and_row`, page stride, row stride, last slot.
    """
    inside = tile < first_tiles
    ok = (slot >= 0) & (slot <= chosen(inside, segment0[4], segment1[4], SEGMENTS))
    base = address(inside, segment0[0], segment1[0], SEGMENTS)
    size = paging(inside, segment0[1], segment1[1], SEGMENTS)
    stride = chosen(inside, segment0[2], segment1[2], SEGMENTS)
    x0, x1, x2, x3, rope, low, high = keys.load_words(base, slot, ok, size, stride, nothing, INTERLEAVED)
    return ok, x0, x1, x2, x3, rope, low, high


@triton.jit
def read(
    slot, ok, fnuz, segment, nothing,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, CODING: tl.constexpr, C: tl.constexpr,
    PIECES: tl.constexpr, N: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Both pieces of a tile of keys of any kind but WORDS; a narrow key's second piece is its first.

    segment: pointer to the pages or rows of a cache, paging of `keys.page_and_row`, page stride, row stride.
    """
    base, size, stride, row_stride = segment[0], segment[1], segment[2], segment[3]
    if KIND == keys.CODE_WORDS:
        left, right = keys.read_code_words(base, slot, ok, size, stride, INTERLEAVED, N, DT, ASM)
    elif KIND == keys.NIBBLE_WORDS:
        left, right = keys.read_nibble_words(base, slot, ok, size, stride, nothing, INTERLEAVED, N, DT, ASM)
    elif KIND == keys.FP4_WORDS:
        left, right = keys.read_fp4_words(base, slot, ok, size, stride, nothing, INTERLEAVED, N, DT, ASM)
    else:
        left = keys.read_piece(
            base, slot, ok, size, stride, row_stride, fnuz, 0, C, KIND, INTERLEAVED, UNIT, NOPE, ROPE, GROUP, SCALES,
            CODING, DT,
        )  # fmt: skip
        right = left
        if PIECES == 2:
            right = keys.read_piece(
                base, slot, ok, size, stride, row_stride, fnuz, C, C, KIND, INTERLEAVED, UNIT, NOPE, ROPE, GROUP,
                SCALES, CODING, DT,
            )  # fmt: skip
    return left, right


@triton.jit
def product(a, b, acc, once, CHAINED: tl.constexpr):
    """Acc + a @ b. Unless CHAINED, in a loop that runs once.

    A compiler that sees this product feed another one gives each warp whole rows, so that on Hopper both warp groups
    compute the same logits. A loop's result hides the chain, and they share the columns.
    """
    if CHAINED:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        for _ in range(once):
            acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def product_in_halves(
    q_row, column, live, key, acc, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, DT: tl.constexpr
):
    """Acc + q @ key^T over the columns of one piece, half of them at a time, with q read from memory.

    q_row: pointers [BH] to rows of q. column: [C] of q. key: [N, C]. Where a matrix unit's operands take the registers
    of two, half a piece of each still fits.
    """
    first, second = tl.split(tl.trans(tl.reshape(column, (2, C // 2))))
    key0, key1 = tl.split(tl.permute(tl.reshape(key, (N, 2, C // 2)), (0, 2, 1)))
    there = live[:, None] & (first < D)[None, :]
    part = tl.load(q_row[:, None] + first[None, :], mask=there, other=0.0).to(DT)
    acc = tl.dot(part, tl.trans(key0), acc, input_precision="ieee")
    there = live[:, None] & (second < D)[None, :]
    part = tl.load(q_row[:, None] + second[None, :], mask=there, other=0.0).to(DT)
    return tl.dot(part, tl.trans(key1), acc, input_precision="ieee")


@triton.jit
def product_in_steps(
    q_row, live, slot, ok, fnuz, segment, acc,
    KIND: tl.constexpr, INTERLEAVED: tl.constexpr, UNIT: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, CODING: tl.constexpr, C: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Acc + q @ key^T with both read from memory, 64 columns at a time.

    q_row: pointers [BH] to rows of q. C: columns of a padded key, which is read once more for the other product: on
    RDNA, one that is held together with operands of the matrix unit spills.
    """
    base, size, stride, row_stride = segment[0], segment[1], segment[2], segment[3]
    W: tl.constexpr = min(C, 64)
    for step in tl.static_range(C // W):
        column = step * W + tl.arange(0, W)
        there = live[:, None] & (column < NOPE + ROPE)[None, :]
        part = tl.load(q_row[:, None] + column[None, :], mask=there, other=0.0).to(DT)
        key = keys.read_piece(
            base, slot, ok, size, stride, row_stride, fnuz, step * W, W, KIND, INTERLEAVED, UNIT, NOPE, ROPE, GROUP,
            SCALES, CODING, DT,
        )  # fmt: skip
        acc = tl.dot(part, tl.trans(key), acc, input_precision="ieee")
    return acc


@triton.jit
def write_part(
    results, split_row, has_keys, heads, sums, H: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Write what a program has of a row that is split, to part, part_lse and part_max, which are `results`.

    split_row: number of the split among those of all rows. heads, sums: as of `write_row`.
    """
    part, part_lse, part_max = results
    head, live, left_column, right_column = heads
    largest, total, empty, acc_left, acc_right = sums
    row = (split_row * H + head).to(tl.int64)
    tl.store(part_lse + row, tl.where(empty, -float("inf"), largest + tl.log2(total)), mask=live)
    if part_max is not None:
        tl.store(part_max + row, tl.where(empty, -float("inf"), largest), mask=live)
    factor = tl.where(empty, 0.0, 1.0 / total)
    to, keep = tl.multiple_of(part + row * D, 4 * (16 if D % 16 == 0 else 1)), live & (head < tl.where(has_keys, H, 0))
    store_columns(to, keep, factor, left_column, right_column, acc_left, acc_right, D, PIECES, EXACT_CASTS)


@triton.jit
def write_row(
    results, token, strides, empty_lse, heads, sums, D: tl.constexpr, PIECES: tl.constexpr, UNIT: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Write a row that one program attended, to out, lse and max_logits, the first three of `results`; then the sink.

    strides: those of out in UNITs, of lse and of max_logits, by token and by head. heads: numbers of the program's
    heads, which of them exist, and the columns of both pieces. sums: the largest logit in base 2, the total weight,
    whether there is none, and both pieces of the weighted sum of keys.
    """
    out, lse, max_logits, sink = results
    out_token, out_head, lse_token, lse_head, max_token, max_head = strides
    head, live, left_column, right_column = heads
    largest, total, empty, acc_left, acc_right = sums
    factor = 1.0 / total
    if sink is not None:
        # one more logit of value zero; a sink of +inf leaves nothing
        factor = 1.0 / (total + tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - largest))
    factor = tl.where(empty, 0.0, factor)
    at = token * lse_token + head.to(tl.int64) * lse_head
    if lse is not None:
        tl.store(lse + at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2), mask=live)
    if max_logits is not None:
        at = token * max_token + head.to(tl.int64) * max_head
        top = tl.where(empty, -float("inf"), numerics.or_nan(largest, total) * LN2)
        tl.store(max_logits + at, top, mask=live)
    WIDE: tl.constexpr = UNIT * (out.dtype.element_ty.primitive_bitwidth // 8)
    to = tl.multiple_of(out + (token * out_token * UNIT + head.to(tl.int64) * out_head * UNIT), WIDE)
    store_columns(to, live, factor, left_column, right_column, acc_left, acc_right, D, PIECES, EXACT_CASTS)


@triton.jit
def store_columns(
    to, keep, factor, left_column, right_column, acc_left, acc_right, D: tl.constexpr, PIECES: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Store the sums of the heads that are kept, times a factor of each, from the addresses `to` on."""
    result = numerics.round_to(acc_left * factor[:, None], to.dtype.element_ty, EXACT_CASTS)
    tl.store(to[:, None] + left_column[None, :], result, mask=keep[:, None] & (left_column < D)[None, :])
    if PIECES == 2:
        result = numerics.round_to(acc_right * factor[:, None], to.dtype.element_ty, EXACT_CASTS)
        tl.store(to[:, None] + right_column[None, :], result, mask=keep[:, None] & (right_column < D)[None, :])


@stable_kernel
def attention(
    q,  # [T, H, D]
    out,  # [T, H, D], dtype of q
    lse,  # [T, H] fp32, or None
    max_logits,  # [T, H] fp32, or None
    sink,  # [H] fp32, or None
    part,  # [T, splits, H, D] fp32, or None
    part_lse,  # [T, splits, H] fp32, base 2, or None
    part_max,  # [T, splits, H] fp32, base 2, or None
    counts,  # [T] int32, or None
    cache0,  # pages of uint8, or of bf16 or fp32 rows; or gathered rows [N, D]
    rows0,  # [T, width0] int32, or RAGGED [index_stride0]
    lens0,  # [T] int32, or RAGGED [T + 1]
    cache1,  # pages of uint8, or of bf16 or fp32 rows
    rows1,  # [T, width1] int32, or RAGGED [index_stride1]
    lens1,  # [T] int32, or RAGGED [T + 1]
    requests,  # [T] int32, or None
    starts,  # [known + 1] int32, or None
    q_token: tl.int64, q_head: tl.int64, out_token: tl.int64, out_head: tl.int64,
    lse_token: tl.int64, lse_head: tl.int64, max_token: tl.int64, max_head: tl.int64,
    width0: tl.int32, index_stride0: tl.int64, page_size0: tl.int32, page_factor0: tl.int32, page_log0: tl.int32,
    page_stride0: tl.int64, row_stride0: tl.int64, last_slot0: tl.int32,
    width1: tl.int32, index_stride1: tl.int64, page_size1: tl.int32, page_factor1: tl.int32, page_log1: tl.int32,
    page_stride1: tl.int64, row_stride1: tl.int64, last_slot1: tl.int32,
    known: tl.int32, tokens: tl.int32, splits: tl.int32, tiles_per_split: tl.int32, once: tl.int32,
    scale: tl.float32, empty_lse: tl.float32,
    H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, SEGMENTS: tl.constexpr,
    KIND0: tl.constexpr, KIND1: tl.constexpr, INTERLEAVED0: tl.constexpr, INTERLEAVED1: tl.constexpr,
    FNUZ0: tl.constexpr, FNUZ1: tl.constexpr, GROUP0: tl.constexpr, GROUP1: tl.constexpr,
    SCALES0: tl.constexpr, SCALES1: tl.constexpr, CODING0: tl.constexpr, CODING1: tl.constexpr,
    UNIT0: tl.constexpr, UNIT1: tl.constexpr,
    RAGGED: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, BH: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, PIECES: tl.constexpr, DT: tl.constexpr, ASM: tl.constexpr, CHAINED: tl.constexpr,
    PREFETCH: tl.constexpr, RELOAD: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid: (T x splits x blocks of BH heads,), heads fastest, so that programs that share keys run together.

    Segment 0 is the window's cache, or the gathered rows; segment 1 is the compressed cache.
    q_token, q_head, out_token, out_head: strides in UNITs.
    tiles_per_split: tiles of each split, or 0 to share a row's tiles evenly. once: 1. empty_lse: of a row without keys.
    SPLIT: write to part, part_lse and part_max instead of out, lse and max_logits.
    counts: receives how many splits of tiles_per_split tiles each row has. A row of one split is then written to out,
    lse and max_logits.
    GROUP: rows of a group. Above 1, BH rows of a program are BH / GROUP heads of each row of a group, which its first
    row leads; programs of other rows return at once. requests, starts, known, tokens: of `kernels_groups.Groups`.
    """
    wait_prior_grid(PDL)
    D: tl.constexpr = NOPE + ROPE
    HEADS: tl.constexpr = BH // GROUP
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    SAME: tl.constexpr = SEGMENTS == 1 or (
        KIND0 == KIND1 and INTERLEAVED0 == INTERLEAVED1 and UNIT0 == UNIT1 and GROUP0 == GROUP1
        and CODING0 == CODING1
    )  # fmt: skip
    pid = tl.program_id(0)
    head = (pid % BLOCKS) * HEADS + tl.arange(0, BH) % HEADS
    split = (pid // BLOCKS) % splits
    token = (pid // (BLOCKS * splits)).to(tl.int64)
    live = head < H
    own, skipped = split * 0, token * 0
    if GROUP > 1:
        leader = pid // (BLOCKS * splits)
        groups = Groups(requests, starts, known, tokens)
        group = group_of(groups, lens0, width0, index_stride0, leader, leader >= 0, GROUP, RAGGED)
        if group.leads == 0:
            return
        member = tl.arange(0, BH) // HEADS
        live &= member <= group.last
        token = (leader + member).to(tl.int64)
        sees0 = columns_in(lens0, leader + member, live, width0, index_stride0, RAGGED)
        begins0, begins1, sees1 = group.own + member - sees0, sees0 * 0, sees0
        if SEGMENTS == 2:
            sees1 = columns_in(lens1, leader + member, live, width1, index_stride1, RAGGED)
    IN_TURN: tl.constexpr = KIND0 == keys.WORDS or KIND0 == keys.FP4_WORDS  # noqa: PLR1714 - a language without `in`
    left_column, right_column = keys.columns(C, IN_TURN)

    # strides and addresses are multiples of UNIT elements; with this hint the compiler uses wide loads
    WIDE: tl.constexpr = UNIT * (q.dtype.element_ty.primitive_bitwidth // 8)
    q_row = tl.multiple_of(q + (token * q_token * UNIT + head.to(tl.int64) * q_head * UNIT), WIDE)
    q_left = tl.load(
        q_row[:, None] + left_column[None, :], mask=live[:, None] & (left_column < D)[None, :], other=0.0
    ).to(DT)
    acc_left = tl.zeros([BH, C], tl.float32)
    if PIECES == 2:
        there = live[:, None] & (right_column < D)[None, :]
        q_right = tl.load(q_row[:, None] + right_column[None, :], mask=there, other=0.0).to(DT)
        acc_right = tl.zeros([BH, C], tl.float32)

    if GROUP > 1:
        row0, own = columns_of(rows0, lens0, leader.to(tl.int64), width0, index_stride0, RAGGED)
        later, _ = columns_of(rows0, lens0, (leader + group.last).to(tl.int64), width0, index_stride0, RAGGED)
        len0, skipped = group.columns, (later.to(tl.int64) - row0.to(tl.int64)) // 4 - group.later
    else:
        row0, len0 = columns_of(rows0, lens0, token, width0, index_stride0, RAGGED)
    first_tiles = tl.cdiv(len0, N)
    tiles = first_tiles
    row1, len1 = row0, len0
    if SEGMENTS == 2:
        if GROUP > 1:
            row1, len1 = columns_of(rows1, lens1, (leader + group.last).to(tl.int64), width1, index_stride1, RAGGED)
        else:
            row1, len1 = columns_of(rows1, lens1, token, width1, index_stride1, RAGGED)
        tiles += tl.cdiv(len1, N)
    if counts is not None:
        row_splits = tl.maximum(tl.cdiv(tiles, tiles_per_split), 1)
        if split >= row_splits:
            return
        # all programs of a row store the same number
        tl.store(counts + token, row_splits)
    if tiles_per_split > 0:
        first = tl.minimum(split * tiles_per_split, tiles)
        last = tl.minimum(first + tiles_per_split, tiles)
    else:
        first = (tiles.to(tl.int64) * split // splits).to(tl.int32)
        last = (tiles.to(tl.int64) * (split + 1) // splits).to(tl.int32)

    paging0, paging1 = (page_size0, page_factor0, page_log0), (page_size1, page_factor1, page_log1)
    segment0 = (cache0, paging0, page_stride0, row_stride0, last_slot0)
    segment1 = (cache1, paging1, page_stride1, row_stride1, last_slot1)
    WORDS: tl.constexpr = KIND0 == keys.WORDS
    largest = tl.full([BH], NOTHING, tl.float32)
    total = tl.zeros([BH], tl.float32)
    # segments that are read by different readers have a loop each: in one loop, their registers would add up
    for LOOP in tl.static_range(1 if SAME else 2):
        begin, end = first, last
        if not SAME:
            if LOOP == 0:
                end = tl.minimum(last, first_tiles)
            else:
                begin, end = tl.maximum(first, first_tiles), last
        slot = load_slots(begin, end, first_tiles, row0, row1, len0, len1, own, skipped, N, SEGMENTS, GROUP)
        if WORDS and PREFETCH:
            ok, x0, x1, x2, x3, rope, low, high = fetch(
                begin, slot, first_tiles, segment0, segment1, once - 1, INTERLEAVED0, SEGMENTS
            )
            slot = load_slots(begin + 1, end, first_tiles, row0, row1, len0, len1, own, skipped, N, SEGMENTS, GROUP)
        for tile in tl.range(begin, end):
            inside = tile < first_tiles
            fnuz = FNUZ0 if FNUZ0 == FNUZ1 else inside == FNUZ0
            z = tl.zeros([BH, N], tl.float32)
            # the offset is 0, which the compiler cannot prove: no operand of q stays in registers from tile to tile
            again = q_row + tile * (once - 1)
            if WORDS:
                if not PREFETCH:
                    ok, x0, x1, x2, x3, rope, low, high = fetch(
                        tile, slot, first_tiles, segment0, segment1, once - 1, INTERLEAVED0, SEGMENTS
                    )
                    slot = load_slots(
                        tile + 1, end, first_tiles, row0, row1, len0, len1, own, skipped, N, SEGMENTS, GROUP
                    )
                here = ok
                left, right = keys.unpack_words(x0, x1, x2, x3, rope, low, high, fnuz, N, DT, ASM)
                if PREFETCH:
                    # the next tile's loads are in flight while this one is multiplied
                    ok, x0, x1, x2, x3, rope, low, high = fetch(
                        tile + 1, slot, first_tiles, segment0, segment1, once - 1, INTERLEAVED0, SEGMENTS
                    )
            else:
                if SAME:
                    segment = (
                        address(inside, cache0, cache1, SEGMENTS),
                        paging(inside, paging0, paging1, SEGMENTS),
                        chosen(inside, page_stride0, page_stride1, SEGMENTS),
                        chosen(inside, row_stride0, row_stride1, SEGMENTS),
                        chosen(inside, last_slot0, last_slot1, SEGMENTS),
                    )
                elif LOOP == 0:
                    segment = segment0
                else:
                    segment = segment1
                here = (slot >= 0) & (slot <= segment[4])
                if LOOP == 0:
                    dialect = fnuz if SAME else FNUZ0
                    if RELOAD:
                        z = product_in_steps(
                            again, live, slot, here, dialect, segment, z, KIND0, INTERLEAVED0, UNIT0, NOPE, ROPE,
                            GROUP0, SCALES0, CODING0, C * PIECES, DT,
                        )  # fmt: skip
                    left, right = read(
                        slot, here, dialect, segment, once - 1, KIND0, INTERLEAVED0, UNIT0, NOPE, ROPE, GROUP0, SCALES0,
                        CODING0, C, PIECES, N, DT, ASM,
                    )  # fmt: skip
                else:
                    if RELOAD:
                        z = product_in_steps(
                            again, live, slot, here, FNUZ1, segment, z, KIND1, INTERLEAVED1, UNIT1, NOPE, ROPE, GROUP1,
                            SCALES1, CODING1, C * PIECES, DT,
                        )  # fmt: skip
                    left, right = read(
                        slot, here, FNUZ1, segment, once - 1, KIND1, INTERLEAVED1, UNIT1, NOPE, ROPE, GROUP1, SCALES1,
                        CODING1, C, PIECES, N, DT, ASM,
                    )  # fmt: skip
                slot = load_slots(tile + 1, end, first_tiles, row0, row1, len0, len1, own, skipped, N, SEGMENTS, GROUP)
            if RELOAD and WORDS:
                z = product_in_halves(again, left_column, live, left, z, D, N, C, DT)
                if PIECES == 2:
                    z = product_in_halves(again, right_column, live, right, z, D, N, C, DT)
            elif not RELOAD:
                z = product(q_left, tl.trans(left), z, once, CHAINED)
                if PIECES == 2:
                    z = product(q_right, tl.trans(right), z, once, CHAINED)
            if WORDS and PREFETCH:
                slot = load_slots(tile + 2, end, first_tiles, row0, row1, len0, len1, own, skipped, N, SEGMENTS, GROUP)
            seen = here[None, :]
            if GROUP > 1:
                # of the union's columns each row sees some in a row
                column = chosen(inside, tile, tile - first_tiles, SEGMENTS) * N + tl.arange(0, N)
                begins, sees = chosen(inside, begins0, begins1, SEGMENTS), chosen(inside, sees0, sees1, SEGMENTS)
                since = column[None, :] - begins[:, None]
                seen = seen & (since >= 0) & (since < sees[:, None])
            z = tl.where(seen, z * (scale * LOG2E), -float("inf"))
            grown = tl.maximum(largest, tl.max(z, 1))
            shrink = tl.exp2(largest - grown)
            p = tl.exp2(z - grown[:, None])
            total = total * shrink + tl.sum(p, 1)
            weights = p.to(DT)
            acc_left = tl.dot(weights, left, acc_left * shrink[:, None], input_precision="ieee")
            if PIECES == 2:
                acc_right = tl.dot(weights, right, acc_right * shrink[:, None], input_precision="ieee")
            largest = grown

    if PIECES == 1:
        acc_right, right_column = acc_left, left_column
    empty = total == 0.0
    launch_dependents(PDL)
    heads, sums = (head, live, left_column, right_column), (largest, total, empty, acc_left, acc_right)
    to_part, to_row = (part, part_lse, part_max), (out, lse, max_logits, sink)
    strides = out_token, out_head, lse_token, lse_head, max_token, max_head
    if SPLIT:
        if counts is None:  # noqa: SIM114 - a constant, and a value
            write_part(to_part, token * splits + split, first < last, heads, sums, H, D, PIECES, EXACT_CASTS)
        elif row_splits > 1:
            write_part(to_part, token * splits + split, first < last, heads, sums, H, D, PIECES, EXACT_CASTS)
        else:
            write_row(to_row, token, strides, empty_lse, heads, sums, D, PIECES, UNIT, EXACT_CASTS)
    else:
        write_row(to_row, token, strides, empty_lse, heads, sums, D, PIECES, UNIT, EXACT_CASTS)
