"""Gather ops: dequantise records of a cache to contiguous rows.

This file launches `kernels_gather`. The grid follows from shapes alone.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from torch import Tensor

from dsv4attn.backends._triton.cache.kernels_gather import gather_kernel, gather_slots_kernel
from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    page_numbers,
    record_alignments,
    record_form,
    row_alignments,
)
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.tensorspec import check_strides

TILE, MOST, WARPS = 4096, 32, 4
"""Values that a program copies (eight of the model's records); largest number of records of a program; its warps."""


def dequantize_and_gather_k_cache(
    out: Tensor, cache: PagedKVCache, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor, offset: int
) -> None:
    """out[i, offset + j] = record seq_lens[i] - gather_lens[i] + j of request i; see `contract.Backend`."""
    tensors = {"out": out, "seq_lens": seq_lens, "gather_lens": gather_lens, "block_table": block_table}
    check_strides(written=("out",), **tensors)
    rows = out.shape[1] - offset
    memory = cache.memory
    constants = _constants(cache.layout, alignment_of_rows(out), alignment_of_records(cache.layout, memory))
    launch(
        gather_kernel,
        (out.shape[0] * cdiv(max(rows, 0), constants["BLOCK_R"]),),
        (
            out, cache.tensor, seq_lens, gather_lens, block_table,
            rows, offset, out.stride(0), out.stride(1), block_table.stride(0), block_table.shape[1],
            page_numbers(cache, memory),
        ),
        constants,
        num_warps=WARPS,
    )  # fmt: skip


def dequant_gather_slots(out: Tensor, cache: PagedKVCache, slots: Tensor) -> None:
    """out[i] = the record in slots[i], zeros where there is no such slot.

    out: [n, D], any row stride. slots: int32, [n] with any stride, or n slots in rows [..., K] with one stride.
    """
    slots = slots[:, None] if slots.ndim == 1 else slots.flatten(0, -2)
    memory = cache.memory
    constants = _constants(cache.layout, alignment_of_rows(out), alignment_of_records(cache.layout, memory))
    launch(
        gather_slots_kernel,
        (cdiv(out.shape[0], constants["BLOCK_R"]),),
        (
            out, cache.tensor, slots, out.shape[0], out.stride(0), slots.stride(0), slots.shape[1],
            page_numbers(cache, memory),
        ),
        constants,
        num_warps=WARPS,
    )  # fmt: skip


@cache
def block_of(layout: KVCacheLayout) -> int:
    """Number of records that a program copies."""
    return min(max(TILE // int(next_power_of_2(layout.head_dim)), 1), MOST)


@cache
def _constants(layout: KVCacheLayout, rows: int, records: int) -> Constants:
    return Constants({"BLOCK_R": block_of(layout), "ROW_ALIGNED": rows, "RECORD": record_form(layout, records)})


@recorded
def variants(layout: KVCacheLayout, *, aligned: bool = True, aligned_rows: bool = True) -> None:
    """Every variant that the ops of this module can need.

    aligned: whether caches are aligned to 16 bytes.
    aligned_rows: whether rows of `out` are aligned to 16 bytes.
    """
    lens, widths = meta_rows(2), row_alignments(layout.head_dim, layout.row_dtype, aligned=aligned_rows)
    for rows, records in product(widths, record_alignments(layout, aligned=aligned)):
        cache = meta_cache(layout, records)
        out = meta_rows(2, 2, layout.head_dim, dtype=layout.row_dtype, alignment=rows)
        dequant_gather_slots(out[0], cache, lens)
        for gather_lens in (None, lens):
            dequantize_and_gather_k_cache(out, cache, lens, gather_lens, meta_rows(2, 2), 0)
