"""What SGLang's engine is asked to do in the tests on a GPU: a table of scenarios, the most important ones first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen
from gpu_tests import Round
from small_model import LENGTHS, mixed, prompt_of

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "context_length": 4096,
    "max_running_requests": 8,
    "max_total_tokens": 65536,
    "swa_full_tokens_ratio": 0.5,
    # several engines share the GPU: the number of tokens limits the caches
    "mem_fraction_static": 0.6,
    "chunked_prefill_size": 1024,
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_flashinfer_autotune": True,
    "disable_custom_all_reduce": True,
    "random_seed": 0,
    "log_level": "info",
}
"""Options of SGLang's `Engine`."""

PAGE = 256
"""Tokens of a page of SGLang's caches of DeepSeek-V4."""

EAGER = {"disable_cuda_graph": True}
GRAPHS = {"cuda_graph_bs_decode": [1, 2, 4, 8], "cuda_graph_backend_prefill": "disabled"}
"""Decodes run in captured graphs. SGLang captures no prompts of DeepSeek-V4 unless it is told to."""
GRAPHS_OF_PROMPTS = {**GRAPHS, "cuda_graph_backend_prefill": "breakable", "cuda_graph_bs_prefill": [256, 1024]}


FIRST = Round([prompt_of(length) for length in LENGTHS], of_prompts=True)


@frozen
class Scenario:
    """One engine, and what it serves.

    name: of the test. rounds: requests. options: of SGLang's `Engine`. environment: variables. checkpoint: the folder's
    name. backend, parts: the variables of dsv4attn.
    """

    name: str
    rounds: Sequence[Round] = (FIRST,)
    options: Mapping[str, Any] = field(factory=dict)
    graphs: Mapping[str, Any] = field(default=EAGER)
    environment: Mapping[str, str] = field(factory=dict)
    checkpoint: str = "plain"
    backend: str = ""
    parts: str = "all"

    def __str__(self) -> str:
        return self.name

    @property
    def is_accepting(self) -> bool:
        """Whether SGLang accepts drafts by chance, so that tokens are not those of the highest probability."""
        return "SGLANG_SIMULATE_ACC_LEN" in self.environment

    def input(self, folder: str, *, by_sglang: bool) -> dict[str, Any]:
        """The input of worker.py. folder: of the checkpoint. by_sglang: serve with SGLang's own attention."""
        environment = {**self.environment, "DSV4ATTN_SGLANG": "0" if by_sglang else "1"}
        if not by_sglang:
            environment["DSV4ATTN_SGLANG_PARTS"] = self.parts
            if self.backend:
                environment["DSV4ATTN_BACKEND"] = self.backend
        return {
            "environment": environment,
            "options": {**DEFAULTS, **self.graphs, **self.options, "model_path": folder},
            "rounds": [step.input() for step in self.rounds],
        }


def _drafts(algorithm: str, tokens: int) -> dict[str, Any]:
    """Options for so many drafts in a step. SGLang takes the drafts' layers from the same folder."""
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": tokens,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": tokens + 1,
    }


def _accepting(length: float) -> dict[str, str]:
    """Let SGLang accept drafts by chance, so many tokens a step in the mean; the drafts of random weights are wrong."""
    return {
        "SGLANG_SIMULATE_ACC_LEN": str(length),
        "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
    }


SHARED = [*prompt_of(2048, 1), *prompt_of(100, 2)]
"""Eight whole pages, and 100 tokens that are a chunk of their own with and without the pages in the radix cache."""
ANSWERED = Round([SHARED])
GROWING = Round([prompt_of(length) for length in (20, 60, 100, 140, 180, 200, 220, 240)], tokens=48)
MIXED_8, MIXED_64 = Round(mixed(8, 8192), tokens=16), Round(mixed(64, 8192), tokens=16)
LONG = {"context_length": 8448, "max_total_tokens": 196608, "chunked_prefill_size": 2048}
MTP_1, MTP_3, DSPARK = _drafts("EAGLE", 1), _drafts("EAGLE", 3), {"speculative_algorithm": "DSPARK"}
"""SGLang drafts with the MTP layer of a DeepSeek-V4 if its algorithm EAGLE is asked for."""

SCENARIOS = [
    Scenario("eager"),
    Scenario("graphs", graphs=GRAPHS),
    Scenario("prefix-cache", (ANSWERED, ANSWERED), {"chunked_prefill_size": 2048}),
    Scenario("chunks-of-256", options={"chunked_prefill_size": 256}, graphs=GRAPHS),
    # SGLang's own switch takes requests out of a running batch at every third step, and they come back later
    Scenario("retraction", (GROWING,), graphs=GRAPHS, environment={"SGLANG_TEST_RETRACT": "1"}),
    Scenario("mtp-1", options=MTP_1, graphs=GRAPHS, checkpoint="mtp"),
    Scenario("mtp-3-accepted", (FIRST,), MTP_3, GRAPHS, _accepting(2.5), "mtp"),
    Scenario("eager-triton", backend="triton"),
    Scenario("graphs-triton", graphs=GRAPHS, backend="triton"),
    Scenario("parts-none", graphs=GRAPHS, parts="none"),
    Scenario("parts-indexer", graphs=GRAPHS, parts="indexer"),
    Scenario("parts-gather", graphs=GRAPHS, parts="gather"),
    Scenario("8-requests", (MIXED_8,), LONG, GRAPHS),
    Scenario(
        "64-requests", (MIXED_64,), LONG | {"max_running_requests": 64}, GRAPHS | {"cuda_graph_bs_decode": [8, 64]}
    ),
    Scenario("mtp-3", options=MTP_3, graphs=GRAPHS, checkpoint="mtp"),
    Scenario("mtp-3-accepted-eager", (FIRST,), MTP_3, EAGER, _accepting(2.5), "mtp"),
    Scenario("graphs-of-prompts", graphs=GRAPHS_OF_PROMPTS),
    Scenario("requests-come-and-go", (MIXED_64,), {**LONG, "max_running_requests": 4}, GRAPHS),
    Scenario("prefix-cache-graphs", (ANSWERED, ANSWERED), {"chunked_prefill_size": 2048}, GRAPHS),
    Scenario("without-overlap", options={"disable_overlap_schedule": True}, graphs=GRAPHS),
    Scenario("dspark", options=DSPARK, graphs=GRAPHS, checkpoint="dspark"),
    Scenario("dspark-accepted", (FIRST,), DSPARK, GRAPHS, _accepting(3.0), "dspark"),
]
"""On one GPU, with attention and the parts indexer and gather on dsv4attn, unless a name says otherwise."""

TENSOR_PARALLEL = Scenario("tensor-parallel-2", options={"tp_size": 2}, graphs=GRAPHS)
"""On two GPUs: each has 32 heads."""

V41 = {"enable_decoder_swa_bounded_replay": False}
"""All layers run on all tokens of a prompt. SGLang reads the configuration of DeepSeek-V4.1 as it is."""
V41_SCENARIOS = [
    Scenario("v41-eager", options=V41, checkpoint="v41", parts="auto"),
    Scenario("v41-graphs", options=V41, graphs=GRAPHS, checkpoint="v41", parts="auto"),
]
"""DeepSeek-V4.1 on one GPU of sm_90, with SGLang's compressor and indexer, which is in torch there."""
V41_OWN_RECORDS = Scenario(
    "v41-own-records", (FIRST,), V41, GRAPHS, {"SGLANG_DSV4_KV_LAYOUT": "v41_new"}, "v41", parts="auto"
)
"""The same on V4.1's own records instead of those of 584 bytes."""


def write_for_sglang(folder: Path) -> None:
    """Write in config.json what SGLang 0.5.23 reads there, as the released models have it.

    SGLang needs `topk_method`, and the length of training in `rope_scaling`: here YaRN by a factor of 1, which changes
    nothing. It does not know transformers' own keys for the same.
    """
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for key in ("rope_parameters", "compress_rates", "transformers_version"):
        config.pop(key, None)
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    scaling["original_max_position_embeddings"] = config["max_position_embeddings"]
    config |= {"topk_method": "noaux_tc", "dtype": "bfloat16", "rope_scaling": scaling}
    if "dspark_target_layer_ids" in config:
        # SGLang first looks for the key without a prefix, and else wants a model of four layers
        config["target_layer_ids"] = config["dspark_target_layer_ids"]
    file.write_text(json.dumps(config))
