"""Strides, alignments and constants of a cache's records, as arguments of kernels.

All arithmetic on layouts is in `core.cache.layout`. Strides and offsets are run-time arguments, so that the arrangement
of a page compiles nothing. Constants are only what determines the shapes of tiles.
"""

from __future__ import annotations

import struct
from functools import cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.forms import PageNumbers, RecordForm, TableNumbers, WriterForm
from dsv4attn.backends._triton.codings import CODINGS
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.core.cache.layout import CacheMemory, Coding, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.errors import ArgumentError


def _accesses(layout: KVCacheLayout) -> tuple[int, int]:
    """Bytes of the widest useful access, and of an element. Eight codes, 16 bytes in bf16, are one access."""
    return (8, 1) if layout.is_quantised else (WIDE, layout.dtype.itemsize)


def alignment_of_records(layout: KVCacheLayout, memory: CacheMemory) -> int:
    """Bytes that divide the address of every record: of the widest useful access, or of an element.

    memory: of a cache with that layout.
    """
    wide, narrow = _accesses(layout)
    return wide if memory.alignment >= wide else narrow


def record_alignments(layout: KVCacheLayout, *, aligned: bool) -> tuple[int, ...]:
    """Possible `alignment_of_records`. aligned: whether caches, pages and plain rows begin at multiples of 16 bytes."""
    wide, narrow = _accesses(layout)
    data, *_ = layout.regions(1)
    return (wide,) if aligned and data.stride % wide == 0 else (wide, narrow)


def row_alignments(width: int, dtype: torch.dtype, *, aligned: bool) -> tuple[int, ...]:
    """Possible `alignment_of_rows` of `width` elements. aligned: whether rows are promised to be aligned."""
    return (WIDE,) if aligned and width * dtype.itemsize % WIDE == 0 else (WIDE, 1)


def alignment_of_rows(*tensors: Tensor) -> int:
    """Bytes that divide the address of every row, along the last dimension: of the widest access, or 1."""
    for tensor in tensors:
        step, element = tensor.data_ptr(), tensor.element_size()
        for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False):
            # the stride of a dimension of size one means nothing
            if size > 1:
                step |= stride * element
        if step % WIDE:
            return 1
    return WIDE


def alignment_of_tokens(*tensors: Tensor) -> int:
    """`alignment_of_rows` of tensors [T, ...], which is the same for one token as for more of the same tensor.

    For kernels that sum in another order where rows are not aligned: bits must not depend on the number of tokens.
    """
    apart = all(tensor.stride(0) * tensor.element_size() % WIDE == 0 for tensor in tensors)
    return alignment_of_rows(*tensors) if apart else 1


def float_bits(x: float) -> int:
    """Bits of a positive number in fp32, which are ordered like the numbers."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


@cache
def record_form(layout: KVCacheLayout, aligned: int) -> RecordForm:
    """The form of a cache's records for kernels that read them. aligned: `alignment_of_records`."""
    coding, dims = CODINGS[Coding.FP8], (layout.nope_dim, layout.rope_dim)
    if layout.is_quantised:
        coding, dims = CODINGS[layout.coding], (layout.coded_dims, layout.plain_dims)
    fnuz = layout.fp8_format is Fp8Format.FNUZ
    return RecordForm(aligned, *dims, layout.group_size, coding, fnuz, exact_casts=not INTERPRETED)


def page_numbers(cache: PagedKVCache, memory: CacheMemory) -> PageNumbers:
    """The numbers of a cache's pages for kernels that read them. memory: of the cache."""
    return PageNumbers(cache.num_blocks, cache.block_size, *memory.record_strides)


def table_numbers(table: Tensor | None) -> TableNumbers:
    """The numbers of a block table; zeros without one."""
    return TableNumbers(0, 0, 0) if table is None else TableNumbers(table.shape[0], table.shape[1], table.stride(0))


@cache
def writer_form(layout: KVCacheLayout, aligned: int) -> WriterForm:
    """The form of a cache's records for kernels that write them. aligned: `alignment_of_records`.

    Raises ArgumentError for records that no kernel here writes as their layout asks.
    """
    if layout.rounds_to_fp4:
        expected = "a layout whose writer does not round to fp4 first: no kernel here does"
        hint = "write with the reference backend, or without rounds_to_fp4; bytes of both are read alike"
        raise ArgumentError("cache layout", expected=expected, actual=f"{layout.fingerprint}, rounds_to_fp4", hint=hint)
    _, _, _, group, coding, fnuz, exact_casts = record_form(layout, aligned)
    dims = layout.nope_dim, layout.rope_dim, layout.coded_dims
    bounds = float_bits(layout.fp8_max), float_bits(layout.amax_floor)
    return WriterForm(aligned, *dims, group, layout.scale_bytes, coding, fnuz, *bounds, exact_casts)
