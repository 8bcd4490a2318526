"""Selection by ranks that divide the entries, each in one process here: candidates of all ranks are merged."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dsv4attn.core.context_parallel import Ownership
from dsv4attn.core.context_parallel.selection import score_selected, select_among
from dsv4attn.core.contract import complete
from dsv4attn.testing.case import Bench, Measure
from dsv4attn.testing.selecting import GARBAGE, Selecting, judge_selection, sum_bits

__all__ = ["selects_over_ranks"]

PAGE = 64
"""Entries of a page, and of a run: so page j of a rank is page j * ranks + rank of the scene."""


def selects_over_ranks(ranks: int) -> Callable[[Bench, Selecting], Measure]:
    """Check that candidates of so many ranks, merged by score and then by number, are the selection of one rank."""

    def check(bench: Bench, scene: Selecting) -> Measure:
        steps, query, cache = complete(bench.backend).layer_steps, scene.query(), scene.book.cache
        request = scene.tensor(np.array([owner for owner, _ in scene.tokens], dtype=np.int32))
        visible = scene.tensor(np.array([seen for _, seen in scene.tokens], dtype=np.int32))
        found = []
        for rank in range(ranks):
            own, table = Ownership(rank, ranks, PAGE), scene.tensor(scene.table[:, rank::ranks])
            local = torch.full((len(scene.tokens), scene.topk), GARBAGE, dtype=torch.int32, device=scene.device)
            most = own.count(int(visible.max()))
            steps.select_topk(query, cache, table, request, own.counts(visible).int(), local, most)
            score = score_selected(query, slice(0, len(local)), cache, table, request, local)
            found.append((own.entry(local).masked_fill_(local < 0, -1), score))
        numbers, scores = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        rows = select_among(numbers, scores, scene.topk).cpu().numpy().astype(np.int64)
        last = np.iinfo(np.int64).max
        rows = np.sort(np.where(rows < 0, last, rows), 1)
        return judge_selection(scene, np.where(rows == last, -1, rows), bits=sum_bits(bench))

    return check
