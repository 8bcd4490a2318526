"""What counts as a repr in a message, and that messages about a row of a step name its token in words."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from attrs import frozen

from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from tests.reprs import reprs_in
from tests.testing import mutants
from tests.testing.verdicts import certificate_of


class Color(Enum):
    RED = 1


@frozen
class Pair:
    left: int
    right: int


@pytest.mark.parametrize(
    "value",
    [Pair(1, 2), Color.RED, object(), Pair, reprs_in, torch.Size([2])],
    ids=["pair", "enum", "object", "class", "function", "size"],
)
def test_a_repr_is_found(value: object) -> None:
    assert reprs_in(f"expected this, got {value!r}") != []


@pytest.mark.parametrize(
    "text", ["Problem.of(geometry, kind, phase)", "q: expected [4, 64], got [2]", "<= 3", "CUDA (sm_90)", "-> a=1"]
)
def test_names_are_no_reprs(text: str) -> None:
    assert reprs_in(text) == []


def test_a_failed_row_is_named_by_its_token() -> None:
    assert chosen(CASES, "sink-matters-swa-decode")
    certificate = certificate_of(mutants.with_attention(mutants.sink_twice), "decode-swa")
    (failed,) = certificate.of("failed")

    assert "(the token at position " in failed.message
    assert " of request " in failed.message
