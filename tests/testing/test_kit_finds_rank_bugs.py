"""The kit drives a backend's own steps over ranks: right ones pass, and every mutant fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.testing.mutants_rank_ops import CHOICES, MERGES, Chooses, Merges
from tests.testing.verdicts import certificate_of, none_fail


@pytest.mark.parametrize(("make", "names"), [(Merges, "shards-*"), (Chooses, "select-ranks-*")])
def test_right_steps_over_ranks_pass(make: Any, names: str) -> None:
    none_fail(make, names)


@pytest.mark.parametrize("bug", MERGES)
def test_a_wrong_merge_of_parts_fails(bug: str) -> None:
    assert certificate_of(partial(Merges, bug), "shards-3-*").of("failed")


@pytest.mark.parametrize("bug", CHOICES)
def test_a_wrong_choice_among_candidates_fails(bug: str) -> None:
    assert certificate_of(partial(Chooses, bug), "select-ranks-*").of("failed")
