"""Kernels of the compressor: states to their slots, and entries from the states of their window.

An entry of a short window is made in one program and in registers: softmax of the scores over the window, RMSNorm,
RoPE, rounding and store. A long window is first pooled by several programs, each for a slice of the dims. What is
computed for an entry follows from its own window alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.kernels_insert import encode, pack_pairs
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import rotate, round_to, scale_of_byte
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2


@stable_kernel
def save_kernel(
    KV,  # [n, WIDTH] fp32
    SCORE,  # [n, WIDTH] fp32
    APE,  # [ratio, WIDTH] fp32
    POSITIONS,  # [n] int64
    CACHE,  # pages of fp32 rows [2 * WIDTH], `page_stride` elements apart
    SLOTS,  # [n] int64
    n: tl.int32, ratio: tl.int32, kv_stride: tl.int64, score_stride: tl.int64, ape_stride: tl.int64,
    num_blocks: tl.int32, block_size: tl.int32, page_stride: tl.int64, data_stride: tl.int64,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROW_ALIGNED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (n / TOKENS,): each program saves the states of TOKENS tokens.

    ROW_ALIGNED, ALIGNED: bytes that divide the address of every row of KV, SCORE and APE, and of every state.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    given = token < n
    column = tl.arange(0, next_power_of_2(WIDTH))
    live = given[:, None] & (column < WIDTH)[None, :]
    slot = tl.load(SLOTS + token, mask=given, other=-1)
    position = tl.load(POSITIONS + token, mask=given, other=0)
    # [TOKENS, WIDTH]
    kv = tl.load(tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED)[:, None] + column[None, :], mask=live)
    score = tl.load(tl.multiple_of(SCORE + token * score_stride, ROW_ALIGNED)[:, None] + column[None, :], mask=live)

    live &= ((slot >= 0) & (slot < num_blocks.to(tl.int64) * block_size))[:, None]
    # positions and slots that exist have 31 bits; division of 64 bits is slow
    place = position.to(tl.int32) % ratio
    place = tl.where(place < 0, place + ratio, place)
    bias = tl.multiple_of(APE + place * ape_stride, ROW_ALIGNED)[:, None] + column[None, :]
    score += tl.load(bias, mask=live, other=0.0)
    block, row = slot.to(tl.int32) // block_size, slot.to(tl.int32) % block_size
    state = tl.multiple_of(CACHE + block.to(tl.int64) * page_stride + row * data_stride, ALIGNED)
    state = state[:, None] + column[None, :]
    tl.store(state, kv, mask=live)
    tl.store(state + WIDTH, score, mask=live)


@triton.jit
def dims_at(
    place, D: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    IN_ORDER: tl.constexpr,
):  # fmt: skip
    """(dim, whether it exists) at places of an entry in registers.

    IN_ORDER: dims follow each other, the first place being empty if an odd number of them comes before the rotated
    ones, so that pairs are pairs. Otherwise every group of codes has SIZE places of its own, and dims past the last
    group follow it.
    """
    if IN_ORDER:
        early: tl.constexpr = (D - ROPE) % 2
        dim = place - early
        exists = (place >= early) & (dim < D)
    else:
        count: tl.constexpr = cdiv(NOPE, GROUP)
        group, member = place // SIZE, place % SIZE
        coded = group < count
        dim = tl.where(coded, group * GROUP, NOPE + (group - count) * SIZE) + member
        exists = tl.where(coded, (member < GROUP) & (dim < NOPE), dim < D)
    return dim, exists


@triton.jit
def pool(
    position, request, STATES, TABLE, num_requests, num_columns, table_stride, state_blocks, state_size, state_inverse,
    state_page, state_stride, dim, live,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, STATES_ALIGNED: tl.constexpr,
):  # fmt: skip
    """The mean [BLOCK] of the kv of the window that ends at a position, weighted by a softmax of its scores.

    dim: [BLOCK] channels of an entry; those that are not `live` are 0. Rows of the window that have no state do not
    count. A tile is ROWS times LANES rows; TILES of them are read at a time. Tiles are added in order. Every lane has a
    softmax of its own; they are merged at the end. So bits depend on ROWS and LANES, not on TILES or BLOCK.
    """
    window: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    width: tl.constexpr = 2 * D if OVERLAP else D
    known = (request >= 0) & (request < num_requests)
    columns = tl.where(known, num_columns, 0)
    blocks = TABLE + tl.where(known, request, 0).to(tl.int64) * table_stride
    # numbers of 31 bits, as division of 64 bits is slow, and unsigned, as they are widened for nothing then
    last, place = position.to(tl.int32) // state_size, position.to(tl.int32) % state_size
    lane = tl.arange(0, LANES)
    # [LANES, BLOCK]
    top = tl.full([LANES, BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    acc = tl.zeros([LANES, BLOCK], tl.float32)
    tiles: tl.constexpr = cdiv(window, ROWS * LANES)
    for step in range(cdiv(tiles, TILES)):
        kvs, scores = (), ()
        for each in tl.static_range(TILES * ROWS):
            # [LANES]
            row = (step * TILES * ROWS + each) * LANES + lane
            # places from the last one of the position's page back to the row
            back = (window - 1 - row + state_size - 1 - place).to(tl.uint32)
            pages = ((back.to(tl.uint64) * state_inverse) >> 48).to(tl.uint32)
            page = (last - pages.to(tl.int32)).to(tl.uint32)
            exists = page < columns
            if window % (TILES * ROWS * LANES):
                exists &= row < window
            block = tl.load(blocks + page, mask=exists, other=-1).to(tl.uint32)
            exists &= block < state_blocks
            inner = (pages + 1) * state_size - 1 - back
            state = STATES + block.to(tl.uint64) * state_page + inner.to(tl.uint64) * state_stride
            state = tl.multiple_of(state, STATES_ALIGNED)
            if OVERLAP:
                # tokens of the entry's own window count by their second half of channels
                state += (row >= RATIO).to(tl.int32) * D
            state = state[:, None] + dim[None, :]
            here = exists[:, None] & live[None, :]
            scores += (tl.load(state + width, mask=here, other=float("-inf")),)  # type: ignore[assignment]
            kvs += (tl.load(state, mask=here, other=0.0),)  # type: ignore[assignment]
        for tile in tl.static_range(TILES):
            higher = top
            for each in tl.static_range(ROWS):
                higher = tl.maximum(higher, scores[tile * ROWS + each])
            base = tl.where(higher == float("-inf"), 0.0, higher)
            if tiles > 1:
                shrink = tl.exp(top - base)
                total, acc = total * shrink, acc * shrink
            top = higher
            for each in tl.static_range(ROWS):
                weight = tl.exp(scores[tile * ROWS + each] - base)
                total += weight
                acc += weight * kvs[tile * ROWS + each]

    # a NaN among scores shows in the sums, maxima may pass over it
    if LANES > 1:
        higher = tl.max(top, 0)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - base[None, :])
        total, acc = total * shrink, acc * shrink
    # [BLOCK]
    total, acc = tl.sum(total, 0), tl.sum(acc, 0)
    return acc / tl.where(total == 0, 1.0, total)


@triton.jit
def store_entry(
    x, dim, live, CACHE, slot, block_size, page_stride, data_stride, scale_offset, scale_stride,
    D: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr, CODE_BITS: tl.constexpr, SCALES: tl.constexpr,
    SCALE_BITS: tl.constexpr, CODING: tl.constexpr, FNUZ: tl.constexpr, LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Write an entry x [GROUPS * SIZE] fp32, at the places of `dims_at`, to a slot that exists.

    CODING: of `numerics`.
    """
    row = slot % block_size
    page = CACHE + slot // block_size * page_stride
    record = tl.multiple_of(page + row * data_stride, ALIGNED)
    if CODE_BITS == 0:
        tl.store(record + dim, round_to(x, CACHE.dtype.element_ty, EXACT_CASTS), mask=live)
    else:
        count: tl.constexpr = cdiv(NOPE, GROUP)
        rounded = round_to(x, tl.bfloat16, EXACT_CASTS)
        # [GROUPS, SIZE], [GROUPS]
        values, group = tl.reshape(rounded.to(tl.float32), (GROUPS, SIZE)), tl.arange(0, GROUPS)
        codes, byte = encode(values, CODING, FNUZ, LARGEST, FLOOR)
        if CODE_BITS == 8:
            codes = tl.reshape(codes, (GROUPS * SIZE,))
            tl.store(record + dim, codes.to(tl.uint8), mask=live & (dim < NOPE))
        else:
            packed = pack_pairs(codes, GROUPS, SIZE // 2)
            at = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
            tl.store(record + at, packed.to(tl.uint8), mask=at < NOPE // 2)
        if NOPE < D:
            # the bf16 values begin right after the codes
            tail = (record + NOPE * CODE_BITS // 8).to(tl.pointer_type(tl.bfloat16))
            tl.store(tail + (dim - NOPE), rounded, mask=live & (dim >= NOPE))
        scales = page + scale_offset + row * scale_stride
        if SCALE_BITS == 32:
            bits = tl.sum(tl.where(group == 0, scale_of_byte(byte).to(tl.int32, bitcast=True), 0), 0)
            part = tl.arange(0, 4)
            tl.store(scales + part, ((bits >> (8 * part)) & 0xFF).to(tl.uint8))
        else:
            tl.store(scales + group, tl.where(group < count, byte, 0).to(tl.uint8), mask=group < SCALES)


@triton.jit
def make_entry(
    token, request, STATES, TABLE, POSITIONS, SLOTS, POOLED, WEIGHT, ANGLES, CACHE, eps,
    num_requests, num_columns, table_stride, state_blocks, state_size, state_inverse, state_page, state_stride,
    num_positions, angle_stride, block_size, page_stride, data_stride, scale_offset, scale_stride,
    D: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, STATES_ALIGNED: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, SCALES: tl.constexpr, SCALE_BITS: tl.constexpr, CODING: tl.constexpr,
    FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, FLOOR: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, IN_ORDER: tl.constexpr,
    ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Make the entry that a token completes, or finish the one that is pooled, and store it."""
    block: tl.constexpr = GROUPS * SIZE
    position, slot = tl.load(POSITIONS + token), tl.load(SLOTS + token)
    # [block], [block / 2]
    dim, live = dims_at(tl.arange(0, block), D, ROPE, NOPE, GROUP, SIZE, IN_ORDER)
    first, _ = dims_at(2 * tl.arange(0, block // 2), D, ROPE, NOPE, GROUP, SIZE, IN_ORDER)
    turned = (first >= D - ROPE) & (first < D)
    # these are on their way while the states are
    angles = ANGLES + tl.minimum(tl.maximum(position - RATIO + 1, 0), num_positions - 1) * angle_stride
    angles += (first - (D - ROPE)) // 2
    cos = tl.load(angles, mask=turned, other=1.0)
    sin = tl.load(angles + ROPE // 2, mask=turned, other=0.0)
    weight = tl.load(WEIGHT + dim, mask=live, other=0.0).to(tl.float32)

    if POOLED is not None:
        x = tl.load(POOLED + token * D + dim, mask=live, other=0.0)
    else:
        x = pool(
            position, request, STATES, TABLE, num_requests, num_columns, table_stride, state_blocks, state_size,
            state_inverse, state_page, state_stride, dim, live, D, RATIO, OVERLAP, ROWS, LANES, 1, block,
            STATES_ALIGNED,
        )  # fmt: skip
    x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
    even, odd = tl.split(tl.reshape(x, (block // 2, 2)))
    turned_even, turned_odd = rotate(even, odd, cos, sin)
    x = tl.join(tl.where(turned, turned_even, even), tl.where(turned, turned_odd, odd))
    store_entry(
        tl.reshape(x, (block,)), dim, live, CACHE, slot, block_size, page_stride, data_stride, scale_offset,
        scale_stride, D, NOPE, GROUP, CODE_BITS, SCALES, SCALE_BITS, CODING, FNUZ, LARGEST, FLOOR, GROUPS, SIZE,
        ALIGNED, EXACT_CASTS,
    )  # fmt: skip


@triton.jit
def completing(
    start, n, tokens, POSITIONS, SLOTS, REQUESTS, num_blocks, block_size, RATIO: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """(index, request, whether it completes an entry that has a slot), each [TOKENS], of the tokens of a program."""
    index = tl.arange(0, TOKENS)
    given = (index < tokens) & (start + index < n)
    slot = tl.load(SLOTS + start + index, mask=given, other=-1)
    position = tl.load(POSITIONS + start + index, mask=given, other=0)
    request = tl.load(REQUESTS + start + index, mask=given, other=-1)
    stored = (slot >= 0) & (slot < num_blocks.to(tl.int64) * block_size)
    return index, request, stored & ((position + 1) % RATIO == 0)


@stable_kernel
def pool_kernel(
    STATES,  # pages of fp32 rows: kv, then scores; `state_page` elements apart
    TABLE,  # [num_requests, num_columns] int32, blocks of states
    REQUESTS,  # [n] int32
    POSITIONS,  # [n] int64
    SLOTS,  # [n] int64, of entries
    POOLED,  # [n, D] fp32
    n: tl.int32, tokens: tl.int32, num_requests: tl.int32, num_columns: tl.int32, table_stride: tl.int64,
    state_blocks: tl.int32, state_size: tl.int32, state_inverse: tl.int64, state_page: tl.int64,
    state_stride: tl.int64, num_blocks: tl.int32, block_size: tl.int32,
    D: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (n / tokens * D / BLOCK,): each program pools BLOCK dims of the entries that its tokens complete.

    They are stored, before their norm, at the rows of POOLED of their tokens; no other row is written. `tokens` is at
    most TOKENS.
    """
    slices: tl.constexpr = cdiv(D, BLOCK)
    start = (tl.program_id(0) // slices).to(tl.int64) * tokens
    dim = tl.program_id(0) % slices * BLOCK + tl.arange(0, BLOCK)
    live = dim < D
    index, request, completes = completing(
        start, n, tokens, POSITIONS, SLOTS, REQUESTS, num_blocks, block_size, RATIO, TOKENS
    )  # fmt: skip
    found = tl.min(tl.where(completes, index, TOKENS), 0)
    while found < TOKENS:
        token = start + found
        x = pool(
            tl.load(POSITIONS + token), tl.sum(tl.where(index == found, request, 0), 0), STATES, TABLE, num_requests,
            num_columns, table_stride, state_blocks, state_size, state_inverse, state_page, state_stride, dim, live,
            D, RATIO, OVERLAP, ROWS, LANES, TILES, BLOCK, 1,
        )  # fmt: skip
        tl.store(POOLED + token * D + dim, x, mask=live)
        found = tl.min(tl.where(completes & (index > found), index, TOKENS), 0)


@stable_kernel
def compress_kernel(
    STATES,  # pages of fp32 rows: kv, then scores; `state_page` elements apart
    TABLE,  # [num_requests, num_columns] int32, blocks of states
    REQUESTS,  # [n] int32
    POSITIONS,  # [n] int64
    SLOTS,  # [n] int64, of CACHE
    POOLED,  # [n, D] fp32 of `pool_kernel`, or None
    WEIGHT,  # [D] bf16 or fp32
    ANGLES,  # [num_positions, ROPE] fp32, cosines before sines
    CACHE,  # pages, `page_stride` elements apart: uint8, or bf16 or fp32 where entries are plain rows
    n: tl.int32, tokens: tl.int32, eps: tl.float32, num_requests: tl.int32, num_columns: tl.int32,
    table_stride: tl.int64, state_blocks: tl.int32, state_size: tl.int32, state_inverse: tl.int64,
    state_page: tl.int64, state_stride: tl.int64, num_positions: tl.int64, angle_stride: tl.int64,
    num_blocks: tl.int32, block_size: tl.int32, page_stride: tl.int64, data_stride: tl.int64,
    scale_offset: tl.int64, scale_stride: tl.int64,
    D: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, OVERLAP: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, STATES_ALIGNED: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, SCALES: tl.constexpr, SCALE_BITS: tl.constexpr, CODING: tl.constexpr,
    FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, FLOOR: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, IN_ORDER: tl.constexpr,
    TOKENS: tl.constexpr, ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (n / tokens,): each program makes the entries that its tokens complete, which are at most TOKENS.

    With POOLED entries are normalised, rotated and stored, and no state is read. `tokens` is at most TOKENS.
    CODE_BITS: 8 of e4m3, 4 of e2m1, 0 of plain rows. SCALES: scale bytes of a record. SCALE_BITS: 8 of an exponent, 32
    of one fp32 scale. Of plain rows, NOPE and GROUP are D.
    """
    start = tl.program_id(0).to(tl.int64) * tokens
    index, request, completes = completing(
        start, n, tokens, POSITIONS, SLOTS, REQUESTS, num_blocks, block_size, RATIO, TOKENS
    )  # fmt: skip
    found = tl.min(tl.where(completes, index, TOKENS), 0)
    while found < TOKENS:
        make_entry(
            start + found, tl.sum(tl.where(index == found, request, 0), 0), STATES, TABLE, POSITIONS, SLOTS, POOLED,
            WEIGHT, ANGLES, CACHE, eps, num_requests, num_columns, table_stride, state_blocks, state_size,
            state_inverse, state_page, state_stride, num_positions, angle_stride, block_size, page_stride, data_stride,
            scale_offset, scale_stride, D, ROPE, RATIO, OVERLAP, ROWS, LANES, STATES_ALIGNED, NOPE, GROUP, CODE_BITS,
            SCALES, SCALE_BITS, CODING, FNUZ, LARGEST, FLOOR, GROUPS, SIZE, IN_ORDER, ALIGNED, EXACT_CASTS,
        )  # fmt: skip
        found = tl.min(tl.where(completes & (index > found), index, TOKENS), 0)
