"""Index arithmetic that runs once a layer, one program a row. This module is what a room gives as `steps`.

`dsv4attn.core.indices` is the definition of every function here: results are equal, integer by integer. Inputs may have
any strides; outputs have unit stride along rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4attn.backends._triton.runtime import Variant, launch, stable_kernel
from dsv4attn.core.contract import PageTable

__all__ = [
    "build_ragged_indices_from_dense",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "depth_of",
    "request_of",
    "slots_of",
    "transient_bytes",
    "variant_of",
    "variants",
]

BLOCK = 1024
"""Columns a program looks at together; wider rows take several rounds."""
SCAN_BLOCK, SCAN_WARPS = 4096, 8
"""Rows that the scan of a ragged build adds up together. It is one program, whatever the batch."""

_INTEGERS = {"tl.int32", "tl.int64"}


def variant_of(kernel: Any, constants: Mapping[str, Any], *absent: str, num_warps: int = 4, **pointers: str) -> Variant:
    """Form of an index kernel. absent: pointers that are None. pointers: types of those that are not to int32."""
    types = {
        p.name: "int" if p.annotation in _INTEGERS else "none" if p.name in absent else pointers.get(p.name, "*i32")
        for p in inspect.signature(kernel.fn).parameters.values()
        if p.name not in constants
    }
    return Variant(kernel, types, constants, num_warps=num_warps)


def variants() -> Iterator[Variant]:
    """Every form that the steps of this module can ask for."""
    one = {"BLOCK": BLOCK}
    for kernel in (translate_kernel, count_kernel, pack_kernel):
        yield variant_of(kernel, one)
    yield variant_of(scan_kernel, {"BLOCK": SCAN_BLOCK}, num_warps=SCAN_WARPS)
    for pages in ((), ("swa_table",)):
        yield variant_of(combine_kernel, one, "topk", "visible_lens", "entry_table", *pages, is_valid="*u1")
        for entries in ((), ("entry_table",)):
            yield variant_of(combine_kernel, one, *entries, *pages, is_valid="*u1")


def depth_of(num_reqs: int) -> int:
    """Halvings after which `request_of` has one request left."""
    return max(num_reqs - 1, 0).bit_length()


@triton.jit
def request_of(token, starts, stride, base, num_reqs, depth):
    """Request (int32) of tokens (int32, any shape): the last that starts at or before it; 0 behind the last request.

    starts: num_reqs + 1 token numbers, `stride` apart, ascending; `base` is taken off each. A search by halving: the
    request looked for is in [low, high), whatever the numbers are.
    """
    low = token * 0
    high = low + num_reqs
    for _ in range(depth):
        middle = (low + high) // 2
        reached = tl.load(starts + middle.to(tl.int64) * stride) - base <= token
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    end = tl.load(starts + num_reqs.to(tl.int64) * stride) - base
    return tl.where(token < end, low, 0)


@triton.jit
def slots_of(records, visible, blocks, stride, num_columns, block_size):
    """Slots (int64) of record numbers (any shape); -1 where not visible, past the table, or where the block is gone.

    visible implies records >= 0. blocks: pointer to block 0 of each record's request; `stride` leads to the next.
    """
    # a record past 2^31 - 1 is past every table, and 32 bits divide much faster
    visible = visible & (records <= 0x7FFFFFFF)
    record = tl.where(visible, records, 0).to(tl.int32)
    column = record // block_size
    block = tl.load(blocks + column.to(tl.int64) * stride, mask=visible & (column < num_columns), other=-1)
    # in 64 bits: a garbage block times the block size may wrap around to a slot that exists
    slot = block.to(tl.int64) * block_size + record % block_size
    return tl.where((block >= 0) & (slot <= 0x7FFFFFFF), slot, -1)


@stable_kernel
def translate_kernel(
    slots,
    lens,
    topk,
    visible_lens,
    token_to_req,
    table,
    slots_stride: tl.int64,
    topk_stride: tl.int64,
    topk_column_stride: tl.int64,
    width: tl.int32,
    visible_stride: tl.int64,
    request_stride: tl.int64,
    table_stride: tl.int64,
    table_column_stride: tl.int64,
    num_reqs: tl.int32,
    num_columns: tl.int32,
    block_size: tl.int32,
    BLOCK: tl.constexpr,
):
    """Grid: (T,). Slots of one token's entries, and where the last visible one ends."""
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


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    visible_lens: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """See `core.indices`."""
    slots, lens = out
    tokens, width = topk_indices.shape
    pointers = slots, lens, topk_indices, visible_lens, token_to_req, block_table
    strides = visible_lens.stride(0), token_to_req.stride(0), *block_table.stride()
    numbers = slots.stride(0), *topk_indices.stride(), width, *strides, *block_table.shape, block_size
    launch(translate_kernel, (tokens,), (*pointers, *numbers), {"BLOCK": BLOCK})


@stable_kernel
def combine_kernel(
    rows,
    lens,
    topk,
    visible_lens,
    is_valid,
    starts,
    seq_lens,
    gather_lens,
    entry_table,
    swa_table,
    rows_stride: tl.int64,
    width: tl.int32,
    topk_stride: tl.int64,
    topk_column_stride: tl.int64,
    topk_width: tl.int32,
    visible_stride: tl.int64,
    valid_stride: tl.int64,
    starts_stride: tl.int64,
    seq_stride: tl.int64,
    gather_stride: tl.int64,
    num_reqs: tl.int32,
    depth: tl.int32,
    window: tl.int32,
    most_entries: tl.int32,
    rows_per_req: tl.int64,
    first_window_row: tl.int64,
    entry_stride: tl.int64,
    entry_column_stride: tl.int64,
    entry_columns: tl.int32,
    entry_block_size: tl.int32,
    entry_slots: tl.int64,
    swa_stride: tl.int64,
    swa_column_stride: tl.int64,
    swa_columns: tl.int32,
    swa_block_size: tl.int32,
    swa_slots: tl.int64,
    BLOCK: tl.constexpr,
):
    """Grid: (T,). The rows of one token: visible entries, moved together, then its window, then -1."""
    token, base = tl.program_id(0), tl.load(starts)
    request = request_of(token, starts, starts_stride, base, num_reqs, depth).to(tl.int64)
    token = token.to(tl.int64)
    seq_len = tl.load(seq_lens + request * seq_stride)
    gather_start = seq_len - tl.load(gather_lens + request * gather_stride)
    position = token + (seq_len - (tl.load(starts + (request + 1) * starts_stride) - base))
    valid = tl.load(is_valid + token * valid_stride)
    first = tl.maximum(position - (window - 1), 0)
    count = tl.where(valid, tl.maximum(position + 1 - first, 0), 0).to(tl.int32)
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
    # entries were stored before column `taken`, and only there: no store below meets one above
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


def combine_topk_swa_indices(
    topk_indices: Tensor | None,
    visible_lens: Tensor | None,
    is_valid: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window: int,
    topk: int,
    rows: int,
    offset: int,
    out: tuple[Tensor, Tensor],
    *,
    swa: PageTable | None = None,
    compressed: PageTable | None = None,
) -> None:
    """See `core.indices`."""
    indices, lens = out
    (tokens, width), num_reqs = indices.shape, seq_lens.shape[0]
    if topk_indices is None or visible_lens is None or not topk:
        topk_indices = visible_lens = compressed = None
        chosen: tuple[int, ...] = (0, 0, 0, 0)
    else:
        chosen = *topk_indices.stride(), topk_indices.shape[1], visible_lens.stride(0)
    tables = [None if pages is None else pages.block_table for pages in (compressed, swa)]
    vectors = is_valid, query_start_loc, seq_lens, gather_lens
    pointers = indices, lens, topk_indices, visible_lens, *vectors, *tables
    sizes = num_reqs, depth_of(num_reqs), window, topk, rows, offset
    strides = [vector.stride(0) for vector in vectors]
    numbers = indices.stride(0), width, *chosen, *strides, *sizes, *_numbers_of(compressed), *_numbers_of(swa)
    launch(combine_kernel, (tokens if num_reqs else 0,), (*pointers, *numbers), {"BLOCK": BLOCK})


def _numbers_of(pages: PageTable | None) -> tuple[int, ...]:
    """Strides, columns, block size and slots of a table."""
    if pages is None:
        return 0, 0, 0, 1, 0
    table, size = pages.block_table, pages.block_size
    return *table.stride(), table.shape[1], size, pages.num_blocks * size


@stable_kernel
def count_kernel(
    indptr,
    indices,
    lens,
    row_stride: tl.int64,
    column_stride: tl.int64,
    width: tl.int32,
    lens_stride: tl.int64,
    num_slots: tl.int64,
    BLOCK: tl.constexpr,
):
    """Grid: (T,). indptr[row + 1] = entries kept of a row."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(lens + row * lens_stride), width)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = indices + row * row_stride + column.to(tl.int64) * column_stride
        entry = tl.load(place, mask=column < end, other=-1)
        count += ((entry >= 0) & (entry < num_slots)).to(tl.int32)
    tl.store(indptr + row + 1, tl.sum(count, 0))


@stable_kernel
def scan_kernel(indptr, num_rows: tl.int32, BLOCK: tl.constexpr):
    """Grid: (1,). Counts in indptr[1:] to where each row ends, in place."""
    tl.store(indptr, 0)
    total = tl.zeros((), tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        count = tl.load(indptr + 1 + row, mask=row < num_rows, other=0)
        # a sum holds the count that stood in its place, so no store overtakes that load
        tl.store(indptr + 1 + row, total + tl.cumsum(count, 0), mask=row < num_rows)
        total += tl.sum(count, 0)


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
    BLOCK: tl.constexpr,
):
    """Grid: (T,). Move the entries kept of a row, in order, to where indptr says."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.minimum(tl.load(lens + row * lens_stride), width)
    target = flat + tl.load(indptr + row).to(tl.int64)
    taken = tl.zeros((), tl.int32)
    for start in range(0, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = indices + row * row_stride + column.to(tl.int64) * column_stride
        entry = tl.load(place, mask=column < end, other=-1)
        keep = (entry >= 0) & (entry < num_slots)
        tl.store(target + taken + tl.cumsum(keep.to(tl.int32), 0) - 1, entry, mask=keep)
        taken += tl.sum(keep.to(tl.int32), 0)


def build_ragged_indices_from_dense(indices: Tensor, lens: Tensor, num_slots: int, out: tuple[Tensor, Tensor]) -> None:
    """See `core.indices`. Three launches, because every program has to be done before rows know where they begin."""
    flat, indptr = out
    rows, width = indices.shape
    numbers = *indices.stride(), width, lens.stride(0), num_slots
    launch(count_kernel, (rows,), (indptr, indices, lens, *numbers), {"BLOCK": BLOCK})
    launch(scan_kernel, (1,), (indptr, rows), {"BLOCK": SCAN_BLOCK}, num_warps=SCAN_WARPS)
    launch(pack_kernel, (rows,), (flat, indptr, indices, lens, *numbers), {"BLOCK": BLOCK})


def transient_bytes(max_elements: int, max_tokens: int) -> int:
    """Nothing is allocated."""
    return 0
