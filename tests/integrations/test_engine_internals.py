"""Names of an engine that an adapter relies on: what is missing, is passed more, or is never called, is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4attn.integrations.engine_internals import Called, Internal, LackingError, Named, Overridden, Stored, lacking

ENGINE = """
from enum import Enum

class Kind(Enum):
    ONE = 1

class Layer:
    declared: int

    def __init__(self):
        self.stored = 1
        self.run(2, scale=3.0)

    def run(self, rows, *, scale):
        return rows * scale

    def unused(self, rows):
        return rows

    @staticmethod
    def name():
        return "layer"

    @classmethod
    def make(cls, rows):
        return cls()

class Op:
    def __call__(self, *args, **options):
        return self.forward(*args, **options)

    def forward(self, *args, **options):
        return self.forward_native(*args, **options)

    def forward_native(self, x, weight, bias=None):
        return x

def call(rows, size=1, *, out):
    return rows
"""
ADAPTER = """
class Layer:
    def run(self, rows, *, scale): ...
    def unused(self, rows): ...

class Narrow:
    def run(self, rows): ...

class Op:
    @staticmethod
    def forward(x, weight, bias=None): ...

class NarrowOp:
    @staticmethod
    def forward(x, weight): ...
"""


@pytest.fixture(autouse=True)
def _engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "an_engine").mkdir()
    (tmp_path / "an_engine" / "__init__.py").write_text("")
    (tmp_path / "an_engine" / "code.py").write_text(ENGINE)
    (tmp_path / "an_engine" / "runner.py").write_text("def start(layer):\n    return layer.unused(1)\n")
    (tmp_path / "an_adapter.py").write_text(ADAPTER)
    (tmp_path / "a_broken_adapter.py").write_text("from an_engine.code import Removed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith(("an_engine", "an_adapter", "a_broken"))]:
        del sys.modules[name]


LAYER = "an_engine.code:Layer"
RIGHT = [
    Named("an_engine.code", ("Kind", "Layer", "call")),
    Named("an_engine.code:Kind", ("ONE",)),
    Stored(LAYER, ("stored", "declared", "run")),
    Called("an_engine.code", "call", 2, ("out",)),
    Called("an_engine.code", "call", 1, ("size", "out")),
    Called(LAYER, "run", 1, ("scale",)),
    Called(LAYER, "make", 1),
    Called(LAYER, "name"),
    Overridden(LAYER, "an_adapter:Layer", ("run",)),
    Overridden(LAYER, "an_adapter:Layer", ("unused",), callers=("an_engine.runner",)),
    Overridden("an_engine.code:Op", "an_adapter:Op", ("forward",), like="forward_native"),
]


@pytest.mark.parametrize("entry", RIGHT, ids=[f"{type(entry).__name__} {' '.join(entry.names())}" for entry in RIGHT])
def test_what_is_there_is_not_said(entry: Internal) -> None:
    assert lacking([entry], "an_engine") == []


WRONG = [
    (Named("an_engine.code", ("Kind", "other")), "an_engine.code.other is not there"),
    (Named("an_engine.other", ("x",)), "an_engine.other cannot be imported: No module named 'an_engine.other'"),
    (Named("an_engine.code:Other", ("x",)), "an_engine.code.Other is not there"),
    (Stored(LAYER, ("missing",)), f"{LAYER}: its objects have no missing"),
    (Called("an_engine.code", "other"), "an_engine.code.other is not there"),
    (
        Called("an_engine.code", "call", 3, ("out",)),
        "an_engine.code.call(rows, size=1, *, out) cannot be called as it is: too many positional arguments",
    ),
    (Called(LAYER, "run", 1), f"{LAYER}.run(self, rows, *, scale) cannot be called as it is: missing a required "),
    (Overridden(LAYER, "an_adapter:Layer", ("other",)), f"{LAYER}.other is not there"),
    (Overridden(LAYER, "an_adapter:Layer", ("unused",)), f"{LAYER}.unused is there, but nothing calls it"),
    (Overridden(LAYER, "an_adapter:Narrow", ("run",)), f"{LAYER}.run: it gets self, rows, scale; dsv4attn's takes "),
    (
        Overridden("an_engine.code:Op", "an_adapter:NarrowOp", ("forward",), like="forward_native"),
        "an_engine.code:Op.forward_native: it gets x, weight, bias; dsv4attn's takes (x, weight): ",
    ),
    (
        Overridden("an_engine.code:Op", "an_adapter:Op", ("forward",), like="forward_hip"),
        "an_engine.code:Op.forward_hip is not there",
    ),
]


@pytest.mark.parametrize(("entry", "said"), WRONG, ids=[said[:60] for _, said in WRONG])
def test_what_is_missing_or_differs_is_one_line(entry: Internal, said: str) -> None:
    [line] = lacking([entry], "an_engine")

    assert line.startswith(said)


def test_a_module_of_the_adapter_that_cannot_be_imported_is_said_if_nothing_says_more() -> None:
    broken = Overridden(LAYER, "a_broken_adapter:Layer", ("run",))
    removed = Named("an_engine.code", ("Removed",))

    assert lacking([broken, removed, removed], "an_engine") == ["an_engine.code.Removed is not there"]
    [line] = lacking([broken], "an_engine")
    assert line.startswith("a_broken_adapter cannot be imported: cannot import name 'Removed' from 'an_engine.code'")
    with pytest.raises(LackingError):
        [*broken.lacking()]
