"""Context parallelism over 2, 3 and 4 ranks: results against one rank and against float64, and errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.core.context_parallel.context_ranks import CASES, SIZES, serve
from tests.ranks import run_ranks
from tests.tools.replay.rank_cases import REPLAYS

Failed = Callable[[int, str], dict[int, str]]
"""Of a size and a case: by rank, how it failed; empty for a case that passed."""

QUICK = 2
"""The size of groups in `make test`. Larger groups are in `make test-rest`."""
SIZED = [size if size == QUICK else pytest.param(size, marks=pytest.mark.matrix) for size in SIZES]
REPLAYED = [
    pytest.param(size, case, marks=[pytest.mark.matrix] * (size != QUICK))
    for size, cases in REPLAYS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """How a case failed. One pool of ranks runs the cases of the smallest groups, and another one the others.

    Of all cases those that this run has selected: most are left to `make test-rest`.
    """
    here = (item for item in request.session.items if item.path == request.path)
    selected = [item.callspec.params for item in here if hasattr(item, "callspec")]

    @cache
    def results(sizes: tuple[int, ...]) -> list[dict[tuple[int, str], str]]:
        folder = tmp_path_factory.mktemp("ranks")
        chosen = {size: [params["case"] for params in selected if params["size"] == size] for size in sizes}
        run_ranks(serve, str(folder), chosen, size=max(sizes))
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(max(sizes))]

    def of(size: int, case: str) -> dict[int, str]:
        sizes = (QUICK,) if size == QUICK else tuple(other for other in SIZES if other != QUICK)
        return {
            rank: cases[size, case] for rank, cases in enumerate(results(sizes)) if rank < size and cases[size, case]
        }

    return of


@pytest.mark.matrix
@pytest.mark.parametrize(("size", "case"), REPLAYED)
def test_a_replay_over_ranks_is_checked_on_each(failed: Failed, case: str, size: int) -> None:
    assert failed(size, case) == {}


@pytest.mark.parametrize("size", SIZED)
@pytest.mark.parametrize("case", CASES)
def test_several_ranks_are_one(failed: Failed, case: str, size: int) -> None:
    assert failed(size, case) == {}


@pytest.mark.matrix
def test_entries_are_divided_over_one_group_and_heads_over_another(failed: Failed) -> None:
    assert failed(4, "heads") == {}


@pytest.mark.matrix
def test_a_rank_that_does_not_come_is_an_error_on_the_others(failed: Failed) -> None:
    texts = failed(3, "gone")
    for rank in (0, 1):
        assert texts[rank].startswith(f"rank {rank} of 3: the exchange of candidates failed: ")
        assert "-> look at the logs of the other ranks" in texts[rank]
