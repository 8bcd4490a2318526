"""Runs of the kit on mutants, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Certificate, Subject, conform
from tests.reprs import reprs_in

_SLIPS = "TypeError", "AttributeError", "NameError", "ImportError", "UnboundLocalError"
"""Errors of a mutant that does not fit the contract any more: the kit finds such a mutant whatever its bug is."""


def certificate_of(make: Callable[[], Any], patterns: str) -> Certificate:
    """The verdict of the kit on a backend, by some cases.

    No case may fail by a slip in the mutant itself, and no message may show a repr, such as that of a token.
    """
    certificate = conform(Subject.of(make()), chosen(CASES, patterns))
    failed = [(outcome.case.name, outcome.trace.strip().splitlines()[-1:]) for outcome in certificate.of("failed")]
    assert [(name, last) for name, last in failed if last and last[0].startswith(_SLIPS)] == []
    assert [text for outcome in certificate.of("failed") if (text := reprs_in(outcome.message))] == []
    return certificate


def none_fail(make: Callable[[], Any], patterns: str) -> None:
    """Assert that the backend keeps the contract in these cases."""
    certificate = certificate_of(make, patterns)

    assert [(outcome.case.name, outcome.message) for outcome in certificate.of("failed")] == []
    assert certificate.ok


def all_fail(make: Callable[[], Any], patterns: str) -> Certificate:
    """Assert that the backend fails every one of these cases, and that every pattern without a wildcard is a name."""
    certificate = certificate_of(make, patterns)

    assert [outcome.case.name for outcome in certificate.outcomes if outcome.state != "failed"] == []
    assert all(outcome.message for outcome in certificate.outcomes)
    names = {outcome.case.name for outcome in certificate.outcomes}
    assert "*" in patterns or names == {*patterns.split(",")}
    return certificate


def breaks(make: Callable[[], Any], patterns: str, must_fail: str, must_pass: str = "") -> None:
    """Assert that the backend fails in some clauses, each in one case at least, and passes in others."""
    certificate = certificate_of(make, patterns)
    clauses = certificate.by_clause()

    assert not certificate.ok
    assert {clause for clause in must_fail.split() if not clauses[clause]["failed"]} == set()
    assert {clause for clause in must_pass.split() if not clauses[clause]["passed"]} == set()
    assert all(outcome.message for outcome in certificate.of("failed"))
