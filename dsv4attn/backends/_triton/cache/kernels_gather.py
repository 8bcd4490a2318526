"""Kernels that read records of a cache and write them, dequantised, to rows.

Each program copies a few records, so that a thread has several loads in flight, and gives up at once where a request
is shorter than the longest could be: the grid follows from shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.cache.forms import PageNumbers
from dsv4attn.backends._triton.index_ops.kernels_common import cut_lengths
from dsv4attn.backends._triton.index_ops.kernels_ragged import pack_rows
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import FP8, cast, decode_e2m1, dequantize
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2


@triton.jit
def copy_records(target, written, CACHE, block, row, exists, pages, RECORD: tl.constexpr):
    """Write records to rows that begin at target [R] pointers, where written [R]; those that do not exist are zeros.

    block, row: [R] int64. Nothing is read of a record that does not exist.
    CACHE: pages, uint8, or bf16 or fp32 where keys are plain rows. pages: `PageNumbers`. RECORD: `RecordForm`. The bf16
    values of a quantised record begin right after its codes.
    """
    NOPE: tl.constexpr = RECORD.nope
    ROPE: tl.constexpr = RECORD.rope
    GROUP: tl.constexpr = RECORD.group
    EXACT_CASTS: tl.constexpr = RECORD.exact_casts
    # Triton 3.6 takes no plain number there, which a field of a constant is
    ALIGNED: tl.constexpr = RECORD.aligned
    dtype: tl.constexpr = target.dtype.element_ty
    page = CACHE + block * pages.page_stride
    record = tl.multiple_of(page + row * pages.data_stride, ALIGNED)
    if GROUP > 0:
        groups: tl.constexpr = cdiv(NOPE, GROUP)
        # [R, G]
        group = tl.arange(0, next_power_of_2(groups))
        scales = (page + pages.scale_offset + row * pages.scale_stride)[:, None] + group[None, :]
        byte = tl.load(scales, mask=exists[:, None] & (group < groups)[None, :], other=0).to(tl.int32)
        # [R, G, S]
        member = tl.arange(0, next_power_of_2(GROUP))
        column = (group[:, None] * GROUP + member[None, :])[None, :, :]
        live = ((member < GROUP)[None, :])[None, :, :] & (column < NOPE)
        at = column if RECORD.coding == FP8 else column // 2
        code = tl.load(record[:, None, None] + at, mask=exists[:, None, None] & live, other=0).to(tl.int32)
        if RECORD.coding == FP8:
            value = dequantize(code, byte[:, :, None], RECORD.fnuz)
        else:
            value = decode_e2m1((code >> (column % 2 * 4)) & 15, byte[:, :, None], RECORD.coding)
        value = cast(value, dtype, EXACT_CASTS)
        tl.store(target[:, None, None] + column, value, mask=written[:, None, None] & live)
        tail = (record + (NOPE if RECORD.coding == FP8 else NOPE // 2)).to(tl.pointer_type(tl.bfloat16))
    else:
        # [R, D]
        column = tl.arange(0, next_power_of_2(NOPE))[None, :]
        value = tl.load(record[:, None] + column, mask=exists[:, None] & (column < NOPE), other=0.0)
        tl.store(target[:, None] + column, cast(value, dtype, EXACT_CASTS), mask=written[:, None] & (column < NOPE))
        tail = record + NOPE
    if ROPE > 0:
        # [R, ROPE]
        column = tl.arange(0, next_power_of_2(ROPE))[None, :]
        value = tl.load(tail[:, None] + column, mask=exists[:, None] & (column < ROPE), other=0.0)
        at = target[:, None] + (NOPE + column)
        tl.store(at, cast(value, dtype, EXACT_CASTS), mask=written[:, None] & (column < ROPE))


@triton.jit
def copy_tile(
    rows_of, CACHE, blocks, first, seq_len, count, rows, row_stride, table_width, pages,
    BLOCK_R: tl.constexpr, ROW_ALIGNED: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK_R of a request's last `count` records, of seq_len >= 0, from number `first` of them on.

    rows_of: where their first row begins, of which there are `rows`. blocks: [table_width] int32 of the request.
    """
    if first < count:
        # [R]
        row = first + tl.arange(0, BLOCK_R)
        position = seq_len - count + row
        column = position // pages.block_size
        wanted = (row < count) & (row < rows) & (position >= 0) & (column < table_width)
        block = tl.load(blocks + column, mask=wanted, other=-1)
        exists = wanted & (block >= 0) & (block < pages.num_blocks)
        target = tl.multiple_of(rows_of + row.to(tl.int64) * row_stride, ROW_ALIGNED)
        in_page = (position % pages.block_size).to(tl.int64)
        copy_records(target, exists, CACHE, block.to(tl.int64), in_page, exists, pages, RECORD)


@stable_kernel
def gather_kernel(
    OUT,  # [n, offset + rows, D]
    CACHE,  # pages: uint8, or bf16 or fp32 where keys are plain rows
    SEQ_LENS,  # [n] int32
    GATHER_LENS,  # [n] int32, or None for all records of each request
    BLOCK_TABLE,  # [n, table_width] int32
    rows: tl.int32, offset: tl.int32, out_stride: tl.int64, row_stride: tl.int64,
    table_stride: tl.int64, table_width: tl.int32, pages: PageNumbers,
    BLOCK_R: tl.constexpr, ROW_ALIGNED: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Grid: (n * ceil(rows / BLOCK_R),): BLOCK_R rows of one request, the first one at `offset`."""
    tiles = tl.cdiv(rows, BLOCK_R)
    request = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * BLOCK_R
    # a request of negative length has no records, and no position overflows
    seq_len = tl.maximum(tl.load(SEQ_LENS + request), 0)
    count = seq_len
    if GATHER_LENS is not None:
        count = tl.load(GATHER_LENS + request)
    copy_tile(
        OUT + request * out_stride + offset.to(tl.int64) * row_stride, CACHE, BLOCK_TABLE + request * table_stride,
        first, seq_len, count, rows, row_stride, table_width, pages, BLOCK_R, ROW_ALIGNED, RECORD,
    )  # fmt: skip


@stable_kernel
def gather_slots_kernel(
    OUT,  # [rows, D]
    CACHE,  # pages: uint8, or bf16 or fp32 where keys are plain rows
    SLOTS,  # [rows / width, width] int32, its rows `slot_stride` apart
    rows: tl.int64, row_stride: tl.int64, slot_stride: tl.int64, width: tl.int32, pages: PageNumbers,
    BLOCK_R: tl.constexpr, ROW_ALIGNED: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """Grid: (ceil(rows / BLOCK_R),): BLOCK_R rows."""
    # [R]
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(SLOTS + row // width * slot_stride + row % width, mask=row < rows, other=-1)
    block = slot // pages.block_size
    exists = (slot >= 0) & (block < pages.num_blocks)
    copy_records(
        tl.multiple_of(OUT + row * row_stride, ROW_ALIGNED), row < rows, CACHE, block.to(tl.int64),
        (slot % pages.block_size).to(tl.int64), exists, pages, RECORD,
    )  # fmt: skip


@stable_kernel
def fill_kernel(
    OUT,  # [n, offset + window_rows, D]
    ENTRIES,  # pages of the compressed cache, as CACHE above, or None
    CACHE,  # pages of the window cache
    SEQ_LENS,  # [n] int32
    GATHER_LENS,  # [n] int32
    ENTRY_TABLE,  # [n, entry_width] int32, None where ENTRIES is
    BLOCK_TABLE,  # [n, table_width] int32
    FLAT,  # ragged lists, or None
    INDPTR,  # [tokens + 1] int32, None where FLAT is
    ROWS,  # [tokens, width] int32, None where FLAT is
    LENS,  # [tokens] int32, None where FLAT is
    offset: tl.int32, window_rows: tl.int32, out_stride: tl.int64, row_stride: tl.int64,
    tail: tl.int32, slice_tokens: tl.int32, window: tl.int32, ratio: tl.int32,
    entry_stride: tl.int64, entry_width: tl.int32, entry_pages: PageNumbers,
    table_stride: tl.int64, table_width: tl.int32, pages: PageNumbers,
    packers: tl.int32, group: tl.int32, tokens: tl.int32, width: tl.int32, rows_stride: tl.int64, num_slots: tl.int64,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, ROW_ALIGNED: tl.constexpr, RECORD: tl.constexpr,
    ENTRY_RECORD: tl.constexpr,
):  # fmt: skip
    """Grid: (packers + n * (ceil(offset / BLOCK_R) + ceil(window_rows / BLOCK_R)),): all of a chunk after its lists.

    The first programs pack `group` dense lists each; the others copy BLOCK_R rows of one request, entries, which begin
    at row 0, or window records, which begin at `offset`. tail, slice_tokens: of `cut_lengths`.
    ENTRY_RECORD: of ENTRIES.
    """
    tile = tl.program_id(0) - packers
    if FLAT is not None:  # noqa: SIM102 - a constant
        if tile < 0:
            first = tl.program_id(0) * group
            pack_rows(FLAT, INDPTR, ROWS, LENS, first, group, tokens, rows_stride, width, num_slots, BLOCK)
    if tile >= 0:
        entry_tiles = tl.cdiv(offset, BLOCK_R)
        tiles = entry_tiles + tl.cdiv(window_rows, BLOCK_R)
        request = (tile // tiles).to(tl.int64)
        first = tile % tiles
        rows_of = OUT + request * out_stride
        seq_len, gather_len = cut_lengths(
            tl.load(SEQ_LENS + request), tl.load(GATHER_LENS + request), tail, slice_tokens, window
        )
        # a request of negative length has no records, and no position overflows
        seq_len = tl.maximum(seq_len, 0)
        if ENTRIES is not None:  # noqa: SIM102 - a constant
            if first < entry_tiles:
                entries = seq_len // ratio
                copy_tile(
                    rows_of, ENTRIES, ENTRY_TABLE + request * entry_stride, first * BLOCK_R, entries, entries, offset,
                    row_stride, entry_width, entry_pages, BLOCK_R, ROW_ALIGNED, ENTRY_RECORD,
                )  # fmt: skip
        if first >= entry_tiles:
            copy_tile(
                rows_of + offset.to(tl.int64) * row_stride, CACHE, BLOCK_TABLE + request * table_stride,
                (first - entry_tiles) * BLOCK_R, seq_len, gather_len, window_rows,
                row_stride, table_width, pages, BLOCK_R, ROW_ALIGNED, RECORD,
            )  # fmt: skip
