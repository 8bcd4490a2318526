"""Selection among the index keys of all ranks: each proposes entries, and every rank takes the best of them."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import read_index_keys, slots_of
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.memory.rank_buffers import candidate_bytes
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.indexer import IndexQuery, scores
from dsv4attn.core.torch_ops.selection import ENTRIES, selection_bytes
from dsv4attn.core.torch_ops.tiles import PLAIN, Arithmetic, tiles

__all__ = ["SelectTopk", "score_selected", "select_among", "select_topk_over_ranks"]

_LAST = torch.iinfo(torch.int32).max
_LOWEST = torch.finfo(torch.float32).min
_ALL = Ownership(0, 1)
"""Of a rank that has all entries: their numbers are those of the sequence."""


class SelectTopk(Protocol):
    """`LayerOps.select_topk`, or what replaces it."""

    def __call__(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        block_table: Tensor,
        token_to_req: Tensor,
        visible_lens: Tensor,
        out: Tensor,
        max_entries: int,
        *,
        whole_from: int | None = None,
    ) -> None:
        """See `LayerOps.select_topk`, and `select_topk_over_ranks` for `whole_from`."""


@without_modes
def select_topk_over_ranks(
    context: RankExchange,
    steps: LayerOps,
    arithmetic: Arithmetic,
    query: IndexQuery,
    cache: PagedKVCache,
    block_table: Tensor,
    token_to_req: Tensor,
    visible_lens: Tensor,
    out: Tensor,
    max_entries: int,
    *,
    whole_from: int | None = None,
) -> None:
    """Write the numbers that this rank gives those of its entries which are among the K best of all ranks.

    out: [T, K] int32, ascending, then -1. The K best are those of `LayerOps.select_topk` over all entries: of equal
    scores the lower entry number wins, NaN is never chosen. steps: select this rank's candidates, with their scores if
    they have `propose_candidates`; else scores are computed again, in torch with this arithmetic. cache,
    block_table, visible_lens: of this rank. max_entries: of whole sequences. whole_from: first token for which all K
    best are written, with their numbers in whole sequences, as prefill with `WholePrefill` takes them; None: none.
    """
    own, tokens = context.ownership, out.shape[0]
    first, cut = (
        tokens if whole_from is None else whole_from,
        partial(context.pieces, row_bytes=candidate_bytes(out.shape[1])),
    )
    pieces = [*((piece, own) for piece in cut(first)), *((piece, _ALL) for piece in cut(tokens, first=first))]
    propose, choose = steps.propose_candidates, steps.choose_candidates
    if propose is not None and choose is not None and out.shape[1] <= steps.most_over_ranks:
        for piece, numbering in pieces:
            mine = out.new_empty(2, piece.stop - piece.start, out.shape[1])
            tables = block_table, token_to_req[piece], visible_lens[piece]
            given = _rows(query, piece), cache, *tables, mine[0], mine[1].view(torch.float32), own.count(max_entries)
            propose(own, *given)
            both = context.gather(mine, "candidates")
            choose(numbering, both[:, 0], both[:, 1].view(torch.float32), out[piece], max_entries)
        return
    maps = block_table, token_to_req
    steps.select_topk(query, cache, *maps, visible_lens, out, own.count(max_entries))
    topk = out.shape[1]
    for piece, numbering in pieces:
        local = out[piece]
        score = score_selected(query, piece, cache, block_table, token_to_req[piece], local, arithmetic)
        number = own.entry(local).masked_fill_(local < 0, -1)
        both = context.gather(torch.stack([number, score.view(torch.int32)]), "candidates")
        numbers, found = (both[:, i].transpose(0, 1).flatten(1).contiguous() for i in range(2))
        best = numbering.local_numbers(select_among(numbers, found.view(torch.float32), topk))
        out[piece] = _ascending(best)


def score_selected(
    query: IndexQuery,
    part: slice,
    cache: PagedKVCache,
    block_table: Tensor,
    token_to_req: Tensor,
    numbers: Tensor,
    arithmetic: Arithmetic = PLAIN,
) -> Tensor:
    """[t, K] fp32 scores of entry numbers [t, K] of some tokens; -inf for -1, for entries without a page, and for NaN.

    The scores are those of `torch_ops.selection`, in products of the same shape.
    """
    result = torch.full(numbers.shape, -inf, device=numbers.device, dtype=torch.float32)
    heads, dim = query.values.shape[1], cache.layout.head_dim
    for tile in tiles(numbers.shape[0], selection_bytes(heads, dim, ENTRIES)):
        tokens = slice(part.start + tile.start, part.start + tile.stop)
        q, weights, request = query.rows(tokens), query.weights[tokens], token_to_req[tile]
        for first in range(0, numbers.shape[1], ENTRIES):
            some = numbers[tile, first : first + ENTRIES]
            padded = torch.nn.functional.pad(some, (0, ENTRIES - some.shape[1]), value=-1)
            slots = slots_of(padded, block_table, request, cache)
            # the sum turns -0 into 0: they are equal
            score = scores(q, weights, read_index_keys(cache, slots), arithmetic).clamp_(min=_LOWEST) + 0.0
            score = score.masked_fill_((slots < 0) | score.isnan(), -inf)
            result[tile, first : first + ENTRIES] = score[:, : some.shape[1]]
    return result


def select_among(numbers: Tensor, score: Tensor, topk: int) -> Tensor:
    """[T, K] the entry numbers with the largest scores among candidates [T, n], in any order, then -1.

    numbers: int32, distinct in a row, -1 for none. score: fp32, not NaN. Of equal scores the lower number wins.
    """
    score = score.masked_fill(numbers < 0, -inf)
    # the last key first: by number, then by score without changing the order of equal ones
    order = numbers.masked_fill(score == -inf, _LAST).argsort(dim=-1, stable=True)
    score, numbers = score.gather(-1, order), numbers.gather(-1, order)
    order = score.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    return numbers.gather(-1, order).masked_fill_(score.gather(-1, order) == -inf, -1)


def _rows(query: IndexQuery, part: slice) -> IndexQuery:
    return IndexQuery(query.values[part], query.weights[part], None if query.scales is None else query.scales[part])


def _ascending(numbers: Tensor) -> Tensor:
    """Each row in ascending order, -1 behind."""
    ordered = numbers.masked_fill(numbers < 0, _LAST).sort(-1).values
    return ordered.masked_fill_(ordered == _LAST, -1)
