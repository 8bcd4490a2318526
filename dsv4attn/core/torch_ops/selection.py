"""Exact selection: scores and the largest of them in one op, in memory that does not grow with the context."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from dsv4attn.core.cache.index_records import read_index_keys, slots_of
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery, scores, scores_bytes
from dsv4attn.core.torch_ops.tiles import Arithmetic, arithmetic_of, tiles

__all__ = [
    "ENTRIES",
    "ascending",
    "better",
    "none_yet",
    "score_entries",
    "score_records",
    "select_all",
    "select_topk",
    "selection_bytes",
]

ENTRIES = 512
"""Entries scored at a time. The number is fixed, so that no score depends on the length of a context."""
_LOWEST = torch.finfo(torch.float32).min


@without_modes
def select_topk(
    query: IndexQuery,
    cache: PagedKVCache,
    token_map: TokenMap,
    out: Tensor,
    max_entries: int,
    *,
    deterministic: bool = False,
    inside: Callable[[slice, int], Tensor] | None = None,
) -> None:
    """The entries with the largest scores of each token, in ascending order of their numbers, then -1.

    Of equal scores the lower entry number wins. An entry with a NaN score, and one without a block, is never chosen.

    query: queries of T tokens.
    cache: pages of index keys.
    token_map: blocks of `cache`, and the request and the visible entries of each token.
    out: [T, K] int32.
    max_entries: the largest of the visible lengths, or more. Entries from there on, in steps of ENTRIES, are not read.
    inside: `inside(part, start)` says for a part of the tokens, and for the ENTRIES entries from `start` on, which of
       these may be selected: [t, ENTRIES] bool. None: all.
    """
    arithmetic, (count, topk) = arithmetic_of(deterministic), out.shape
    heads, dim = query.values.shape[1], cache.layout.head_dim
    for part in tiles(count, selection_bytes(heads, dim, topk)):
        queries, tokens, best = query.tokens(part), token_map.tokens(part), none_yet(out[part])
        for start in range(0, max_entries, ENTRIES):
            score, entry = score_entries(queries, cache, tokens, start, arithmetic)
            if inside is not None:
                score = score.masked_fill_(~inside(part, start), -inf)
            best = better(best, score, entry.masked_fill(score == -inf, -1))
        out[part] = ascending(best[1])


def select_all(visible_lens: Tensor, out: Tensor) -> None:
    """All entries of tokens that see at most K: 0 .. visible_lens - 1, then -1.

    visible_lens: [T] int32.
    out: [T, K] int32.
    """
    numbers = torch.arange(out.shape[1], dtype=out.dtype, device=out.device)
    out.copy_(torch.where(numbers < visible_lens[:, None], numbers, -1))


def score_entries(
    query: IndexQuery, cache: PagedKVCache, token_map: TokenMap, start: int, arithmetic: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Scores and numbers [t, ENTRIES] of the entries from `start` on; -inf where one is absent, not seen, or NaN.

    query, token_map: of t tokens. Scores of other entries are finite or +inf.
    """
    lens = token_map.visible_lens[:, None]
    entry = torch.arange(start, start + ENTRIES, device=lens.device, dtype=torch.int32).expand(lens.shape[0], -1)
    slots = slots_of(entry, token_map.block_table, token_map.token_to_req, cache).masked_fill_(entry >= lens, -1)
    return score_records(query.rows(slice(None)), query.weights, cache, slots, arithmetic), entry


def score_records(q: Tensor, weights: Tensor, cache: PagedKVCache, slots: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Scores [t, n] of keys at slots [t, n], as of `scores`; -inf where a slot is negative, and for NaN; else more."""
    # the sum turns -0 into 0: they are equal
    score = scores(q, weights, read_index_keys(cache, slots), arithmetic).clamp_(min=_LOWEST) + 0.0
    return score.masked_fill_((slots < 0) | score.isnan(), -inf)


def none_yet(out: Tensor) -> tuple[Tensor, Tensor]:
    """Scores -inf and numbers -1, of the shape of out: where `better` begins."""
    return torch.full(out.shape, -inf, device=out.device, dtype=torch.float32), out.new_full(out.shape, -1)


def ascending(numbers: Tensor) -> Tensor:
    """Each row of numbers [t, K] int32 in ascending order, then the negative ones as -1."""
    last = torch.iinfo(numbers.dtype).max
    ordered = numbers.masked_fill(numbers < 0, last).sort(-1).values
    return ordered.masked_fill_(ordered == last, -1)


def better(best: tuple[Tensor, Tensor], score: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of both: scores and entry numbers [t, K]. Entries of `best` have lower numbers, and so come first."""
    scores_, entries = torch.cat([best[0], score], -1), torch.cat([best[1], entry], -1)
    order = scores_.sort(dim=-1, descending=True, stable=True).indices[:, : best[0].shape[1]]
    return scores_.gather(-1, order), entries.gather(-1, order)


def selection_bytes(heads: int, dim: int, topk: int) -> int:
    """Temporaries of a token that selects."""
    return scores_bytes(heads, dim, ENTRIES) + 64 * (topk + ENTRIES)
