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
# ruff: noqa: PYI024 - fields have no types of Python's

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.attention import keys
from dsv4attn.backends._triton.attention.forms import CallNumbers, SegmentNumbers, Strides
from dsv4attn.backends._triton.attention.kernels_groups import Groups, columns_in, group_of
from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents, wait_prior_grid
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING

Lists = namedtuple("Lists", "window compressed window_length compressed_length own skipped first_tiles")
"""Indices of a program's keys. window, compressed: pointers to [window_length] and [compressed_length] int32. own,
skipped: of a group of several rows, columns of the window from `own` on lie `skipped` elements further. first_tiles:
tiles of the window, which come before those of the compressed segment."""
Heads = namedtuple("Heads", "number live left_column right_column")
"""Heads of a program. number: [rows] of each row of products. live: which of them exist. left_column, right_column: of
both pieces."""
Sums = namedtuple("Sums", "largest total empty left right")
"""What a program has of its heads. largest: logit in base 2. total: of weights. empty: whether there is none. left,
right: both pieces of the weighted sum of keys."""


@triton.jit
def columns_of(rows, lens, token, numbers, RAGGED: tl.constexpr):
    """Address of a token's first index, and how many of its columns count. numbers: `SegmentNumbers`.

    rows, lens: [T, width] int32 and [T] int32; RAGGED: flat [index_stride] and [T + 1], both int32.
    """
    if RAGGED:
        # for any values of indptr, nothing outside the list is read
        start = tl.maximum(tl.load(lens + token), 0)
        end = tl.minimum(tl.maximum(tl.load(lens + token + 1), 0).to(tl.int64), numbers.index_stride).to(tl.int32)
        row, count = rows + start.to(tl.int64), end - start
    else:
        row, count = rows + token * numbers.index_stride, tl.load(lens + token)
    return row, tl.minimum(tl.maximum(count, 0), numbers.width)


@triton.jit
def chosen(inside, a, b, SEGMENTS: tl.constexpr):
    """The number of the tile's segment: a of the window (inside), b of the compressed segment."""
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
def pages_of(keys_of_segment, numbers):
    """`keys.Pages` of a segment. keys_of_segment: pointer. numbers: `SegmentNumbers`."""
    return keys.Pages(
        keys_of_segment, numbers.page_size, numbers.page_factor, numbers.page_log, numbers.page_stride,
        numbers.row_stride, numbers.last_slot,
    )  # fmt: skip


@triton.jit
def pages_of_tile(inside, window, compressed, SEGMENTS: tl.constexpr):
    """`keys.Pages` of the tile's segment, as `chosen`."""
    return keys.Pages(
        address(inside, window.base, compressed.base, SEGMENTS),
        chosen(inside, window.size, compressed.size, SEGMENTS),
        chosen(inside, window.factor, compressed.factor, SEGMENTS),
        chosen(inside, window.log, compressed.log, SEGMENTS),
        chosen(inside, window.stride, compressed.stride, SEGMENTS),
        chosen(inside, window.row_stride, compressed.row_stride, SEGMENTS),
        chosen(inside, window.last_slot, compressed.last_slot, SEGMENTS),
    )


@triton.jit
def load_slots(lists, tile, last, ROW: tl.constexpr, TILE: tl.constexpr):
    """Indices of a tile's columns, -1 past its segment's length and in tiles past the last."""
    column = tl.arange(0, TILE.keys)
    inside = tile < lists.first_tiles
    # one address, chosen: a loop body for each segment would double the code
    row = address(inside, lists.window, lists.compressed, ROW.segments)
    column += chosen(inside, tile, tile - lists.first_tiles, ROW.segments) * TILE.keys
    length = tl.where(tile < last, chosen(inside, lists.window_length, lists.compressed_length, ROW.segments), 0)
    at = row + column
    if TILE.group > 1:
        at += tl.where(column >= tl.where(inside, lists.own, length), lists.skipped, 0)
    return tl.load(at, mask=column < length, other=-1)


@triton.jit
def fetch(inside, slot, window, compressed, runtime_zero, FORM: tl.constexpr, ROW: tl.constexpr):
    """Which of a tile's slots exist, and the raw words of their records. window, compressed: `keys.Pages`."""
    pages = pages_of_tile(inside, window, compressed, ROW.segments)
    ok = (slot >= 0) & (slot <= pages.last_slot)
    x0, x1, x2, x3, rope, low, high = keys.load_words(pages, slot, ok, runtime_zero, FORM)
    return ok, x0, x1, x2, x3, rope, low, high


@triton.jit
def read(
    q_row, live, slot, ok, fnuz, pages, acc, runtime_zero, FORM: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr
):
    """Acc, and both pieces of a tile of keys of any kind but WORDS; a narrow key's second piece is its first.

    Where q is reloaded, q @ key^T is added to acc, see `product_in_steps`.
    """
    C: tl.constexpr = TILE.columns
    if TILE.reload:
        acc = product_in_steps(q_row, live, slot, ok, fnuz, pages, acc, FORM, ROW, TILE)
    if FORM.kind == keys.CODE_WORDS:
        left, right = keys.read_code_words(pages, slot, ok, FORM, TILE)
    elif FORM.kind == keys.NIBBLE_WORDS:
        left, right = keys.read_nibble_words(pages, slot, ok, runtime_zero, FORM, TILE)
    elif FORM.kind == keys.FP4_WORDS:
        left, right = keys.read_fp4_words(pages, slot, ok, runtime_zero, FORM, TILE)
    else:
        left = keys.read_piece(pages, slot, ok, fnuz, 0, C, FORM, ROW, TILE.dtype)
        right = left
        if TILE.pieces == 2:
            right = keys.read_piece(pages, slot, ok, fnuz, C, C, FORM, ROW, TILE.dtype)
    return acc, left, right


@triton.jit
def product(a, b, acc, runtime_one, CHAINED: tl.constexpr):
    """Acc + a @ b. Unless CHAINED, in a loop that runs once.

    A compiler that sees this product feed another one gives each warp whole rows, so that on Hopper both warp groups
    compute the same logits. A loop's result hides the chain, and they share the columns.
    """
    if CHAINED:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        for _ in range(runtime_one):
            acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def product_in_halves(q_row, column, live, key, acc, ROW: tl.constexpr, TILE: tl.constexpr):
    """Acc + q @ key^T over the columns of one piece, half of them at a time, with q read from memory.

    q_row: pointers [BH] to rows of q. column: [C] of q. key: [N, C]. Where a matrix unit's operands take the registers
    of two, half a piece of each still fits.
    """
    D: tl.constexpr = ROW.nope + ROW.rope
    C: tl.constexpr = TILE.columns
    first, second = tl.split(tl.trans(tl.reshape(column, (2, C // 2))))
    key0, key1 = tl.split(tl.permute(tl.reshape(key, (TILE.keys, 2, C // 2)), (0, 2, 1)))
    there = live[:, None] & (first < D)[None, :]
    part = tl.load(q_row[:, None] + first[None, :], mask=there, other=0.0).to(TILE.dtype)
    acc = tl.dot(part, tl.trans(key0), acc, input_precision="ieee")
    there = live[:, None] & (second < D)[None, :]
    part = tl.load(q_row[:, None] + second[None, :], mask=there, other=0.0).to(TILE.dtype)
    return tl.dot(part, tl.trans(key1), acc, input_precision="ieee")


@triton.jit
def product_in_steps(
    q_row, live, slot, ok, fnuz, pages, acc, FORM: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr
):
    """Acc + q @ key^T with both read from memory, 64 columns at a time.

    q_row: pointers [BH] to rows of q. The key is read once more for the other product: on RDNA, one that is held
    together with operands of the matrix unit spills.
    """
    C: tl.constexpr = TILE.columns * TILE.pieces
    W: tl.constexpr = min(C, 64)
    for step in tl.static_range(C // W):
        column = step * W + tl.arange(0, W)
        there = live[:, None] & (column < ROW.nope + ROW.rope)[None, :]
        part = tl.load(q_row[:, None] + column[None, :], mask=there, other=0.0).to(TILE.dtype)
        key = keys.read_piece(pages, slot, ok, fnuz, step * W, W, FORM, ROW, TILE.dtype)
        acc = tl.dot(part, tl.trans(key), acc, input_precision="ieee")
    return acc


@triton.jit
def write_part(results, split_row, has_keys, heads, sums, ROW: tl.constexpr, TILE: tl.constexpr):
    """Write what a program has of a row that is split, to part, part_lse and part_max, which are `results`.

    split_row: number of the split among those of all rows. heads, sums: `Heads` and `Sums`.
    """
    part, part_lse, part_max = results
    D: tl.constexpr = ROW.nope + ROW.rope
    row = (split_row * ROW.heads + heads.number).to(tl.int64)
    largest, total, empty = sums.largest, sums.total, sums.empty
    tl.store(part_lse + row, tl.where(empty, -float("inf"), largest + tl.log2(total)), mask=heads.live)
    if part_max is not None:
        tl.store(part_max + row, tl.where(empty, -float("inf"), largest), mask=heads.live)
    factor = tl.where(empty, 0.0, 1.0 / total)
    to = tl.multiple_of(part + row * D, 4 * (16 if D % 16 == 0 else 1))
    keep = heads.live & (heads.number < tl.where(has_keys, ROW.heads, 0))
    store_columns(to, keep, factor, heads, sums, ROW, TILE)


@triton.jit
def write_row(results, token, strides, empty_lse, heads, sums, ROW: tl.constexpr, TILE: tl.constexpr):
    """Write a row that one program attended, to out, lse and max_logits, the first three of `results`; then the sink.

    strides: `Strides`. heads, sums: `Heads` and `Sums`.
    """
    out, lse, max_logits, sink = results
    UNIT: tl.constexpr = ROW.unit
    head, live, largest, total, empty = heads.number, heads.live, sums.largest, sums.total, sums.empty
    factor = 1.0 / total
    if sink is not None:
        # one more logit of value zero; a sink of +inf leaves nothing
        factor = 1.0 / (total + tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - largest))
    factor = tl.where(empty, 0.0, factor)
    at = token * strides.lse_token + head.to(tl.int64) * strides.lse_head
    if lse is not None:
        tl.store(lse + at, tl.where(empty, empty_lse, (largest + tl.log2(total)) * LN2), mask=live)
    if max_logits is not None:
        at = token * strides.max_token + head.to(tl.int64) * strides.max_head
        top = tl.where(empty, -float("inf"), numerics.or_nan(largest, total) * LN2)
        tl.store(max_logits + at, top, mask=live)
    WIDE: tl.constexpr = UNIT * (out.dtype.element_ty.primitive_bitwidth // 8)
    to = out + (token * strides.out_token * UNIT + head.to(tl.int64) * strides.out_head * UNIT)
    store_columns(tl.multiple_of(to, WIDE), live, factor, heads, sums, ROW, TILE)


@triton.jit
def store_columns(to, keep, factor, heads, sums, ROW: tl.constexpr, TILE: tl.constexpr):
    """Store the sums of the heads that are kept, times a factor of each, from the addresses `to` on."""
    D: tl.constexpr = ROW.nope + ROW.rope
    left, right = heads.left_column, heads.right_column
    result = numerics.round_to(sums.left * factor[:, None], to.dtype.element_ty, TILE.exact_casts)
    tl.store(to[:, None] + left[None, :], result, mask=keep[:, None] & (left < D)[None, :])
    if TILE.pieces == 2:
        result = numerics.round_to(sums.right * factor[:, None], to.dtype.element_ty, TILE.exact_casts)
        tl.store(to[:, None] + right[None, :], result, mask=keep[:, None] & (right < D)[None, :])


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
    window_keys,  # pages of uint8, or of bf16 or fp32 rows; or gathered rows [N, D]
    window_rows,  # [T, width] int32, or ragged [index_stride]
    window_lens,  # [T] int32, or ragged [T + 1]
    compressed_keys,  # pages of uint8, or of bf16 or fp32 rows
    compressed_rows,  # [T, width] int32, or ragged [index_stride]
    compressed_lens,  # [T] int32, or ragged [T + 1]
    requests,  # [T] int32, or None
    starts,  # [requests + 1] int32, or None
    strides: Strides,
    window: SegmentNumbers,
    compressed: SegmentNumbers,
    numbers: CallNumbers,
    WINDOW: tl.constexpr,  # SegmentForm
    COMPRESSED: tl.constexpr,  # SegmentForm
    ROW: tl.constexpr,  # RowForm
    TILE: tl.constexpr,  # TileForm
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (T x splits x blocks of heads,), heads fastest, so that programs that share keys run together.

    An only segment, also gathered rows, is the window, and is passed as the compressed one too.
    SPLIT: write to part, part_lse and part_max instead of out, lse and max_logits.
    counts: receives how many splits of tiles_per_split tiles each row has. A row of one split is then written to out,
    lse and max_logits.
    With groups (`TileForm.group`), a program attends heads of each row of a group, which its first row leads; programs
    of other rows return at once. requests, starts: of `kernels_groups.Groups`.
    """
    wait_prior_grid(PDL)
    H: tl.constexpr = ROW.heads
    D: tl.constexpr = ROW.nope + ROW.rope
    RAGGED: tl.constexpr = ROW.ragged
    SEGMENTS: tl.constexpr = ROW.segments
    UNIT: tl.constexpr = ROW.unit
    BH: tl.constexpr = TILE.heads
    N: tl.constexpr = TILE.keys
    C: tl.constexpr = TILE.columns
    PIECES: tl.constexpr = TILE.pieces
    DT: tl.constexpr = TILE.dtype
    GROUP: tl.constexpr = TILE.group
    HEADS: tl.constexpr = BH // GROUP
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    SAME: tl.constexpr = SEGMENTS == 1 or (
        WINDOW.kind == COMPRESSED.kind and WINDOW.interleaved == COMPRESSED.interleaved
        and WINDOW.unit == COMPRESSED.unit and WINDOW.group == COMPRESSED.group and WINDOW.coding == COMPRESSED.coding
    )  # fmt: skip
    splits, tiles_per_split = numbers.splits, numbers.tiles_per_split
    # the compiler cannot prove that this is 0
    runtime_zero = numbers.runtime_one - 1
    pid = tl.program_id(0)
    head = (pid % BLOCKS) * HEADS + tl.arange(0, BH) % HEADS
    split = (pid // BLOCKS) % splits
    token = (pid // (BLOCKS * splits)).to(tl.int64)
    live = head < H
    own, skipped = split * 0, token * 0
    if GROUP > 1:
        leader = pid // (BLOCKS * splits)
        groups = Groups(requests, starts, numbers.requests, numbers.tokens)
        group = group_of(groups, window_lens, window.width, window.index_stride, leader, leader >= 0, GROUP, RAGGED)
        if group.leads == 0:
            return
        member = tl.arange(0, BH) // HEADS
        live &= member <= group.last
        token = (leader + member).to(tl.int64)
        window_sees = columns_in(window_lens, leader + member, live, window.width, window.index_stride, RAGGED)
        window_begins, compressed_begins = group.own + member - window_sees, window_sees * 0
        compressed_sees = window_sees
        if SEGMENTS == 2:
            compressed_sees = columns_in(
                compressed_lens, leader + member, live, compressed.width, compressed.index_stride, RAGGED
            )
    IN_TURN: tl.constexpr = WINDOW.kind == keys.WORDS or WINDOW.kind == keys.FP4_WORDS  # noqa: PLR1714 - a language without `in`
    left_column, right_column = keys.columns(C, IN_TURN)

    # strides and addresses are multiples of UNIT elements; with this hint the compiler uses wide loads
    WIDE: tl.constexpr = UNIT * (q.dtype.element_ty.primitive_bitwidth // 8)
    q_row = tl.multiple_of(q + (token * strides.q_token * UNIT + head.to(tl.int64) * strides.q_head * UNIT), WIDE)
    q_left = tl.load(
        q_row[:, None] + left_column[None, :], mask=live[:, None] & (left_column < D)[None, :], other=0.0
    ).to(DT)
    acc_left = tl.zeros([BH, C], tl.float32)
    if PIECES == 2:
        there = live[:, None] & (right_column < D)[None, :]
        q_right = tl.load(q_row[:, None] + right_column[None, :], mask=there, other=0.0).to(DT)
        acc_right = tl.zeros([BH, C], tl.float32)

    if GROUP > 1:
        follower = (leader + group.last).to(tl.int64)
        window_row, own = columns_of(window_rows, window_lens, leader.to(tl.int64), window, RAGGED)
        later, _ = columns_of(window_rows, window_lens, follower, window, RAGGED)
        window_length = group.columns
        skipped = (later.to(tl.int64) - window_row.to(tl.int64)) // 4 - group.later
    else:
        window_row, window_length = columns_of(window_rows, window_lens, token, window, RAGGED)
    first_tiles = tl.cdiv(window_length, N)
    tiles = first_tiles
    compressed_row, compressed_length = window_row, window_length
    if SEGMENTS == 2:
        if GROUP > 1:
            compressed_row, compressed_length = columns_of(
                compressed_rows, compressed_lens, follower, compressed, RAGGED
            )
        else:
            compressed_row, compressed_length = columns_of(compressed_rows, compressed_lens, token, compressed, RAGGED)
        tiles += tl.cdiv(compressed_length, N)
    lists = Lists(window_row, compressed_row, window_length, compressed_length, own, skipped, first_tiles)
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

    window_pages, compressed_pages = pages_of(window_keys, window), pages_of(compressed_keys, compressed)
    WORDS: tl.constexpr = WINDOW.kind == keys.WORDS
    PREFETCH: tl.constexpr = WORDS and TILE.prefetch
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
        slot = load_slots(lists, begin, end, ROW, TILE)
        if PREFETCH:
            inside = begin < first_tiles
            ok, x0, x1, x2, x3, rope, low, high = fetch(
                inside, slot, window_pages, compressed_pages, runtime_zero, WINDOW, ROW
            )
            slot = load_slots(lists, begin + 1, end, ROW, TILE)
        for tile in tl.range(begin, end):
            inside = tile < first_tiles
            fnuz = WINDOW.fnuz if WINDOW.fnuz == COMPRESSED.fnuz else inside == WINDOW.fnuz
            z = tl.zeros([BH, N], tl.float32)
            # no operand of q stays in registers from tile to tile
            again = q_row + tile * runtime_zero
            if WORDS:
                if not PREFETCH:
                    ok, x0, x1, x2, x3, rope, low, high = fetch(
                        inside, slot, window_pages, compressed_pages, runtime_zero, WINDOW, ROW
                    )
                    slot = load_slots(lists, tile + 1, end, ROW, TILE)
                here = ok
                left, right = keys.unpack_words(x0, x1, x2, x3, rope, low, high, fnuz, N, DT, TILE.assembly)
                if PREFETCH:
                    # the next tile's loads are in flight while this one is multiplied
                    ok, x0, x1, x2, x3, rope, low, high = fetch(
                        tile + 1 < first_tiles, slot, window_pages, compressed_pages, runtime_zero, WINDOW, ROW
                    )
            else:
                if SAME:
                    pages = pages_of_tile(inside, window_pages, compressed_pages, SEGMENTS)
                elif LOOP == 0:
                    pages = window_pages
                else:
                    pages = compressed_pages
                here = (slot >= 0) & (slot <= pages.last_slot)
                if LOOP == 0:
                    dialect = fnuz if SAME else WINDOW.fnuz
                    z, left, right = read(again, live, slot, here, dialect, pages, z, runtime_zero, WINDOW, ROW, TILE)
                else:
                    z, left, right = read(
                        again, live, slot, here, COMPRESSED.fnuz, pages, z, runtime_zero, COMPRESSED, ROW, TILE
                    )
                slot = load_slots(lists, tile + 1, end, ROW, TILE)
            if TILE.reload and WORDS:
                z = product_in_halves(again, left_column, live, left, z, ROW, TILE)
                if PIECES == 2:
                    z = product_in_halves(again, right_column, live, right, z, ROW, TILE)
            elif not TILE.reload:
                z = product(q_left, tl.trans(left), z, numbers.runtime_one, TILE.chained)
                if PIECES == 2:
                    z = product(q_right, tl.trans(right), z, numbers.runtime_one, TILE.chained)
            if PREFETCH:
                slot = load_slots(lists, tile + 2, end, ROW, TILE)
            seen = here[None, :]
            if GROUP > 1:
                # of the union's columns each row sees some in a row
                column = chosen(inside, tile, tile - first_tiles, SEGMENTS) * N + tl.arange(0, N)
                begins = chosen(inside, window_begins, compressed_begins, SEGMENTS)
                sees = chosen(inside, window_sees, compressed_sees, SEGMENTS)
                since = column[None, :] - begins[:, None]
                seen = seen & (since >= 0) & (since < sees[:, None])
            z = tl.where(seen, z * (numbers.scale * LOG2E), -float("inf"))
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
    heads = Heads(head, live, left_column, right_column)
    sums = Sums(largest, total, empty, acc_left, acc_right)
    to_part, to_row = (part, part_lse, part_max), (out, lse, max_logits, sink)
    if SPLIT:
        if counts is None:  # noqa: SIM114 - a constant, and a value
            write_part(to_part, token * splits + split, first < last, heads, sums, ROW, TILE)
        elif row_splits > 1:
            write_part(to_part, token * splits + split, first < last, heads, sums, ROW, TILE)
        else:
            write_row(to_row, token, strides, numbers.empty_lse, heads, sums, ROW, TILE)
    else:
        write_row(to_row, token, strides, numbers.empty_lse, heads, sums, ROW, TILE)
