"""Selection in two levels of DeepSeek-V4.1: the launchers of `kernels_candidates` around those of `select`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import nan
from typing import Any

from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends._triton.layer.kernels_candidates import block_scores_kernel, keep_kernel
from dsv4attn.backends._triton.layer.select import select
from dsv4attn.backends._triton.sizes import next_power_of_2

__all__ = ["block_columns", "keep_candidates", "select_blocks", "variants"]

TILE = 1024
"""Entries of a program."""


def block_columns(max_entries: int, block_size: int) -> int:
    """Columns of the scores of blocks: as many as there are, up to a multiple of the widest access."""
    return -(-max_entries // (64 * block_size)) * 64


def select_blocks(
    scores: Tensor, blocks: Tensor, visible_lens: Tensor, out: Tensor, block_size: int, max_entries: int
) -> None:
    """Write the numbers of the blocks with the largest scores of each token to out [T, N] int32, ascending, then -1.

    scores: [T, >= max_entries] fp32. blocks: [T, `block_columns`] fp32, memory. visible_lens: [T] int32.
    """
    constants, most = _constants(block_size), -(-max_entries // block_size)
    parts = -(-most // constants["BLOCKS"])
    counts = out.new_empty(out.shape[0])
    launch(
        block_scores_kernel,
        (out.shape[0] * parts,),
        (scores, visible_lens, blocks, counts, scores.stride(0), blocks.stride(0), max_entries, parts),
        constants,
    )
    select(blocks, None, counts, out, most, run=0)


def keep_candidates(scores: Tensor, candidates: Tensor, kept: Tensor, block_size: int, max_entries: int) -> None:
    """Write the scores of entries in candidates [T, N] int32 to kept [T, >= max_entries] fp32, and NaN elsewhere.

    scores: [T, >= max_entries] fp32.
    """
    kept.fill_(nan)
    constants, (tokens, most) = _constants(block_size), candidates.shape
    parts = -(-most // constants["BLOCKS"])
    launch(
        keep_kernel,
        (tokens * parts,),
        (
            scores, candidates, kept, scores.stride(0), candidates.stride(0), kept.stride(0), most, max_entries, parts,
        ),
        constants,
    )  # fmt: skip


@cache
def _constants(block_size: int) -> dict[str, Any]:
    return {"SIZE": block_size, "BLOCKS": max(TILE // next_power_of_2(block_size), 1)}


def variants(block_size: int) -> Iterator[Variant]:
    """Every variant that this module can need, but for those of `select`."""
    types = dict.fromkeys(("SCORES", "OUT"), "*fp32") | dict.fromkeys(("LENS", "COUNTS", "CANDIDATES"), "*i32")
    for kernel in (block_scores_kernel, keep_kernel):
        yield Variant.from_types(kernel, types, _constants(block_size))
