"""`examples/engine.py` serves what it says, and its own check finds a prefix hit on wrong pages."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from tests.examples.shop import ROOT

ENGINE = ROOT / "examples" / "engine.py"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module; beside it stands `engine_parts`."""
    monkeypatch.syspath_prepend(str(ENGINE.parent))
    return importlib.import_module("engine")


def test_it_serves_mixed_batches_and_a_prefix_hit_and_generates_the_same_without_it(engine: ModuleType) -> None:
    done = CliRunner().invoke(engine.main, [])

    assert done.exit_code == 0, done.output
    assert "A prefills 0..255\n" in done.output
    assert "B arrives with 560 tokens, 512 in the caches\n" in done.output
    assert "A decodes 673, B prefills 512..559\n" in done.output
    assert "C arrives with 560 tokens, 0 in the caches\n" in done.output
    assert re.search(r"A decodes 676, B decodes 562, C prefills 0\.\.253\n", done.output)
    generated = re.findall(r"generated (\[.*\])", done.output)
    assert len(generated) == 2
    assert len(set(generated)) == 1
    assert done.output.splitlines()[-1].startswith("ok: ")


@pytest.mark.parametrize("cache", [0, 1], ids=["window", "compressed"])
def test_its_check_fails_if_a_prefix_hit_takes_over_pages_in_the_wrong_order(
    engine: ModuleType, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = engine.Scheduler.add

    def wrong(self: Any, request: Any) -> None:
        add(self, request)
        request.tables[cache].reverse()

    monkeypatch.setattr(engine.Scheduler, "add", wrong)
    monkeypatch.setattr(engine, "NEW_TOKENS", 2)
    done = CliRunner().invoke(engine.main, [])

    assert done.exit_code == 1, done.output
    assert done.output.splitlines()[-1].startswith("NOT EQUAL: ")


def test_it_uses_public_names_alone() -> None:
    import dsv4attn

    text = "".join(path.read_text(encoding="utf-8") for path in ENGINE.parent.glob("engine*.py"))

    assert set(re.findall(r"\bds\.(\w+)", text)) <= set(dsv4attn.__all__)
    assert not re.findall(r"(?:import|from) dsv4attn\.|\bds\.\w+\.(?:core|backends)", text)
    assert len(ENGINE.read_text(encoding="utf-8").splitlines()) <= 150
