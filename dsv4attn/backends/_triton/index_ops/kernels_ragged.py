"""Kernels that write ragged index lists: every program computes where its row begins, or reads it from a scan.

The length of a row is the number of entries that its token may see, and absent entries are -1. Lengths alone determine
where rows begin, so that no program waits for another.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.index_ops.kernels_common import slots_of
from dsv4attn.backends._triton.launching.runtime import stable_kernel


@triton.jit
def length_of(lens, row, mask, stride, width):
    """Entries of rows: what their tokens may see, cut to the width. lens: [T] int32, `stride` apart."""
    length = tl.load(lens + row.to(tl.int64) * stride, mask=mask, other=0)
    return tl.minimum(tl.maximum(length, 0), width)


@stable_kernel
def scan_kernel(
    indptr,  # [rows + 1] int32
    lens,  # [rows] int32, `stride` apart
    stride: tl.int64, width: tl.int32, rows: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). Where every row begins, and after them where the last one ends."""
    total = tl.zeros((), tl.int32)
    tl.store(indptr, total)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        length = length_of(lens, row, row < rows, stride, width)
        tl.store(indptr + 1 + row, total + tl.cumsum(length, 0), mask=row < rows)
        total += tl.sum(length, 0)


@triton.jit
def length_before(row, lens, stride, width, BLOCK: tl.constexpr):
    """Entries of all rows before one. lens: [rows] int32, `stride` apart."""
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, row, BLOCK):
        other = start + tl.arange(0, BLOCK)
        before += length_of(lens, other, other < row, stride, width)
    return tl.sum(before, 0)


@triton.jit
def span_of(row, rows, scanned, indptr, lens, stride, width, BLOCK: tl.constexpr):
    """Where a row begins, int64, and its length; stored to indptr unless that is scanned. No rows: nothing is.

    indptr: [rows + 1] int32. lens: [rows] int32, `stride` apart.
    """
    begin = length_before(tl.where(scanned != 0, 0, row), lens, stride, width, BLOCK)
    begin += tl.load(indptr + row, mask=(scanned != 0) & (row < rows), other=0)
    length = length_of(lens, row, row < rows, stride, width)
    tl.store(indptr, 0, mask=(scanned == 0) & (row == 0))
    tl.store(indptr + row + 1, begin + length, mask=(scanned == 0) & (row < rows))
    return begin.to(tl.int64), length


@triton.jit
def pack_row(to, source, length, column_stride, num_slots, BLOCK: tl.constexpr):
    """Copy the leading columns of a dense row; -1 for values outside [0, num_slots)."""
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        entry = tl.load(source + column.to(tl.int64) * column_stride, mask=column < length, other=-1)
        tl.store(to + column, tl.where(entry < num_slots, tl.maximum(entry, -1), -1), mask=column < length)


@triton.jit
def pack_rows(
    flat, indptr, indices, lens, first, count, rows, row_stride, width, num_slots, BLOCK: tl.constexpr
):  # fmt: skip
    """Pack rows first .. first + count - 1 of dense ones [rows, width]; their lengths lie side by side.

    Sums the lengths of all rows before them, and stores where each row ends.
    """
    begin = length_before(first, lens, 1, width, BLOCK)
    tl.store(indptr, 0, mask=first == 0)
    source = indices + first.to(tl.int64) * row_stride
    for row in range(first, tl.minimum(first + count, rows)):
        length = tl.minimum(tl.maximum(tl.load(lens + row), 0), width)
        pack_row(flat + begin.to(tl.int64), source, length, 1, num_slots, BLOCK)
        begin += length
        source += row_stride
        tl.store(indptr + row + 1, begin)


@stable_kernel
def pack_kernel(
    flat,  # [capacity] int32, written from row to row
    indptr,  # [T + 1] int32
    indices,  # [T, width] int32
    lens,  # [T] int32
    row_stride: tl.int64, column_stride: tl.int64, width: tl.int32, lens_stride: tl.int64,
    num_slots: tl.int64, rows: tl.int32, scanned: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (max(T, 1),). A dense row's leading columns, as they are. scanned: whether indptr is there already."""
    row = tl.program_id(0)
    begin, length = span_of(row, rows, scanned, indptr, lens, lens_stride, width, BLOCK)
    pack_row(flat + begin, indices + row.to(tl.int64) * row_stride, length, column_stride, num_slots, BLOCK)


@stable_kernel
def ragged_translate_kernel(
    flat,  # [capacity] int32
    indptr,  # [T + 1] int32
    topk,  # [T, width] int32
    visible_lens,  # [T] int32
    row_lens,  # [T] int32
    token_to_req,  # [T] int32
    table,  # [num_reqs, num_columns] int32
    topk_stride: tl.int64, topk_column_stride: tl.int64, width: tl.int32, visible_stride: tl.int64,
    lens_stride: tl.int64, request_stride: tl.int64, table_stride: tl.int64, table_column_stride: tl.int64,
    num_reqs: tl.int32, num_columns: tl.int32, block_size: tl.int32, rows: tl.int32, scanned: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (max(T, 1),). Slots of a token's visible entries, moved together. After them -1, up to the row's length.

    scanned: as in `pack_kernel`.
    """
    row = tl.program_id(0)
    begin, length = span_of(row, rows, scanned, indptr, row_lens, lens_stride, width, BLOCK)
    token = row.to(tl.int64)
    request = tl.load(token_to_req + token * request_stride, mask=row < rows, other=-1)
    known = (request >= 0) & (request < num_reqs)
    visible_len = tl.load(visible_lens + token * visible_stride, mask=known, other=0)
    blocks = table + request.to(tl.int64) * table_stride
    taken = tl.zeros((), tl.int32)
    for start in range(0, tl.where(visible_len > 0, width, 0), BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = topk + token * topk_stride + column.to(tl.int64) * topk_column_stride
        entry = tl.load(place, mask=column < width, other=-1)
        slot = slots_of(
            entry, (entry >= 0) & (entry < visible_len), blocks, table_column_stride, num_columns, block_size
        )
        keep = (slot >= 0).to(tl.int32)
        to = taken + tl.cumsum(keep, 0) - 1
        tl.store(flat + begin + to, slot.to(tl.int32), mask=(keep > 0) & (to < length))
        taken += tl.sum(keep, 0)
    # slots were stored only before column `taken`: these stores do not overlap them
    for start in range(tl.minimum(taken, length), length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(flat + begin + column, tl.full([BLOCK], -1, tl.int32), mask=column < length)
