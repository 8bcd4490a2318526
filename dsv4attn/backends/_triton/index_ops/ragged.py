"""Ragged index lists. Up to FEW rows in one launch: every program adds up the lengths of the rows before its own.

`dsv4attn.core.indices` is the definition of both functions. A row is as long as its token may see, whatever stands in
it, and what is absent is -1: so where rows begin follows from lengths alone, and no program waits for another. That
takes time in the square of the rows, so with more of them one program adds up all lengths first.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops.common import BLOCK, slots_of, variant_of
from dsv4attn.backends._triton.launching.runtime import launch, stable_kernel
from dsv4attn.core.tensorspec import check_strides

__all__ = ["build_ragged_indices_from_dense", "compute_global_topk_ragged_indices_and_indptr", "variants"]

FEW = 4096
"""Rows up to which another launch would take longer than the sums."""
SCAN_BLOCK, SCAN_WARPS = 4096, 8
"""Rows that the one program adds up together."""


@triton.jit
def length_of(lens, row, mask, stride, width):
    """Entries of rows: what their tokens may see, cut to the width."""
    length = tl.load(lens + row.to(tl.int64) * stride, mask=mask, other=0)
    return tl.minimum(tl.maximum(length, 0), width)


@stable_kernel
def scan_kernel(indptr, lens, stride: tl.int64, width: tl.int32, rows: tl.int32, BLOCK: tl.constexpr):
    """Grid: (1,). Where every row begins, and behind them where the last one ends."""
    total = tl.zeros((), tl.int32)
    tl.store(indptr, total)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        length = length_of(lens, row, row < rows, stride, width)
        tl.store(indptr + 1 + row, total + tl.cumsum(length, 0), mask=row < rows)
        total += tl.sum(length, 0)


@triton.jit
def span_of(row, rows, scanned, indptr, lens, stride, width, BLOCK: tl.constexpr):
    """Where a row begins, int64, and its length; told to indptr unless that is scanned. No rows: nothing is."""
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tl.where(scanned != 0, 0, row), BLOCK):
        other = start + tl.arange(0, BLOCK)
        before += length_of(lens, other, other < row, stride, width)
    begin = tl.sum(before, 0) + tl.load(indptr + row, mask=(scanned != 0) & (row < rows), other=0)
    length = length_of(lens, row, row < rows, stride, width)
    tl.store(indptr, 0, mask=(scanned == 0) & (row == 0))
    tl.store(indptr + row + 1, begin + length, mask=(scanned == 0) & (row < rows))
    return begin.to(tl.int64), length


@stable_kernel
def pack_kernel(
    flat,
    indptr,
    indices,
    lens,
    row_stride: tl.int64,
    column_stride: tl.int64,
    width: tl.int32,
    lens_stride: tl.int64,
    num_slots: tl.int64,
    rows: tl.int32,
    scanned: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (max(T, 1),). A dense row's leading columns, as they are. scanned: whether indptr is there already."""
    row = tl.program_id(0)
    begin, length = span_of(row, rows, scanned, indptr, lens, lens_stride, width, BLOCK)
    for start in range(0, length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = indices + row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
        entry = tl.load(place, mask=column < length, other=-1)
        tl.store(flat + begin + column, tl.where(entry < num_slots, tl.maximum(entry, -1), -1), mask=column < length)


@stable_kernel
def ragged_translate_kernel(
    flat,
    indptr,
    topk,
    visible_lens,
    row_lens,
    token_to_req,
    table,
    topk_stride: tl.int64,
    topk_column_stride: tl.int64,
    width: tl.int32,
    visible_stride: tl.int64,
    lens_stride: tl.int64,
    request_stride: tl.int64,
    table_stride: tl.int64,
    table_column_stride: tl.int64,
    num_reqs: tl.int32,
    num_columns: tl.int32,
    block_size: tl.int32,
    rows: tl.int32,
    scanned: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (max(T, 1),). Slots of a token's visible entries, moved together; -1 behind, up to the row's length."""
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
    # slots were stored before column `taken`, and only there: no store meets one above
    for start in range(tl.minimum(taken, length), length, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(flat + begin + column, tl.full([BLOCK], -1, tl.int32), mask=column < length)


def build_ragged_indices_from_dense(indices: Tensor, lens: Tensor, num_slots: int, out: tuple[Tensor, Tensor]) -> None:
    """See `core.indices`."""
    flat, indptr = out
    check_strides(flat=flat, indptr=indptr)
    rows, width = indices.shape
    numbers = *indices.stride(), width, lens.stride(0), num_slots, rows, _scanned(indptr, lens, rows, width)
    launch(pack_kernel, (max(rows, 1),), (flat, indptr, indices, lens, *numbers), {"BLOCK": BLOCK})


def compute_global_topk_ragged_indices_and_indptr(
    topk_indices: Tensor,
    visible_lens: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor],
    row_lens: Tensor | None = None,
) -> None:
    """See `core.indices`."""
    flat, indptr = out
    check_strides(flat=flat, indptr=indptr)
    tokens, width = topk_indices.shape
    row_lens = visible_lens if row_lens is None else row_lens
    pointers = flat, indptr, topk_indices, visible_lens, row_lens, token_to_req, block_table
    strides = visible_lens.stride(0), row_lens.stride(0), token_to_req.stride(0), *block_table.stride()
    numbers = *topk_indices.stride(), width, *strides, *block_table.shape, block_size, tokens
    scanned = _scanned(indptr, row_lens, tokens, width)
    launch(ragged_translate_kernel, (max(tokens, 1),), (*pointers, *numbers, scanned), {"BLOCK": BLOCK})


def _scanned(indptr: Tensor, lens: Tensor, rows: int, width: int) -> int:
    """Fill indptr if there are many rows; 1 if so, 0 if every program is to find its own place."""
    if rows <= FEW:
        return 0
    launch(scan_kernel, (1,), (indptr, lens, lens.stride(0), width, rows), {"BLOCK": SCAN_BLOCK}, num_warps=SCAN_WARPS)
    return 1


def variants() -> Iterator[Variant]:
    """Every form that the steps of this module can ask for."""
    for kernel in (pack_kernel, ragged_translate_kernel):
        yield variant_of(kernel, {"BLOCK": BLOCK})
    yield variant_of(scan_kernel, {"BLOCK": SCAN_BLOCK}, num_warps=SCAN_WARPS)
