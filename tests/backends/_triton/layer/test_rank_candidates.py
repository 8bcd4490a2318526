"""Selection among the candidates of all ranks, against a sort in Python and against torch's definition."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.selection import kernels_ranks, ranks
from dsv4attn.backends._triton.layer.selection import launch as select
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.selection import select_among, select_topk_over_ranks
from dsv4attn.core.torch_ops.arguments import TokenMap
from dsv4attn.core.torch_ops.indexer import IndexQuery
from dsv4attn.core.torch_ops.tiles import PLAIN
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.index_ops.index_trials import planted
from tests.backends._triton.layer.test_select_topk import few_in_registers
from tests.core.context_parallel.test_context_parallel_buffers import Alone

SIZES = [(1, 5), (2, 8), (3, 5), (8, 16), (5, 1)]
sizes = pytest.mark.parametrize(("size", "topk"), SIZES)
LOWEST = float(torch.finfo(torch.float32).min)
ORDER = "place += tl.where(other == rank, 0, low)"
RUN = "the wrong run", ("local = number // (interleave * ranks) * interleave", "local = number // (interleave * ranks)")
BUGS = {
    "the order of ranks, not of numbers": (ORDER, "place += tl.where(other < rank, topk, 0)"),
    "a score of none": ('(score == float("-inf"))', "(score != score)"),
    "entries of others": ("// interleave % ranks == rank", "// interleave % ranks >= 0"),
    **dict([RUN]),
}
"""Of `place_kernel`, `own_kernel` and what both ways share."""
TIE = "(-own_number >= last)"
TOGETHER_BUGS = {
    "the higher number of equal ones": (TIE, "(-own_number <= last)"),
    "all equal ones": (TIE, "(own_number >= 0)"),
    "no equal one": (TIE, "(own_number < 0)"),
    "the last rank is left out": ("(holder < ranks)", "(holder < ranks - 1)"),
    "a score of none of this rank": ('(own_number >= 0) & (own_score != float("-inf"))', "(own_number >= 0)"),
    "a score of none": ('(number >= 0) & (score != float("-inf"))', "(number >= 0)"),
    "one too few": ("some * 0, topk, 0)", "some * 0, topk - 1, 0)"),
    **dict([RUN]),
}
"""Of `keep_kernel`."""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Candidates that do not fit registers of one program."""
    monkeypatch.setattr(ranks, "TOGETHER", 0)
    ranks._keep_form.cache_clear()
    yield
    ranks._keep_form.cache_clear()


def judge(size: int, topk: int, interleave: int, seed: int, kernels: ModuleType = ranks) -> None:
    """Fail unless every rank has its part of the best candidates. Scores are few, or all differ if the seed is odd."""
    draw, rows, entries = torch.Generator().manual_seed(seed), 4, 3 * size * topk
    owners = [Ownership(rank, size, interleave) for rank in range(size)]
    numbers = torch.full((size, rows, topk), -1, dtype=torch.int32)
    scores = torch.full((size, rows, topk), -inf)
    values = torch.tensor([LOWEST, -1.0, 0.0, 0.5, 3.0, inf])
    for rank, ownership in enumerate(owners):
        for row in range(rows):
            count = min(
                [0, topk, topk, int(torch.randint(0, topk + 1, (), generator=draw))][row], ownership.count(entries)
            )
            some = torch.randperm(ownership.count(entries), generator=draw)[:count].sort().values
            numbers[rank, row, :count] = ownership.entry(some).int()
            few = values[torch.randint(0, 6, (count,), generator=draw)]
            scores[rank, row, :count] = torch.randn(count, generator=draw) if seed % 2 else few
    scores[:, 1][torch.rand(size, topk, generator=draw) < 0.65] = -inf  # candidates without a page
    both = torch.stack([numbers, scores.view(torch.int32)], 1).to(DEVICE)
    flat = [tensor.transpose(0, 1).flatten(1) for tensor in (numbers, scores)]
    defined = select_among(flat[0], flat[1], topk)
    for ownership in owners:
        out = torch.full((rows, topk + 2), -7, dtype=torch.int32, device=DEVICE)
        kernels.choose(ownership, both[:, 0], both[:, 1].view(torch.float32), out[:, 1:-1], entries)
        for row in range(rows):
            pairs = zip(*(tensor[row].tolist() for tensor in flat), strict=True)
            best = sorted((-s, n) for n, s in pairs if n >= 0 and s > -inf)[:topk]
            mine = sorted(ownership.local(n) for _, n in best if ownership.owner(n) == ownership.rank)
            assert out[row].tolist() == [-7, *mine, *[-1] * (topk - len(mine)), -7]
            assert (
                sorted(ownership.local_numbers(defined[row]).tolist(), key=lambda n: (n < 0, n))
                == out[row, 1:-1].tolist()
            )


@sizes
@pytest.mark.parametrize("interleave", [1, 3])
def test_every_rank_keeps_its_part_of_the_best(size: int, topk: int, interleave: int) -> None:
    for seed in range(6):
        judge(size, topk, interleave, seed)


@pytest.mark.parametrize(
    ("size", "topk"), [pytest.param(*one, marks=pytest.mark.slow if one == (8, 16) else []) for one in SIZES]
)
@pytest.mark.usefixtures("apart")
def test_every_rank_keeps_the_same_part_if_candidates_are_too_many_for_a_program(size: int, topk: int) -> None:
    for seed, interleave in ((0, 1), (1, 3), (2, 2)):
        judge(size, topk, interleave, seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_as_many_candidates_as_models_have(seed: int) -> None:
    judge(5, 512, 2, seed)


def test_all_that_are_chosen_have_the_numbers_of_whole_sequences() -> None:
    numbers = torch.tensor([[[0, 4, 5, -1]], [[2, 3, 7, 9]]], dtype=torch.int32, device=DEVICE)
    scores = torch.tensor([[[1.0, 3.0, 2.0, -inf]], [[2.0, -1.0, 2.0, 8.0]]], device=DEVICE)
    out = torch.full((1, 4), -7, dtype=torch.int32, device=DEVICE)
    with observed() as seen:
        ranks.choose(Ownership(0, 1), numbers, scores, out, 10)

    assert out.tolist() == [[2, 4, 5, 9]]
    assert len(seen) == 3


@pytest.mark.mutation
@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")
@pytest.mark.parametrize(("bug", "alone"), [*((bug, False) for bug in BUGS), *((bug, True) for bug in TOGETHER_BUGS)])
def test_planted_bugs_are_found(bug: str, tmp_path: Path, *, alone: bool) -> None:
    def judged(old: str, new: str) -> None:
        kernels = planted(ranks, kernels_ranks, tmp_path, old, new)
        kernels.__dict__["TOGETHER"] = ranks.TOGETHER if alone else 0
        for seed in range(8):
            judge(3, 6, 2, seed, kernels)

    judged("", "")
    with pytest.raises(AssertionError):
        judged(*(TOGETHER_BUGS if alone else BUGS)[bug])


@pytest.mark.parametrize("split", [2**20, 32])
def test_scores_of_candidates_are_those_of_the_selection(split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that fit registers, of longer ones, and of rows in parts."""
    ownership, draw, topk, forms = Ownership(1, 3, 2), torch.Generator().manual_seed(split), 4, set[Variant]()
    monkeypatch.setattr(select, "SPLIT_LENGTH", split)
    odd = torch.tensor([0.5, -0.0, -inf, 7.0, inf, nan, -LOWEST, LOWEST, -1.5, 1e-45, -1e-45])
    with few_in_registers(), observed() as seen:
        for entries in (1, 5, 16, 40, 100):
            scores = odd[torch.randint(0, len(odd), (4, entries), generator=draw)]
            lens = torch.tensor([entries, entries, entries // 2, 0], dtype=torch.int32)
            numbers = torch.full((4, topk + 2), -7, dtype=torch.int32, device=DEVICE)
            sent, alone = torch.zeros(4, topk + 1, device=DEVICE), torch.zeros_like(numbers[:, 1:-1])
            arguments = scores.to(DEVICE), None, lens.to(DEVICE)
            select.select(*arguments, numbers[:, 1:-1], entries, run=0, proposed=(ownership, sent[:, 1:]))
            select.select(*arguments, alone, entries, run=0)

            for row, local in enumerate(alone.tolist()):
                expected = [max(float(scores[row, n]), LOWEST) + 0.0 if n >= 0 else -inf for n in local]
                assert numbers[row].tolist() == [-7, *(ownership.entry(n) if n >= 0 else -1 for n in local), -7]
                assert [*map(str, sent[row].tolist())] == [*map(str, [0.0, *expected])]
        for aligned in (False, True):
            forms |= {*select.variants(topk, 100, aligned=aligned, proposes=True)}
        # compiled kernels keep their blocks: rows that fit them are split here alone
        assert {*seen} <= forms or (split == 32 and not INTERPRETED)


def foreseen(topk: int) -> set[Variant]:
    return {*ranks.variants(topk), *select.variants(topk, 4096, aligned=False)}


@pytest.mark.parametrize(("size", "topk"), [(1, 8), (2, 16), (3, 8), (4, 512), (16, 2)])
def test_a_choice_takes_one_launch_that_is_foreseen(size: int, topk: int) -> None:
    with observed() as seen:
        judge(size, topk, 1, 0)

    assert [variant.name for variant in seen] == ["keep_kernel"] * size
    assert set(seen) <= foreseen(topk)


@pytest.mark.usefixtures("apart")
def test_a_choice_among_too_many_takes_three_launches_that_are_foreseen() -> None:
    with observed() as seen:
        judge(4, 8, 1, 0)

    assert len(seen) == 4 * 3
    assert set(seen) <= foreseen(8)


@pytest.mark.parametrize(
    ("size", "topk", "together"),
    [(2, 512, True), (16, 512, True), (17, 2, False), (2, 2048, True), (4, 2048, True), (5, 2048, False)],
)
def test_candidates_of_models_fit_a_program(size: int, topk: int, *, together: bool) -> None:
    assert (ranks._keep_form(size, topk) is not None) is together


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
    for ownership, cache in zip(owners, caches, strict=True):
        for n in range(ownership.count(entries)):
            cache.tensor[n // 4, n % 4] = keys[ownership.entry(n)].to(DEVICE)
    steps, sent = GenericBackend().layer_ops, list[Tensor]()

    class Recorded(Alone):
        def gather(self, mine: Tensor, what: str, *, out: Tensor | None = None) -> Tensor:
            sent.append(mine.clone())
            return torch.stack(sent[-1:] * size if len(sent) < size + 1 else sent[:size])

    def run(ownership: Ownership) -> Tensor:
        out = torch.full((3, topk), -7, dtype=torch.int32, device=DEVICE)
        lens = ownership.counts(torch.tensor(visible)).int().to(DEVICE)
        cache, token_map = caches[ownership.rank], TokenMap(table, request, lens)
        select_topk_over_ranks(Recorded(ownership), steps, PLAIN, query, cache, token_map, out, entries)  # type: ignore[arg-type]
        return out

    for ownership in owners:
        run(ownership)
    outs = [run(ownership) for ownership in owners]
    for row, seen in enumerate(visible):
        score = torch.relu(q[row].double() @ keys[:seen].double().T).sum(0).tolist()
        best = [e for _, e in sorted((-s, e) for e, s in enumerate(score))[:topk]]
        for ownership, out in zip(owners, outs, strict=True):
            mine = sorted(ownership.local(e) for e in best if ownership.owner(e) == ownership.rank)
            assert out[row].tolist() == mine + [-1] * (topk - len(mine))
