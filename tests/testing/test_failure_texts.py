"""What a failed comparison says: the place, what was there, what was expected, and the error in budgets."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, conform


def larger(call: AttentionCall) -> None:
    call.out[2, 3, 17] += 9


def not_a_number(call: AttentionCall) -> None:
    call.out[2, 3, 17] = float("nan")


def other_lse(call: AttentionCall) -> None:
    assert call.lse is not None
    call.lse[2, 3] += 1


def lse_is_no_number(call: AttentionCall) -> None:
    assert call.lse is not None
    call.lse[2, 3] = float("nan")


@pytest.mark.parametrize("case", ["call-plain-c4a-decode", "decode-c4a"])
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (
            larger,
            r"row 2\b.*, head 3: error of [\d.e+]+ budgets; out of dim 17 is [\d.]+, expected -?0\.\d+; lse \S+, ",
        ),
        (not_a_number, r"row 2\b.*, head 3: 1 of 512 values of out are NaN; out of dim 17 is NaN, expected -?0\.\d+; "),
        (other_lse, r"row 2\b.*, head 3: error of [\d.e+]+ budgets in lse; out of dim \d+ is "),
        (lse_is_no_number, r"row 2\b.*, head 3: lse is NaN; .*; lse NaN, expected \d"),
    ],
)
def test_a_wrong_output_is_named_with_its_row_head_and_dim(
    case: str, plant: Callable[[AttentionCall], None], said: str
) -> None:
    class Planted(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:
            super().decode(call)
            plant(call)

    (outcome,) = conform(Subject.of(Planted()), [c for c in chosen(CASES, None) if c.name == case]).outcomes

    assert outcome.state == "failed"
    assert re.search(said, outcome.message), outcome.message
    assert "tolerances" not in outcome.message
    assert "1 of " in outcome.message
