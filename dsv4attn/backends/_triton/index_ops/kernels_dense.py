"""Kernels of index arithmetic that runs once a layer, one program a row: entries to slots, and rows of gathered keys.

`torch_ops.index_ops` is the definition. Inputs may have any strides; outputs have unit stride along rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.index_ops.kernels_common import cut_lengths, request_of, slots_of
from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel


@stable_kernel
def translate_kernel(
    slots,  # [T, width] int32
    lens,  # [T] int32
    topk,  # [T, width] int32
    visible_lens,  # [T] int32
    token_to_req,  # [T] int32
    table,  # [num_reqs, num_columns] int32
    slots_stride: tl.int64, topk_stride: tl.int64, topk_column_stride: tl.int64, width: tl.int32,
    visible_stride: tl.int64, request_stride: tl.int64, table_stride: tl.int64, table_column_stride: tl.int64,
    num_reqs: tl.int32, num_columns: tl.int32, block_size: tl.int32,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). Slots of one token's entries, and where the last visible one ends."""
    wait_then_launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(token_to_req + token * request_stride)
    known = (request >= 0) & (request < num_reqs)
    visible_len = tl.where(known, tl.load(visible_lens + token * visible_stride), 0)
    blocks = table + request.to(tl.int64) * table_stride
    length = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        entry = tl.load(topk + token * topk_stride + column.to(tl.int64) * topk_column_stride, mask=inside, other=-1)
        visible = (entry >= 0) & (entry < visible_len)
        slot = slots_of(entry, visible, blocks, table_column_stride, num_columns, block_size)
        tl.store(slots + token * slots_stride + column, slot.to(tl.int32), mask=inside)
        length = tl.where(visible, column + 1, length)  # columns ascend, so the last one stays
    tl.store(lens + token, tl.max(length, 0))


@stable_kernel
def combine_kernel(
    rows,  # [T, width] int32
    lens,  # [T] int32
    topk,  # [T, topk_width] int32, or None
    visible_lens,  # [T] int32, None where topk is
    is_valid,  # [T] bool
    starts,  # [num_reqs + 1] int32
    seq_lens,  # [num_reqs] int32
    gather_lens,  # [num_reqs] int32
    entry_table,  # [num_reqs, entry_columns] int32, or None
    swa_table,  # [num_reqs, swa_columns] int32, or None
    rows_stride: tl.int64, width: tl.int32, topk_stride: tl.int64, topk_column_stride: tl.int64,
    topk_width: tl.int32, visible_stride: tl.int64, valid_stride: tl.int64, starts_stride: tl.int64,
    seq_stride: tl.int64, gather_stride: tl.int64, num_reqs: tl.int32, depth: tl.int32,
    window: tl.int32, most_entries: tl.int32, rows_per_req: tl.int64, first_window_row: tl.int64,
    entry_stride: tl.int64, entry_column_stride: tl.int64, entry_columns: tl.int32,
    entry_block_size: tl.int32, entry_slots: tl.int64,
    swa_stride: tl.int64, swa_column_stride: tl.int64, swa_columns: tl.int32,
    swa_block_size: tl.int32, swa_slots: tl.int64, tail: tl.int32, slice_tokens: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (T,). The rows of one token: visible entries, moved together, then its window, then -1.

    entry_table, swa_table: None where slots are not to be looked at. tail, slice_tokens: of `cut_lengths`.
    """
    token, base = tl.program_id(0), tl.load(starts)
    request = request_of(token, starts, starts_stride, base, num_reqs, depth).to(tl.int64)
    token = token.to(tl.int64)
    valid = tl.load(is_valid + token * valid_stride, mask=request >= 0, other=0)
    request = tl.maximum(request, 0)
    first_row = request * rows_per_req
    row = rows + token * rows_stride
    taken = tl.zeros((), tl.int32)
    if topk is not None:
        visible_len = tl.where(valid, tl.load(visible_lens + token * visible_stride), 0)
        entries = topk + token * topk_stride
        for start in range(0, topk_width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < topk_width
            entry = tl.load(entries + column.to(tl.int64) * topk_column_stride, mask=inside, other=-1)
            keep = (entry >= 0) & (entry < visible_len)
            if entry_table is not None:
                blocks = entry_table + request * entry_stride
                slot = slots_of(entry, keep, blocks, entry_column_stride, entry_columns, entry_block_size)
                keep = (slot >= 0) & (slot < entry_slots)
            place = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(row + place, (first_row + entry).to(tl.int32), mask=keep & (place < most_entries))
            taken += tl.sum(keep.to(tl.int32), 0)
        taken = tl.minimum(taken, most_entries)
    seq_len, gather_len = cut_lengths(
        tl.load(seq_lens + request * seq_stride), tl.load(gather_lens + request * gather_stride),
        tail, slice_tokens, window,
    )  # fmt: skip
    gather_start = seq_len - gather_len
    end = tl.load(starts + (request + 1) * starts_stride) - base
    position = token + (seq_len - tl.where(slice_tokens >= 0, slice_tokens, end))
    # no position before the first one that is gathered
    near = tl.minimum(position + 1 - tl.maximum(gather_start, 0), window)
    count = tl.where(valid, tl.maximum(near, 0), 0).to(tl.int32)
    first = position + 1 - count
    # entries were stored only before column `taken`: these stores do not overlap them
    for start in range(taken, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        seen = column < taken + count
        place = first + (column - taken)
        value = first_row + first_window_row + (place - gather_start)
        if swa_table is not None:
            blocks = swa_table + request * swa_stride
            slot = slots_of(place, seen, blocks, swa_column_stride, swa_columns, swa_block_size)
            seen = (slot >= 0) & (slot < swa_slots)
        tl.store(row + column, tl.where(seen, value, -1).to(tl.int32), mask=column < width)
    tl.store(lens + token, taken + count)
