"""`prepare_rows`: all rows and lists of a gathered prefill chunk in two launches.

The first, `combine_kernel`, makes the list of each token. The second, `fill_kernel`, copies the records of both caches,
and packs the lists where a backend takes ragged ones. `core.attention.gathered.fill_by_ops` is the definition:
results are equal, byte by byte. What depends on metadata alone is computed where it is used, in both kernels, so no
other launch makes a plan.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.forms import PageNumbers
from dsv4attn.backends._triton.cache.gather import block_of
from dsv4attn.backends._triton.cache.kernels_gather import fill_kernel
from dsv4attn.backends._triton.cache.records import (
    alignment_of_records,
    alignment_of_rows,
    page_numbers,
    record_alignments,
    record_form,
    row_alignments,
)
from dsv4attn.backends._triton.index_ops.common import CONSTANTS
from dsv4attn.backends._triton.index_ops.dense import prepare_combine
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import BLOCK_SIZE, meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import ChunkRows, ChunkTokens, DenseIndices, PageTable, RaggedIndices
from dsv4attn.core.contract.backend import FillRows
from dsv4attn.core.tensorspec import check_strides

WARPS = 4
PACKERS = 4096
"""Most programs that pack lists. Each sums the lengths of all lists before its own, so that time in sums grows with
PACKERS times the lists, and there is no launch for the sums."""


def prepare_rows(
    chunk: ChunkRows, topk_indices: Tensor | None, window: PagedKVCache, compressed: PagedKVCache | None
) -> FillRows:
    """See `contract.Backend`."""
    kv, (indices, lens), ragged = chunk.kv, (chunk.combined.indices, chunk.combined.lens), chunk.ragged
    # a chunk without entries gathers none, whatever cache there is
    entries = None if chunk.compressed is None else compressed
    pages = None if entries is None else chunk.compressed
    entry_table = None if pages is None else pages.block_table
    seq_lens, gather_lens, offset = chunk.tokens.seq_lens, chunk.tokens.gather_lens, chunk.tokens.offset
    check_strides(written=("kv",), kv=kv, seq_lens=seq_lens, gather_lens=gather_lens)
    check_strides(swa_block_table=chunk.swa.block_table, compressed_block_table=entry_table)
    (n, rows, _), (tokens, width) = kv.shape, indices.shape
    combine = prepare_combine(
        topk_indices,
        chunk.tokens,
        (indices, lens),
        swa=chunk.swa,
        compressed=chunk.compressed,
        tail=chunk.tail,
    )

    flat = indptr = None
    group, packers = 1, 0
    if ragged is not None:
        flat, indptr = ragged.indices, ragged.indptr
        check_strides(flat=flat, indptr=indptr)
        group = max(cdiv(tokens, PACKERS), 1)
        packers = max(cdiv(tokens, group), 1)
    packed = (None, None) if flat is None else (indices, lens)
    layouts = window.layout, None if entries is None else entries.layout
    of_entries = 1 if entries is None else alignment_of_records(entries.layout, entries.memory)
    aligned = alignment_of_records(window.layout, window.memory), of_entries
    constants = _constants(*layouts, alignment_of_rows(kv), *aligned, CONSTANTS["BLOCK"])
    cut = (0, -1) if chunk.tail is None else (chunk.tail, tokens)
    numbers = (
        offset, rows - offset, *kv.stride()[:2], *cut, chunk.tokens.window, chunk.ratio,
        *_numbers_of(pages, entries), *_numbers_of(chunk.swa, window),
        packers, group, tokens, width, indices.stride(0), n * rows,
    )  # fmt: skip
    launch = Launch(fill_kernel, constants, numbers, WARPS)
    block = constants["BLOCK_R"]
    programs = packers + n * (cdiv(offset, block) + cdiv(rows - offset, block))
    pointers = seq_lens, gather_lens, entry_table, chunk.swa.block_table, flat, indptr, *packed

    def fill(topk_indices: Tensor | None, window: PagedKVCache, compressed: PagedKVCache | None) -> None:
        combine(topk_indices)
        compressed_pages = None if pages is None or compressed is None else compressed.tensor
        launch(programs, (kv, compressed_pages, window.tensor, *pointers))

    return fill


def _numbers_of(pages: PageTable | None, cache: PagedKVCache | None) -> tuple[int, int, PageNumbers]:
    """Stride and columns of a table, and the pages of its cache."""
    if pages is None or cache is None:
        return 0, 0, PageNumbers(0, 1, 0, 0, 0, 0)
    table = pages.block_table
    return table.stride(0), table.shape[1], page_numbers(cache, cache.memory)


@cache
def _constants(
    layout: KVCacheLayout, entries: KVCacheLayout | None, rows: int, records: int, entry_records: int, block: int
) -> Constants:
    """Constants of `fill_kernel`. rows, records, entry_records: alignments. block: columns packed together."""
    window = record_form(layout, records)
    of_entries = window if entries is None else record_form(entries, entry_records)
    forms = {"RECORD": window, "ENTRY_RECORD": of_entries}
    return Constants({"BLOCK": block, "BLOCK_R": block_of(layout), "ROW_ALIGNED": rows, **forms})


@recorded
def variants(layout: KVCacheLayout, entries: KVCacheLayout | None, *, ragged: bool, aligned: bool = True) -> None:
    """Every variant of both launches for layers of these layouts.

    aligned: whether caches are to 16 bytes. Rows are in the workspace, where all views are.
    """
    lens, pages, dim, dtype = meta_rows(2), PageTable(meta_rows(2, 2), BLOCK_SIZE), layout.head_dim, layout.row_dtype
    lists, topk = DenseIndices(meta_rows(2, 2), lens), None if entries is None else lens[:, None]
    selected = None if entries is None else lens
    tokens = ChunkTokens(lens, lens, meta_rows(3), selected, meta_rows(2, dtype=torch.bool), 1, 1, 2, 1)
    of_entries = (1,) if entries is None else record_alignments(entries, aligned=aligned)
    alignments = product(
        row_alignments(dim, dtype, aligned=True), record_alignments(layout, aligned=aligned), of_entries
    )
    for rows, records, entry_records in alignments:
        chunk = ChunkRows(
            tokens,
            meta_rows(2, 2, dim, dtype=dtype, alignment=rows),
            lists,
            RaggedIndices(lens, meta_rows(3), 2) if ragged else None,
            None,
            pages,
            None if entries is None else pages,
            1,
            lens,
            lens,
        )
        compressed = None if entries is None else meta_cache(entries, entry_records)
        window = meta_cache(layout, records)
        prepare_rows(chunk, topk, window, compressed)(topk, window, compressed)
