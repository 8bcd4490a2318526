"""Selection among the candidates of all ranks: the launchers of `kernels_ranks`, with `select` between them.

`core.context_parallel.selection` is the definition.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.backends._triton.layer.selection.kernels_ranks import keep_kernel, own_kernel, place_kernel
from dsv4attn.backends._triton.layer.selection.launch import select
from dsv4attn.backends._triton.sizes import next_power_of_2
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.torch_modes import without_modes

TOGETHER = 8192
"""Largest number of candidates of one token, over all ranks, that a program holds in registers."""
MOST_RANKS = 16
"""Largest number of ranks whose candidates one program holds. Each power of two from 2 up to it is a variant."""


@without_modes
def choose(ownership: Ownership, numbers: Tensor, scores: Tensor, out: Tensor, max_entries: int) -> None:
    """Write those of the K best candidates of all ranks that this rank owns to `out`, ascending, then -1.

    Of equal scores the lower number wins. There is one launch if the candidates fit into registers and R is the number
    of ranks of `ownership`. Otherwise there are three launches.

    numbers: [R, T, K] int32, entry numbers of the candidates of each rank, ascending, then -1.
    scores: [R, T, K] fp32, with the strides of `numbers`. -inf where there is no candidate. Never NaN.
    out: [T, K] int32.
    max_entries: bound of the entry numbers.
    """
    ranks, rows, topk = numbers.shape
    if not (rows and topk):
        return
    rank, size, interleave = ownership.rank, ownership.size, ownership.interleave
    rank_stride, row_stride, _ = numbers.stride()
    if size == ranks and (form := _keep_form(ranks, topk)):
        launch(
            keep_kernel,
            (rows,),
            (numbers, scores, out, rank_stride, row_stride, out.stride(0), topk, rank, size, interleave),
            form[0],
            num_warps=form[1],
        )
        return
    width, constants = round_up(ranks * topk, 64), _constants(topk)
    placed, counts, chosen = out.new_empty(rows, width), out.new_empty(rows), out.new_empty(rows, topk)
    placed_scores = scores.new_empty(rows, width)
    launch(
        place_kernel,
        (rows * ranks,),
        (
            numbers, scores, placed, placed_scores, counts, rank_stride, row_stride, width, topk, ranks,
            topk.bit_length(),
        ),
        constants,
    )  # fmt: skip
    # there are at most as many candidates as entries, and -1 comes after the candidates
    select(placed_scores, None, counts, chosen, min(ranks * topk, max_entries), run=0)
    launch(
        own_kernel,
        (rows,),
        (chosen, placed, out, chosen.stride(0), width, out.stride(0), topk, rank, size, interleave),
        constants,
    )


@cache
def _constants(topk: int) -> Constants:
    return Constants({"BLOCK": next_power_of_2(topk)})


@cache
def _keep_form(ranks: int, topk: int) -> tuple[Constants, int] | None:
    """Constants and warps of `keep_kernel`; None if a program cannot hold all candidates."""
    block, together = next_power_of_2(topk), max(next_power_of_2(ranks), 2)
    if together > MOST_RANKS or together * block > TOGETHER:
        return None
    return Constants({"BLOCK": block, "RANKS": together}), min(max(together * block // 256, 4), 16)


@recorded
def variants(topk: int) -> None:
    """Every variant that this module can need, without those of `select` that only long rows have."""
    out = meta_rows(1, topk)
    for ranks in (1 << i for i in range(1, MOST_RANKS.bit_length())):
        numbers, scores = meta_rows(ranks, 1, topk), meta_rows(ranks, 1, topk, dtype=torch.float32)
        # of more ranks than there are candidates, which takes three launches
        for size in (ranks, ranks + 1):
            choose(Ownership(0, size), numbers, scores, out, ranks * topk)
