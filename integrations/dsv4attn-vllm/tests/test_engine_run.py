"""Requests served by vLLM's own engine on a CPU, against transformers' DeepSeek-V4 in fp32.

served.py says what is faked.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine import KINDS, SIZES, generator
from processes import execute, run
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

CHUNK, TOKENS = 128, 6
"""Tokens of a step: longer prompts are prefilled in chunks, together with decodes of other requests. Tokens that
are generated for each prompt."""

PAGES = 110
"""Too few for four requests of more than 256 tokens together."""

SHORT, LONG, MIDDLE, *FULL = (
    torch.randint(256, (n,), generator=generator(n)).tolist() for n in (5, 300, 131, 252, 253, 254, 255)
)


def checkpoint(folder: Path) -> Any:
    """Save a layer of each kind with random weights as DeepSeek does, and return transformers' model of it in fp32.

    bf16 can represent the weights. Experts are chosen by token: a choice by score changes with the last bit of a score.
    There are as many of them as vLLM's compiled router wants.
    """
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 32}
    sizes = {**SIZES, **experts, "index_topk": 16, "index_n_heads": 16}
    types = {"layer_types": [*KINDS.values()], "mlp_layer_types": ["hash_moe"] * len(KINDS)}
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**sizes, **types, num_hidden_layers=len(KINDS))).float().eval()
    for name, weight in model.named_parameters():
        vectors = weight.dim() == 1 or "bias" in name
        std = 1.0 if "embed" in name else 0.5 if vectors else weight.shape[-1] ** -0.5
        random = torch.randn_like(weight) * std
        weight.data = (1 + random / 5 if "norm" in name else random).bfloat16().float()
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.tid2eid.copy_(torch.rand(256, gate.num_experts).argsort(1)[:, : gate.top_k])
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({_deepseeks(name): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return model


def _deepseeks(name: str) -> str:
    """The name of a weight in DeepSeek's checkpoints, of which transformers writes a few in another way."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def serve(
    folder: Path, backend: str, rounds: Sequence[Sequence[list[int]]]
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
    }
    log = run(folder, execute, {"code": "import served\nserved.main(**given)", "given": arguments})
    return *torch.load(out), log


def logprobs(model: Any, prompts: Sequence[list[int]], answers: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Log-probabilities [n, vocabulary] of each prompt and its answer, after each token but the last."""
    with torch.no_grad():
        pairs = zip(prompts, answers, strict=True)
        rows = [model(torch.tensor([prompt + answer["tokens"][:-1]])).logits[0] for prompt, answer in pairs]
    return [row.log_softmax(dim=-1) for row in rows]


def rms(values: Tensor) -> float:
    """The root of the mean square."""
    return values.square().mean().sqrt().item()


def check_answers(expected: Sequence[Tensor], answers: Sequence[Mapping[str, Any]]) -> None:
    """Hold all positions against transformers. vLLM computes in bf16, and the caches have fp8."""
    for logs, answer in zip(expected, answers, strict=True):
        assert answer["logprobs"].shape == logs.shape
        assert 0.9 < logs.std(dim=1).mean() < 1.1
        assert rms(answer["logprobs"] - logs) < 0.05
        decoded, tokens = logs[-TOKENS:], torch.tensor(answer["tokens"])
        assert (decoded.max(dim=1).values - decoded.gather(1, tokens[:, None])[:, 0]).max() < 0.1


def check_log(log: str, backend: str) -> None:
    """The parts of vLLM that this is about did run, and the log says once for each phase which backend runs it."""
    assert re.findall(r"dsv4attn-vllm: (\w+) runs on (\w+):", log) == [("decode", backend), ("prefill", backend)]
    assert "DeepSeek-V4 attention of vLLM 0.33.0 runs on dsv4attn" in log
    assert "compressor, indexer, mhc" in log
    assert "Using V2 Model Runner" in log
    assert f"Chunked prefill is enabled with max_num_batched_tokens={CHUNK}" in log


def _entries(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn.compressor


BUGS: Mapping[str, Callable[[Any], object]] = {
    "no sinks": lambda model: [layer.self_attn.sinks.data.fill_(-100) for layer in model.model.layers],
    "a window of 127": lambda model: setattr(model.config, "sliding_window", 127),
    "a window of 129": lambda model: setattr(model.config, "sliding_window", 129),
    "the worst entries": lambda model: _entries(model, 1).indexer.scorer.weights_proj.weight.data.neg_(),
    "15 entries of 16": lambda model: setattr(_entries(model, 1).indexer, "index_topk", 15),
    "17 entries of 16": lambda model: setattr(_entries(model, 1).indexer, "index_topk", 17),
    "another theta": lambda model: model.model.rotary_emb.compress_inv_freq.mul_(1.05),
    "no keys at ratio 4": lambda model: _entries(model, 1).kv_norm.weight.data.zero_(),
    "no keys at ratio 128": lambda model: _entries(model, 2).kv_norm.weight.data.zero_(),
}


def check_bugs(
    model: Any, expected: Tensor, prompts: Sequence[list[int]], answers: Sequence[Mapping[str, Any]]
) -> None:
    """The engine has nothing of the difference that a bug makes to transformers' model. With the bug it would have all.

    This sees what is smaller than the rounding of single positions, as rounding has no direction. Of 15 and 17 entries
    it has some of both: rounded scores exchange the last entry for the next one here and there.
    """
    error = torch.cat([answer["logprobs"] for answer in answers]) - expected
    for name, bug in BUGS.items():
        broken = copy.deepcopy(model)
        bug(broken)
        way = torch.cat(logprobs(broken, prompts, answers)) - expected
        share = ((error * way).sum() / way.square().sum()).item()
        assert rms(way) > 0.004, name
        assert abs(share) < (0.4 if "of 16" in name else 0.1), (name, share)


def test_requests_are_answered_as_by_transformers(tmp_path: Path) -> None:
    """Three rounds.

    Ragged prompts together; one of them alone, whose first page of tokens comes from the prefix cache; and more at once
    than there are pages for, so that a request is preempted and prefilled again.
    """
    model, prompts = checkpoint(tmp_path), [SHORT, LONG, MIDDLE]

    (together, [again], crowd), preempted, log = serve(tmp_path, "reference", [prompts, [LONG], FULL])

    check_log(log, "reference")
    expected = logprobs(model, prompts, together)
    check_answers(expected, together)
    check_bugs(model, torch.cat(expected), prompts, together)
    assert (together[1]["cached"], again["cached"]) == (0, 256)
    assert again["tokens"] == together[1]["tokens"]
    assert rms(again["logprobs"] - together[1]["logprobs"][-TOKENS:]) < 0.01
    assert preempted > 0
    check_answers([rows[-TOKENS:] for rows in logprobs(model, FULL, crowd)], crowd)


def test_requests_are_answered_by_triton_too(tmp_path: Path) -> None:
    """Fewer of them, for its interpreter."""
    model, prompts = checkpoint(tmp_path), [SHORT, MIDDLE]

    [answers], _, log = serve(tmp_path, "triton", [prompts])

    check_log(log, "triton")
    check_answers(logprobs(model, prompts, answers), answers)
