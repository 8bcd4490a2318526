"""Kernels of the compressor: states to their slots, and entries from the states of their window.

An entry of a short window is made in one program and in registers: softmax of the scores over the window, RMSNorm,
RoPE, rounding and store. A long window is first pooled by several programs, each for a slice of the dims. What is
computed for an entry follows from its own window alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.forms import PageNumbers, TableNumbers
from dsv4attn.backends._triton.cache.kernels_insert import encode, pack_pairs
from dsv4attn.backends._triton.launching.kernels_pdl import (
    launch_dependents,
    launch_dependents_of_few,
    wait_prior_grid,
    wait_then_launch_dependents,
)
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import FP8, rotate, round_to, scale_of_byte
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2


@stable_kernel
def save_kernel(
    KV,  # [n, WIDTH] fp32
    SCORE,  # [n, WIDTH] fp32
    APE,  # [ratio, WIDTH] fp32
    POSITIONS,  # [n] int64
    CACHE,  # pages of fp32 rows [2 * WIDTH]
    SLOTS,  # [n] int64
    n: tl.int32, ratio: tl.int32, kv_stride: tl.int64, score_stride: tl.int64, ape_stride: tl.int64, pages: PageNumbers,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, ROW_ALIGNED: tl.constexpr, ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n / TOKENS,): each program saves the states of TOKENS tokens.

    ROW_ALIGNED, ALIGNED: bytes that divide the address of every row of KV, SCORE and APE, and of every state.
    """
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    given = token < n
    column = tl.arange(0, next_power_of_2(WIDTH))
    live = given[:, None] & (column < WIDTH)[None, :]
    slot = tl.load(SLOTS + token, mask=given, other=-1)
    position = tl.load(POSITIONS + token, mask=given, other=0)
    # [TOKENS, WIDTH]
    kv = tl.load(tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED)[:, None] + column[None, :], mask=live)
    score = tl.load(tl.multiple_of(SCORE + token * score_stride, ROW_ALIGNED)[:, None] + column[None, :], mask=live)

    live &= ((slot >= 0) & (slot < pages.num_blocks.to(tl.int64) * pages.block_size))[:, None]
    # positions and slots that exist have 31 bits; division of 64 bits is slow
    place = position.to(tl.int32) % ratio
    place = tl.where(place < 0, place + ratio, place)
    bias = tl.multiple_of(APE + place * ape_stride, ROW_ALIGNED)[:, None] + column[None, :]
    score += tl.load(bias, mask=live, other=0.0)
    block, row = slot.to(tl.int32) // pages.block_size, slot.to(tl.int32) % pages.block_size
    state = tl.multiple_of(CACHE + block.to(tl.int64) * pages.page_stride + row * pages.data_stride, ALIGNED)
    state = state[:, None] + column[None, :]
    tl.store(state, kv, mask=live)
    tl.store(state + WIDTH, score, mask=live)


@triton.jit
def dims_at(place, ENTRY: tl.constexpr):
    """(dim, whether it exists) at places of an entry in registers, see `EntryForm`."""
    if ENTRY.in_order:
        early: tl.constexpr = (ENTRY.dim - ENTRY.rope) % 2
        dim = place - early
        exists = (place >= early) & (dim < ENTRY.dim)
    else:
        NOPE: tl.constexpr = ENTRY.nope
        count: tl.constexpr = cdiv(NOPE, ENTRY.group)
        group, member = place // ENTRY.size, place % ENTRY.size
        coded = group < count
        dim = tl.where(coded, group * ENTRY.group, NOPE + (group - count) * ENTRY.size) + member
        exists = tl.where(coded, (member < ENTRY.group) & (dim < NOPE), dim < ENTRY.dim)
    return dim, exists


@triton.jit
def pool(position, request, STATES, TABLE, table, states, inverse, dim, live, POOL: tl.constexpr):
    """The mean [POOL.block] of the kv of the window that ends at a position, weighted by a softmax of its scores.

    dim: channels of an entry; those that are not `live` are 0. table: `TableNumbers`. states: `PageNumbers`. POOL: a
    `PoolForm`. Rows of the window that have no state do not count. Tiles are added in order. Every lane has a softmax
    of its own; they are merged at the end. So bits depend on rows and lanes, not on tiles or the block.
    """
    RATIO: tl.constexpr = POOL.ratio
    OVERLAP: tl.constexpr = POOL.overlap
    ROWS: tl.constexpr = POOL.rows
    LANES: tl.constexpr = POOL.lanes
    TILES: tl.constexpr = POOL.tiles
    BLOCK: tl.constexpr = POOL.block
    D: tl.constexpr = POOL.dim
    ALIGNED: tl.constexpr = POOL.aligned
    window: tl.constexpr = 2 * RATIO if OVERLAP else RATIO
    width: tl.constexpr = 2 * D if OVERLAP else D
    known = (request >= 0) & (request < table.requests)
    columns = tl.where(known, table.columns, 0)
    blocks = TABLE + tl.where(known, request, 0).to(tl.int64) * table.stride
    # numbers of 31 bits, as division of 64 bits is slow, and unsigned, as they are widened for nothing then
    last, place = position.to(tl.int32) // states.block_size, position.to(tl.int32) % states.block_size
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
            back = (window - 1 - row + states.block_size - 1 - place).to(tl.uint32)
            pages = ((back.to(tl.uint64) * inverse) >> 48).to(tl.uint32)
            page = (last - pages.to(tl.int32)).to(tl.uint32)
            exists = page < columns
            if window % (TILES * ROWS * LANES):
                exists &= row < window
            block = tl.load(blocks + page, mask=exists, other=-1).to(tl.uint32)
            exists &= block < states.num_blocks
            inner = (pages + 1) * states.block_size - 1 - back
            state = STATES + block.to(tl.uint64) * states.page_stride + inner.to(tl.uint64) * states.data_stride
            state = tl.multiple_of(state, ALIGNED)
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
def places_of(position, ANGLES, num_positions, angle_stride, ENTRY: tl.constexpr):
    """(dims, whether they exist, which pairs of them rotate, cosines, sines) at the places of an entry.

    position: of the token that completes the entry.
    """
    block: tl.constexpr = ENTRY.groups * ENTRY.size
    plain: tl.constexpr = ENTRY.dim - ENTRY.rope
    # [block], [block / 2]
    dim, live = dims_at(tl.arange(0, block), ENTRY)
    first, _ = dims_at(2 * tl.arange(0, block // 2), ENTRY)
    turned = (first >= plain) & (first < ENTRY.dim)
    angles = ANGLES + tl.minimum(tl.maximum(position - ENTRY.ratio + 1, 0), num_positions - 1) * angle_stride
    angles += (first - plain) // 2
    cos = tl.load(angles, mask=turned, other=1.0)
    sin = tl.load(angles + ENTRY.rope // 2, mask=turned, other=0.0)
    return dim, live, turned, cos, sin


@triton.jit
def store_entry(x, dim, live, turned, cos, sin, CACHE, slot, pages, ENTRY: tl.constexpr):
    """Rotate an entry x [block] fp32, at the places of `places_of`, and write it to a slot that exists."""
    GROUPS: tl.constexpr = ENTRY.groups
    SIZE: tl.constexpr = ENTRY.size
    NOPE: tl.constexpr = ENTRY.nope
    # Triton 3.6 takes no field of a constant for a constant of a function if that is a tuple, nor as an alignment
    WRITER: tl.constexpr = ENTRY.writer
    ALIGNED: tl.constexpr = WRITER.aligned
    even, odd = tl.split(tl.reshape(x, (GROUPS * SIZE // 2, 2)))
    turned_even, turned_odd = rotate(even, odd, cos, sin)
    x = tl.reshape(tl.join(tl.where(turned, turned_even, even), tl.where(turned, turned_odd, odd)), (GROUPS * SIZE,))
    row = slot % pages.block_size
    page = CACHE + slot // pages.block_size * pages.page_stride
    record = tl.multiple_of(page + row * pages.data_stride, ALIGNED)
    if ENTRY.scales == 0:
        tl.store(record + dim, round_to(x, CACHE.dtype.element_ty, WRITER.exact_casts), mask=live)
    else:
        count: tl.constexpr = cdiv(NOPE, ENTRY.group)
        rounded = round_to(x, tl.bfloat16, WRITER.exact_casts)
        # [GROUPS, SIZE], [GROUPS]
        values, group = tl.reshape(rounded.to(tl.float32), (GROUPS, SIZE)), tl.arange(0, GROUPS)
        codes, byte = encode(values, WRITER)
        if WRITER.coding == FP8:
            codes = tl.reshape(codes, (GROUPS * SIZE,))
            tl.store(record + dim, codes.to(tl.uint8), mask=live & (dim < NOPE))
        else:
            packed = pack_pairs(codes, GROUPS, SIZE // 2)
            at = group[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
            tl.store(record + at, packed.to(tl.uint8), mask=at < NOPE // 2)
        if ENTRY.dim > NOPE:
            # the bf16 values begin right after the codes
            tail = (record + (NOPE if WRITER.coding == FP8 else NOPE // 2)).to(tl.pointer_type(tl.bfloat16))
            tl.store(tail + (dim - NOPE), rounded, mask=live & (dim >= NOPE))
        scales = page + pages.scale_offset + row * pages.scale_stride
        if ENTRY.float_scale:
            bits = tl.sum(tl.where(group == 0, scale_of_byte(byte).to(tl.int32, bitcast=True), 0), 0)
            part = tl.arange(0, 4)
            tl.store(scales + part, ((bits >> (8 * part)) & 0xFF).to(tl.uint8))
        else:
            tl.store(scales + group, tl.where(group < count, byte, 0).to(tl.uint8), mask=group < ENTRY.scales)


@triton.jit
def completing(start, n, tokens, POSITIONS, SLOTS, REQUESTS, pages, RATIO: tl.constexpr, TOKENS: tl.constexpr):
    """(index, request, whether it completes an entry that has a slot), each [TOKENS], of the tokens of a program."""
    index = tl.arange(0, TOKENS)
    given = (index < tokens) & (start + index < n)
    slot = tl.load(SLOTS + start + index, mask=given, other=-1)
    position = tl.load(POSITIONS + start + index, mask=given, other=0)
    request = tl.load(REQUESTS + start + index, mask=given, other=-1)
    stored = (slot >= 0) & (slot < pages.num_blocks.to(tl.int64) * pages.block_size)
    return index, request, stored & ((position + 1) % RATIO == 0)


@stable_kernel
def pool_kernel(
    STATES,  # pages of fp32 rows: kv, then scores
    TABLE,  # [requests, columns] int32, blocks of states
    REQUESTS,  # [n] int32
    POSITIONS,  # [n] int64
    SLOTS,  # [n] int64, of entries
    POOLED,  # [n, dim] fp32
    n: tl.int32, tokens: tl.int32, table: TableNumbers, states: PageNumbers, inverse: tl.int64, pages: PageNumbers,
    POOL: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n / tokens * dim / block,): each program pools POOL.block dims of the entries that its tokens complete.

    They are stored, before their norm, at the rows of POOLED of their tokens; no other row is written. `tokens` is at
    most TOKENS. inverse: 2^48 / `states.block_size`, rounded up. pages: of entries.
    """
    wait_then_launch_dependents(PDL)
    slices: tl.constexpr = cdiv(POOL.dim, POOL.block)
    start = (tl.program_id(0) // slices).to(tl.int64) * tokens
    dim = tl.program_id(0) % slices * POOL.block + tl.arange(0, POOL.block)
    live = dim < POOL.dim
    index, request, completes = completing(start, n, tokens, POSITIONS, SLOTS, REQUESTS, pages, POOL.ratio, TOKENS)
    found = tl.min(tl.where(completes, index, TOKENS), 0)
    while found < TOKENS:
        token = start + found
        own = tl.sum(tl.where(index == found, request, 0), 0)
        x = pool(tl.load(POSITIONS + token), own, STATES, TABLE, table, states, inverse, dim, live, POOL)
        tl.store(POOLED + token * POOL.dim + dim, x, mask=live)
        found = tl.min(tl.where(completes & (index > found), index, TOKENS), 0)


@stable_kernel
def compress_kernel(
    STATES,  # pages of fp32 rows: kv, then scores
    TABLE,  # [requests, columns] int32, blocks of states
    REQUESTS,  # [n] int32
    POSITIONS,  # [n] int64
    SLOTS,  # [n] int64, of CACHE
    POOLED,  # [n, dim] fp32 of `pool_kernel`, or None
    WEIGHT,  # [dim] bf16 or fp32
    ANGLES,  # [num_positions, rope] fp32, cosines before sines
    CACHE,  # pages: uint8, or bf16 or fp32 where entries are plain rows
    n: tl.int32, tokens: tl.int32, eps: tl.float32, table: TableNumbers, states: PageNumbers, inverse: tl.int64,
    num_positions: tl.int64, angle_stride: tl.int64, pages: PageNumbers,
    POOL: tl.constexpr, ENTRY: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n / tokens,): each program makes the entries that its tokens complete, which are at most TOKENS.

    With POOLED entries are normalised, rotated and stored, and no state is read. `tokens` is at most TOKENS. Numbers
    are those of `pool_kernel`. ENTRY: an `EntryForm`.
    """
    wait_prior_grid(PDL)
    launch_dependents_of_few(n, 0, PDL)
    start = tl.program_id(0).to(tl.int64) * tokens
    index, request, completes = completing(start, n, tokens, POSITIONS, SLOTS, REQUESTS, pages, POOL.ratio, TOKENS)
    found = tl.min(tl.where(completes, index, TOKENS), 0)
    while found < TOKENS:
        token = start + found
        own = tl.sum(tl.where(index == found, request, 0), 0)
        position, slot = tl.load(POSITIONS + token), tl.load(SLOTS + token)
        # these are on their way while the states are
        dim, live, turned, cos, sin = places_of(position, ANGLES, num_positions, angle_stride, ENTRY)
        weight = tl.load(WEIGHT + dim, mask=live, other=0.0).to(tl.float32)
        if POOLED is not None:
            x = tl.load(POOLED + token * ENTRY.dim + dim, mask=live, other=0.0)
        else:
            x = pool(position, own, STATES, TABLE, table, states, inverse, dim, live, POOL)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / ENTRY.dim + eps) * weight
        store_entry(x, dim, live, turned, cos, sin, CACHE, slot, pages, ENTRY)
        found = tl.min(tl.where(completes & (index > found), index, TOKENS), 0)
    launch_dependents(PDL)
