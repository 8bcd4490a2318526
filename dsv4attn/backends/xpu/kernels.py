"""Kernels of the Intel backend: gather of the keys of decode rows, and attention on values in a key's leading dims."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton import numerics
from dsv4attn.backends._triton.cache.forms import PageNumbers
from dsv4attn.backends._triton.cache.kernels_gather import copy_records
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import LN2, LOG2E, NOTHING


@stable_kernel
def gather_selected(
    KV,
    PACKED,
    LENS_OUT,
    CACHE,
    INDICES,
    LENS,
    BEFORE,
    columns: tl.int32,
    width: tl.int32,
    width_before: tl.int32,
    index_stride: tl.int64,
    kv_stride: tl.int64,
    pages: PageNumbers,
    BLOCK_R: tl.constexpr,
    ROW_ALIGNED: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Grid (T * tiles,): BLOCK_R columns of one token's segment, of `width` columns; at least one tile.

    A token has `columns` rows of KV and as many columns of PACKED: its window's first, then the other segment's. The
    launch of the other segment takes the window's lengths, BEFORE, and its width. LENS_OUT: columns of all segments so
    far. An existing slot is copied, and PACKED has the row of its copy. A missing slot is -1, and no row is written.
    """
    tiles = tl.maximum(tl.cdiv(width, BLOCK_R), 1)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * BLOCK_R
    count = tl.minimum(tl.maximum(tl.load(LENS + token), 0), width)
    before = tl.full((), 0, tl.int32)
    if BEFORE is not None:
        before = tl.minimum(tl.maximum(tl.load(BEFORE + token), 0), width_before)
    if first == 0:
        tl.store(LENS_OUT + token, before + count)
    if first < count:
        # [R]
        column = first + tl.arange(0, BLOCK_R)
        wanted = column < count
        slot = tl.load(INDICES + token * index_stride + column, mask=wanted, other=-1)
        block = slot // pages.block_size
        exists = (slot >= 0) & (block < pages.num_blocks)
        row = token * columns + before + column
        tl.store(PACKED + row, tl.where(exists, row, -1).to(tl.int32), mask=wanted)
        copy_records(
            tl.multiple_of(KV + row * kv_stride, ROW_ALIGNED), exists, CACHE, block.to(tl.int64),
            (slot % pages.block_size).to(tl.int64), exists, pages, RECORD,
        )  # fmt: skip


@stable_kernel
def attend_leading_values(
    q,
    kv,
    indices,
    lens,
    sink,
    out,
    max_logits,
    lse,
    q_token: tl.int64,
    q_head: tl.int64,
    kv_row: tl.int64,
    index_stride: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    width: tl.int32,
    last_slot: tl.int32,
    scale: tl.float32,
    H: tl.constexpr,
    DV: tl.constexpr,
    DQK: tl.constexpr,
    ROW_ALIGNED: tl.constexpr,
    BH: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    PIECES: tl.constexpr,
    TAIL: tl.constexpr,
    DT: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):
    """Grid (T * blocks of BH heads,). Values are the first DV of a key's DQK dims, in PIECES of C; TAIL holds the rest.

    Arguments are those of `attention`, strides in elements. lens may be None: all columns count. max_logits and lse are
    contiguous. ROW_ALIGNED: bytes that divide the address of every row of kv.
    """
    BLOCKS: tl.constexpr = (H + BH - 1) // BH
    head = (tl.program_id(0) % BLOCKS) * BH + tl.arange(0, BH)
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    live = head < H
    column, behind = tl.arange(0, C), DV + tl.arange(0, TAIL)
    q_row = q + (token * q_token + head.to(tl.int64) * q_head)
    q_left = tl.load(q_row[:, None] + column[None, :], mask=live[:, None] & (column < DV)[None, :], other=0.0).to(DT)
    q_tail = tl.load(q_row[:, None] + behind[None, :], mask=live[:, None] & (behind < DQK)[None, :], other=0.0).to(DT)
    acc_left = tl.zeros([BH, C], tl.float32)
    if PIECES == 2:
        there = live[:, None] & (C + column < DV)[None, :]
        q_right = tl.load(q_row[:, None] + (C + column)[None, :], mask=there, other=0.0).to(DT)
        acc_right = tl.zeros([BH, C], tl.float32)

    count = width
    if lens is not None:
        count = tl.minimum(tl.maximum(tl.load(lens + token), 0), width)
    largest = tl.full([BH], NOTHING, tl.float32)
    total = tl.zeros([BH], tl.float32)
    for tile in tl.range(0, tl.cdiv(count, N)):
        at = tile * N + tl.arange(0, N)
        slot = tl.load(indices + token * index_stride + at, mask=at < count, other=-1)
        ok = (slot >= 0) & (slot <= last_slot)
        row = tl.multiple_of(kv + tl.where(ok, slot, 0).to(tl.int64) * kv_row, ROW_ALIGNED)[:, None]
        left = tl.load(row + column[None, :], mask=ok[:, None] & (column < DV)[None, :], other=0.0).to(DT)
        tail = tl.load(row + behind[None, :], mask=ok[:, None] & (behind < DQK)[None, :], other=0.0).to(DT)
        z = tl.dot(q_left, tl.trans(left), input_precision="ieee")
        z = tl.dot(q_tail, tl.trans(tail), z, input_precision="ieee")
        if PIECES == 2:
            beyond = ok[:, None] & (C + column < DV)[None, :]
            right = tl.load(row + (C + column)[None, :], mask=beyond, other=0.0).to(DT)
            z = tl.dot(q_right, tl.trans(right), z, input_precision="ieee")
        z = tl.where(ok[None, :], z * (scale * LOG2E), -float("inf"))
        grown = tl.maximum(largest, tl.max(z, 1))
        shrink = tl.exp2(largest - grown)
        p = tl.exp2(z - grown[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc_left = tl.dot(p.to(DT), left, acc_left * shrink[:, None], input_precision="ieee")
        if PIECES == 2:
            acc_right = tl.dot(p.to(DT), right, acc_right * shrink[:, None], input_precision="ieee")
        largest = grown

    empty = total == 0.0
    result = token * H + head
    tl.store(max_logits + result, tl.where(empty, -float("inf"), numerics.or_nan(largest, total) * LN2), mask=live)
    tl.store(lse + result, tl.where(empty, -float("inf"), (largest + tl.log2(total)) * LN2), mask=live)
    if sink is not None:
        # one more logit of value zero; a sink of +inf leaves nothing
        total += tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2E - largest)
    factor = tl.where(empty, 0.0, 1.0 / total)
    to = (out + (token * out_token + head.to(tl.int64) * out_head))[:, None] + column[None, :]
    result = numerics.round_to(acc_left * factor[:, None], out.dtype.element_ty, EXACT_CASTS)
    tl.store(to, result, mask=live[:, None] & (column < DV)[None, :])
    if PIECES == 2:
        result = numerics.round_to(acc_right * factor[:, None], out.dtype.element_ty, EXACT_CASTS)
        tl.store(to + C, result, mask=live[:, None] & (C + column < DV)[None, :])
