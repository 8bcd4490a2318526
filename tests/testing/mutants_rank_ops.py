"""Backends whose own steps over ranks are wrong: in the merge of parts, and in the choice among candidates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.selection import score_selected, select_among
from dsv4attn.core.contract.rank_ops import RankOps
from dsv4attn.core.torch_ops import merge
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from tests.layer_ops import TorchOps

MERGES = (
    "a sink for each part",
    "lse with the sink",
    "parts of equal weight",
    "NaN of empty parts",
    "base 2",
    "one part lost",
)
CHOICES = ("the higher number of equal ones", "numbers of a rank", "entries of others", "scores of none")


class Merges(ReferenceBackend):
    """Packs and merges partials by itself, with one bug of `MERGES`, or none."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self._bug = bug
        self.rank_ops = RankOps(pack_partial=self.pack_partial, merge_partials=self.merge_partials)

    def pack_partial(self, out: Tensor, lse: Tensor, sent: Tensor, sent_lse: Tensor) -> None:
        """Copy."""
        # what a part without keys holds does not matter
        sent.copy_(out.masked_fill((lse == -inf)[..., None], torch.nan))
        sent_lse.copy_(lse)

    def merge_partials(
        self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, attn_sink: Tensor | None, _: Sequence[Tensor]
    ) -> None:
        """By the definition."""
        if self._bug != "NaN of empty parts":
            outs = outs.masked_fill((lses == -inf)[..., None], 0)
        if self._bug == "one part lost":
            outs, lses = outs[1:], lses[1:]
        if self._bug == "a sink for each part" and attn_sink is not None:
            outs = torch.stack([merge.apply_sink(*part, attn_sink) for part in zip(outs, lses, strict=True)])
            attn_sink = None
        given = lses * 0.6931472 if self._bug == "base 2" else lses
        if self._bug == "parts of equal weight":
            given = torch.where(lses == -inf, lses, 0.0)
        if self._bug == "NaN of empty parts":
            weight = (lses - lses.amax(0).clamp(min=-1e30)).exp()
            merged = (weight[..., None] * outs).sum(0) / weight.sum(0)[..., None]
            whole = merge.merge_lse(outs.nan_to_num(), lses)[1]
        else:
            merged, whole = merge.merge_lse(outs, given)
        if self._bug in ("base 2", "parts of equal weight"):
            whole = merge.merge_lse(outs, lses)[1]
        out.copy_(merged if attn_sink is None else merge.apply_sink(merged, whole, attn_sink))
        sinks = torch.zeros_like(whole) if attn_sink is None else attn_sink.expand_as(whole)
        lse.copy_(torch.logaddexp(whole, sinks) if self._bug == "lse with the sink" else whole)


class Chooses(ReferenceBackend):
    """Proposes and chooses candidates by itself, with one bug of `CHOICES`, or none."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self._bug = bug

    @cached_property
    def layer_ops(self) -> Any:
        """Torch's, with a selection over ranks."""
        return _Steps(self._bug).table()


class _Steps(TorchOps):
    most_over_ranks = 10**6

    def __init__(self, bug: str) -> None:
        self._bug = bug

    def propose_candidates(
        self,
        ownership: Ownership,
        query: IndexQuery,
        cache: Any,
        token_map: TokenMap,
        numbers: Tensor,
        scores: Tensor,
        max_entries: int,
    ) -> None:
        self.select_topk(query, cache, token_map, numbers, max_entries)
        scores.copy_(score_selected(query, cache, token_map, numbers))
        if self._bug != "numbers of a rank":
            numbers.copy_(ownership.entry(numbers).masked_fill_(numbers < 0, -1))

    def choose_candidates(
        self, ownership: Ownership, numbers: Tensor, scores: Tensor, out: Tensor, max_entries: int
    ) -> None:
        flat, score = (each.transpose(0, 1).flatten(1) for each in (numbers, scores))
        if self._bug == "the higher number of equal ones":
            best = max_entries - select_among(torch.where(flat < 0, flat, max_entries - flat), score, out.shape[1])
            best = best.masked_fill(best > max_entries, -1)
        elif self._bug == "scores of none":
            best = select_among(flat.clamp(min=0), score.masked_fill(score == -inf, inf), out.shape[1])
        else:
            best = select_among(flat, score, out.shape[1])
        mine = ownership.local_numbers(best)
        if self._bug == "entries of others":
            mine = torch.where(best < 0, best, ownership.local(best))
        last = torch.iinfo(torch.int32).max
        ordered = mine.masked_fill(mine < 0, last).sort(-1).values
        out.copy_(ordered.masked_fill(ordered == last, -1))
