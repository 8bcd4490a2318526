"""`make test` and `make test-rest` run every test once, but for those marked `slow`; `make test-slow` runs these."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.marks import COLLECTED, in_turn, pairwise, turn_of

ROOT = Path(__file__).parents[1]
KINDS = "mutation", "matrix", "slow"
MARKS = [marks for count in range(4) for marks in combinations(KINDS, count)]


@functools.cache
def expressions() -> dict[str, str]:
    """The expression of markers of every target of the Makefile that runs tests by `$(PYTEST) -m`."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r'^([\w-]+): [^\n]*\n\t\$\(PYTEST\) -m ("[^"]+"|\w+) \$\(ARGS\)$', text, re.MULTILINE)
    return {target: expression.strip('"') for target, expression in found}


@functools.cache
def targets_of(marks: frozenset[str]) -> set[str]:
    """The targets that run a test with these markers."""
    values = {kind: kind in marks for kind in KINDS}
    return {target for target, expression in expressions().items() if eval(expression, {}, values)}  # noqa: S307


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: "-".join(marks) or "none")
def test_two_targets_have_no_test_in_common_and_leave_out_slow_ones_only(marks: tuple[str, ...]) -> None:
    expected = "test-slow" if "slow" in marks else "test-rest" if marks else "test"
    assert targets_of(frozenset(marks)) == {expected, "test-all"}


def test_every_collected_test_belongs_to_the_targets_that_its_markers_say(request: pytest.FixtureRequest) -> None:
    collected, own = request.config.stash[COLLECTED], {item.nodeid for item in request.session.items}
    by_target = {
        target: {name for name, marks in collected.items() if target in targets_of(frozenset(marks))}
        for target in expressions()
    }

    assert own <= {*collected}
    assert by_target["test"] | by_target["test-rest"] == {n for n, marks in collected.items() if "slow" not in marks}
    assert not by_target["test"] & by_target["test-rest"]
    assert by_target["test-all"] == {*collected}
    for target, expression in expressions().items():
        if request.config.option.markexpr == expression and not request.config.option.keyword:
            assert own == by_target[target]


WHOLLY_LONG = {
    f"tests/{name}.py"
    for name in (
        "backends/_triton/layer/test_context_parallel", "backends/_triton/layer/test_gates",
        "backends/triton/test_deterministic_layers", "integrations/test_transformers_patch_device",
    )
}  # fmt: skip
"""Files whose every test takes 7 to 12 s; `make test-rest` runs them."""


def test_every_file_keeps_tests_in_the_default_run_unless_all_are_long(request: pytest.FixtureRequest) -> None:
    collected = request.config.stash[COLLECTED]
    files = {name.partition("::")[0] for name in collected}
    kept = {name.partition("::")[0] for name, marks in collected.items() if not marks & {"mutation", "matrix"}}

    assert files - kept == WHOLLY_LONG & files


SAMPLE = """
import pytest
@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_product(a, b, c): ...

@pytest.mark.in_turn
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_turns(a, b): ...

@pytest.mark.mutation
def test_bug(): ...
"""


COLLECT = """
import json, sys
import pytest
folder, config, *expressions = sys.argv[1:]
for expression in expressions:
    words = ["-m", expression] if expression else []
    words += ["--collect-only", "-q", "-c", config, "-p", "tests.marks", "-p", "no:cacheprovider", folder]
    print(json.dumps([expression, int(pytest.main(words))]))
"""
"""A program that collects a folder once for each expression of markers, and prints the expression after its tests."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Tests of the sample that each expression of markers selects; "" is a run without an expression."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_sample.py").write_text(SAMPLE, encoding="utf-8")
    command = [sys.executable, "-c", COLLECT, str(folder), str(ROOT / "pyproject.toml"), *expressions().values(), ""]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    *parts, rest = re.split(r"^(\[.*\])\n", out, flags=re.MULTILINE)
    assert not rest
    ends = [json.loads(end) for end in parts[1::2]]
    assert [code for _, code in ends] == [0] * len(ends)
    selected = [len(re.findall(r"test_sample\.py::", part)) for part in parts[::2]]
    return dict(zip([expression for expression, _ in ends], selected, strict=True))


@pytest.mark.parametrize(
    ("target", "count"),
    [("test", 12), ("test-rest", 1), ("test-slow", 24), ("test-all", 37), ("", 13)],
)
def test_a_target_collects_its_part_of_a_file(target: str, count: int, counts: dict[str, int]) -> None:
    assert counts[expressions()[target] if target else ""] == count


def test_a_selection_keeps_every_pair_of_values() -> None:
    rows = [(a, b, c, d) for a in range(4) for b in "xyz" for c in (False, True) for d in range(3) if (a, d) != (0, 0)]
    selected = [rows[number] for number in pairwise(rows)]

    def pairs(of: Sequence[tuple[object, ...]]) -> set[object]:
        return {pair for row in of for pair in combinations(enumerate(row), 2)}

    assert pairs(selected) == pairs([*rows])
    assert 12 <= len(selected) <= 16 < len(rows)


@pytest.mark.parametrize("rows", [[(0, 0), (0, 1), (1, 0), (1, 1)], [("a",), ("b",)], [()]])
def test_a_selection_of_one_or_two_axes_is_the_product(rows: list[tuple[object, ...]]) -> None:
    assert pairwise(rows) == [*range(len(rows))]


@pytest.mark.parametrize(("lefts", "rights"), [(2, 2), (3, 4), (5, 2), (3, 3), (1, 1), (3, 1), (1, 4)])
def test_a_selection_in_turn_has_half_of_a_product_and_every_value(lefts: int, rights: int) -> None:
    rows = [*product(range(lefts), range(rights))]
    even, odd = ([rows[number] for number in in_turn(rows, turn)] for turn in (0, 1))

    for selected in (even, odd):
        assert [{*axis} for axis in zip(*selected, strict=True)] == [{*range(lefts)}, {*range(rights)}]
    assert {*even, *odd} == {*rows}
    if min(lefts, rights) > 1:
        assert (len(even), len(odd)) == (-(-len(rows) // 2), len(rows) // 2)


def test_tests_of_one_product_take_different_halves() -> None:
    assert {turn_of(f"test_{letter}") for letter in "abcd"} == {0, 1}
