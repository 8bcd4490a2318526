"""The kit drives a backend's own steps over ranks: right ones pass, and every planted bug fails."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.testing.mutants_rank_ops import CHOICES, MERGES, Chooses, Merges


def failed(backend: Any, names: str) -> set[str]:
    certificate = conform(Subject.of(backend), chosen(CASES, names))

    assert certificate.outcomes
    return {outcome.case.name for outcome in certificate.of("failed")}


@pytest.mark.parametrize(("made", "names"), [(Merges, "shards-*"), (Chooses, "select-ranks-*")])
def test_right_steps_over_ranks_pass(made: Any, names: str) -> None:
    assert failed(made(), names) == set()


@pytest.mark.parametrize("bug", MERGES)
def test_a_wrong_merge_of_parts_fails(bug: str) -> None:
    assert failed(Merges(bug), "shards-3-*")


@pytest.mark.parametrize("bug", CHOICES)
def test_a_wrong_choice_among_candidates_fails(bug: str) -> None:
    assert failed(Chooses(bug), "select-ranks-*")
