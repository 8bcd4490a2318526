"""Ragged index lists. Up to FEW rows in one launch: every program adds up the lengths of the rows before its own.

`dsv4attn.core.indices` is the definition of both functions. A row is as long as its token may see, whatever stands in
it, and what is absent is -1: so where rows begin follows from lengths alone. To add them up in every program takes time
in the square of the rows, so with more than FEW one program, `scan_kernel`, adds up all lengths first.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.index_ops.common import BLOCK, variant_of
from dsv4attn.backends._triton.index_ops.kernels_ragged import pack_kernel, ragged_translate_kernel, scan_kernel
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.core.tensorspec import check_strides

__all__ = ["build_ragged_indices_from_dense", "compute_global_topk_ragged_indices_and_indptr", "variants"]

FEW = 4096
"""Rows up to which another launch would take longer than the sums."""
SCAN_BLOCK, SCAN_WARPS = 4096, 8
"""Rows that the one program adds up together."""


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
