"""What vLLM's engine is asked to do in the tests on a GPU: a table of scenarios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen
from gpu_tests import Round
from small_model import LENGTHS, SIZES, mixed, of_stages, prompt_of

SIZES_OF_STAGES = of_stages(SIZES)
"""For pipeline parallelism."""

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.02,
    "kv_cache_memory_bytes": 2**31,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "max_logprobs": 256,
}
CAPTURED = [1, 2, 4, 8]


FIRST = Round([prompt_of(length) for length in LENGTHS], of_prompts=True)


@frozen
class Scenario:
    """One engine, and what it serves.

    name: of the test. rounds: names of actions, or requests. options: of vLLM's `LLM`. environment: variables.
    graphs: the mode of captured graphs, or "eager". checkpoint: the folder's name. capability: that of the GPU for
    which vLLM takes this one. backend, parts: the variables of dsv4attn. gpus: how many. records_entries: whether files
    of selected entries are written.
    """

    name: str
    rounds: Sequence[Round | str] = (FIRST,)
    options: Mapping[str, Any] = field(factory=dict)
    environment: Mapping[str, str] = field(factory=dict)
    graphs: str = "FULL_AND_PIECEWISE"
    checkpoint: str = "plain"
    capability: str = ""
    backend: str = ""
    parts: str = "all"
    gpus: int = 1
    records_entries: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def has_own_records(self) -> bool:
        """Whether V4.1's keys are rounded to its own records."""
        return "kv_cache_dtype" in self.options

    @property
    def is_accepting(self) -> bool:
        """Whether vLLM accepts drafts by chance, so that tokens are not those of the highest probability."""
        return "rejection_sample_method" in self.options.get("speculative_config", {})

    def input(self, folder: str, *, by_vllm: bool) -> dict[str, Any]:
        """The input of worker.py. folder: of the checkpoint. by_vllm: serve with vLLM's own attention and parts."""
        options = {**DEFAULTS, **self.options, "model": folder}
        if self.gpus > 1:
            options = {"tensor_parallel_size": self.gpus, **options}
        captured = CAPTURED
        if by_vllm:
            # TileLang compiles for 13 s each what vLLM would compile ahead; so only what runs
            options["kernel_config"] = {"enable_jit_warmup": False}
            captured = CAPTURED[-1:] if "speculative_config" in options else CAPTURED
        if self.graphs == "eager":
            options["enforce_eager"] = True
        else:
            graphs = {"mode": 0, "cudagraph_mode": self.graphs, "cudagraph_capture_sizes": captured}
            options["compilation_config"] = {**graphs, **options.get("compilation_config", {})}
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **self.environment}
        if by_vllm:
            environment["DSV4ATTN_VLLM"] = "0"
        else:
            environment |= {"DSV4ATTN_VLLM": "1", "DSV4ATTN_VLLM_PARTS": self.parts}
            if self.backend:
                environment["DSV4ATTN_BACKEND"] = self.backend
        return {
            "environment": environment,
            "capability": "" if by_vllm else self.capability,
            "is_v41": self.checkpoint.startswith("v41"),
            "options": options,
            "rounds": [step if isinstance(step, str) else step.input() for step in self.rounds],
        }


def _speculative(method: str, tokens: int, **options: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": tokens, **options}}


def _accepting(length: float) -> dict[str, Any]:
    """Let vLLM accept drafts by chance, so many tokens a step in the mean; the drafts of random weights are wrong."""
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}


PREFIX = prompt_of(2048, 1)
SHARED = [*PREFIX, *prompt_of(100, 2)]
GROWING = Round([prompt_of(length) for length in (20, 30, 40, 50, 60, 70, 80, 100)], tokens=72)
"""Prompts that all fit into the pool of `FEW_PAGES`. Decodes then add pages to windows and to states of compressors."""
FEW_PAGES = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 160,
}
"""For `GROWING`. vLLM wants 140 pages for one request of 512 tokens while two steps run at once, as on a GPU."""
OTHERS = [Round([prompt_of(2148, seed)], tokens=1) for seed in range(10, 16)]
OFFLOADING = {
    "kv_offloading_size": 1.0,
    "num_gpu_blocks_override": 1000,
    "max_model_len": 2304,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 1,
}
"""GiB of the CPU, and so few blocks on the GPU that the other requests take all."""
MIXED_8, MIXED_64 = Round(mixed(8, 8192), tokens=16), Round(mixed(64, 8192), tokens=16)
LONG = {"max_model_len": 8448, "kv_cache_memory_bytes": 2**32, "max_num_batched_tokens": 2048}
AT_ONCE_AND_ALONE = (
    FIRST,
    Round([*reversed(FIRST.prompts)], of_prompts=True),
    *(Round([prompt], of_prompts=True) for prompt in FIRST.prompts),
)
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
SHORT = Round([prompt_of(length) for length in LENGTHS[:3]], of_prompts=True)

SCENARIOS = [
    Scenario("eager", graphs="eager"),
    Scenario("eager-triton", graphs="eager", backend="triton"),
    Scenario("graphs-full", graphs="FULL"),
    Scenario("graphs-full-decode-only", graphs="FULL_DECODE_ONLY"),
    Scenario("graphs-piecewise", graphs="PIECEWISE"),
    Scenario("graphs-mixed"),
    Scenario("graphs-mixed-triton", backend="triton"),
    *(Scenario(f"chunks-of-{n}", options={"max_num_batched_tokens": n}) for n in (64, 256, 2048)),
    # the second request computes the 100 tokens after the prefix as the first one does, in a chunk of their own
    Scenario("prefix-cache", (Round([SHARED]), Round([SHARED])), {"max_num_batched_tokens": 2048, "max_num_seqs": 1}),
    # the prefix goes to the CPU, the GPU's blocks are taken by other requests, and it comes back
    Scenario("offload", (Round([SHARED]), *OTHERS, Round([SHARED])), OFFLOADING, records_entries=True),
    Scenario("entries", (FIRST, Round([SHARED]), Round([SHARED])), records_entries=True),
    Scenario("preemption", (GROWING,), FEW_PAGES),
    Scenario("requests-come-and-go", (MIXED_64,), {**LONG, "max_num_seqs": 4}),
    Scenario("async-scheduling", options={"async_scheduling": True}),
    Scenario("sync-scheduling", options={"async_scheduling": False}),
    Scenario("8-requests", (MIXED_8,), LONG),
    Scenario("64-requests", (MIXED_64,), {**LONG, "max_num_seqs": 64}),
    Scenario("batch-invariant", AT_ONCE_AND_ALONE, environment=INVARIANT),
    Scenario("batch-invariant-eager", AT_ONCE_AND_ALONE, environment=INVARIANT, graphs="eager"),
    Scenario("batch-invariant-triton", AT_ONCE_AND_ALONE, environment=INVARIANT, backend="triton"),
    Scenario("mtp-1", options=_speculative("mtp", 1), checkpoint="mtp"),
    Scenario("mtp-3", options=_speculative("mtp", 3), checkpoint="mtp"),
    Scenario("mtp-1-accepted", options=_speculative("mtp", 1, **_accepting(1.6)), checkpoint="mtp"),
    Scenario("mtp-3-accepted", options=_speculative("mtp", 3, **_accepting(2.5)), checkpoint="mtp"),
    Scenario("mtp-3-accepted-eager", (FIRST,), _speculative("mtp", 3, **_accepting(2.5)), {}, "eager", "mtp"),
    Scenario("dspark", options=_speculative("dspark", 5), checkpoint="dspark"),
    Scenario("dspark-accepted", options=_speculative("dspark", 5, **_accepting(3.0)), checkpoint="dspark"),
    Scenario("sleep-and-wake", (SHORT, "sleep", "wake", SHORT), {"enable_sleep_mode": True}),
    Scenario("weights-again", (SHORT, "reload", SHORT), {"enable_sleep_mode": True}),
    *(
        Scenario(f"as-on-sm-{c.replace('.', '')}", capability=c, backend="triton", parts="all")
        for c in ("8.0", "8.6", "8.9")
    ),
    *(Scenario(f"parts-{name}", parts=name) for name in ("none", "indexer", "compressor", "projection", "mhc", "auto")),
]
"""On one GPU."""

WITHOUT_OFFLOADING = Scenario(
    "without-offload",
    (Round([SHARED]), *OTHERS, Round([SHARED])),
    {name: value for name, value in OFFLOADING.items() if name != "kv_offloading_size"},
)
"""The scenario "offload" without a cache on the CPU: the prefix is computed again."""

V41_OPTIONS = {
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 2**30,
    "limit_mm_per_prompt": {"image": 0},
}
OWN_RECORDS = {"kv_cache_dtype": "nvfp4_ds_mla"}
"""V4.1's own records: 528 bytes in windows, 288 in compressed caches."""
V41_ROUNDS = (FIRST, Round([prompt_of(2000, 3)]), Round([prompt_of(2000, 3)]), Round([prompt_of(250, 4)]))
"""Prompts of later rounds are prefilled in one chunk, the third round's after a hit in the prefix cache."""

V41_SCENARIOS = [
    evolve(scenario, name=f"v41-{scenario.name}", options={**V41_OPTIONS, **scenario.options})
    for scenario in (
        Scenario("eager", V41_ROUNDS, graphs="eager", checkpoint="v41"),
        Scenario("eager-triton", V41_ROUNDS, graphs="eager", checkpoint="v41", backend="triton"),
        Scenario("graphs-full-decode-only", V41_ROUNDS, graphs="FULL_DECODE_ONLY", checkpoint="v41"),
        Scenario("graphs-mixed", V41_ROUNDS, checkpoint="v41"),
        Scenario("chunks-of-256", options={"max_num_batched_tokens": 256}, checkpoint="v41"),
        Scenario("dspark", V41_ROUNDS, _speculative("dspark", 5), checkpoint="v41-dspark"),
        Scenario("dspark-accepted", V41_ROUNDS, _speculative("dspark", 5, **_accepting(3.0)), checkpoint="v41-dspark"),
        Scenario("own-records-eager", V41_ROUNDS, OWN_RECORDS, graphs="eager", checkpoint="v41"),
        Scenario("own-records-graphs-mixed", V41_ROUNDS, OWN_RECORDS, checkpoint="v41"),
        Scenario("own-records-chunks-of-256", options={**OWN_RECORDS, "max_num_batched_tokens": 256}, checkpoint="v41"),
        Scenario(
            "own-records-eager-triton", V41_ROUNDS, OWN_RECORDS, graphs="eager", checkpoint="v41", backend="triton"
        ),
        Scenario("own-records-dspark", V41_ROUNDS, OWN_RECORDS | _speculative("dspark", 5), checkpoint="v41-dspark"),
        # vLLM's compressor and indexer, with DeepGEMM on index keys in these blocks
        Scenario("own-records-parts-auto", V41_ROUNDS, OWN_RECORDS, checkpoint="v41", parts="auto"),
    )
]
"""DeepSeek-V4.1 on one GPU, with dsv4attn's indexer and compressor, but for "parts-auto"."""

TENSOR_PARALLEL = Scenario("tensor-parallel-2", gpus=2, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
PIPELINE_PARALLEL = Scenario(
    "pipeline-parallel-2",
    options={"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
    gpus=2,
    environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    checkpoint="stages",
)
"""Both on two GPUs."""
