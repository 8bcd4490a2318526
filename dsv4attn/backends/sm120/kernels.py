"""Kernels around FlashInfer: `prepare` pads and copies the inputs of its kernels, `settle` copies results back."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel


@triton.jit
def copy_row(to, rows, token, first, width, to_width, stride, column_stride, last_slot, COLUMNS: tl.constexpr):
    """Copy COLUMNS columns of a token's row to a row of `to_width`: -1 for missing slots, and after `width`."""
    # [N]
    column = first + tl.arange(0, COLUMNS)
    inside = column < width
    slot = tl.load(rows + token * stride + column.to(tl.int64) * column_stride, mask=inside, other=-1)
    tl.store(to + token * to_width + column, tl.where(slot <= last_slot, slot, -1), mask=column < to_width)


@stable_kernel
def prepare(
    q,
    sink,
    rows0,
    rows1,
    wide_q,
    wide_sink,
    to0,
    to1,
    q_token: tl.int64,
    q_head: tl.int64,
    q_dim: tl.int64,
    sink_stride: tl.int64,
    heads: tl.int32,
    wide: tl.int32,
    width0: tl.int32,
    to_width0: tl.int64,
    stride0: tl.int64,
    column_stride0: tl.int64,
    last_slot0: tl.int32,
    width1: tl.int32,
    to_width1: tl.int64,
    stride1: tl.int64,
    column_stride1: tl.int64,
    last_slot1: tl.int32,
    pieces: tl.int32,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    D: tl.constexpr,
):
    """Grid (T * pieces,): a piece is COLUMNS columns of each row of indices, and HEADS heads of q.

    wide_q, wide_sink: copies of q and sink with `wide` heads, the added ones zeros and without a sink. to0, to1: index
    rows for FlashInfer. Arguments that are None are not copied. q's strides are in units of UNIT elements.
    """
    token, piece = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces
    if to0 is not None:
        copy_row(to0, rows0, token, piece * COLUMNS, width0, to_width0, stride0, column_stride0, last_slot0, COLUMNS)
    if to1 is not None:
        copy_row(to1, rows1, token, piece * COLUMNS, width1, to_width1, stride1, column_stride1, last_slot1, COLUMNS)
    if wide_q is not None:
        # [H], [D]
        head, dim = piece * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        row = tl.multiple_of(q + (token * q_token * UNIT + head.to(tl.int64) * q_head * UNIT), 2 * UNIT)
        offset = dim if UNIT > 1 else dim.to(tl.int64) * q_dim
        # [H, D]
        value = tl.load(row[:, None] + offset[None, :], mask=(head < heads)[:, None], other=0.0)
        to = tl.multiple_of(wide_q + (token * wide + head) * D, 16)
        tl.store(to[:, None] + dim[None, :], value, mask=(head < wide)[:, None])
    if wide_sink is not None:
        # [M]; one program writes all of them
        every = tl.arange(0, MOST)
        some = tl.where(tl.program_id(0) == 0, wide, 0)
        logit = tl.load(
            sink + every.to(tl.int64) * sink_stride, mask=every < tl.minimum(heads, some), other=-float("inf")
        )
        tl.store(wide_sink + every, logit, mask=every < some)


@stable_kernel
def settle(
    flash_lse,
    lse,
    wide_out,
    out,
    flash_token: tl.int64,
    flash_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    out_dim: tl.int64,
    heads: tl.int32,
    wide: tl.int32,
    pieces: tl.int32,
    empty_lse: tl.float32,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    D: tl.constexpr,
):
    """Grid (T * pieces,): a piece is HEADS heads of `out`, which are the first of `wide_out`'s.

    lse: copy of `flash_lse`, FlashInfer's lse, which may be the same memory, with `empty_lse` for rows without keys.
    Arguments that are None are skipped. out's strides are in units of UNIT elements.
    """
    token, piece = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces
    if out is not None:
        # [H], [D]
        head, dim = piece * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        there = (head < heads)[:, None]
        # [H, D]
        value = tl.load(tl.multiple_of(wide_out + (token * wide + head) * D, 16)[:, None] + dim[None, :], mask=there)
        row = tl.multiple_of(out + (token * out_token * UNIT + head.to(tl.int64) * out_head * UNIT), 2 * UNIT)
        offset = dim if UNIT > 1 else dim.to(tl.int64) * out_dim
        tl.store(row[:, None] + offset[None, :], value, mask=there)
    if lse is not None:
        # [M]; the first piece writes all of them
        every = tl.arange(0, MOST).to(tl.int64)
        inside = every < tl.where(piece == 0, heads, 0)
        raw_lse = tl.load(flash_lse + token * flash_token + every * flash_head, mask=inside)
        raw_lse = tl.where(raw_lse == -float("inf"), empty_lse, raw_lse)
        tl.store(lse + token * lse_token + every * lse_head, raw_lse, mask=inside)
