"""measure_serving.py on a CPU: its figures and its table, with engines that only count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import refusal
from measuring import prompts_of
from on_gpu.measure_serving import VOCABULARY, kernels_of, main, measured, table_of, write_model
from rich.console import Console


class CountingEngine:
    """An engine that takes a second for prompts and so many for each further token of an answer."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.served = seconds, list[tuple[list[list[int]], int, str | None]]()

    def ask(self, prompts: list[list[int]], tokens: int, profile: str | None) -> float:
        """Serve prompts: the seconds."""
        self.served.append((prompts, tokens, profile))
        return 1 + self.seconds * (tokens - 1)


def test_figures_are_those_of_both_engines_on_the_same_prompts() -> None:
    engines: dict[str, Any] = {"dsv4attn": CountingEngine(0.1), "sglang": CountingEngine(0.2)}
    figures = measured(engines, 2, 8, 11, 3)

    served = engines["dsv4attn"].served
    assert served == engines["sglang"].served
    # each turn has other prompts, of which each engine answers one token and then all
    assert [tokens for _, tokens, _ in served] == [1, 11] * 4
    assert served[::2] == [(prompts_of(2, 8, turn, VOCABULARY), 1, None) for turn in range(4)]
    assert {tuple(map(len, prompts)) for prompts, *_ in served} == {(8, 8)}
    assert len({str(prompts) for prompts, *_ in served}) == 4
    assert [round(of["per_token_ms"]) for of in figures.values()] == [100, 200]
    assert figures["dsv4attn"]["first_token_s"] == 1
    assert round(figures["dsv4attn"]["tokens_per_s"], 3) == 11

    report = {"layers": ["swa"], "gpus": 1, "device": "GPU", "date": "2026-11-29"}
    report["cases"] = [{"requests": 2, "prompt": 8192, "figures": figures}]
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table_of(report))
    assert "2 x 8,192" in captured.get()
    assert "0.500" in captured.get()


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--json", "missing/out.json", "Invalid value for '--json': 'missing/out.json': expected a file in a folder"),
        ("--folder", "file/below", "'--folder': a folder: expected one that can be written, got file/below: Not a"),
        ("--profile", "file", "Invalid value for '--profile': expected a folder that does not exist yet, got file"),
        ("--profile", "file/below", "'--profile': a folder: expected one that can be written, got file/below: Not a"),
        ("--cases", "1x16321", "at most 256 requests of 16384 tokens with their answers, got 1x16321 and 64"),
        ("--cases", "257x8", "at most 256 requests of 16384 tokens with their answers, got 257x8 and 64"),
        ("--layers", "c4", "expected some of"),
        ("--options", "[]", "expected a JSON object, got '[]'"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused_before_an_engine_starts(
    option: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(main, [option, text], tmp_path, monkeypatch)


def test_kernels_of_a_profile_are_summed_by_name() -> None:
    times = [("a", 10, 5), ("b", 20, 1), ("a", 30, 5)]
    events = [{"cat": "kernel", "name": name, "ts": ts, "dur": dur} for name, ts, dur in times]
    head, *lines = kernels_of([*events, {"cat": "cuda_runtime", "name": "c", "ts": 0, "dur": 99}]).splitlines()

    assert head.startswith("25 us in up to 8 steps, of which kernels take 11")
    assert [line.split() for line in lines] == [["10", "2", "a"], ["1", "1", "b"]]


def test_the_model_has_the_layers_and_experts_that_are_asked_for(tmp_path: Path) -> None:
    write_model(tmp_path, ["swa", "c4a", "c128a"], 32)
    config = json.loads((tmp_path / "config.json").read_text())

    assert (config["num_hidden_layers"], config["n_routed_experts"]) == (3, 32)
    assert config["topk_method"] == "noaux_tc"
