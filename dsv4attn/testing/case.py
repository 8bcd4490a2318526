"""The type of a conformance case: clauses of the contract, a case input to run, and a check of the results.

A case input (`kit.factories.CaseInput`) lists its requirements as `core.contract.problem.Problem`s. The kit asks the
backend's support about them before it runs the case. If the backend refuses, its reasons are in the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import attrs
import torch

from dsv4attn.core.contract.backend import Backend, KeyForm
from dsv4attn.core.contract.layer_ops import LayerOps
from dsv4attn.errors import ArgumentError, did_you_mean

__all__ = ["Area", "Bench", "Case", "Check", "Measure", "SkipCase", "Wrong", "chosen", "dtype_name", "worst_of"]


class Area(str, Enum):
    """Which class of the pytest suite runs a case."""

    DECODE = "decode"
    PREFILL = "prefill"
    CACHE = "cache"
    MEMORY = "memory"
    LAYER = "layer"


class SkipCase(Exception):  # noqa: N818 - a verdict, not an error
    """This machine cannot run the case, whatever the backend is."""


class Wrong(AssertionError):  # noqa: N818 - as SkipCase
    """The backend's answer breaks a clause."""

    def __init__(self, message: str, measure: Measure | None = None) -> None:
        """Take the message, and the measure if the comparison gave a number.

        message: the clause in words, and how the answer breaks it.
        measure: the error and its budget, if there is one.
        """
        self.measure = measure
        super().__init__(message)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put a place in front of the message of a Wrong that the `with` block raises.

    where: the place, without a colon.
    """
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{where}: {wrong}", wrong.measure) from wrong


@attrs.frozen
class Measure:
    """Largest error of a case and its budget.

    error: largest error, in the unit of the budget.
    budget: largest error allowed; 0 asks for equal bits.
    """

    error: float = 0.0
    budget: float = 0.0

    @property
    def fraction(self) -> float:
        """Error as a fraction of the budget."""
        if self.budget:
            return self.error / self.budget
        return 0.0 if self.error == 0 else math.inf

    @property
    def shown(self) -> str:
        """The fraction, as reports print it; "same" for equal bits."""
        if not self.budget and self.error == 0:
            return "same"
        if self.fraction >= 1e4:
            return ">9999"
        return f"{self.fraction:.2f}" if self.fraction < 10 else f"{self.fraction:.0f}"

    def hold(self, where: str) -> Measure:
        """Return this measure if its error is within the budget; raise Wrong otherwise.

        where: the place of the largest error, for the message.
        """
        if not self.fraction <= 1:
            raise Wrong(where, self)
        return self


def worst_of(*measures: Measure) -> Measure:
    """The measure that takes most of its budget."""
    return max(measures, key=lambda measure: measure.fraction)


@attrs.frozen
class Bench:
    """A backend and a device to run cases on.

    backend: the backend under test.
    device: torch device.
    lse: whether this backend returns an lse.
    """

    backend: Backend
    device: str = "cpu"
    lse: bool = True

    @property
    def layer_ops(self) -> LayerOps:
        """The backend's ops of the layer around attention, with torch's definition of those that it does not bring."""
        return self.backend.layer_ops

    def require_gathering(self) -> None:
        """Raise SkipCase if the backend reads pages in prefill, so that it gathers nothing."""
        if self.backend.capabilities.prefill_keys is not KeyForm.GATHERED:
            raise SkipCase("does not apply: this backend reads pages in prefill and gathers nothing")


Check = Callable[[Bench, Any], Measure]
"""Runs a case input on a bench and compares the results. Raises Wrong, or returns the error of the backend."""


def _clauses(value: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(value.split() if isinstance(value, str) else value)


@attrs.frozen(eq=False)
class Case:
    """A named case of the conformance kit.

    area: class of the pytest suite that runs it.
    name: unique in the kit.
    clauses: clauses of docs/contract.md that it tests; as text, with spaces between them.
    says: a sentence that holds exactly if the case passes.
    inputs: a `CaseInput` on the CPU; `on` moves it to a device.
    check: runs the case input and compares.
    needs_lse: whether the case is about the lse; other cases run without it where a backend returns none.
    """

    area: Area
    name: str
    clauses: tuple[str, ...] = attrs.field(converter=_clauses)
    says: str
    inputs: Any
    check: Check
    needs_lse: bool = attrs.field(default=False, kw_only=True)

    @property
    def id(self) -> str:
        """Clauses and name, as in the names of tests."""
        return f"{'.'.join(self.clauses)}-{self.name}"

    def as_json(self) -> dict[str, Any]:
        """What says which case it is, as plain values."""
        return {"name": self.name, "area": self.area.value, "clauses": list(self.clauses), "says": self.says}

    def run(self, bench: Bench) -> Measure:
        """Run the case. Raises Wrong if a clause is broken, SkipCase if this machine cannot run it.

        bench: the backend, its device and the oracle.
        """
        return self.check(bench, _on(self, bench.device))


@cache
def _on(case: Case, device: str) -> Any:  # noqa: ANN401 - a `kit.factories.CaseInput`
    """CaseInput of a case on a device: made once, so that several backends share the oracle's answer."""
    return case.inputs if case.inputs.device == device else attrs.evolve(case.inputs, device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as problems spell it.

    dtype: a torch dtype.
    """
    return str(dtype).removeprefix("torch.")


def chosen(cases: Iterable[Case], patterns: str | None) -> list[Case]:
    """Cases that match one of some comma-separated patterns: a clause, its letter, an area, or a name with wildcards.

    A pattern after "!" leaves out what it matches; if all patterns are such, they leave it out of all cases.
    cases: the cases to choose from.
    Raises ArgumentError for a pattern that matches nothing, and if all that match are left out.
    """
    cases = list(cases)
    if not patterns:
        return cases
    words = [text for text in (text.strip() for text in patterns.split(",")) if text]
    wanted = [case for word in words if not word.startswith("!") for case in _matching(cases, word)]
    left_out = [case for word in words if word.startswith("!") for case in _matching(cases, word[1:].strip())]
    if all(word.startswith("!") for word in words):
        wanted = cases
    selected = [case for case in cases if case in wanted and case not in left_out]
    if words and not selected:
        raise ArgumentError("filter", expected="patterns that leave a case", actual=repr(patterns))
    return selected if words else []


def _matching(cases: Sequence[Case], pattern: str) -> list[Case]:
    """Cases that match one pattern. Raises ArgumentError if there are none."""
    matching = [case for case in cases if _matches(case, pattern)]
    if not matching:
        clauses = ", ".join(sorted({clause for case in cases for clause in case.clauses}))
        areas = ", ".join(dict.fromkeys(case.area.value for case in cases))
        expected = f"clauses ({clauses}), their letters, areas ({areas}), or names of cases such as {cases[0].name}"
        hint = did_you_mean(pattern, {case.name for case in cases} | {area.value for area in Area})
        raise ArgumentError("filter", expected=expected, actual=f"{pattern!r}, which none has{hint}")
    return matching


def _matches(case: Case, pattern: str) -> bool:
    words = {*case.clauses, *(clause[0] for clause in case.clauses), case.area.value}
    return pattern in words or fnmatchcase(case.name, pattern) or pattern in case.name.split("-")
