"""What a case of the conformance kit is: clauses of the contract, something to run, and what is compared.

A case asks for nothing by itself: its scene says as `core.problem.Problem`s what a backend must be able to do, so that
a backend which cannot is asked before it is run, and its reasons stand in the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Protocol

import attrs
import torch

from dsv4attn.core.contract import Backend
from dsv4attn.core.layout import KVCacheLayout
from dsv4attn.core.problem import Problem
from dsv4attn.errors import ArgumentError, did_you_mean

__all__ = ["Area", "Bench", "Case", "Check", "Measure", "Scene", "SkipCase", "Wrong", "chosen", "dtype_name"]


class Area(str, Enum):
    """Which class of the pytest suite runs a case."""

    DECODE = "decode"
    PREFILL = "prefill"
    CACHE = "cache"
    MEMORY = "memory"


class SkipCase(Exception):  # noqa: N818 - a verdict, not an error
    """This machine cannot run the case, whatever the backend is."""


class Wrong(AssertionError):  # noqa: N818 - as SkipCase
    """The backend's answer breaks a clause."""

    def __init__(self, message: str, measure: Measure | None = None) -> None:
        """Say what is wrong; `measure` where there is a number."""
        self.measure = measure
        super().__init__(message)


@attrs.frozen
class Measure:
    """Largest error of a case and the budget it has, in the same unit. A budget of 0 asks for equal bits."""

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
        """Return this measure if the budget is kept; raise Wrong otherwise."""
        if not self.fraction <= 1:
            raise Wrong(where, self)
        return self


@attrs.frozen
class Bench:
    """What a case is run on. lse: whether this backend gives one."""

    backend: Backend
    device: str = "cpu"
    lse: bool = True


class Scene(Protocol):
    """What a case runs: a `Scenario`, a `Call`, or `Rows`."""

    @property
    def device(self) -> str:
        """Torch device it is on."""

    def problems(self, *, lse: bool = True) -> Sequence[Problem]:
        """What a backend must be able to do."""

    def named_layouts(self) -> Sequence[KVCacheLayout]:
        """Layouts of all caches."""


Check = Callable[[Bench, Any], Measure]
"""What is compared: runs a scene on a bench, raises Wrong or returns how far off the backend was."""


def _clauses(value: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(value.split() if isinstance(value, str) else value)


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """A named case. clauses: of docs/contract.md. says: a sentence that holds exactly if the case passes."""

    name: str
    area: Area
    clauses: tuple[str, ...] = attrs.field(converter=_clauses)
    says: str
    scene: Any
    """A `Scene`, on the CPU; `on` moves it."""
    check: Check
    needs_lse: bool = False
    """Whether the case is about the lse; others are run without it where a backend gives none."""

    @property
    def id(self) -> str:
        """Clauses and name, as tests are called."""
        return f"{'.'.join(self.clauses)}-{self.name}"

    def run(self, bench: Bench) -> Measure:
        """Run the case. Raises Wrong if a clause is broken, SkipCase if this machine cannot tell."""
        return self.check(bench, _on(self, bench.device))


@cache
def _on(case: Case, device: str) -> Any:  # noqa: ANN401 - a Scene
    """Scene of a case on a device: made once, so that several backends share the oracle's answer."""
    return case.scene if case.scene.device == device else attrs.evolve(case.scene, device=device)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype as problems spell it."""
    return str(dtype).removeprefix("torch.")


def chosen(cases: Iterable[Case], patterns: str | None) -> list[Case]:
    """Cases that match one of some comma-separated patterns: a clause, its letter, an area, or a name with wildcards.

    Raises ArgumentError for a pattern that matches nothing.
    """
    cases = list(cases)
    if not patterns:
        return cases
    wanted = []
    for pattern in filter(None, (text.strip() for text in patterns.split(","))):
        hits = [case for case in cases if _matches(case, pattern)]
        if not hits:
            clauses = ", ".join(sorted({clause for case in cases for clause in case.clauses}))
            areas = ", ".join(dict.fromkeys(case.area.value for case in cases))
            expected = f"clauses ({clauses}), their letters, areas ({areas}), or names of cases such as {cases[0].name}"
            hint = did_you_mean(pattern, {case.name for case in cases} | {area.value for area in Area})
            raise ArgumentError("filter", expected=expected, actual=f"{pattern!r}, which none has{hint}")
        wanted += hits
    return [case for case in cases if case in wanted]


def _matches(case: Case, pattern: str) -> bool:
    known = {*case.clauses, *(clause[0] for clause in case.clauses), case.area.value}
    return pattern in known or fnmatchcase(case.name, pattern) or pattern in case.name.split("-")
