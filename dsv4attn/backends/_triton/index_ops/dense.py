"""Index arithmetic that runs once a layer, one program a row. This module is what a room gives as `steps`.

`dsv4attn.core.indices` is the definition of every function here: results are equal, integer by integer. Inputs may have
any strides; outputs have unit stride along rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import triton.language as tl
from torch import Tensor

from dsv4attn.backends._triton.attention.attend import Again, may_go_again
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops import ragged
from dsv4attn.backends._triton.index_ops.common import BLOCK, depth_of, request_of, slots_of, variant_of
from dsv4attn.backends._triton.index_ops.ragged import (
    build_ragged_indices_from_dense,
    compute_global_topk_ragged_indices_and_indptr,
)
from dsv4attn.backends._triton.launching.ready import is_plain
from dsv4attn.backends._triton.launching.runtime import Constants, launch, stable_kernel
from dsv4attn.core.keys import PageTable
from dsv4attn.core.tensorspec import check_strides

__all__ = [
    "build_ragged_indices_from_dense",
    "combine_topk_swa_indices",
    "compute_global_topk_indices_and_lens",
    "compute_global_topk_ragged_indices_and_indptr",
    "transient_bytes",
    "variants",
]


def variants() -> Iterator[Variant]:
    """Every form that the steps of this module can ask for."""
    one = {"BLOCK": BLOCK}
    yield variant_of(translate_kernel, one)
    yield from ragged.variants()
    for pages in ((), ("swa_table",)):
        yield variant_of(combine_kernel, one, "topk", "visible_lens", "entry_table", *pages, is_valid="*u1")
        for entries in ((), ("entry_table",)):
            yield variant_of(combine_kernel, one, *entries, *pages, is_valid="*u1")


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
) -> Callable[[], None]:
    """See `core.indices`. Returns what does it again."""
    slots, lens = out
    check_strides(written=("slots",), slots=slots, lens=lens)
    tokens, width = topk_indices.shape
    pointers = slots, lens, topk_indices, visible_lens, token_to_req, block_table
    strides = visible_lens.stride(0), token_to_req.stride(0), *block_table.stride()
    numbers = slots.stride(0), *topk_indices.stride(), width, *strides, *block_table.shape, block_size
    translation = _translation(numbers, topk_indices.device, *[pointer.dtype for pointer in pointers])
    plain = is_plain(pointers)

    def again() -> None:
        translation.launch(tokens, pointers, free=plain and may_go_again(()))

    again()
    return again


@lru_cache(maxsize=256)
def _translation(numbers: tuple[int, ...], device: torch.device, *dtypes: torch.dtype) -> Again:
    """One for all launches that pass these numbers, on a device, with pointers of these dtypes."""
    return Again(translate_kernel, Constants({"BLOCK": BLOCK}), numbers)


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
    check_strides(written=("indices",), indices=indices, lens=lens)
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


def transient_bytes(max_elements: int, max_tokens: int) -> int:
    """Nothing is allocated."""
    return 0
