"""Attention over ranks: launchers of `attention.kernels_ranks`. The definition is `core.torch_ops.merge`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.attention.kernels_ranks import merge_parts_kernel, pack_part_kernel
from dsv4attn.backends._triton.attention.launch import wide_unit
from dsv4attn.backends._triton.cache.records import row_alignments
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends._triton.tuning import padded
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.tensorspec import BufferSpec

TOGETHER = 4
"""Number of ranks whose partial results are loaded together. Results do not depend on this number."""


def pack_partial(out: Tensor, lse: Tensor, sent: Tensor, sent_lse: Tensor) -> None:
    """See `core.torch_ops.merge`."""
    rows, heads, dim = out.shape
    unit = wide_unit(out, *out.stride()[:2])
    if wide_unit(sent, dim) < unit:
        unit = 1
    launch(
        pack_part_kernel,
        (rows * heads,),
        (out, lse, sent, sent_lse, out.stride(0) // unit, out.stride(1) // unit, *lse.stride()),
        _packing(heads, dim, unit),
    )


def merge_partials(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, attn_sink: Tensor | None, scratch: Sequence[Tensor] = ()
) -> None:
    """See `core.torch_ops.merge`."""
    rows, heads, dim = out.shape
    unit = wide_unit(out, *out.stride()[:2])
    if wide_unit(outs, dim, outs.stride(0)) < unit:
        unit = 1
    strides = outs.stride(0) // unit, lses.stride(0), out.stride(0) // unit, out.stride(1) // unit, *lse.stride()
    numbers = *strides, 0 if attn_sink is None else attn_sink.stride(0), outs.shape[0]
    # products are rounded before they are added, as they are in torch
    launch(
        merge_parts_kernel,
        (rows * heads,),
        (outs, lses, out, lse, attn_sink, *numbers),
        _merging(heads, dim, unit),
        fp_fusion=False,
    )


@lru_cache(maxsize=64)
def _packing(heads: int, dim: int, unit: int) -> Constants:
    return Constants({"H": heads, "D": dim, "DP": padded(dim), "UNIT": unit})


@lru_cache(maxsize=64)
def _merging(heads: int, dim: int, unit: int) -> Constants:
    return Constants({**_packing(heads, dim, unit), "N": TOGETHER, "EXACT_CASTS": not INTERPRETED})


@recorded
def variants(heads: int, dim: int, dtype: torch.dtype, *, sinks: Sequence[bool], aligned: bool = True) -> None:
    """Every variant that this module can need. aligned: whether rows of out are aligned to 16 bytes."""
    lse, attn_sink = meta_rows(2, heads, dtype=torch.float32), meta_rows(heads, dtype=torch.float32)
    # a send buffer begins at a multiple of 16 bytes if the size of its lse is one
    for rows in row_alignments(dim, dtype, aligned=aligned and heads % 4 == 0):
        out = meta_rows(2, heads, dim, dtype=dtype, alignment=rows)
        pack_partial(out, lse, out, lse)
        for sink in sinks:
            merge_partials(out[None], lse[None], out, lse, attn_sink if sink else None)


def _no_scratch(tokens: int, heads: int, dim: int) -> tuple[BufferSpec, ...]:
    """Sums stay in registers."""
    return ()


RANK_OPS = RankOps(pack_partial=pack_partial, merge_partials=merge_partials, merge_scratch=_no_scratch)
