"""Kernels of DeepSeek-V4.1's compressor: latents of a few tokens each, their ring of states, and what is stored.

A program makes or stores one row in registers. What is computed for a token follows from its own window alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="assignment, attr-defined"

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.forms import PageNumbers, TableNumbers
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.compressor.kernels import places_of, store_entry
from dsv4attn.backends._triton.numerics import round_to
from dsv4attn.backends._triton.sizes import next_power_of_2


@triton.jit
def ring_row(position, request, exists, STATES, TABLE, table, states, STATES_ALIGNED: tl.constexpr):
    """(pointer, whether there is one) of the row of a position in the ring of a request, if it `exists`."""
    exists &= (request >= 0) & (request < table.requests) & (position >= 0)
    place = (tl.maximum(position, 0) % (table.columns.to(tl.int64) * states.block_size)).to(tl.int32)
    row = TABLE + tl.where(exists, request, 0).to(tl.int64) * table.stride
    block = tl.load(row + place // states.block_size, mask=exists, other=-1)
    exists &= (block >= 0) & (block < states.num_blocks)
    at = STATES + block.to(tl.int64) * states.page_stride
    at += (place % states.block_size).to(tl.int64) * states.data_stride
    return tl.multiple_of(at, STATES_ALIGNED), exists


@stable_kernel
def latent_kernel(
    KV,  # [n, D] fp32
    SCORE,  # [n, D] fp32, or None with RATIO 1
    POSITIONS,  # [n] int64
    REQUESTS,  # [n] int32
    WEIGHT,  # [D]
    STATES,  # pages of fp32 rows: kv, then scores; None with RATIO 1
    TABLE,  # [requests, columns] int32, blocks of the rings; None with RATIO 1
    OUT,  # [n, D] bf16, dense
    kv_stride: tl.int64, score_stride: tl.int64, eps: tl.float32, table: TableNumbers, states: PageNumbers,
    D: tl.constexpr, RATIO: tl.constexpr, ROW_ALIGNED: tl.constexpr, STATES_ALIGNED: tl.constexpr,
    EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): the latent that a token completes, or zeros, also for a token of no request (-1).

    Rows of the ring are read, none is written.

    ROW_ALIGNED, STATES_ALIGNED: bytes that divide the address of every row of KV and SCORE, and of every state.
    """
    wait_then_launch_dependents(PDL)
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
                saved = (position >= back) & (given == 0)
                state, exists = ring_row(position - back, request, saved, STATES, TABLE, table, states, STATES_ALIGNED)
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
    STATES,  # pages of fp32 rows: kv, then scores
    TABLE,  # [requests, columns] int32, blocks of the rings
    n: tl.int32, kv_stride: tl.int64, score_stride: tl.int64, table: TableNumbers, states: PageNumbers,
    D: tl.constexpr, ROW_ALIGNED: tl.constexpr, STATES_ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): a token's kv and scores go to its row in the ring of its request, unless a later token has it."""
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(REQUESTS + token)
    behind = token + table.columns.to(tl.int64) * states.block_size
    later = tl.load(REQUESTS + behind, mask=behind < n, other=-1)
    position, last = tl.load(POSITIONS + token), (behind >= n) | (later != request)
    state, exists = ring_row(position, request, last, STATES, TABLE, table, states, STATES_ALIGNED)
    if exists:
        dim = tl.arange(0, next_power_of_2(D))
        live = dim < D
        kv = tl.load(tl.multiple_of(KV + token * kv_stride, ROW_ALIGNED) + dim, mask=live)
        score = tl.load(tl.multiple_of(SCORE + token * score_stride, ROW_ALIGNED) + dim, mask=live)
        tl.store(state + dim, kv, mask=live)
        tl.store(state + D + dim, score, mask=live)


@stable_kernel
def store_kernel(
    X,  # [n, dim] bf16 or fp32
    POSITIONS,  # [n] int64
    SLOTS,  # [n] int64, of CACHE
    WEIGHT,  # [dim], or None without a norm
    ANGLES,  # [num_positions, rope] fp32, cosines before sines
    CACHE,  # pages: uint8, or bf16 or fp32 where entries are plain rows
    x_stride: tl.int64, eps: tl.float32, num_positions: tl.int64, angle_stride: tl.int64, pages: PageNumbers,
    ENTRY: tl.constexpr, ROW_ALIGNED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (n,): a row is normalised, rotated and stored, if its token completes an entry that has a slot.

    ENTRY: an `EntryForm`. ROW_ALIGNED: bytes that divide the address of every row of X.
    """
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(POSITIONS + token), tl.load(SLOTS + token)
    completes = (position + 1) % ENTRY.ratio == 0
    if completes & (slot >= 0) & (slot < pages.num_blocks.to(tl.int64) * pages.block_size):
        dim, live, turned, cos, sin = places_of(position, ANGLES, num_positions, angle_stride, ENTRY)
        x = tl.load(tl.multiple_of(X + token * x_stride, ROW_ALIGNED) + dim, mask=live, other=0.0).to(tl.float32)
        if WEIGHT is not None:
            weight = tl.load(WEIGHT + dim, mask=live, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / ENTRY.dim + eps) * weight
            x = round_to(x, tl.bfloat16, ENTRY.writer.exact_casts).to(tl.float32)
        store_entry(x, dim, live, turned, cos, sin, CACHE, slot, pages, ENTRY)
