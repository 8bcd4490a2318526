"""Selection by ranks that divide the entries, each in one process here: candidates of all ranks are merged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.selection import score_selected, select_among
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_selection import GARBAGE, IndexSelection, judge_selection, sum_bits

__all__ = ["selects_over_ranks"]

I64 = NDArray[np.int64]
PAGE = 64
"""Entries of a page, and of a run: so page j of a rank is page j * ranks + rank of the case input."""


def selects_over_ranks(ranks: int) -> Callable[[Bench, IndexSelection], Measure]:
    """Check that candidates of so many ranks, merged by score and then by number, are the selection of one rank."""

    def check(bench: Bench, inputs: IndexSelection) -> Measure:
        steps, query, cache = complete(bench.backend).layer_ops, inputs.query(), inputs.oracle_cache.cache
        request = inputs.tensor(np.array([owner for owner, _ in inputs.tokens], dtype=np.int32))
        visible = inputs.tensor(np.array([seen for _, seen in inputs.tokens], dtype=np.int32))
        if inputs.topk <= steps.most_over_ranks:
            rows = _ascending(_by_kernels(steps, inputs, ranks, request, visible))
            if (rows[:, inputs.topk :] >= 0).any():
                raise Wrong(f"ranks hold more than the {inputs.topk} entries of a token together")
            return judge_selection(inputs, rows[:, : inputs.topk], bits=sum_bits(bench))
        found = []
        for rank in range(ranks):
            own, table = Ownership(rank, ranks, PAGE), inputs.tensor(inputs.table[:, rank::ranks])
            local = torch.full((len(inputs.tokens), inputs.topk), GARBAGE, dtype=torch.int32, device=inputs.device)
            most = own.count(int(visible.max()))
            steps.select_topk(query, cache, table, request, own.counts(visible).int(), local, most)
            score = score_selected(query, slice(0, len(local)), cache, table, request, local)
            found.append((own.entry(local).masked_fill_(local < 0, -1), score))
        numbers, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        rows = select_among(numbers, scores, inputs.topk).cpu().numpy().astype(np.int64)
        return judge_selection(inputs, _ascending(rows), bits=sum_bits(bench))

    return check


def _by_kernels(steps: LayerOps, inputs: IndexSelection, ranks: int, request: Tensor, visible: Tensor) -> I64:
    """[T, ranks * K] entry numbers that ranks hold of the best candidates, by the backend's ops."""
    assert steps.propose_candidates is not None
    assert steps.choose_candidates is not None
    query, shape, most = inputs.query(), (len(inputs.tokens), inputs.topk), int(visible.max())
    numbers = torch.full((ranks, *shape), GARBAGE, dtype=torch.int32, device=inputs.device)
    scores = torch.full((ranks, *shape), torch.nan, device=inputs.device, dtype=torch.float32)
    owners = [Ownership(rank, ranks, PAGE) for rank in range(ranks)]
    for rank, own in enumerate(owners):
        given = (
            inputs.oracle_cache.cache,
            inputs.tensor(inputs.table[:, rank::ranks]),
            request,
            own.counts(visible).int(),
        )
        steps.propose_candidates(own, query, *given, numbers[rank], scores[rank], own.count(most))
    found = []
    for own in owners:
        local = torch.full(shape, GARBAGE, dtype=torch.int32, device=inputs.device)
        steps.choose_candidates(own, numbers, scores, local, most)
        found.append(own.entry(local).masked_fill_(local < 0, -1))
    return torch.cat(found, 1).cpu().numpy().astype(np.int64)


def _ascending(rows: I64) -> I64:
    """Rows in ascending order, then -1."""
    last = np.iinfo(np.int64).max
    rows = np.sort(np.where(rows < 0, last, rows), 1)
    return np.where(rows == last, -1, rows)
