"""Index arithmetic of a rank that holds a part of the compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.cache.selected_keys import PageTable, StepTokens
from dsv4attn.core.torch_ops.index_ops import get_compressed_slot_mapping, positions_of, visible_entries

__all__ = ["build_owned_slot_mapping"]


def build_owned_slot_mapping(
    ownership: Ownership,
    tokens: StepTokens,
    pages: PageTable,
    ratio: int,
    out: tuple[Tensor, Tensor],
) -> None:
    """`index_ops.build_compressed_slot_mapping` of one rank: slots of its entries, and how many of them a token sees.

    pages: of this rank: its entry number e is in column e // block_size. out: ([>= n] int64 slots, -1 for tokens that
    complete no entry or another rank's; [>= n] int32 counts of entries of this rank).
    """
    slots, lens = out
    n, request = tokens.token_to_req.shape[0], tokens.token_to_req.long()
    position = positions_of(tokens.query_start_loc, tokens.seq_lens, request)
    entry, is_valid = torch.div(position, ratio, rounding_mode="floor"), tokens.is_valid & (request >= 0)
    own = is_valid & (ownership.owner(entry) == ownership.rank)
    # the position that the token would have if this rank's entries were all there are
    local = ownership.local(entry) * ratio + position % ratio
    slots[:n] = get_compressed_slot_mapping(local, own, request, pages.block_table, pages.block_size, ratio)
    slots[n:].fill_(-1)
    lens[:n] = ownership.counts(visible_entries(position, is_valid, ratio))
    lens[n:].zero_()
