"""Selection among the candidates of all ranks, against a sort in Python and against torch's definition."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import INTERPRETED, observed
from dsv4attn.backends._triton.layer import kernels_ranks, ranks, select
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.context_parallel import Ownership, select_topk_over_ranks
from dsv4attn.core.context_parallel.selection import select_among
from dsv4attn.core.definitions import PLAIN, IndexQuery
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.index_ops.trials import planted
from tests.core.test_rank_buffers import Alone

LOWEST = float(torch.finfo(torch.float32).min)
ORDER = "place += tl.where(other == rank, 0, low)"
BUGS = {
    "the order of ranks, not of numbers": (ORDER, "place += tl.where(other < rank, topk, 0)"),
    "a score of none": ('(score == float("-inf"))', "(score != score)"),
    "entries of others": ("// interleave % ranks == rank", "// interleave % ranks >= 0"),
    "the wrong run": ("local = number // (interleave * ranks) * interleave", "local = number // (interleave * ranks)"),
}


def judge(size: int, topk: int, interleave: int, seed: int, kernels: ModuleType = ranks) -> None:
    """Fail unless every rank has its part of the best candidates. Scores are few, so that many are equal."""
    draw, rows, entries = torch.Generator().manual_seed(seed), 4, 3 * size * topk
    owners = [Ownership(rank, size, interleave) for rank in range(size)]
    numbers = torch.full((size, rows, topk), -1, dtype=torch.int32)
    scores = torch.full((size, rows, topk), -inf)
    values = torch.tensor([LOWEST, -1.0, 0.0, 0.5, 3.0, inf])
    for rank, own in enumerate(owners):
        for row in range(rows):
            count = min([0, topk, topk, int(torch.randint(0, topk + 1, (), generator=draw))][row], own.count(entries))
            some = torch.randperm(own.count(entries), generator=draw)[:count].sort().values
            numbers[rank, row, :count] = own.entry(some).int()
            scores[rank, row, :count] = values[torch.randint(0, 6, (count,), generator=draw)]
    scores[:, 1, 1:] = -inf  # candidates without a page
    both = torch.stack([numbers, scores.view(torch.int32)], 1).to(DEVICE)
    flat = [one.transpose(0, 1).flatten(1) for one in (numbers, scores)]
    defined = select_among(flat[0], flat[1], topk)
    for own in owners:
        out = torch.full((rows, topk + 2), -7, dtype=torch.int32, device=DEVICE)
        kernels.choose(own, both[:, 0], both[:, 1].view(torch.float32), out[:, 1:-1], entries)
        for row in range(rows):
            pairs = zip(*(one[row].tolist() for one in flat), strict=True)
            best = sorted((-s, n) for n, s in pairs if n >= 0 and s > -inf)[:topk]
            mine = sorted(own.local(n) for _, n in best if own.owner(n) == own.rank)
            assert out[row].tolist() == [-7, *mine, *[-1] * (topk - len(mine)), -7]
            assert sorted(own.local_numbers(defined[row]).tolist(), key=lambda n: (n < 0, n)) == out[row, 1:-1].tolist()


@pytest.mark.parametrize("interleave", [1, 3])
@pytest.mark.parametrize(("size", "topk"), [(1, 5), (2, 8), (3, 5), (8, 16), (5, 1)])
def test_every_rank_keeps_its_part_of_the_best(size: int, topk: int, interleave: int) -> None:
    for seed in range(4):
        judge(size, topk, interleave, seed)


def test_as_many_candidates_as_models_have() -> None:
    judge(5, 512, 2, 0)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, tmp_path: Path) -> None:
    judge(3, 6, 2, 1, planted(ranks, kernels_ranks, tmp_path, "", ""))
    with pytest.raises(AssertionError):
        judge(3, 6, 2, 1, planted(ranks, kernels_ranks, tmp_path, *BUGS[bug]))


def test_scores_of_candidates_are_those_of_the_selection() -> None:
    own, scores = Ownership(1, 3, 2), torch.tensor([[0.5, -0.0, -inf, 7.0, 2.0]] * 2, device=DEVICE)
    numbers = torch.tensor([[0, 1, 2, -1], [3, 4, -1, -1]], dtype=torch.int32, device=DEVICE)
    sent = torch.zeros(2, 4, device=DEVICE)
    ranks.propose(own, scores, numbers, sent)

    assert numbers.tolist() == [[2, 3, 8, -1], [9, 14, -1, -1]]
    assert sent.tolist() == [[0.5, 0.0, LOWEST, -inf], [7.0, 2.0, -inf, -inf]]
    assert str(float(sent[0, 1])) == "0.0"


def test_a_choice_takes_three_launches_that_are_foreseen() -> None:
    with observed() as seen:
        judge(4, 8, 1, 0)

    assert len(seen) == 4 * 3
    assert set(seen) <= {*ranks.variants(8), *select.variants(8, 4096, "cpu", aligned=False)}


@pytest.mark.parametrize("interleave", [1, 2])
@pytest.mark.parametrize("entries", [0, 3, 61])
def test_ranks_together_select_what_one_selects(entries: int, interleave: int) -> None:
    """Two ranks of one process: each is asked for its candidates, then both choose. Keys are small integers."""
    draw, size, topk, heads, dim = torch.Generator().manual_seed(entries), 2, 6, 2, 16
    layout = KVCacheLayout.rows(dim, 0, dtype=torch.float32)
    keys = torch.randint(-1, 2, (entries, dim), generator=draw).float()
    q = torch.randint(0, 2, (3, heads, dim), generator=draw).float()
    query = IndexQuery(q.to(DEVICE), torch.ones(3, heads, device=DEVICE))
    visible, owners = [entries, entries // 2, 0], [Ownership(rank, size, interleave) for rank in range(size)]
    request, table = (
        torch.zeros(3, dtype=torch.int32, device=DEVICE),
        torch.arange(8, dtype=torch.int32)[None].to(DEVICE),
    )
    caches = [PagedKVCache(torch.full((8, 4, dim), nan, device=DEVICE), layout) for _ in owners]
    for own, cache in zip(owners, caches, strict=True):
        for n in range(own.count(entries)):
            cache.tensor[n // 4, n % 4] = keys[own.entry(n)].to(DEVICE)
    steps, sent = GenericBackend().layer_steps, list[Tensor]()

    class Recorded(Alone):
        def gather(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Tensor:
            sent.append(mine.clone())
            return torch.stack(sent[-1:] * size if len(sent) < size + 1 else sent[:size])

    def run(own: Ownership) -> Tensor:
        out = torch.full((3, topk), -7, dtype=torch.int32, device=DEVICE)
        lens = own.counts(torch.tensor(visible)).int().to(DEVICE)
        given = query, caches[own.rank], table, request, lens, out, entries
        select_topk_over_ranks(Recorded(own), steps, PLAIN, *given)  # type: ignore[arg-type]
        return out

    for own in owners:
        run(own)
    outs = [run(own) for own in owners]
    for row, seen in enumerate(visible):
        score = torch.relu(q[row].double() @ keys[:seen].double().T).sum(0).tolist()
        best = [e for _, e in sorted((-s, e) for e, s in enumerate(score))[:topk]]
        for own, out in zip(owners, outs, strict=True):
            mine = sorted(own.local(e) for e in best if own.owner(e) == own.rank)
            assert out[row].tolist() == mine + [-1] * (topk - len(mine))
