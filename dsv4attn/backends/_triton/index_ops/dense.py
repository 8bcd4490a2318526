"""Index arithmetic that runs once a layer: the launcher of `kernels_dense`, which backends give as `index_ops`.

`torch_ops.index_ops` is the definition of every function here: results are equal, integer by integer. Inputs may have
any strides; outputs have unit stride along rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.index_ops import ragged
from dsv4attn.backends._triton.index_ops.common import CONSTANTS, depth_of
from dsv4attn.backends._triton.index_ops.kernels_dense import combine_kernel, translate_kernel
from dsv4attn.backends._triton.index_ops.ragged import (
    build_ragged_indices_from_dense,
    compute_global_topk_ragged_indices_and_indptr,
)
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import Launch, architecture
from dsv4attn.core.cache.selected_keys import ChunkTokens, PageTable
from dsv4attn.core.contract.index_ops import IndexOps, prepared_op
from dsv4attn.core.tensorspec import check_strides


@cache
def _translate_constants(arch: str) -> Constants:
    return Constants({**CONSTANTS, "PDL": uses_pdl(arch) and not INTERPRETED})


@prepared_op
def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    visible_lens: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor],
) -> Callable[[Tensor], None]:
    """See `core.torch_ops.index_ops`."""
    slots, lens = out
    check_strides(written=("slots",), slots=slots, lens=lens)
    tokens, width = topk_indices.shape
    strides = visible_lens.stride(0), token_to_req.stride(0), *block_table.stride()
    numbers = slots.stride(0), *topk_indices.stride(), width, *strides, *block_table.shape, block_size
    launch = Launch(translate_kernel, _translate_constants(architecture()), numbers)

    def run(topk_indices: Tensor) -> None:
        launch(tokens, (slots, lens, topk_indices, visible_lens, token_to_req, block_table))

    return run


def prepare_combine(
    topk_indices: Tensor | None,
    tokens: ChunkTokens,
    out: tuple[Tensor, Tensor],
    *,
    swa: PageTable | None = None,
    compressed: PageTable | None = None,
    tail: int | None = None,
) -> Callable[[Tensor | None], None]:
    """See `core.torch_ops.index_ops.combine_topk_swa_indices`; also of a slice of one request.

    tail: of `selected_keys.ChunkRows`.
    """
    (indices, lens), visible_lens = out, tokens.visible_lens
    check_strides(written=("indices",), indices=indices, lens=lens)
    (num_tokens, width), num_reqs = indices.shape, tokens.seq_lens.shape[0]
    vectors = tokens.is_valid, tokens.query_start_loc, tokens.seq_lens, tokens.gather_lens
    selection: tuple[int, ...] = (0, 0, 0, 0)
    has_entries = topk_indices is not None and visible_lens is not None and tokens.topk > 0
    if not has_entries:
        visible_lens = compressed = None
    elif topk_indices is not None and visible_lens is not None:
        selection = *topk_indices.stride(), topk_indices.shape[1], visible_lens.stride(0)
    blocks = [None if pages is None else pages.block_table for pages in (compressed, swa)]
    strides = [vector.stride(0) for vector in vectors]
    sizes = tokens.window, tokens.topk, tokens.rows, tokens.offset
    numbers = indices.stride(0), width, *selection, *strides, num_reqs, depth_of(num_reqs), *sizes
    cut = (0, -1) if tail is None else (tail, num_tokens)
    launch = Launch(combine_kernel, CONSTANTS, (*numbers, *_numbers_of(compressed), *_numbers_of(swa), *cut))
    programs = num_tokens if num_reqs else 0

    def run(topk_indices: Tensor | None) -> None:
        entries = topk_indices if has_entries else None
        launch(programs, (indices, lens, entries, visible_lens, *vectors, *blocks))

    return run


combine_topk_swa_indices = prepared_op(prepare_combine)


def _numbers_of(pages: PageTable | None) -> tuple[int, ...]:
    """Strides, columns, block size and slots of a table."""
    if pages is None:
        return 0, 0, 0, 1, 0
    table, size = pages.block_table, pages.block_size
    return *table.stride(), table.shape[1], size, pages.num_blocks * size


def transient_bytes(max_elements: int, max_tokens: int) -> int:
    """Nothing is allocated."""
    return 0


INDEX_OPS = IndexOps(
    compute_global_topk_indices_and_lens=compute_global_topk_indices_and_lens,
    combine_topk_swa_indices=combine_topk_swa_indices,
    build_ragged_indices_from_dense=build_ragged_indices_from_dense,
    compute_global_topk_ragged_indices_and_indptr=compute_global_topk_ragged_indices_and_indptr,
    transient_bytes=transient_bytes,
)


@recorded
def variants() -> None:
    """Every variant that the ops of this module can need."""
    ragged.variants()
    lens, lists, starts = meta_rows(2), meta_rows(2, 2), meta_rows(3)
    compute_global_topk_indices_and_lens(lists, lens, lens, lists, 1, (lists, lens))
    pages = PageTable(lists, 1)
    for visible_lens, compressed in ((None, None), (lens, None), (lens, pages)):
        entries = None if visible_lens is None else lists
        tokens = ChunkTokens(lens, lens, starts, visible_lens, meta_rows(2, dtype=torch.bool), 1, 1, 2, 1)
        for swa in (None, pages):
            prepare_combine(entries, tokens, (lists, lens), swa=swa, compressed=compressed)(entries)
