from __future__ import annotations

import copy
import pickle

import pytest

from dsv4attn import errors
from dsv4attn.errors import (
    ArgumentError,
    CanaryError,
    Dsv4AttnError,
    GeometryError,
    LayoutMismatchError,
    NoForwardContextError,
    OutOfPagesError,
    TraceError,
    UnknownNameError,
    UnsupportedError,
    WorkspaceError,
    did_you_mean,
)

EXAMPLES: list[tuple[Dsv4AttnError, str, type[Exception]]] = [
    (ArgumentError("q", expected="[T, H, D]", actual="[2]"), "q: expected [T, H, D], got [2]", ValueError),
    (ArgumentError("q", expected="x", actual=None, hint="do y"), "q: expected x, got None -> do y", ValueError),
    (LayoutMismatchError("cache", expected="a", actual="b"), "cache: expected a, got b", ArgumentError),
    (UnsupportedError("heads", expected="even", actual=3), "heads: expected even, got 3", ArgumentError),
    (GeometryError("config: field 'x' is missing"), "config: field 'x' is missing", ValueError),
    (
        UnknownNameError("backend", "reverence", ["zinc", "reference"]),
        "unknown backend 'reverence'; did you mean 'reference'? (known: reference, zinc)",
        ValueError,
    ),
    (UnknownNameError("backend", "zzz", ["xpu"]), "unknown backend 'zzz' (known: xpu)", ValueError),
    (
        WorkspaceError(needed=512, has=256, caller="acme.decode", arena="decode"),
        (
            "workspace: acme.decode needs 512 bytes in arena 'decode', which is locked at 256 bytes "
            "-> reserve a plan for larger limits before lock(), or call unlock() first"
        ),
        RuntimeError,
    ),
    (CanaryError("bytes were overwritten"), "bytes were overwritten", RuntimeError),
    (NoForwardContextError("no step"), "no step", RuntimeError),
    (OutOfPagesError("3 blocks needed"), "3 blocks needed", RuntimeError),
    (TraceError("t.jsonl", 7, "not JSON"), "t.jsonl:7: not JSON", ValueError),
]
each_example = pytest.mark.parametrize(
    ("error", "text", "usual"), EXAMPLES, ids=[type(error).__name__ for error, _, _ in EXAMPLES]
)


@each_example
def test_an_error_says_what_is_wrong_and_is_caught_by_its_usual_name(
    error: Dsv4AttnError, text: str, usual: type[Exception]
) -> None:
    assert str(error) == text
    assert isinstance(error, Dsv4AttnError)
    assert isinstance(error, usual)


@each_example
def test_an_error_survives_the_way_from_a_worker_process(
    error: Dsv4AttnError, text: str, usual: type[Exception]
) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301 - our own
        assert type(twin) is type(error)
        assert str(twin) == text
        assert vars(twin) == vars(error)


def test_the_parts_of_an_error_can_be_read() -> None:
    wrong = ArgumentError("q", expected="x", actual=3, hint="y")
    unknown = UnknownNameError("model", "flsh", ["pro", "flash"])
    small = WorkspaceError(needed=2, has=1, caller="c", arena="l")
    line = TraceError("p", 3, "why")

    assert (wrong.argument, wrong.expected, wrong.actual, wrong.hint) == ("q", "x", 3, "y")
    assert (unknown.kind, unknown.name, unknown.known) == ("model", "flsh", ["flash", "pro"])
    assert (small.needed, small.has, small.caller, small.arena) == (2, 1, "c", "l")
    assert (line.path, line.line, line.problem) == ("p", 3, "why")


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("flsh", ["flash", "pro"], "; did you mean 'flash'?"),
        ("FLSH", ["flash", "pro"], "; did you mean 'flash'?"),
        ("quantum", ["flash", "pro"], ""),
        ("", ["flash"], ""),
        ("flash", [], ""),
    ],
)
def test_the_nearest_name_is_suggested_if_one_is_near(name: str, known: list[str], said: str) -> None:
    assert did_you_mean(name, known) == said
    assert did_you_mean(name, iter(known)) == said


def test_every_error_is_one_of_ours_and_explains_itself() -> None:
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]

    assert len(kinds) >= 11
    for kind in kinds:
        assert issubclass(kind, Dsv4AttnError)
        assert kind.__name__ in errors.__all__
        assert kind.__doc__
