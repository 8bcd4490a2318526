"""Cases of prefill over the keys of all ranks: in small pieces, with a mutant, with ranks that gather no keys."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from dsv4attn.core.context_parallel import keys
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.memory import rank_buffers
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from tests.core.context_parallel.context_attention import attention, context_over


def keys_in_pieces(group: Any) -> None:
    """Pages in pieces of one or two, and rows in pieces of a few tokens, for both kinds of layers."""
    sizes = rank_buffers.PIECE_BYTES, rank_buffers.PART_TOKENS
    rank_buffers.PART_TOKENS = 7
    try:
        for pages, kind in ((1, LayerKind.CSA), (2, LayerKind.HCA)):
            rank_buffers.PIECE_BYTES = pages * group.size() * 64 * 32 * 4 // SMALL_RATIOS[kind]
            attention(group, kind, "gathered-dense", keys_of_all=True)
            attention(group, kind, "paged-ragged", keys_of_all=True)
    finally:
        rank_buffers.PIECE_BYTES, rank_buffers.PART_TOKENS = sizes


SMALL_RATIOS = {LayerKind.CSA: 4, LayerKind.HCA: 16}


def keys_mutant(group: Any) -> None:
    """Keys of ranks in another order are found."""
    place = keys.place_entries

    def rolled(ownership: Any, pages: Tensor, *rest: Any) -> None:
        place(ownership, pages.roll(1, 0), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "place_entries", rolled)
        with pytest.raises(AssertionError):
            attention(group, LayerKind.CSA, "paged-dense", keys_of_all=True)


def keys_refused(group: Any) -> None:
    """Metadata of gathered keys for ranks that gather none are refused on every rank, before anything is sent."""
    context = ContextParallel(group, 2, prefill_keys=False)
    with pytest.raises(ArgumentError, match=r"^metadata: expected metadata without a WholePrefill"):
        attention(group, LayerKind.CSA, "paged-dense", context, keys_of_all=True)
    attention(group, LayerKind.CSA, "paged-dense", context_over(group, 4), keys_of_all=True)
