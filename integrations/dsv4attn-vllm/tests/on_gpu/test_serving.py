"""vLLM's engine on a GPU, against transformers in fp32 and against itself with its own attention."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import small_model
import torch
from gpu_tests import GAP, RMS, Round, report, run_engine
from small_model import logprobs, replayed, share_of
from small_v41 import ReferenceV41

import dsv4attn
from on_gpu.scenarios import PIPELINE_PARALLEL, SCENARIOS, TENSOR_PARALLEL, V41_SCENARIOS, WITHOUT_OFFLOADING, Scenario

HERE = Path(__file__).parent
UNKNOWN = -2
"""In files of entries: nobody recorded them."""
KERNELS_OF_VLLM = {
    "_topk_log_softmax_kernel",
    "fused_moe_kernel",
    "_prepare_dflash_inputs_kernel",
    "_rms_norm_kernel",
    "_softmax_kernel",
    "bmm_kernel",
    "matmul_kernel_descriptor_persistent",
    "matmul_kernel_persistent",
    "mean_kernel",
}
"""Kernels that vLLM compiles while it serves, with its own attention too: log-probabilities, experts in bf16, and
inputs of DSpark's drafts. The others are those of its batch-invariant mode."""

OF_VLLM_TOO = [s for s in SCENARIOS if not (s.capability or s.backend or "VLLM_BATCH_INVARIANT" in s.environment)]
"""What vLLM's own attention can serve. It has no batch-invariant mode for this model."""


def serve(scenario: Scenario, folder: Path, results: Path, *, by_vllm: bool = False) -> dict[str, Any]:
    """Run worker.py: the answers of each round, metrics, seconds, and the log."""
    name = f"{scenario.name}{'-by-vllm' if by_vllm else ''}"
    recorded = scenario.records_entries and not by_vllm
    variables = {"DSV4ATTN_VLLM_ENTRIES": str(results / f"{name}.entries")} if recorded else {}
    inputs = scenario.input(str(folder), by_vllm=by_vllm)
    served = run_engine(HERE / "worker.py", results, name, inputs, 420, variables)
    compiled = set(re.findall(r"JIT compilation during inference: (\w+)", served["log"]))
    return {**served, "compiled": compiled - KERNELS_OF_VLLM}


def expected_logprobs(model: Any, step: Round, answers: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Log-probabilities, by transformers or the reference of V4.1, of the rows that the engine returned."""
    last = None if step.of_prompts else step.tokens
    if isinstance(model, ReferenceV41) and not step.of_prompts:
        requests = zip(step.prompts, answers, strict=True)
        return [
            logprobs(model.replayed(len(prompt), answer["cached"]), [prompt], [answer], last=last)[0]
            for prompt, answer in requests
        ]
    return logprobs(model, step.prompts, answers, last=last)


def figures(model: Any, scenario: Scenario, served: dict[str, Any]) -> dict[str, float]:
    """Worst error of a request, share of tokens that transformers would choose, and the worst gap of another one.

    The last two are absent where drafts are accepted by chance.
    """
    steps = [step for step in scenario.rounds if isinstance(step, Round)]
    expected, answers = [], []
    for step, of_step in zip(steps, served["rounds"], strict=True):
        expected += expected_logprobs(model, step, of_step)
        answers += of_step
    found = small_model.figures(expected, answers)
    # engines of other tests need the memory
    torch.cuda.empty_cache()
    return {"rms": found["rms"]} if scenario.is_accepting else found


def check_equal_bits(steps: Sequence[Round], rounds: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """The answer to a prompt has the same bits in each round as in the first one."""
    first = {tuple(prompt): answer for prompt, answer in zip(steps[0].prompts, rounds[0], strict=True)}
    unequal = {}
    for number, (step, answers) in enumerate(zip(steps, rounds, strict=True)):
        for prompt, answer in zip(step.prompts, answers, strict=True):
            expected = first[tuple(prompt)]["logprobs"]
            rows = (answer["logprobs"] != expected).any(dim=1).nonzero()[:, 0].tolist()
            if rows:
                worst = (answer["logprobs"] - expected).abs().max().item()
                unequal[number, len(prompt)] = f"{len(rows)} of {len(expected)} rows from row {rows[0]}, by {worst:.2g}"
    assert not unequal, f"by round and tokens of the prompt: {unequal}"


def is_of_dsv4attn(kernel: str) -> bool:
    """Whether a kernel of this name is defined in dsv4attn."""
    package = Path(dsv4attn.__file__).parent
    return any(f"def {kernel}(" in file.read_text(encoding="utf-8") for file in package.rglob("*.py"))


def check_scenario(scenario: Scenario, folder: Path, model: Any, results: Path) -> dict[str, Any]:
    """Serve a scenario with dsv4attn, hold its answers against transformers, and leave the figures."""
    served = serve(scenario, folder, results)
    found = figures(model, scenario, served)
    backends = sorted(set(re.findall(r"dsv4attn-vllm: \w+ runs on (\w+):", served["log"])))
    report(
        results,
        scenario.name,
        {**found, "backend": backends, "ready_s": served["ready"], "wall_s": served["seconds"], **served["metrics"]},
    )
    assert backends == [scenario.backend or "sm90"]
    compiled = served["compiled"]
    if isinstance(model, ReferenceV41):
        # of this model vLLM itself compiles some kernels late
        compiled = {kernel for kernel in compiled if is_of_dsv4attn(kernel)}
    assert not compiled, "compiled while serving"
    assert found["rms"] < RMS
    assert found.get("gap", 0) < GAP
    return served


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_requests_are_answered_as_by_transformers(
    scenario: Scenario, checkpoints: dict[str, Path], transformers_model: Any, results: Path
) -> None:
    served = check_scenario(scenario, checkpoints[scenario.checkpoint], transformers_model, results)

    metrics, rounds = served["metrics"], served["rounds"]
    if scenario.name == "preemption":
        assert metrics["vllm:num_preemptions"] > 0
    if scenario.name == "prefix-cache":
        [[first], [second]] = rounds
        assert (first["cached"], second["cached"]) == (0, 2048)
        assert torch.equal(first["logprobs"], second["logprobs"])
    if scenario.environment.get("VLLM_BATCH_INVARIANT"):
        check_equal_bits(scenario.rounds, rounds)
    if scenario.name == "offload":
        [[first], *_, [again]] = rounds
        assert again["cached"] == metrics["vllm:external_prefix_cache_hits"] == 2048
        assert torch.equal(first["logprobs"], again["logprobs"])
        check_without_offloading(rounds, checkpoints["plain"], results)
    if scenario.records_entries:
        check_entries(scenario, served, transformers_model, results)
    if scenario.is_accepting:
        assert 0 < metrics["vllm:spec_decode_num_accepted_tokens"] < metrics["vllm:spec_decode_num_draft_tokens"]
    if scenario.name in ("sleep-and-wake", "weights-again"):
        before, after = rounds
        for earlier, later in zip(before, after, strict=True):
            assert earlier["tokens"] == later["tokens"]
            assert torch.equal(earlier["logprobs"], later["logprobs"])


def check_without_offloading(rounds: Sequence[Any], folder: Path, results: Path) -> None:
    """All answers have the bits of an engine that offloads nothing."""
    without = serve(WITHOUT_OFFLOADING, folder, results)

    assert without["rounds"][-1][0]["cached"] == 0
    for [offloaded], [computed] in zip(rounds, without["rounds"], strict=True):
        assert offloaded["tokens"] == computed["tokens"]
        assert torch.equal(offloaded["logprobs"], computed["logprobs"])


def check_entries(scenario: Scenario, served: Mapping[str, Any], model: Any, results: Path) -> None:
    """Each request has a file of what its tokens selected; -2 for tokens whose blocks came from the CPU.

    If transformers attends to these entries, its log-probabilities move to vLLM's.
    """
    requests = [
        (prompt, answer)
        for step, answers in zip(scenario.rounds, served["rounds"], strict=True)
        for prompt, answer in zip(step.prompts, answers, strict=True)
    ]
    files = [torch.load(file) for file in (results / f"{scenario.name}.entries").glob("*.pt")]
    expected_tokens = sorted([*prompt, *answer["tokens"]] for prompt, answer in requests)
    assert sorted(file["tokens"].tolist() for file in files) == expected_tokens
    unknown = 0
    for file in files:
        [(layer, entries)] = file["entries"].items()
        known = entries[:, 0] != UNKNOWN
        unknown += int((~known).sum())
        seen = (torch.arange(len(entries)) + 1) // 4
        assert (layer, len(entries)) == (1, len(file["tokens"]) - 1)
        assert torch.equal((entries >= 0).sum(1)[known], seen.clamp(max=entries.shape[1])[known])
        assert (entries < seen[:, None])[known].all()
        assert (entries.diff(dim=1)[entries[:, 1:] >= 0] > 0).all()
    if scenario.name == "offload":
        assert unknown == served["metrics"]["vllm:external_prefix_cache_hits"]
        return
    assert unknown == 0
    first = [next(file for file in files if file["tokens"].tolist() == [*p, *a["tokens"]]) for p, a in requests]
    prompts, answers = scenario.rounds[0].prompts, served["rounds"][0]
    expected = logprobs(model, prompts, answers)
    changed = replayed(model, prompts, answers, [file["entries"] for file in first[: len(prompts)]])
    size, share = share_of(changed, expected, answers)
    print(f"entries: a difference of {size:.4f}, {share:.3f} of it in the answers")
    (results / "entries-replayed.json").write_text(json.dumps({"difference": size, "share": share}))
    assert 0.7 < share < 1.3


@pytest.mark.parametrize("scenario", V41_SCENARIOS, ids=str)
def test_v41_is_answered_as_by_the_reference(
    scenario: Scenario, v41_checkpoints: dict[str, Path], v41_model: ReferenceV41, results: Path
) -> None:
    model = v41_model.rounded() if scenario.has_own_records else v41_model
    served = check_scenario(scenario, v41_checkpoints[scenario.checkpoint], model, results)

    assert "DeepSeek-V4.1 attention of vLLM" in served["log"]
    records = (528, 288) if scenario.has_own_records else (584, 584)
    assert "a token has {} bytes in window caches, an entry {} in compressed ones".format(*records) in served["log"]
    if len(served["rounds"]) > 1:
        _, [first], [again], _ = served["rounds"]
        # whole pages of the cache, whose size the engine chooses: 64 entries on a GPU
        assert first["cached"] == 0
        assert 1920 <= again["cached"] < 2000


TWO_GPUS = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")


@TWO_GPUS
def test_ranks_that_share_layers_answer_as_transformers(
    checkpoints: dict[str, Path], transformers_model: Any, results: Path
) -> None:
    check_scenario(TENSOR_PARALLEL, checkpoints[TENSOR_PARALLEL.checkpoint], transformers_model, results)


@TWO_GPUS
def test_ranks_that_are_stages_answer_as_transformers(
    stages_checkpoint: Path, stages_model: Any, results: Path
) -> None:
    check_scenario(PIPELINE_PARALLEL, stages_checkpoint, stages_model, results)


@pytest.mark.skipif(find_spec("tilelang") is None or find_spec("cutlass") is None, reason="needs tilelang and CuTeDSL")
@pytest.mark.parametrize("scenario", OF_VLLM_TOO, ids=str)
def test_vllms_own_attention_is_as_far_from_transformers(
    scenario: Scenario, checkpoints: dict[str, Path], transformers_model: Any, results: Path
) -> None:
    """The same bounds hold for vLLM's own attention, so they are not those of a looser engine."""
    served = serve(scenario, checkpoints[scenario.checkpoint], results, by_vllm=True)

    found = figures(transformers_model, scenario, served)
    seconds = {"ready_s": served["ready"], "wall_s": served["seconds"]}
    report(results, f"{scenario.name}-by-vllm", {**found, **seconds, **served["metrics"]})
    assert "runs on dsv4attn" not in served["log"]
    assert found["rms"] < RMS
    assert found.get("gap", 0) < GAP
