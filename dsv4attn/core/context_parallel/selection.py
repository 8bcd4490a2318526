"""Selection among the index keys of all ranks: every rank proposes entries, and every rank takes the best of them."""

from __future__ import annotations

from math import inf
from typing import Protocol

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import slots_of
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.core.memory.rank_buffers import candidate_bytes
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.selection import ENTRIES, ascending, score_records, selection_bytes
from dsv4attn.core.torch_ops.tiles import PLAIN, Arithmetic, tiles

__all__ = ["SelectTopk", "score_selected", "select_among", "select_topk_over_ranks"]

_LAST = torch.iinfo(torch.int32).max
_ALL = Ownership(0, 1)
"""Of a rank that has all entries: their numbers are those of the sequence."""


class SelectTopk(Protocol):
    """`LayerOps.select_topk`, or what replaces it."""

    def __call__(
        self,
        query: IndexQuery,
        cache: PagedKVCache,
        token_map: TokenMap,
        out: Tensor,
        max_entries: int,
        *,
        whole_from: int | None = None,
    ) -> None:
        """See `LayerOps.select_topk`, and `select_topk_over_ranks` for `whole_from`."""


@without_modes
def select_topk_over_ranks(
    context: RankExchange,
    ops: LayerOps,
    arithmetic: Arithmetic,
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    *,
    whole_from: int | None = None,
) -> None:
    """Write the entries of this rank that are among the K best of all ranks, by the numbers that this rank gives them.

    The K best are those of `LayerOps.select_topk` over all entries: of equal scores the lower entry number wins, and
    NaN is never chosen.

    ops: select this rank's candidates. With `propose_candidates` they give the scores too; else torch computes the
       scores of the candidates again.
    arithmetic: of torch's scores.
    cache, token_map: of this rank.
    out: [T, K] int32, ascending, then -1.
    max_entries: bound of the entries of whole sequences.
    whole_from: first token for which all K best are written, with their numbers in whole sequences, as prefill with
       `WholePrefill` takes them. None: no token.
    """
    owner, (tokens, topk) = context.ownership, out.shape
    first, row_bytes = tokens if whole_from is None else whole_from, candidate_bytes(topk)
    pieces = [(piece, owner) for piece in context.pieces(first, row_bytes=row_bytes)]
    pieces += [(piece, _ALL) for piece in context.pieces(tokens, first=first, row_bytes=row_bytes)]
    propose, choose = ops.propose_candidates, ops.choose_candidates
    if propose is not None and choose is not None and topk <= ops.most_over_ranks:
        for piece, numbering in pieces:
            proposal = out.new_empty(2, piece.stop - piece.start, topk)
            numbers, score, entries = proposal[0], proposal[1].view(torch.float32), owner.count(max_entries)
            propose(owner, query.tokens(piece), cache, token_map.tokens(piece), numbers, score, entries)
            both = context.gather(proposal, "candidates")
            choose(numbering, both[:, 0], both[:, 1].view(torch.float32), out[piece], max_entries)
        return
    ops.select_topk(query, cache, token_map, out, owner.count(max_entries))
    for piece, numbering in pieces:
        local = out[piece]
        score = score_selected(query.tokens(piece), cache, token_map.tokens(piece), local, arithmetic)
        number = owner.entry(local).masked_fill_(local < 0, -1)
        both = context.gather(torch.stack([number, score.view(torch.int32)]), "candidates")
        numbers, score = (both[:, i].transpose(0, 1).flatten(1).contiguous() for i in range(2))
        best = numbering.local_numbers(select_among(numbers, score.view(torch.float32), topk))
        out[piece] = ascending(best)


def score_selected(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, numbers: Tensor, arithmetic: Arithmetic = PLAIN
) -> Tensor:
    """[T, K] fp32 scores of entry numbers [T, K]; -inf for -1, for entries without a page, and for NaN.

    The scores are those of `torch_ops.selection`, in products of the same shape.
    """
    result = torch.full(numbers.shape, -inf, device=numbers.device, dtype=torch.float32)
    heads, dim = query.values.shape[1], cache.layout.head_dim
    for tile in tiles(numbers.shape[0], selection_bytes(heads, dim, ENTRIES)):
        q, weights, token_to_req = query.rows(tile), query.weights[tile], token_map.token_to_req[tile]
        for first in range(0, numbers.shape[1], ENTRIES):
            some = numbers[tile, first : first + ENTRIES]
            padded = torch.nn.functional.pad(some, (0, ENTRIES - some.shape[1]), value=-1)
            slots = slots_of(padded, token_map.block_table, token_to_req, cache)
            score = score_records(q, weights, cache, slots, arithmetic)
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
