"""Requests served by vLLM's own engine on a CPU, against transformers' DeepSeek-V4 in fp32.

served.py says what is faked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine import SIZES
from processes import execute, run
from small_model import (
    checkpoint,
    error_shares,
    logprobs,
    prompt_of,
    replayed,
    rms,
    share_of,
    transformers_integration,
    worst_gap,
)
from torch import Tensor

CHUNK, TOKENS = 128, 6
"""Tokens of a step: longer prompts are prefilled in chunks, together with decodes of other requests. Tokens that
are generated for each prompt."""

PAGES = 110
"""Too few for four requests of more than 256 tokens together."""

SHORT, LONG, MIDDLE, *FULL = map(prompt_of, (5, 300, 131, 252, 253, 254, 255))


SIZES_OF_MODEL = {**SIZES, "moe_intermediate_size": 32, "index_topk": 16, "index_n_heads": 16}


def serve(
    folder: Path, backend: str, rounds: Sequence[Sequence[list[int]]], **options: Any
) -> tuple[list[list[dict[str, Any]]], int, str]:
    """The answers in each round (see served.py) of an engine in a process of its own, its preemptions, and its log."""
    limits = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": CHUNK, "max_logprobs": 256}
    limits["num_gpu_blocks_override"] = PAGES
    out = folder / "answers.pt"
    arguments = {
        "model": str(folder),
        "out": str(out),
        "backend": backend,
        "rounds": rounds,
        "tokens": TOKENS,
        **limits,
        **options,
    }
    log = run(folder, execute, {"code": "import served\nserved.main(**given)", "given": arguments})
    return *torch.load(out), log


def check_answers(expected: Sequence[Tensor], answers: Sequence[Mapping[str, Any]]) -> None:
    """Hold all positions against transformers. vLLM computes in bf16, and the caches have fp8."""
    for logs, answer in zip(expected, answers, strict=True):
        assert answer["logprobs"].shape == logs.shape
        assert 0.9 < logs.std(dim=1).mean() < 1.1
        assert rms(answer["logprobs"] - logs) < 0.05
        assert worst_gap(logs, answer["tokens"]) < 0.1


def check_log(log: str, backend: str) -> None:
    """The parts of vLLM that this is about did run, and the log says once for each phase which backend runs it."""
    assert re.findall(r"dsv4attn-vllm: (\w+) runs on (\w+):", log) == [("decode", backend), ("prefill", backend)]
    assert f"DeepSeek-V4 attention of vLLM {version('vllm')} runs on dsv4attn" in log
    assert "compressor, indexer, mhc" in log
    assert "Using V2 Model Runner" in log
    assert f"Chunked prefill is enabled with max_num_batched_tokens={CHUNK}" in log


def check_bugs(
    model: Any, expected: Tensor, prompts: Sequence[list[int]], answers: Sequence[Mapping[str, Any]]
) -> None:
    """The engine has nothing of the difference that a bug makes to transformers' model. With the bug it would have all.

    This sees what is smaller than the rounding of single positions, as rounding has no direction. Of 15 and 17 entries
    it has some of both: rounded scores exchange the last entry for the next one here and there.
    """
    for name, (size, share) in error_shares(model, expected, prompts, answers).items():
        assert size > 0.004, name
        assert abs(share) < (0.4 if name.startswith("one entry") else 0.1), (name, share)


def test_requests_are_answered_as_by_transformers(tmp_path: Path) -> None:
    """Three rounds.

    Ragged prompts together; one of them alone, whose first page of tokens comes from the prefix cache; and more at once
    than there are pages for, so that a request is preempted and prefilled again. The entries that each token selected
    are recorded.
    """
    model, prompts, folder = checkpoint(tmp_path, SIZES_OF_MODEL), [SHORT, LONG, MIDDLE], tmp_path / "entries"

    (together, [again], crowd), preempted, log = serve(
        tmp_path, "reference", [prompts, [LONG], FULL], entries=str(folder)
    )

    check_log(log, "reference")
    expected = logprobs(model, prompts, together)
    check_answers(expected, together)
    check_bugs(model, torch.cat(expected), prompts, together)
    assert (together[1]["cached"], again["cached"]) == (0, 256)
    assert again["tokens"] == together[1]["tokens"]
    assert rms(again["logprobs"] - together[1]["logprobs"][-TOKENS:]) < 0.01
    assert preempted > 0
    check_answers([rows[-TOKENS:] for rows in logprobs(model, FULL, crowd)], crowd)
    requests = [*zip([*prompts, LONG, *FULL], [*together, again, *crowd], strict=True)]
    files = [torch.load(file) for file in folder.glob("*.pt")]
    check_entries(model, files, requests)
    check_replays(model, files, prompts, together, expected)


def check_entries(
    model: Any, files: Sequence[Mapping[str, Any]], requests: Sequence[tuple[list[int], Mapping[str, Any]]]
) -> None:
    """Each request has a file, with about the entries that transformers' indexer selects in fp32."""
    expected_tokens = sorted([*prompt, *answer["tokens"]] for prompt, answer in requests)
    assert sorted(file["tokens"].tolist() for file in files) == expected_tokens
    topk, chosen = SIZES_OF_MODEL["index_topk"], []
    indexer = model.model.layers[1].self_attn.compressor.indexer
    hook = indexer.register_forward_hook(lambda _, __, entries: chosen.append(entries[0]))
    for file in files:
        [(layer, entries)] = file["entries"].items()
        tokens = file["tokens"][:-1]
        assert (layer, entries.dtype, entries.shape) == (1, torch.int32, (len(tokens), topk))
        seen = (torch.arange(len(tokens)) + 1) // 4
        assert torch.equal((entries >= 0).sum(1), seen.clamp(max=topk))
        assert (entries < seen[:, None]).all()
        assert entries.min() >= -1
        assert (entries.diff(dim=1)[entries[:, 1:] >= 0] > 0).all()
        with torch.no_grad():
            model(tokens[None].long())
        rows = zip(entries, chosen.pop(), strict=True)
        same = torch.stack([torch.isin(row[row >= 0], other).float().mean() for row, other in rows])
        # rounded scores exchange some of the last entries
        assert same[3:].mean() > 0.95
    hook.remove()
    first, second = (file["entries"][1] for file in files if file["tokens"].tolist()[: len(LONG)] == LONG)
    assert torch.equal(first[:256], second[:256])


def check_replays(
    model: Any,
    files: Sequence[Mapping[str, Any]],
    prompts: Sequence[list[int]],
    answers: Sequence[Mapping[str, Any]],
    expected: Sequence[Tensor],
) -> None:
    """A trainer replays the files: by transformers, and by dsv4attn's layers, each in fp32.

    expected: log-probabilities of transformers with its own selection. The difference that the files make to them is in
    vLLM's answers as a whole: vLLM's layers attended to these entries. Files of other requests would leave none of it.
    """
    transformers = transformers_integration()
    from dsv4attn.integrations.transformers import patched

    requests = [[*prompt, *answer["tokens"]] for prompt, answer in zip(prompts, answers, strict=True)]
    entries = [next(file["entries"] for file in files if file["tokens"].tolist() == tokens) for tokens in requests]
    of_transformers, context = replayed(model, prompts, answers, entries), patched.set_forward_context
    size, share = share_of(of_transformers, expected, answers)
    assert size > 0.004
    assert 0.8 < share < 1.2
    owner = transformers.patch(model, "reference", kv_layout="fp32", index_layout="fp32", max_len=512, max_batch=3)
    for tokens, of_request, logs in zip(requests, entries, of_transformers, strict=True):

        def injecting(metadata: Any, record_entries: Mapping[str, Tensor]) -> Any:
            injected = records.injected(owner.step.requests, [of_request])  # noqa: B023 - called in this round of the loop
            of_layer = {prefix: injected[prefix] for prefix in record_entries}
            return context(metadata, record_entries=record_entries, inject_entries=of_layer)

        cache = transformers.DeepseekV4PagedCache(model)
        with owner.record_entries() as records, mock.patch.object(patched, "set_forward_context", injecting):
            # two steps
            parts = torch.tensor([tokens[:-1]]).split([len(tokens) - 4, 3], dim=1)
            with torch.no_grad():
                logits = torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])
        torch.testing.assert_close(logits.log_softmax(-1), logs, rtol=0, atol=2e-5)
        [sequence] = cache.sequences
        assert torch.equal(records.of(sequence)[1], of_request[1])
    transformers.unpatch(model)


def test_requests_are_answered_by_triton_too(tmp_path: Path) -> None:
    """Fewer of them, for its interpreter."""
    model, prompts = checkpoint(tmp_path, SIZES_OF_MODEL), [SHORT, MIDDLE]

    [answers], _, log = serve(tmp_path, "triton", [prompts])

    check_log(log, "triton")
    check_answers(logprobs(model, prompts, answers), answers)


def test_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Prompts together, and each of them alone, in vLLM's batch-invariant mode. The second one is cut elsewhere."""
    checkpoint(tmp_path, SIZES_OF_MODEL)
    prompts = [SHORT, MIDDLE]

    (together, *alone), _, log = serve(
        tmp_path, "reference", [prompts, *([prompt] for prompt in prompts)], of_prompts=3, invariant=True
    )

    check_log(log, "reference")
    for first, [second] in zip(together, alone, strict=True):
        assert first["tokens"] == second["tokens"]
        assert torch.equal(first["logprobs"], second["logprobs"])
