"""Kernels of DeepSeek-V4.1's compressor: latents of a few tokens each, their ring of states, and what is stored.

A program makes or stores one row in registers. What is computed for a token follows from its own window alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.kernels_compress import dims_at, store_entry
from dsv4attn.backends._triton.numerics import rotate, round_to
from dsv4attn.backends._triton.sizes import next_power_of_2


@triton.jit
def ring_row(
    position, request, exists, STATES, TABLE, num_requests, num_columns, table_stride, state_blocks, state_size,
    state_page, state_stride, STATES_ALIGNED: tl.constexpr,
):  # fmt: skip
    """(pointer, whether there is one) of the row of a position in the ring of a request, if it `exists`."""
    exists &= (request >= 0) & (request < num_requests) & (position >= 0)
    place = (tl.maximum(position, 0) % (num_columns.to(tl.int64) * state_size)).to(tl.int32)
    row = TABLE + tl.where(exists, request, 0).to(tl.int64) * table_stride
    block = tl.load(row + place // state_size, mask=exists, other=-1)
    exists &= (block >= 0) & (block < state_blocks)
    at = STATES + block.to(tl.int64) * state_page + (place % state_size).to(tl.int64) * state_stride
    return tl.multiple_of(at, STATES_ALIGNED), exists


@stable_kernel
def latent_kernel(
    KV,  # [n, D] fp32
    SCORE,  # [n, D] fp32, or None with RATIO 1
    POSITIONS,  # [n] int64
    REQUESTS,  # [n] int32
    WEIGHT,  # [D]
    STATES,  # pages of fp32 rows: kv, then scores; `state_page` elements apart; None with RATIO 1
    TABLE,  # [num_requests, num_columns] int32, blocks of the rings; None with RATIO 1
    OUT,  # [n, D] bf16, dense
    kv_stride: tl.int64, score_stride: tl.int64, eps: tl.float32, num_requests: tl.int32, num_columns: tl.int32,
    table_stride: tl.int64, state_blocks: tl.int32, state_size: tl.int32, state_page: tl.int64, state_stride: tl.int64,
    D: tl.constexpr, RATIO: tl.constexpr, ROW_ALIGNED: tl.constexpr, STATES_ALIGNED: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): the latent that a token completes, or zeros, also for a token of no request (-1).

    Rows of the ring are read, none is written.

    ROW_ALIGNED, STATES_ALIGNED: bytes that divide the address of every row of KV and SCORE, and of every state.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(POSITIONS + token)
    dim = tl.arange(0, next_power_of_2(D))
    live = dim < D
    x = tl.zeros([next_power_of_2(D)], tl.float32)
    request = tl.load(REQUESTS + token)
    if ((position + 1) % RATIO == 0) & (request >= 0):
        x = tl.load(tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED) + dim, mask=live, other=0.0)
        if RATIO > 1:
            scores = (tl.load(tl.multiple_of(SCORE + token * score_stride, ROW_ALIGNED) + dim, mask=live, other=0.0),)
            values = (x,)
            for back in tl.static_range(1, RATIO):
                given = token >= back
                before = token - tl.where(given, back, 0)
                given &= tl.load(REQUESTS + before) == request
                given &= tl.load(POSITIONS + before) == position - back
                state, exists = ring_row(
                    position - back, request, (position >= back) & (given == 0), STATES, TABLE, num_requests,
                    num_columns, table_stride, state_blocks, state_size, state_page, state_stride, STATES_ALIGNED,
                )  # fmt: skip
                # as bounds, since interpreted scalars of one bit do not join masks
                here, there = dim < tl.where(given, D, 0), dim < tl.where(exists, D, 0)
                score = tl.multiple_of(SCORE + before * score_stride, ROW_ALIGNED) + dim
                saved = tl.load(state + D + dim, mask=there, other=float("-inf"))
                scores += (tl.where(given, tl.load(score, mask=here, other=0.0), saved),)
                kv = tl.multiple_of(KV + before * kv_stride, ROW_ALIGNED) + dim
                saved = tl.load(state + dim, mask=there, other=0.0)
                values += (tl.where(given, tl.load(kv, mask=here, other=0.0), saved),)
            top = scores[0]
            for back in tl.static_range(1, RATIO):
                top = tl.maximum(top, scores[back])
            # a NaN among scores shows in the sums, a maximum may pass over it
            total = tl.exp(scores[0] - top)
            x = total * values[0]
            for back in tl.static_range(1, RATIO):
                weight = tl.exp(scores[back] - top)
                total += weight
                x += weight * values[back]
            x = tl.where(live, x / total, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x *= tl.load(WEIGHT + dim, mask=live, other=0.0).to(tl.float32)
    tl.store(OUT + token * D + dim, round_to(x, tl.bfloat16, EXACT_CASTS), mask=live)


@stable_kernel
def ring_kernel(
    KV,  # [n, D] fp32
    SCORE,  # [n, D] fp32
    POSITIONS,  # [n] int64
    REQUESTS,  # [n] int32
    STATES,  # pages of fp32 rows: kv, then scores; `state_page` elements apart
    TABLE,  # [num_requests, num_columns] int32, blocks of the rings
    n: tl.int32, kv_stride: tl.int64, score_stride: tl.int64, num_requests: tl.int32, num_columns: tl.int32,
    table_stride: tl.int64, state_blocks: tl.int32, state_size: tl.int32, state_page: tl.int64, state_stride: tl.int64,
    D: tl.constexpr, ROW_ALIGNED: tl.constexpr, STATES_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): a token's kv and scores go to its row in the ring of its request, unless a later token has it."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(REQUESTS + token)
    behind = token + num_columns.to(tl.int64) * state_size
    later = tl.load(REQUESTS + behind, mask=behind < n, other=-1)
    state, exists = ring_row(
        tl.load(POSITIONS + token), request, (behind >= n) | (later != request), STATES, TABLE, num_requests,
        num_columns, table_stride, state_blocks, state_size, state_page, state_stride, STATES_ALIGNED,
    )  # fmt: skip
    if exists:
        dim = tl.arange(0, next_power_of_2(D))
        live = dim < D
        kv = tl.load(tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED) + dim, mask=live)
        score = tl.load(tl.multiple_of(SCORE + token * score_stride, ROW_ALIGNED) + dim, mask=live)
        tl.store(state + dim, kv, mask=live)
        tl.store(state + D + dim, score, mask=live)


@stable_kernel
def store_kernel(
    X,  # [n, D] bf16 or fp32
    POSITIONS,  # [n] int64
    SLOTS,  # [n] int64, of CACHE
    WEIGHT,  # [D], or None without a norm
    ANGLES,  # [num_positions, ROPE] fp32, cosines before sines
    CACHE,  # pages, `page_stride` elements apart: uint8, or bf16 or fp32 where entries are plain rows
    x_stride: tl.int64, eps: tl.float32, num_positions: tl.int64, angle_stride: tl.int64, num_blocks: tl.int32,
    block_size: tl.int32, page_stride: tl.int64, data_stride: tl.int64, scale_offset: tl.int64, scale_stride: tl.int64,
    D: tl.constexpr, ROPE: tl.constexpr, RATIO: tl.constexpr, NOPE: tl.constexpr, GROUP: tl.constexpr,
    CODE_BITS: tl.constexpr, SCALES: tl.constexpr, SCALE_BITS: tl.constexpr, CODING: tl.constexpr,
    FNUZ: tl.constexpr,
    LARGEST: tl.constexpr, FLOOR: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, IN_ORDER: tl.constexpr,
    ROW_ALIGNED: tl.constexpr, ALIGNED: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): a row is normalised, rotated and stored, if its token completes an entry that has a slot.

    ROW_ALIGNED, ALIGNED: bytes that divide the address of every row of X, and of every record. Other constants are
    those of `compress_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(POSITIONS + token), tl.load(SLOTS + token)
    if ((position + 1) % RATIO == 0) & (slot >= 0) & (slot < num_blocks.to(tl.int64) * block_size):
        block: tl.constexpr = GROUPS * SIZE
        # [block], [block / 2]
        dim, live = dims_at(tl.arange(0, block), D, ROPE, NOPE, GROUP, SIZE, IN_ORDER)
        first, _ = dims_at(2 * tl.arange(0, block // 2), D, ROPE, NOPE, GROUP, SIZE, IN_ORDER)
        turned = (first >= D - ROPE) & (first < D)
        angles = ANGLES + tl.minimum(tl.maximum(position - RATIO + 1, 0), num_positions - 1) * angle_stride
        angles += (first - (D - ROPE)) // 2
        cos = tl.load(angles, mask=turned, other=1.0)
        sin = tl.load(angles + ROPE // 2, mask=turned, other=0.0)
        x = tl.load(tl.multiple_of(X + token * x_stride, ROW_ALIGNED) + dim, mask=live, other=0.0).to(tl.float32)
        if WEIGHT is not None:
            weight = tl.load(WEIGHT + dim, mask=live, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * weight
            x = round_to(x, tl.bfloat16, EXACT_CASTS).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (block // 2, 2)))
        turned_even, turned_odd = rotate(even, odd, cos, sin)
        x = tl.join(tl.where(turned, turned_even, even), tl.where(turned, turned_odd, odd))
        store_entry(
            tl.reshape(x, (block,)), dim, live, CACHE, slot, block_size, page_stride, data_stride, scale_offset,
            scale_stride, D, NOPE, GROUP, CODE_BITS, SCALES, SCALE_BITS, CODING, FNUZ, LARGEST, FLOOR, GROUPS,
            SIZE,
            ALIGNED, EXACT_CASTS,
        )  # fmt: skip
