"""SGLang's engine on a GPU, against transformers in fp32 and against itself with its own attention."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import small_model
import torch
from gpu_tests import GAP, RMS, report, run_engine
from small_model import logprobs

from on_gpu.scenarios import PAGE, SCENARIOS, TENSOR_PARALLEL, V41_OWN_RECORDS, V41_SCENARIOS, Scenario

HERE = Path(__file__).parent
TIMEOUT = 240

BY_SGLANG_TOO = [s for s in SCENARIOS if not (s.backend or s.parts != "all")]
"""What SGLang's own attention can serve."""


def serve(scenario: Scenario, folder: Path, results: Path, *, by_sglang: bool = False) -> dict[str, Any]:
    """Run worker.py: the answers of each round, seconds, and the log."""
    name = f"{scenario.name}{'-by-sglang' if by_sglang else ''}"
    inputs = scenario.input(str(folder), by_sglang=by_sglang)
    return run_engine(HERE / "worker.py", results, name, inputs, TIMEOUT, {})


def check_scenario(
    scenario: Scenario, folder: Path, model: Any, results: Path, *, by_sglang: bool = False, gap: float = GAP
) -> dict[str, Any]:
    """Serve a scenario, hold its answers against transformers, and leave the figures. gap: bound of `worst_gap`."""
    served = serve(scenario, folder, results, by_sglang=by_sglang)
    expected, answers = [], []
    for step, of_step in zip(scenario.rounds, served["rounds"], strict=True):
        last = None if step.of_prompts else step.tokens
        expected += logprobs(model, step.prompts, of_step, last=last)
        answers += of_step
    found = small_model.figures(expected, answers)
    # engines of other tests need the memory
    torch.cuda.empty_cache()
    if scenario.is_accepting:
        found = {"rms": found["rms"]}
    numbers = {name: sum(answer[name] for answer in answers) for name in ("retractions", "drafts", "accepted")}
    cached = [[answer["cached"] for answer in of_step] for of_step in served["rounds"]]
    backends = sorted(set(re.findall(r"dsv4attn-sglang: (?:decode|prefill), \d+ heads: (\w+):", served["log"])))
    said = {"lines": re.findall(r"dsv4attn(?:-sglang)?: (?!replaced)(.*)", served["log"])}
    seconds = {"ready_s": served["ready"], "wall_s": served["seconds"]}
    figures = {**found, "backend": backends, "cached": cached, **numbers, **seconds, **said}
    name = f"{scenario.name}{'-by-sglang' if by_sglang else ''}"
    report(results, name, figures)
    assert found["rms"] < RMS
    assert found.get("gap", 0) < gap
    if scenario.is_accepting:
        assert 0 < numbers["accepted"] < numbers["drafts"]
    return {**served, **figures}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_requests_are_answered_as_by_transformers(
    scenario: Scenario, checkpoints: dict[str, Path], transformers_model: Any, results: Path
) -> None:
    served = check_scenario(scenario, checkpoints[scenario.checkpoint], transformers_model, results)

    assert served["backend"] == [scenario.backend or "sm90"]
    if scenario.name == "retraction":
        assert served["retractions"] > 0
    if scenario.name.startswith("prefix-cache"):
        [[first], [second]] = served["rounds"]
        assert (first["cached"], second["cached"]) == (0, 8 * PAGE)
        assert first["tokens"] == second["tokens"]
        assert torch.equal(first["logprobs"], second["logprobs"])


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_ranks_that_share_heads_answer_as_transformers(
    checkpoints: dict[str, Path], transformers_model: Any, results: Path
) -> None:
    served = check_scenario(TENSOR_PARALLEL, checkpoints["plain"], transformers_model, results)

    assert served["backend"] == ["sm90"]


def test_v41_on_its_own_records_is_answered_as_by_the_reference(
    v41_checkpoint: Path, v41_model: Any, results: Path
) -> None:
    served = check_scenario(V41_OWN_RECORDS, v41_checkpoint, v41_model, results)

    assert served["backend"] == ["sm90"]


def test_v41_is_no_farther_from_the_reference_than_with_sglangs_own_attention(
    v41_checkpoint: Path, v41_model: Any, results: Path
) -> None:
    """On 584-byte records SGLang rounds V4.1's entries twice, so that its own attention does not keep GAP either."""
    own = check_scenario(V41_SCENARIOS[0], v41_checkpoint, v41_model, results, by_sglang=True, gap=math.inf)
    assert not own["lines"]

    for scenario in V41_SCENARIOS:
        served = check_scenario(scenario, v41_checkpoint, v41_model, results, gap=own["gap"])
        assert served["backend"] == ["sm90"]
        assert served["rms"] < 1.05 * own["rms"]


@pytest.mark.parametrize("scenario", BY_SGLANG_TOO, ids=str)
def test_sglangs_own_attention_is_as_far_from_transformers(
    scenario: Scenario, checkpoints: dict[str, Path], transformers_model: Any, results: Path
) -> None:
    """The same bounds hold for SGLang's own attention, so they are not those of a looser engine."""
    served = check_scenario(scenario, checkpoints[scenario.checkpoint], transformers_model, results, by_sglang=True)

    assert not served["lines"]
