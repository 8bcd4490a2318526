"""The verdict of `measure_layers.py`: rows like those of an H200 pass, and planted errors do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from budgets import BUDGETS, excesses


def row(**apart: float) -> dict[str, Any]:
    """A row of 8,192 tokens, or one with other distances. Those of records, attention and output were measured."""
    usual = {"records": 15, "q": 1e-3, "attention": 2e-3, "output": 4e-2, "layer": 4e-2}
    named = {f"dsv4attn none, {part}": value for part, value in (usual | apart).items()}
    return {"phase": "prefill", "tokens": 8192, "kind": "c4a", "apart": named}


def test_usual_distances_pass() -> None:
    assert excesses([row(), row(records=0)]) == []


@pytest.mark.parametrize("part", BUDGETS)
@pytest.mark.parametrize("wrong", ["far", "nan"])
def test_a_planted_error_is_named(part: str, wrong: str) -> None:
    value = math.nan if wrong == "nan" else 1e5 if part == "records" else 2 * BUDGETS[part]
    (said,) = excesses([row(), row(**{part: value})])

    assert said.startswith(f"prefill 8192 c4a: dsv4attn none, {part} is ")
