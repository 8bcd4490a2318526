"""`examples/engine.py` serves what it says, and its own check finds a prefix hit on wrong pages."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from dsv4attn.core.contract import device
from tests.examples.built_wheels import ROOT

ENGINE = ROOT / "examples" / "engine.py"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module. `engine_parts` is in the same folder."""
    monkeypatch.syspath_prepend(str(ENGINE.parent))
    return importlib.import_module("engine")


@pytest.mark.matrix
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


@pytest.mark.mutation
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


@pytest.mark.parametrize(
    ("args", "variable", "said"),
    [
        (["--backend", "refernz"], "", "'refernz' cannot be used: no backend has this name; did you mean 'reference'?"),
        (
            ["--backend", "rocm"],
            "",
            "backend 'rocm' cannot run this call; INTERPRETER  a CPU, needs an accelerator, or",
        ),
        ([], "rocm", "backend 'rocm' cannot run this call; INTERPRETER"),
        ([], "decode=", "environment variable DSV4ATTN_BACKEND: expected NAME or"),
    ],
)
def test_a_backend_that_cannot_be_had_is_an_error_of_one_line(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch, args: list[str], variable: str, said: str
) -> None:
    monkeypatch.setattr(device, "_triton_version", lambda: "3.9")
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = CliRunner().invoke(engine.main, args, env={"DSV4ATTN_BACKEND": variable})

    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 1
    [line] = done.output.splitlines()
    assert line.startswith("Error: ")
    assert said in line


@pytest.mark.parametrize(
    ("args", "variable", "said"),
    [
        ([], "", "decode and prefill on reference: the only backend native to cpu that can run this call  (default)"),
        (["--backend", "reference"], "rocm", "decode and prefill on reference: asked for by name  (argument)"),
        ([], "reference", "reference: asked for by name  (environment variable DSV4ATTN_BACKEND)"),
    ],
)
def test_it_says_which_backend_runs_and_where_the_choice_is_from(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch, args: list[str], variable: str, said: str
) -> None:
    def stop(backend: Any, _: Any) -> None:
        raise SystemExit(f"made {backend.name}")

    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    monkeypatch.setattr(engine, "Engine", stop)
    done = CliRunner().invoke(engine.main, args, env={"DSV4ATTN_BACKEND": variable})

    assert said in done.output.splitlines()[0]
    assert done.output.splitlines()[1] == "made reference"


def test_it_uses_public_names_alone() -> None:
    import dsv4attn

    text = "".join(path.read_text(encoding="utf-8") for path in ENGINE.parent.glob("engine*.py"))

    assert set(re.findall(r"\bds\.(\w+)", text)) <= set(dsv4attn.__all__)
    assert not re.findall(r"(?:import|from) dsv4attn\.|\bds\.\w+\.(?:core|backends)", text)
    assert len(ENGINE.read_text(encoding="utf-8").splitlines()) <= 150
