"""Cases of the tests' own, over a case input of the kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4attn.testing.case import Area, Bench, Case, Measure
from dsv4attn.testing.cases.table import CASES


def case_of(check: Callable[[Bench, Any], Measure], **fields: Any) -> Case:
    """A case of our own over some case input of the kit."""
    inputs = next(case.inputs for case in CASES if case.name == "sink-none-decode")
    known = {"name": "own", "area": Area.DECODE, "clauses": ["F1"], "says": "it is so", "inputs": inputs}
    return Case(**{**known, "check": check, **fields})


def raising(error: BaseException) -> Callable[[Bench, Any], Measure]:
    """A check that raises."""

    def check(bench: Bench, inputs: object) -> Measure:
        raise error

    return check
