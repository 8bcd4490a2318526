"""Outcomes of the same cases on one backend or several: the budgets that each used."""

from __future__ import annotations

import math
from typing import Any

import attrs

from dsv4attn.core.contract.backend import API_VERSION
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.case import Case
from dsv4attn.testing.conform import Certificate, Outcome, Subject, environment, parse_request, versions


@attrs.frozen
class Parity:
    """Outcomes of the same cases on several backends.

    certificates: one for each backend, in the order of the request; at least one.
    cases: all cases of the run, also those that an interrupt left out.
    """

    certificates: tuple[Certificate, ...]
    cases: tuple[Case, ...]

    @property
    def date(self) -> str:
        """Start of the run, UTC."""
        return self.certificates[0].date

    @property
    def chosen(self) -> str | None:
        """The filter, or None for all cases."""
        return self.certificates[0].chosen

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped before all cases had run on all backends."""
        return any(certificate.interrupted for certificate in self.certificates)

    @property
    def names(self) -> list[str]:
        """Backends with their options, as in the request."""
        return [certificate.subject.label for certificate in self.certificates]

    @property
    def ok(self) -> bool:
        """Whether every backend proved something and broke nothing."""
        return all(certificate.ok for certificate in self.certificates)

    @property
    def rows(self) -> list[tuple[Case, list[Outcome | None]]]:
        """Each case that ran with its outcome on every backend; None where it was interrupted before."""
        ran = max((len(c.outcomes) for c in self.certificates), default=0)
        return [
            (case, [c.outcomes[i] if i < len(c.outcomes) else None for c in self.certificates])
            for i, case in enumerate(self.cases[:ran])
        ]

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        left_out = {"schema", "products", "contract", "versions", "environment", "layouts", "filter", "clauses"}
        left_out |= {"cases", "date", "seconds"}
        backends = []
        for certificate in self.certificates:
            own = {key: value for key, value in certificate.as_json().items() if key not in left_out}
            backends.append({"name": certificate.subject.label, **own})
        cases = [
            {
                **case.as_json(),
                "results": {name: _result(o) for name, o in zip(self.names, outcomes, strict=True) if o is not None},
            }
            for case, outcomes in self.rows
        ]
        facts = {"contract": API_VERSION, "versions": versions(), "environment": environment(), "filter": self.chosen}
        return {
            "ok": self.ok,
            "complete": not self.interrupted,
            **facts,
            "backends": backends,
            "cases": cases,
            "date": self.date,
        }


def _result(outcome: Outcome) -> dict[str, Any]:
    fields = ("state", "error", "budget", "fraction", "message", "ended", "reasons", "seconds")
    whole = outcome.as_json()
    return {key: whole[key] for key in fields}


def cell(outcome: Outcome | None) -> str:
    """An outcome in a word: the part of the budget that it used, "same" for equal bits, or its state.

    outcome: the outcome; None if the case did not run.
    """
    if outcome is None:
        return "not run"
    if outcome.state in ("refused", "skipped"):
        return outcome.state
    measured = outcome.measure is not None and math.isfinite(outcome.measure.fraction)
    shown = outcome.measure.shown if outcome.measure is not None and measured else ""
    return shown if outcome.state == "passed" else f"FAIL {shown}".rstrip()


def subjects(requests: str, *, device: str | None = None) -> list[Subject]:
    """Backends of a comma-separated list, `NAME` or `NAME:option=value:...` each; no two alike.

    requests: the list, as in `--backends`.
    device: a torch device; None: for each backend the one that `Subject.named` takes.
    """
    trials: dict[str, Subject] = {}
    for text in filter(None, (part.strip() for part in requests.split(","))):
        name, options = parse_request(text, ":")
        subject = Subject.named(name, device=device, options=options)
        if subject.label in trials:
            raise ArgumentError("backends", expected="each backend once", actual=f"{subject.label} twice")
        trials[subject.label] = subject
    if not trials:
        raise ArgumentError("backends", expected="names separated by commas", actual=repr(requests))
    return list(trials.values())
