"""The choice among candidates of all ranks: the launchers of `kernels_ranks` around `select`, which proposes them.

`core.context_parallel.selection` is the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import triton
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import Constants, launch
from dsv4attn.backends._triton.layer.kernels_ranks import keep_kernel, own_kernel, place_kernel
from dsv4attn.backends._triton.layer.select import select
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.torch_modes import without_modes

__all__ = ["choose", "variants"]

TOGETHER = 8192
"""Candidates of all ranks for a token that are in registers of a program, at most."""
MOST_RANKS = 16
"""Ranks whose candidates are in one program, at most. Each power of two up to it, but 1, is a form of the kernel."""


@without_modes
def choose(ownership: Ownership, numbers: Tensor, scores: Tensor, out: Tensor, max_entries: int) -> None:
    """Write this rank's numbers of the K best candidates of all ranks to out [T, K] int32, ascending, then -1.

    numbers: [R, T, K] int32, of each rank ascending, then -1; scores: [R, T, K] fp32, of the same strides, -inf for
    none, not NaN. Of equal scores the lower number wins. max_entries: bound of numbers that are not -1. It is one
    launch where candidates fit registers, and numbers are of one of the R ranks; else it is three.
    """
    ranks, rows, topk = numbers.shape
    if not (rows and topk):
        return
    owner = ownership.rank, ownership.size, ownership.interleave
    if ownership.size == ranks and (form := _keep_form(ranks, topk)):
        strides = *numbers.stride()[:2], out.stride(0)
        launch(keep_kernel, (rows,), (numbers, scores, out, *strides, topk, *owner), form[0], num_warps=form[1])
        return
    width, constants = round_up(ranks * topk, 64), _constants(topk)
    placed, counts, chosen = out.new_empty(rows, width), out.new_empty(rows), out.new_empty(rows, topk)
    placed_scores = scores.new_empty(rows, width)
    strides = *numbers.stride()[:2], width
    given = numbers, scores, placed, placed_scores, counts, *strides, topk, ranks, topk.bit_length()
    launch(place_kernel, (rows * ranks,), given, constants)
    # candidates are at most as many as entries, and stand before what is none
    select(placed_scores, None, counts, chosen, min(ranks * topk, max_entries), run=0)
    strides = chosen.stride(0), width, out.stride(0)
    launch(own_kernel, (rows,), (chosen, placed, out, *strides, topk, *owner), constants)


@cache
def _constants(topk: int) -> Constants:
    return Constants({"BLOCK": triton.next_power_of_2(topk)})


@cache
def _keep_form(ranks: int, topk: int) -> tuple[Constants, int] | None:
    """Constants and warps of `keep_kernel`; None if it cannot hold so many candidates."""
    block, together = triton.next_power_of_2(topk), max(triton.next_power_of_2(ranks), 2)
    if together > MOST_RANKS or together * block > TOGETHER:
        return None
    return Constants({"BLOCK": block, "RANKS": together}), min(max(together * block // 256, 4), 16)


def variants(topk: int) -> Iterator[Variant]:
    """Every form that this module can ask for, beside those of `select`."""
    types = dict.fromkeys(("SCORES", "PLACED_SCORES"), "*fp32")
    for kernel in (place_kernel, own_kernel):
        yield Variant.from_types(kernel, types, _constants(topk))
    for ranks in range(1, MOST_RANKS.bit_length()):
        if form := _keep_form(1 << ranks, topk):
            yield Variant.from_types(keep_kernel, types, form[0], num_warps=form[1])
