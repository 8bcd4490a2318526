"""Ragged index lists: the launcher of `kernels_ragged`.

`torch_ops.index_ops` is the definition of both functions. Up to FEW rows take one launch, in which every program sums
the lengths of the rows before its own. That takes time in the square of the rows, so above FEW rows one program,
`scan_kernel`, sums all lengths first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from dsv4attn.backends._triton.index_ops.common import CONSTANTS
from dsv4attn.backends._triton.index_ops.kernels_ragged import pack_kernel, ragged_translate_kernel, scan_kernel
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.core.contract.index_ops import prepared_op
from dsv4attn.core.tensorspec import check_strides

FEW = 4096
"""Rows up to which the sums take less time than another launch."""
SCAN_WARPS = 8
_SCAN = Constants({"BLOCK": 4096})
"""Lengths that `scan_kernel` reads together."""


@prepared_op
def build_ragged_indices_from_dense(
    indices: Tensor, lens: Tensor, num_slots: int, out: tuple[Tensor, Tensor]
) -> Callable[[Tensor], None]:
    """See `core.torch_ops.index_ops`."""
    flat, indptr = out
    check_strides(flat=flat, indptr=indptr)
    rows, width = indices.shape
    numbers = *indices.stride(), width, lens.stride(0), num_slots, rows, int(rows > FEW)
    scan, pack = _scan(indptr, lens, rows, width), Launch(pack_kernel, CONSTANTS, numbers)

    def run(indices: Tensor) -> None:
        scan()
        pack(max(rows, 1), (flat, indptr, indices, lens))

    return run


@prepared_op
def compute_global_topk_ragged_indices_and_indptr(
    topk_indices: Tensor,
    visible_lens: Tensor,
    token_to_req: Tensor,
    block_table: Tensor,
    block_size: int,
    out: tuple[Tensor, Tensor],
    row_lens: Tensor | None = None,
) -> Callable[[Tensor], None]:
    """See `core.torch_ops.index_ops`."""
    flat, indptr = out
    check_strides(flat=flat, indptr=indptr)
    tokens, width = topk_indices.shape
    lens = visible_lens if row_lens is None else row_lens
    strides = visible_lens.stride(0), lens.stride(0), token_to_req.stride(0), *block_table.stride()
    numbers = *topk_indices.stride(), width, *strides, *block_table.shape, block_size, tokens, int(tokens > FEW)
    scan, translate = _scan(indptr, lens, tokens, width), Launch(ragged_translate_kernel, CONSTANTS, numbers)

    def run(topk_indices: Tensor) -> None:
        scan()
        translate(max(tokens, 1), (flat, indptr, topk_indices, visible_lens, lens, token_to_req, block_table))

    return run


def _scan(indptr: Tensor, lens: Tensor, rows: int, width: int) -> Callable[[], None]:
    """Fill indptr if there are more than FEW rows."""
    launch = Launch(scan_kernel, _SCAN, (lens.stride(0), width, rows), SCAN_WARPS)
    return partial(launch, int(rows > FEW), (indptr, lens))


@recorded
def variants() -> None:
    """Every variant that the ops of this module can need."""
    lens, lists = meta_rows(FEW + 1), meta_rows(FEW + 1, 2)
    out = lists.flatten(), meta_rows(FEW + 2)
    build_ragged_indices_from_dense(lists, lens, 2, out)
    compute_global_topk_ragged_indices_and_indptr(lists, lens, lens, lists, 1, out)
