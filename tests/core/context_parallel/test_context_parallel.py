"""Context parallelism over 2, 3 and 4 ranks: results against one rank and against float64, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.core.context_parallel.context_ranks import CASES, SIZES, serve
from tests.ranks import run_ranks
from tests.tools.replay.rank_cases import REPLAYS

Failed = dict[int, dict[tuple[int, str], str]]
"""By rank, and by size and case: how it failed."""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """The text of every failure by rank; an empty text is a case that passed. One pool of ranks runs all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(serve, str(folder), size=max(SIZES))
    return {rank: torch.load(Path(folder, f"{rank}.pt")) for rank in range(max(SIZES))}


def assert_no_rank_failed(failed: Failed, size: int, case: str) -> None:
    assert {rank: cases[size, case] for rank, cases in failed.items() if rank < size and cases[size, case]} == {}


@pytest.mark.parametrize(("size", "case"), [(size, case) for size, cases in REPLAYS.items() for case in cases])
def test_a_replay_over_ranks_is_checked_on_each(failed: Failed, case: str, size: int) -> None:
    assert_no_rank_failed(failed, size, case)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_several_ranks_are_one(failed: Failed, case: str, size: int) -> None:
    assert_no_rank_failed(failed, size, case)


def test_entries_are_divided_over_one_group_and_heads_over_another(failed: Failed) -> None:
    assert_no_rank_failed(failed, 4, "heads")


def test_a_rank_that_does_not_come_is_an_error_on_the_others(failed: Failed) -> None:
    for rank in (0, 1):
        assert failed[rank][3, "gone"].startswith(f"rank {rank} of 3: the exchange of candidates failed: ")
        assert "-> look at the logs of the other ranks" in failed[rank][3, "gone"]
