"""Exact selection: scores and the largest of them in one step, in memory that does not grow with the context."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import read_index_keys, slots_of
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.indexer import IndexQuery, scores, scores_bytes
from dsv4attn.core.torch_ops.tiles import Arithmetic, arithmetic_of, tiles

__all__ = ["ENTRIES", "better", "score_entries", "select_topk", "selection_bytes"]

ENTRIES = 512
"""Entries scored at a time. Always so many, so that no score depends on the length of a context."""
_LOWEST = torch.finfo(torch.float32).min


@without_modes
def select_topk(
    query: IndexQuery,
    cache: PagedKVCache,
    block_table: Tensor,
    token_to_req: Tensor,
    visible_lens: Tensor,
    out: Tensor,
    max_entries: int,
    *,
    deterministic: bool = False,
    inside: Callable[[slice, int], Tensor] | None = None,
) -> None:
    """The entries with the largest scores of each token, in ascending order of their numbers, then -1.

    Of equal scores the lower entry number wins. An entry with a NaN score, and one without a block, is never chosen.

    query: of T tokens. cache: pages of index keys. block_table: [R, N] int32 of it. token_to_req: [T] int32.
    visible_lens: [T] int32 - entries that each token sees, 0 for padding. out: [T, K] int32. max_entries: the largest
    of `visible_lens`, or more; entries behind it, in steps of ENTRIES, are not looked at. inside: by a part of the
    tokens and the first of ENTRIES entries, which of these may be selected [t, ENTRIES]; None: all.
    """
    arithmetic, (count, topk) = arithmetic_of(deterministic), out.shape
    heads, dim = query.values.shape[1], cache.layout.head_dim
    for part in tiles(count, selection_bytes(heads, dim, topk)):
        tokens, maps = out[part].shape[0], (block_table, token_to_req[part], visible_lens[part, None])
        best = (
            torch.full((tokens, topk), -inf, device=out.device, dtype=torch.float32),
            out.new_full((tokens, topk), -1),
        )
        for start in range(0, max_entries, ENTRIES):
            score, entry = score_entries(query, part, cache, *maps, start, arithmetic)
            if inside is not None:
                score = score.masked_fill_(~inside(part, start), -inf)
            best = better(best, score, entry.masked_fill(score == -inf, -1))
        last = torch.iinfo(out.dtype).max
        numbers = best[1].masked_fill(best[1] < 0, last).sort(-1).values
        out[part] = numbers.masked_fill_(numbers == last, -1)


def score_entries(
    query: IndexQuery,
    part: slice,
    cache: PagedKVCache,
    block_table: Tensor,
    token_to_req: Tensor,
    lens: Tensor,
    start: int,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """Scores and numbers [t, ENTRIES] of the entries from `start` on; -inf where one is absent, not seen, or NaN.

    part: tokens of the query. token_to_req: [t] and lens [t, 1]: of these. Scores of others are finite or +inf.
    """
    q, weights = query.rows(part), query.weights[part]
    entry = torch.arange(start, start + ENTRIES, device=lens.device, dtype=torch.int32).expand(q.shape[0], -1)
    slots = slots_of(entry, block_table, token_to_req, cache).masked_fill_(entry >= lens, -1)
    # the sum turns -0 into 0: they are equal
    score = scores(q, weights, read_index_keys(cache, slots), arithmetic).clamp_(min=_LOWEST) + 0.0
    return score.masked_fill_((slots < 0) | score.isnan(), -inf), entry


def better(best: tuple[Tensor, Tensor], score: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of both: scores and entry numbers [t, K]. Entries of `best` have lower numbers, and so come first."""
    scores_, entries = torch.cat([best[0], score], -1), torch.cat([best[1], entry], -1)
    order = scores_.sort(dim=-1, descending=True, stable=True).indices[:, : best[0].shape[1]]
    return scores_.gather(-1, order), entries.gather(-1, order)


def selection_bytes(heads: int, dim: int, topk: int) -> int:
    """Temporaries of a token that selects."""
    return scores_bytes(heads, dim, ENTRIES) + 64 * (topk + ENTRIES)
