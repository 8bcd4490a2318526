"""Exact selection: scores and the largest of them in one step, in memory that does not grow with the context."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from dsv4attn.core.definitions.indexer import IndexQuery, scores, scores_bytes
from dsv4attn.core.definitions.records import read_index_keys, slots_of
from dsv4attn.core.definitions.tiles import PLAIN, Arithmetic, tiles
from dsv4attn.core.layout import PagedKVCache

__all__ = ["select_topk", "selection_bytes"]

ENTRIES = 512
"""Entries scored at a time. Always so many, so that no score depends on the length of a context."""
_LOWEST = torch.finfo(torch.float32).min


def select_topk(
    query: IndexQuery,
    cache: PagedKVCache,
    block_table: Tensor,
    token_to_req: Tensor,
    visible_lens: Tensor,
    out: Tensor,
    max_entries: int,
    arithmetic: Arithmetic = PLAIN,
) -> None:
    """The entries with the largest scores of each token, in ascending order of their numbers, then -1.

    Of equal scores the lower entry number wins. An entry with a NaN score, and one without a block, is never chosen.

    query: of T tokens. cache: pages of index keys. block_table: [R, N] int32 of it. token_to_req: [T] int32.
    visible_lens: [T] int32 - entries that each token sees, 0 for padding. out: [T, K] int32. max_entries: the largest
    of `visible_lens`, or more; entries behind it, in steps of ENTRIES, are not looked at.
    """
    count, topk = out.shape
    heads, dim = query.values.shape[1], cache.layout.head_dim
    for part in tiles(count, selection_bytes(heads, dim, topk)):
        q, weights, lens = query.rows(part), query.weights[part], visible_lens[part, None]
        best = q.new_full((q.shape[0], topk), -inf), out.new_full((q.shape[0], topk), -1)
        for start in range(0, max_entries, ENTRIES):
            entry = torch.arange(start, start + ENTRIES, device=out.device, dtype=out.dtype).expand(q.shape[0], -1)
            slots = slots_of(entry, block_table, token_to_req[part], cache).masked_fill_(entry >= lens, -1)
            # the sum turns -0 into 0: they are equal
            score = scores(q, weights, read_index_keys(cache, slots), arithmetic).clamp_(min=_LOWEST) + 0.0
            absent = (slots < 0) | score.isnan()
            best = _better(best, score.masked_fill_(absent, -inf), entry.masked_fill(absent, -1))
        last = torch.iinfo(out.dtype).max
        numbers = best[1].masked_fill(best[1] < 0, last).sort(-1).values
        out[part] = numbers.masked_fill_(numbers == last, -1)


def _better(best: tuple[Tensor, Tensor], score: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of both: scores and entry numbers [t, K]. Entries of `best` have lower numbers, and so come first."""
    scores_, entries = torch.cat([best[0], score], -1), torch.cat([best[1], entry], -1)
    order = scores_.sort(dim=-1, descending=True, stable=True).indices[:, : best[0].shape[1]]
    return scores_.gather(-1, order), entries.gather(-1, order)


def selection_bytes(heads: int, dim: int, topk: int) -> int:
    """Temporaries of a token that selects."""
    return scores_bytes(heads, dim, ENTRIES) + 64 * (topk + ENTRIES)
