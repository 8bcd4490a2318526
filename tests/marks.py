"""What a run of some targets of the Makefile leaves out: slow tests, and most of a product of several axes.

The selection of a product of three or more axes keeps every pair of values that the product has (`pairwise`). That of
two axes takes the values of one in turn with those of the other (`in_turn`): it has every value, and half of the pairs.
Which half depends on the test's name, so that a pair that one test leaves out is in another test of the same product.

In the folders whose tests run interpreted kernels, whole models or one check on many cases, `make test` takes two cases
of each test. Which two depends on the test's name. The further cases are marked `matrix`, so CI runs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from zlib import crc32

import pytest

__all__ = ["COLLECTED", "in_turn", "pairwise", "pytest_collection_modifyitems", "turn_of"]

COSTLY = (
    "backends", "compat", "core/attention", "core/cache", "core/context_parallel", "core/layer", "core/memory",
    "core/metadata", "integrations", "parity", "serving", "testing", "tools/bench", "tools/replay",
)  # fmt: skip
"""Folders of `tests` whose tests run interpreted kernels, whole models or one check on many cases."""
CASES = 2
"""Cases of a test in these folders that have no marker of a further run."""
COLLECTED = pytest.StashKey[dict[str, set[str]]]()
"""Every test that a run collects, by its name, with its markers, before an expression selects some."""


def pairwise(rows: Sequence[Sequence[Hashable]]) -> list[int]:
    """Numbers of rows, in order, so that each pair of values of two columns is in one of these rows if in any.

    Each next row is the first of those with the most new pairs. Rows of one or two columns all stay.
    """
    pairs: list[set[object]] = [{*combinations(enumerate(row), 2)} or {row} for row in map(tuple, rows)]
    missing, selected = set[object]().union(*pairs), list[int]()
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        selected.append(best)
        missing -= pairs[best]
    return sorted(selected)


def in_turn(rows: Sequence[Sequence[Hashable]], turn: int = 0) -> list[int]:
    """Numbers of rows, in order, whose values stand at places of their columns that add up to an even number.

    turn: 1 for an odd number, so that two tests of the same product have different halves of its pairs. A row with a
    value that no such row has stays too.
    """
    columns: list[dict[Hashable, int]] = [{} for _ in rows[0]]
    places = [[known.setdefault(value, len(known)) for known, value in zip(columns, row, strict=True)] for row in rows]
    selected = [number for number, row in enumerate(places) if sum(row) % 2 == turn]
    missing = {*range(len(rows))}.difference(selected)
    present = {pair for number in selected for pair in enumerate(rows[number])}
    for number in sorted(missing):
        if not present.issuperset(enumerate(rows[number])):
            selected.append(number)
            present.update(enumerate(rows[number]))
    return sorted(selected)


def turn_of(name: str) -> int:
    """Which half of its product a test of this name takes: 0 or 1."""
    return crc32(name.encode()) & 1


def _values(params: Mapping[str, object]) -> list[int]:
    """A number for each value of the parameters; each value of a dict, as of options of a backend, is a value."""
    values = list[object]()
    for value in params.values():
        values += value.values() if isinstance(value, dict) else [value]
    return [*map(id, values)]


def _mark_left_out(items: Sequence[pytest.Item]) -> None:
    """Mark what the selection of a test leaves out; parameters marked `slow` are no part of it.

    What they leave out has no new value, nor with `pairwise` a new pair of values, and is marked `slow`.
    """
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "slow" not in marks:
            for how in marks & {"pairwise", "in_turn"}:
                tests.setdefault((item.nodeid.partition("[")[0], how), []).append(item)
    for (name, how), functions in tests.items():
        rows = [_values(function.callspec.params) for function in functions]
        selected = {*(pairwise(rows) if how == "pairwise" else in_turn(rows, turn_of(name.rpartition("::")[2])))}
        for number, function in enumerate(functions):
            if number not in selected:
                function.add_marker("slow")


def _mark_further_cases(items: Sequence[pytest.Item]) -> None:
    """Mark all but CASES cases of each test in a costly folder `matrix`."""
    further, tests = {"mutation", "matrix", "slow"}, dict[str, list[pytest.Item]]()
    for item in items:
        folder = item.path.parent.as_posix().rpartition("/tests/")[2]
        if folder.startswith(COSTLY) and further.isdisjoint(mark.name for mark in item.iter_markers()):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        count = len(cases)
        first = crc32(name.encode()) % count
        kept = {(first + number * count // CASES) % count for number in range(CASES)}
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("matrix")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what selections leave out. Leave slow tests to a run that says so (-m slow)."""
    _mark_left_out(items)
    _mark_further_cases(items)
    config.stash[COLLECTED] = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
