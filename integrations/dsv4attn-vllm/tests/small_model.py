"""A small DeepSeek-V4 with random weights, transformers' answers in fp32, and those of vLLM's engine.

The tests that serve requests use it, on a CPU (test_engine_run.py) and on a GPU (on_gpu/). It imports nothing of vLLM
before `answers` is called.
"""

from __future__ import annotations

import copy
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4

DSPARK_LAYERS = 3
RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
LAYER_TYPES = tuple(RATIOS)
CHOSEN = 16.0
"""Bias of the experts of a layer that chooses by score. Without it a choice changes with the last bit of a score."""

SIZES = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "moe_intermediate_size": 128,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 512,
    "o_groups": 8,
    "o_lora_rank": 128,
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "max_position_embeddings": 16384,
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "bfloat16",
}
"""A layer of each kind with 64 heads and Flash's selection. The rest is small, so that transformers can follow."""

LENGTHS = (5, 300, 131, 2500, 2050)
"""Of prompts: shorter than a window, longer than one, and long enough that 512 entries are selected from more."""


def prompt_of(length: int, seed: int | None = None) -> list[int]:
    """A random prompt of the vocabulary's 256 tokens. seed: by default the length."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    return torch.randint(256, (length,), generator=generator).tolist()


def mixed(count: int, longest: int) -> list[list[int]]:
    """Prompts of lengths that grow from 3 to the longest, in a shuffled order."""
    lengths = [round(3 * (longest / 3) ** (i / (count - 1))) for i in range(count)]
    return [prompt_of(lengths[i * 37 % count], i) for i in range(count)]


def configuration(sizes: Mapping[str, Any]) -> DeepseekV4Config:
    """Transformers' configuration of one layer of each kind, or of those that the sizes name.

    Experts are chosen by token, unless the sizes say otherwise (`mlp_layer_types`). There are as many of them as vLLM's
    compiled router wants.
    """
    experts = {"n_routed_experts": 256, "num_experts_per_tok": 6}
    types = {"layer_types": [*LAYER_TYPES], "mlp_layer_types": ["hash_moe"] * len(LAYER_TYPES)}
    entries = {**experts, **types, **sizes}
    return DeepseekV4Config(**entries, num_hidden_layers=len(entries["layer_types"]))


def of_stages(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a model for two pipeline-parallel stages, with the same two kinds of layers in each.

    vLLM 0.33.0 gives no token ids to the second stage, so experts are chosen by score there, as in released models. It
    cannot plan the caches of a stage that has no layer of a kind that another stage has.
    """
    types = ["compressed_sparse_attention", "heavily_compressed_attention"] * 2
    experts = ["hash_moe", "hash_moe", "moe", "moe"]
    return {**sizes, "layer_types": types, "mlp_layer_types": experts, "topk_method": "noaux_tc"}


def random_model(sizes: Mapping[str, Any]) -> Any:
    """Transformers' model with random weights, in fp32. bf16 can represent the weights."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(configuration(sizes)).float().eval()
    for name, weight in model.named_parameters():
        vectors = weight.dim() == 1 or "bias" in name
        std = 1.0 if "embed" in name else 0.5 if vectors else weight.shape[-1] ** -0.5
        random = torch.randn_like(weight) * std
        weight.data = (1 + random / 5 if "norm" in name else random).bfloat16().float()
    for layer in model.model.layers:
        gate = layer.mlp.gate
        if hasattr(gate, "tid2eid"):
            gate.tid2eid.copy_(torch.rand(256, gate.num_experts).argsort(1)[:, : gate.top_k])
        else:
            gate.e_score_correction_bias[torch.randperm(gate.num_experts)[: gate.top_k]] = CHOSEN
    return model


def checkpoint(folder: Path, sizes: Mapping[str, Any]) -> Any:
    """Save the random model under DeepSeek's names of weights, and return it."""
    model = random_model(sizes)
    model.save_pretrained(folder)
    write_as_released(folder)
    file = folder / "model.safetensors"
    save_file({_name_of_deepseek(name): weight for name, weight in load_file(file).items()}, file, {"format": "pt"})
    return model


def checkpoint_with_drafts(folder: Path, base: Path, method: str) -> None:
    """Make a folder with the weights of another one (links) and those of draft layers for a method of vLLM.

    base: as `checkpoint` saves it, or `checkpoint_v41` with "dspark". method: "mtp", with one draft layer, or "dspark",
    with three.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((base / "config.json").read_text())
    # a configuration of V4.1 has that of text inside
    text, weights = config.get("text_config", config), load_file(base / "model.safetensors")
    # left by a process that was killed
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors").symlink_to(base / "model.safetensors")
    save_file(_draft_weights(weights, text, method), folder / "drafts.safetensors", {"format": "pt"})
    text |= draft_settings(method, text["num_hidden_layers"])
    (folder / "config.json").write_text(json.dumps(config))


def draft_settings(method: str, layers: int) -> dict[str, Any]:
    """What a configuration says about draft layers of a model with so many layers."""
    if method == "mtp":
        return {"topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
    return {
        "topk_method": "noaux_tc",
        "n_mtp_layers": DSPARK_LAYERS,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [*range(layers)][-3:],
        "dspark_markov_rank": 16,
        "dspark_noise_token_id": 0,
    }


def made_once(shared: Path, name: str, make: Callable[[], object]) -> None:
    """Call a function that writes something into a folder, unless a process did so before. Others wait meanwhile."""
    with (shared / f"lock-{name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = shared / f"complete-{name}"
        if not complete.exists():
            make()
            complete.touch()


def v4_checkpoints(shared: Path, finish: Callable[[Path], object] = lambda _: None) -> dict[str, Path]:
    """Make folders of the model, "plain", "mtp" and "dspark", in a shared one. finish: is called with each of them."""
    folders = {name: shared / name for name in ("plain", "mtp", "dspark")}

    def make() -> None:
        checkpoint(folders["plain"], SIZES)
        for method in ("mtp", "dspark"):
            checkpoint_with_drafts(folders[method], folders["plain"], method)
        for folder in folders.values():
            finish(folder)

    made_once(shared, "v4", make)
    return folders


def write_as_released(folder: Path) -> None:
    """Write a configuration of transformers as DeepSeek's checkpoints have it, which vLLM 0.32 reads too."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    fields["compress_ratios"] = [RATIOS[name] for name in fields.pop("layer_types")]
    fields["num_hash_layers"] = fields.pop("mlp_layer_types").count("hash_moe")
    file.write_text(json.dumps(fields))


def _name_of_deepseek(name: str) -> str:
    """The name of a weight in DeepSeek's checkpoints, of which transformers writes a few in another way."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def _draft_weights(weights: Mapping[str, Tensor], config: Mapping[str, Any], method: str) -> dict[str, Tensor]:
    """Weights of draft layers. Blocks are copies of the model's first layer, which has a window only."""
    hidden, block, generator = config["hidden_size"], "layers.0.", torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    out = {}
    for draft in range(DSPARK_LAYERS if method == "dspark" else 1):
        for name, weight in weights.items():
            if name.startswith(block) and not name.endswith("tid2eid"):
                out[f"mtp.{draft}.{name.removeprefix(block)}"] = weight.clone()
        # experts of a draft are chosen by score
        out[f"mtp.{draft}.ffn.gate.bias"] = torch.zeros(config["n_routed_experts"])
    last = f"mtp.{draft}."
    # V4.1 has no head of hyper-connections
    heads = {"hc_head_fn", "hc_head_base", "hc_head_scale"} & weights.keys()
    out |= {last + name: weights[name].clone() for name in sorted(heads)}
    out[last + "norm.weight"] = weights["norm.weight"].clone()
    if method == "mtp":
        out |= {last + name: torch.ones(hidden).bfloat16() for name in ("enorm.weight", "hnorm.weight")}
        out |= {last + name: random(hidden, hidden) for name in ("e_proj.weight", "h_proj.weight")}
        out[last + "head.weight"] = weights["head.weight"].clone()
        out[last + "emb.tok_emb.weight"] = weights["embed.weight"].clone()
        return out
    rank, vocabulary = 16, config["vocab_size"]
    out |= {
        "mtp.0.main_proj.weight": random(hidden, 3 * hidden),
        "mtp.0.main_norm.weight": torch.ones(hidden).bfloat16(),
    }
    out |= {last + f"markov_head.markov_w{i}.weight": random(vocabulary, rank) for i in (1, 2)}
    out[last + "confidence_head.proj.weight"] = random(1, hidden + rank).float()
    return out


# ---------------------------------------------------------------- answers of vLLM's engine


def answers(llm: Any, prompts: Sequence[Sequence[int]], tokens: int, *, of_prompts: bool) -> list[dict[str, Any]]:
    """Generate a number of tokens greedily for all prompts at once. of_prompts: log-probabilities of prompts too.

    Of each prompt: tokens, those that were generated. cached: tokens of the prompt that were in the prefix cache.
    logprobs: [n, vocabulary] fp32, of the tokens after the first of the prompt, or of those after the whole prompt.
    """
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    numbers = {"logprobs": vocabulary, "prompt_logprobs": vocabulary if of_prompts else None}
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **numbers)
    results = []
    for output in llm.generate([{"prompt_token_ids": [*prompt]} for prompt in prompts], sampling, use_tqdm=False):
        [completion] = output.outputs
        rows = [*(output.prompt_logprobs or [None])[1:], *completion.logprobs]
        logprobs = torch.tensor([[row[token].logprob for token in range(vocabulary)] for row in rows])
        generated = [*completion.token_ids]
        results.append({"tokens": generated, "cached": output.num_cached_tokens, "logprobs": logprobs})
    return results


# ---------------------------------------------------------------- answers of transformers


def logprobs(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]], *, last: int | None = None
) -> list[Tensor]:
    """Log-probabilities [n, vocabulary] of each prompt and its answer, after each token but the last, on the CPU.

    last: how many rows at the end are computed, by default all.
    """
    device, results = next(model.parameters()).device, []
    with torch.no_grad():
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.tensor([[*prompt, *answer["tokens"][:-1]]], device=device)
            logits = model(tokens, logits_to_keep=last or 0).logits[0]
            results.append(logits.log_softmax(dim=-1).cpu())
    return results


def model_on_gpu(sizes: Mapping[str, Any]) -> Any:
    """The random model in fp32 on a GPU. Its attention takes some queries at a time, for memory."""
    torch.backends.cuda.matmul.allow_tf32 = False
    _attend_in_parts(modeling_deepseek_v4)
    return random_model(sizes).cuda()


@cache
def _attend_in_parts(modeling: Any) -> None:
    """Let transformers' attention take some queries at a time."""
    attend, rows = modeling.eager_attention_forward, 512

    def attend_in_parts(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> tuple[Any, None]:
        parts = zip(query.split(rows, dim=2), attention_mask.split(rows, dim=2), strict=True)
        return torch.cat([attend(module, q, key, value, mask, **options)[0] for q, mask in parts], dim=1), None

    modeling.eager_attention_forward = attend_in_parts


def transformers_integration() -> Any:
    """`dsv4attn.integrations.transformers`, which refuses the older releases of transformers that vLLM allows.

    They have the same DeepSeek-V4.
    """
    with mock.patch("dsv4attn.core.contract.device.version_of", return_value="5.23.0"):
        from dsv4attn.integrations import transformers
    return transformers


def replayed(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]], entries: Sequence[Any]
) -> list[Tensor]:
    """Log-probabilities as `logprobs` returns them, of a model that attends to recorded entries of each request."""
    results = []
    for prompt, answer, of_request in zip(prompts, answers, entries, strict=True):
        with transformers_integration().replay_entries(model, [of_request]):
            results += logprobs(model, [prompt], [answer])
    return results


def share_of(
    changed: Sequence[Tensor], expected: Sequence[Tensor], answers: Sequence[Mapping[str, Any]]
) -> tuple[float, float]:
    """Rms of the difference that a change makes to expected log-probabilities, and its share in an engine's answers.

    The share is 1 for an engine with the change, and near 0 for one without it. It sees what is smaller than the
    rounding of single positions, as rounding has no direction.
    """
    error = torch.cat([answer["logprobs"] for answer in answers]) - torch.cat([*expected])
    difference = torch.cat([*changed]) - torch.cat([*expected])
    return rms(difference), ((error * difference).sum() / difference.square().sum()).item()


def figures(expected: Sequence[Tensor], answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far the answers of requests are from the expected log-probabilities.

    expected: of each request [n, vocabulary]. answers: as `answers` returns them. rms: the worst of a request. gap: the
    worst of `worst_gap`. equal: the share of tokens that are the most likely ones.
    """
    errors, gaps, equal, total = [], [], 0, 0
    for rows, answer in zip(expected, answers, strict=True):
        assert answer["logprobs"].shape == rows.shape
        # the mean over a few rows spreads
        assert len(rows) < 8 or 0.9 < rows.std(dim=1).mean() < 1.1
        errors.append(rms(answer["logprobs"] - rows))
        gaps.append(worst_gap(rows, answer["tokens"]))
        tail = rows[-len(answer["tokens"]) :].argmax(dim=1)
        equal += int((tail == torch.tensor(answer["tokens"])).sum())
        total += len(answer["tokens"])
    return {"rms": max(errors), "gap": max(gaps), "equal": equal / total}


def rms(values: Tensor) -> float:
    """The root of the mean square."""
    return values.square().mean().sqrt().item()


def worst_gap(expected: Tensor, tokens: Sequence[int]) -> float:
    """How much less likely, in the logarithm, the least likely chosen token is than the best one at its place.

    expected: [n, vocabulary], whose last rows are those of the tokens.
    """
    rows = expected[-len(tokens) :]
    return (rows.max(dim=1).values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max().item()


# ---------------------------------------------------------------- bugs of which the answers must have nothing


def _compressor(model: Any, layer: int) -> Any:
    return model.model.layers[layer].self_attn.compressor


def _bugs(topk: int) -> dict[str, Callable[[Any], object]]:
    return {
        "no sinks": lambda model: [layer.self_attn.sinks.data.fill_(-100) for layer in model.model.layers],
        "a window of 127": lambda model: setattr(model.config, "sliding_window", 127),
        "a window of 129": lambda model: setattr(model.config, "sliding_window", 129),
        "the worst entries": lambda model: _compressor(model, 1).indexer.scorer.weights_proj.weight.data.neg_(),
        "one entry less": lambda model: setattr(_compressor(model, 1).indexer, "index_topk", topk - 1),
        "one entry more": lambda model: setattr(_compressor(model, 1).indexer, "index_topk", topk + 1),
        "another theta": lambda model: model.model.rotary_emb.compress_inv_freq.mul_(1.05),
        "no keys at ratio 4": lambda model: _compressor(model, 1).kv_norm.weight.data.zero_(),
        "no keys at ratio 128": lambda model: _compressor(model, 2).kv_norm.weight.data.zero_(),
    }


BUGS = tuple(_bugs(0))
"""Names of the bugs of `error_shares`."""


def error_shares(
    model: Any,
    expected: Tensor,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Mapping[str, Any]],
    bugs: Sequence[str] = BUGS,
) -> dict[str, tuple[float, float]]:
    """By name of a bug: rms of the difference that it makes to transformers' model, and its share, as of `share_of`."""

    def broken_models() -> Iterator[tuple[str, Any]]:
        topk = model.config.index_topk
        for name in bugs:
            broken = copy.deepcopy(model)
            _bugs(topk)[name](broken)
            yield name, broken

    return shares_of_bugs(broken_models(), expected, prompts, answers)


def shares_of_bugs(
    broken_models: Iterable[tuple[str, Any]],
    expected: Tensor,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[float, float]]:
    """What `error_shares` returns. broken_models: models with a bug, and its name."""
    return {name: share_of(logprobs(broken, prompts, answers), [expected], answers) for name, broken in broken_models}
