"""Measure vLLM's engine with dsv4attn and with its own attention, by turns: `python measure_serving.py --help`.

Both engines hold a model with the sizes of DeepSeek-V4-Flash or Pro and fewer layers, in the released formats (fp8 with
a scale for each 128 x 128, experts in MXFP4) with random weights, and captured graphs. They are two processes on one
GPU, which serve the same requests one after the other. Each has caches of its own for what it compiles, so that both
start as on a new machine; but DeepGEMM's kernels, which both need, are compiled by the engine that starts first, that
with dsv4attn.

- first token: seconds from the arrival of all requests to the last first token

- per token: milliseconds between two tokens of a request, the median over requests; prompts of others included

- in decode: milliseconds between two tokens of the request whose first token came last: all prompts are done then

- step: milliseconds of a step in which all requests decode, the median over steps: a stall is not in it

- device busy: milliseconds of such a step in which the device worked, with `--profile`, unless prompts wait for memory

- tokens/s: generated tokens of all requests in a second, prompts included in the time

The file of results has the longest of these steps too (`longest_step_ms`), how long Python collected garbage in a turn
(`gc_ms`), how often torch asked the device for memory (`device_allocations`), and the figures of each turn.

With `--experts 32` a layer has an eighth of Flash's experts, as one of eight ranks of expert parallelism. More layers
fit, and attention has its share of a step as there, where ranks exchange tokens besides.

With `--gpus N` both engines divide heads and experts over the same N GPUs (`tensor_parallel_size`), by turns, and
`--memory` is of each GPU. `--options '{"enable_expert_parallel": true}'` gives each GPU whole experts.

With `--rank-of N` both engines hold on one GPU what each of N tensor-parallel ranks has: an Nth of the heads, of the
groups of the output projection, of the columns of every expert, and of the vocabulary. What ranks exchange is left out.

With `--drafts N` a layer of MTP proposes N tokens in each step. vLLM accepts half of them by chance, as those of random
weights are wrong.

Weights are equal in both engines, and tokens of a step are spread over the experts evenly, unless `--routing model` is
passed: a model with random weights sends tokens to few experts or to many, by chance, and experts are most of a step.

With `--profile` each engine serves each case once more, and writes files about steps of decode alone: summary.json
(milliseconds of a step, and those in which the device was busy), kernels.txt, host.txt, python.txt, trace.json.gz.
Files that begin with prefill are about the first step, with prompts.

With `--engine-process`, and with several GPUs, vLLM schedules and runs steps in a process of its own, as `vllm serve`
does; another one makes answers of the tokens meanwhile. A step is then measured as the second process sees it, and
collections of garbage, the device's allocations and profiles, which are facts of the first one, are left out.

An engine that does not start, or ends, is left out: the end of its log is printed, and the other one is measured. The
file of results is written after each case.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from attrs import define, field
from rich.console import Console
from rich.table import Table

from dsv4attn.tools.cli.options import PATH, target_file, target_folder

sys.path.append(str(Path(__file__).parents[1]))
import measuring
from measuring import FIGURES, Engine, EngineError, check_cases, kinds_of, medians, object_of, prompts_of, say
from released_sizes import FP8, MODELS

PLUGINS = OF_DSV4ATTN, OF_VLLM = "dsv4attn", "vllm"
EXPERTS = {
    "flash": {"n_routed_experts": 256, "moe_intermediate_size": 2048},
    "pro": {"n_routed_experts": 384, "moe_intermediate_size": 3072},
}
SHARED = "num_attention_heads", "o_groups", "moe_intermediate_size", "vocab_size"
"""Sizes of which each tensor-parallel rank has a part."""
LAYERS = {"flash": "swa c4a c128a c4a c128a c4a", "pro": "c4a c128a"}
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256]
"""Numbers of requests for which graphs are captured."""
CACHES = "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TILELANG_TMP_DIR", "VLLM_CACHE_ROOT"
"""Variables that name a folder for compiled code."""
VOCABULARY = 16000
"""Tokens of prompts are below it, as any rank has them."""
WIDTH = 200
"""Characters in a line of the table."""
EVEN, OF_MODEL = "even", "model"
ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
ENGINE_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    # it inherits the routing of tokens, and gets the function that makes weights
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
"""Variables of vLLM for `--engine-process`."""
PROFILED = 8
"""Steps that torch's profiler sees, and as many that Python's sees."""
BEFORE_PROFILE = 12
"""Steps of decode before them, at least."""
PROFILE_ROWS = 70
"""Lines of a profile."""


def sizes_of(model: str, ranks: int) -> dict[str, Any]:
    """Sizes of a model as one of so many tensor-parallel ranks has them. Raises UsageError if ranks would differ."""
    sizes = {**measuring.CONFIGURATION, **MODELS[model], **EXPERTS[model]}
    shared = {name: divmod(sizes[name], ranks) for name in SHARED}
    columns = shared["moe_intermediate_size"][0]
    # blocks of 128 columns have a scale each
    if any(rest for _, rest in shared.values()) or columns % FP8["weight_block_size"][1]:
        raise click.UsageError(f"--rank-of: expected ranks with equal shares of a model of {model}, got {ranks}")
    return {**sizes, **{name: size for name, (size, _) in shared.items()}}


def model_folder(kinds: Sequence[str], sizes: Mapping[str, Any]) -> str:
    """A folder with the configuration of a model of these layers."""
    folder = tempfile.mkdtemp(prefix="dsv4attn-vllm-")
    measuring.write_configuration(folder, kinds, sizes)
    file = Path(folder, "config.json")
    released = {"quantization_config": FP8, "expert_dtype": "fp4", "topk_method": "noaux_tc"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **released}))
    return folder


def give_values(model: Any) -> None:
    """Give fp8 and MXFP4 weights random values and small scales, as those of `load_format="dummy"` may not be finite.

    All scales become one power of two, as kernels keep them in various orders. Values follow from a weight's name.
    """
    import torch

    for name, weight in model.named_parameters():
        data = weight.data
        draw = torch.Generator(data.device).manual_seed(zlib.crc32(name.encode()))
        if "tid2eid" in name:
            continue
        if "scale" in name and data.dtype in (torch.uint8, torch.float8_e8m0fnu):
            data.view(torch.uint8).fill_(127 - 8)
        elif "scale" in name and data.is_floating_point():
            data.fill_(2.0**-12)
        elif data.dtype is torch.float8_e4m3fn:
            codes = data.view(torch.uint8)
            # of either sign, and below 127, which is NaN
            codes.random_(0, 254, generator=draw)
            codes.add_(codes >= 127)
        elif data.dtype in (torch.uint8, torch.int32) and data.dim() > 1:
            data.view(torch.uint8).random_(0, 256, generator=draw)


def give_all_values(worker: Any) -> None:
    """Give values to the model of one of vLLM's workers, and to its layer of drafts."""
    for model in (worker.get_model(), worker.get_draft_model()):
        if model is not None:
            give_values(model)


def route_evenly() -> None:
    """Let vLLM spread the tokens of a step over all experts: token t has experts k t, k t + 1, ..., modulo experts."""
    import torch
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator, RoutingStrategy

    class Even(RoutingStrategy):
        """Tables are made when vLLM measures memory, for its largest step; graphs read parts of them."""

        def __init__(self) -> None:
            self.tables: dict[Any, Any] = {}

        def route_tokens(
            self, hidden_states: Any, router_logits: Any, top_k: int, indices_type: Any = None
        ) -> tuple[Any, Any]:
            tokens, experts = router_logits.shape
            key = experts, top_k, indices_type, router_logits.device
            if key not in self.tables or len(self.tables[key][0]) < tokens:
                numbers = torch.arange(tokens * top_k, device=router_logits.device).view(tokens, top_k) % experts
                weights = torch.full(numbers.shape, 1 / top_k, dtype=torch.float32, device=numbers.device)
                self.tables[key] = weights, numbers.to(indices_type or torch.int32)
            weights, numbers = self.tables[key]
            return weights[:tokens], numbers[:tokens]

    RoutingSimulator.register_strategy(EVEN, Even())


def serve(link: Connection, log: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    """What an engine's process does.

    It sends the device, versions, and seconds until it was ready. Then it serves each (prompts, tokens, folder) that
    arrives, and sends figures; with a folder it writes a profile there.
    """
    measuring.begin_engine(log, environment)
    import torch
    import triton
    import vllm
    from vllm import LLM, SamplingParams

    if os.environ.get(ROUTING) == EVEN:
        route_evenly()
    begin = time.perf_counter()
    llm = LLM(**options)
    seconds = time.perf_counter() - begin
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    versions = {"triton": triton.__version__, "vllm": vllm.__version__}
    llm.collective_rpc(give_all_values)
    drafts = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
    few = SamplingParams(max_tokens=2, logprobs=1, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": [*range(1000, 2000)]}], few, use_tqdm=False)
    values = [entry.logprob for row in output.outputs[0].logprobs for entry in row.values()]
    assert all(map(math.isfinite, values)), values
    link.send((seconds, {**machine, **versions}))
    while (work := link.recv()) is not None:
        prompts, tokens, folder = work
        if folder is None:
            link.send(timed(llm, prompts, tokens))
        else:
            prefills = -(-sum(map(len, prompts)) // options["max_num_batched_tokens"])
            link.send(profiled(llm, prompts, prefills + BEFORE_PROFILE, 1 + drafts, Path(folder)))


def answers_of(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[Any]:
    """What vLLM's `LLM` returns for these prompts."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return outputs


@contextmanager
def collections() -> Iterator[list[float]]:
    """Seconds of each collection of garbage in the block."""
    begins, seconds = list[float](), list[float]()

    def note(phase: str, _info: object) -> None:
        if phase == "start":
            begins.append(time.perf_counter())
        elif begins:
            seconds.append(time.perf_counter() - begins.pop())

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def nothing() -> None:
    """Do nothing."""


@contextmanager
def around_steps(
    engine: Any, before: Callable[[], None] = nothing, after: Callable[[], None] = nothing
) -> Iterator[None]:
    """Call functions before and after each step of vLLM's engine, which is in this process."""
    original = engine.step

    def step() -> Any:
        before()
        outputs = original()
        after()
        return outputs

    engine.step = step
    try:
        yield
    finally:
        del engine.step


def timed(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Serve prompts, and return figures."""
    import torch

    ends: list[float] = []
    allocations = torch.cuda.memory_stats().get("num_device_alloc", 0)
    begin = time.perf_counter()
    with collections() as collected, around_steps(llm.llm_engine, after=lambda: ends.append(time.monotonic())):
        outputs = answers_of(llm, prompts, tokens)
    seconds = time.perf_counter() - begin
    metrics = [output.metrics for output in outputs]
    between = [(metric.last_token_ts - metric.first_token_ts) / (tokens - 1) for metric in metrics]
    last = max(range(len(outputs)), key=lambda i: metrics[i].first_token_ts)
    steps = decode_steps(ends, metrics[last].first_token_ts, min(metric.last_token_ts for metric in metrics))
    figures = {
        "first_token_s": max(metric.first_token_latency for metric in metrics),
        "per_token_ms": statistics.median(between) * 1e3,
        "decode_ms": between[last] * 1e3,
        "tokens_per_s": tokens * len(outputs) / seconds,
        "step_ms": statistics.median(steps) * 1e3,
        "longest_step_ms": max(steps) * 1e3,
    }
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
        return figures
    return figures | {
        "gc_ms": sum(collected) * 1e3,
        "device_allocations": torch.cuda.memory_stats().get("num_device_alloc", 0) - allocations,
    }


def decode_steps(ends: Sequence[float], first: float, finish: float) -> list[float]:
    """Seconds of the steps in which all requests decode; of all steps after the last first token if there are none.

    ends: when each step ended, by the clock of vLLM's events. first: when the last of the requests had its first token.
    finish: when the first of the requests had its last token.
    """
    begin, end = bisect_right(ends, first), bisect_right(ends, finish)
    chosen = ends[begin : end + 1] if end > begin else ends[begin:]
    return [after - before for before, after in pairwise(chosen)] or [math.nan]


def profiled(llm: Any, prompts: Sequence[Sequence[int]], skipped: int, most: int, folder: Path) -> dict[str, float]:
    """Serve prompts; write profiles of the first step and of PROFILED later ones; return what `summary.json` has.

    most: tokens of a request in a step. Where prompts wait for memory, the later steps may have some of them:
    `of_decode` is then 0.
    """
    import cProfile

    import torch
    from torch.profiler import ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    # the first start takes seconds
    with profile(activities=activities):
        torch.zeros(1, device="cuda")
    of_torch, prefill_of_torch = profile(activities=activities), profile(activities=activities)
    of_python, prefill_of_python = cProfile.Profile(), cProfile.Profile()
    clock: dict[str, float] = {}

    def begin() -> None:
        torch.cuda.synchronize()
        clock["begin"] = time.perf_counter()
        clock.setdefault("first", time.monotonic())

    def end(name: str) -> None:
        torch.cuda.synchronize()
        clock[name] = (time.perf_counter() - clock.pop("begin")) * 1e3 / PROFILED

    actions: dict[int, list[Callable[[], Any]]] = {
        1: [prefill_of_torch.start, prefill_of_python.enable],
        2: [torch.cuda.synchronize, prefill_of_python.disable, prefill_of_torch.stop],
        skipped: [begin],
        skipped + PROFILED: [partial(end, "step_ms"), of_torch.start, begin],
        skipped + 2 * PROFILED: [partial(end, "profiled_step_ms"), of_torch.stop, of_python.enable],
        skipped + 3 * PROFILED: [of_python.disable],
    }
    steps = itertools.count(1)

    def before() -> None:
        for action in actions.get(next(steps), ()):
            action()

    with around_steps(llm.llm_engine, before):
        outputs = answers_of(llm, prompts, (skipped + 3 * PROFILED + 4) * most)
    first = clock.pop("first")
    clock["of_decode"] = float(all(output.metrics.first_token_ts < first for output in outputs))
    on_device = [event for event in of_torch.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    intervals = [(event.time_range.start, event.time_range.end) for event in on_device]
    summary = {**clock, "busy_ms": busy(intervals) / 1e3 / PROFILED, "launched": len(intervals) / PROFILED}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    write_profiles(folder, "", of_torch, of_python)
    write_profiles(folder, "prefill-", prefill_of_torch, prefill_of_python)
    return summary


def write_profiles(folder: Path, prefix: str, of_torch: Any, of_python: Any) -> None:
    """Write what the profilers saw, to files whose names begin with the prefix."""
    import pstats

    means = of_torch.key_averages()
    for name, order in (("kernels", "self_cuda_time_total"), ("host", "self_cpu_time_total")):
        table = means.table(sort_by=order, row_limit=PROFILE_ROWS, max_name_column_width=90)
        (folder / f"{prefix}{name}.txt").write_text(table)
    with (folder / f"{prefix}python.txt").open("w") as stream:
        for order in ("tottime", "cumtime"):
            pstats.Stats(of_python, stream=stream).sort_stats(order).print_stats(PROFILE_ROWS)
    of_torch.export_chrome_trace(str(folder / f"{prefix}trace.json.gz"))


def busy(intervals: Sequence[tuple[float, float]]) -> float:
    """How long at least one of these (begin, end) lasts."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def engine_of(plugin: str, options: dict[str, Any], folder: Path, parts: str, environment: Mapping[str, str]) -> Engine:
    """A process with an engine. plugin: `OF_DSV4ATTN` or `OF_VLLM`."""
    common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    chosen = {"DSV4ATTN_VLLM": "0"} if plugin == OF_VLLM else {"DSV4ATTN_VLLM": "1", "DSV4ATTN_VLLM_PARTS": parts}
    common |= {name: str(folder / f"{plugin}-caches" / name.lower()) for name in CACHES}
    common |= {"DG_JIT_CACHE_DIR": str(folder / "deep-gemm"), **environment}
    return Engine(serve, folder / f"{plugin}.log", {**common, **chosen}, options)


@define
class Run:
    """Engines that serve by turns, and the report, which is written to a file after each step.

    engines: those that run, by plugin.
    """

    report: dict[str, Any]
    file: Path | None
    engines: dict[str, Engine] = field(factory=dict)

    def save(self) -> None:
        """Write the report."""
        if self.file:
            self.file.write_text(json.dumps(self.report, indent=1) + "\n")

    def leave_out(self, plugin: str, error: EngineError) -> None:
        """Go on without an engine that failed."""
        self.engines.pop(plugin, None)
        self.report["failed"][plugin] = str(error)
        say(f"{plugin}: {error}")

    def start(self, plugin: str, engine: Engine, limit: float, *, is_alone: bool = True) -> None:
        """Wait until an engine is ready, for this number of seconds at most. is_alone: no other starts meanwhile."""
        try:
            ready_s, context = engine.receive(limit)
        except EngineError as error:
            self.leave_out(plugin, error)
        else:
            self.engines[plugin] = engine
            self.report |= context
            if is_alone:
                self.report["ready_s"][plugin] = ready_s
            say(f"{plugin}: ready after {ready_s:.1f} s")
        self.save()

    def measure(self, count: int, length: int) -> None:
        """Serve so many prompts of this length. The first turn is not counted."""
        measured: dict[str, list[dict[str, float]]] = {plugin: [] for plugin in self.engines}
        for turn in range(self.report["turns"] + 1):
            for plugin, engine in [*self.engines.items()]:
                try:
                    figures = engine.ask(prompts_of(count, length, turn, VOCABULARY), self.report["tokens"], None)
                except EngineError as error:
                    self.leave_out(plugin, error)
                else:
                    measured[plugin] += [figures] * (turn > 0)
        served = {name: {**medians(turns), "of_turns": turns} for name, turns in measured.items() if turns}
        if served:
            self.report["cases"].append({"requests": count, "prompt": length, **served})
            say(json.dumps(self.report["cases"][-1]))
        self.save()

    def profile(self, count: int, length: int, folder: Path) -> None:
        """Let each engine serve so many prompts of this length once more, with a profile in the folder of its name."""
        for plugin, engine in [*self.engines.items()]:
            prompts = prompts_of(count, length, self.report["turns"] + 1, VOCABULARY)
            try:
                summary = engine.ask(prompts, self.report["tokens"], str(folder / plugin))
            except EngineError as error:
                self.leave_out(plugin, error)
            else:
                say(f"{plugin}: profile of {count}x{length}: {json.dumps(summary)}")
                for case in self.report["cases"]:
                    of_case = (case["requests"], case["prompt"]) == (count, length) and plugin in case
                    if of_case and summary["of_decode"]:
                        case[plugin]["busy_ms"] = summary["busy_ms"]
        self.save()


def drafting(drafts: int) -> dict[str, Any]:
    """What vLLM is told about so many drafts."""
    accepting = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1 + drafts / 2}
    return {"method": "mtp", "num_speculative_tokens": drafts, **accepting}


@click.command(help=__doc__)
@click.option("--model", type=click.Choice([*MODELS]), default="flash", show_default=True)
@click.option(
    "--layers",
    "kinds",
    callback=kinds_of,
    help="kinds of layers, with spaces between them; by default those that fit twice in 80 GB",
)
@click.option("--experts", type=click.IntRange(6), help="in a layer, as one of several ranks has; by default all")
@click.option(
    "--cases",
    default="1x1024,8x1024,64x1024,256x1024,1x8192,8x8192,64x8192",
    show_default=True,
    callback=measuring.cases_of,
    help="REQUESTSxTOKENS",
)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="that each request generates")
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True, help="of each engine, after one more")
@click.option("--parts", default="all", show_default=True, help="DSV4ATTN_VLLM_PARTS")
@click.option("--captured", default=" ".join(map(str, CAPTURED)), show_default=True, help="requests of captured graphs")
@click.option("--drafts", type=click.IntRange(0), default=0, show_default=True, help="of MTP for each request and step")
@click.option(
    "--routing",
    type=click.Choice([EVEN, OF_MODEL]),
    default=EVEN,
    show_default=True,
    help="tokens are spread over experts evenly, or by the model's router, whose weights are random",
)
@click.option("--profile", type=PATH, callback=target_folder, help="folder for profiles of each engine in each case")
@click.option("--memory", default=8.0, show_default=True, help="GiB of the caches of keys of each engine")
@click.option("--start-limit", default=400.0, show_default=True, help="seconds that an engine may take to start")
@click.option("--at-once", is_flag=True, help="start both engines at once; how long they take is then not measured")
@click.option("--options", "more", default="{}", callback=object_of, help="of vLLM's LLM, for both engines, as JSON")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="that share each layer")
@click.option(
    "--rank-of", type=click.IntRange(min=1), default=1, show_default=True, help="ranks, of which each engine is one"
)
@click.option("--engine-process", is_flag=True, help="schedule and run steps in a process of their own; no profiles")
@click.option(
    "--folder",
    type=PATH,
    callback=target_folder,
    help="for logs and compiled code; with that of an earlier run, both start warm",
)
@click.option("--only", type=click.Choice([OF_DSV4ATTN, OF_VLLM]), help="one engine alone")
@click.option("--json", "out", callback=target_file, help="file for the results")
def main(
    *,
    model: str,
    kinds: list[str] | None,
    experts: int | None,
    cases: list[tuple[int, int]],
    tokens: int,
    turns: int,
    parts: str,
    captured: str,
    drafts: int,
    routing: str,
    profile: Path | None,
    memory: float,
    start_limit: float,
    at_once: bool,
    more: dict[str, Any],
    gpus: int,
    rank_of: int,
    engine_process: bool,
    folder: Path | None,
    only: str | None,
    out: Path | None,
) -> None:
    """See the module."""
    if (engine_process or gpus > 1) and profile is not None:
        cure = "take one GPU" if gpus > 1 else "leave --engine-process out"
        raise click.UsageError(f"--profile needs steps in the process that it profiles: {cure}")
    kinds = kinds or LAYERS[model].split()
    sizes = sizes_of(model, rank_of)
    experts = sizes["n_routed_experts"] = experts or sizes["n_routed_experts"]
    options = {
        "model": model_folder(kinds, sizes),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "disable_log_stats": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": round(memory * 2**30),
        "max_model_len": 16384,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": [int(count) * (1 + drafts) for count in captured.split()]},
        **({"speculative_config": drafting(drafts)} if drafts else {}),
        **({"tensor_parallel_size": gpus} if gpus > 1 else {}),
        **more,
    }
    check_cases(cases, tokens, options["max_num_seqs"], options["max_model_len"])
    folder = folder or Path(tempfile.mkdtemp(prefix="dsv4attn-vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"logs: {folder}")
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "model": model,
        "layers": kinds,
        "experts": experts,
        "tokens": tokens,
        "turns": turns,
        "parts": parts,
        "max_num_batched_tokens": options["max_num_batched_tokens"],
        "memory_gib": memory,
        "routing": routing,
        "options": more,
        **({"engine_process": True} if engine_process else {}),
        **({"drafts": drafts} if drafts else {}),
        **({"gpus": gpus} if gpus > 1 else {}),
        **({"rank_of": rank_of} if rank_of > 1 else {}),
        "ready_s": {},
        "failed": {},
        "cases": [],
    }
    run, environment = Run(report, out), {ROUTING: EVEN} if routing == EVEN else {}
    environment |= ENGINE_PROCESS if engine_process or gpus > 1 else {}
    # an error now, not after the first start
    run.save()
    engines: list[Engine] = []
    try:
        chosen = [plugin for plugin in PLUGINS if only in (None, plugin)]
        for plugin in chosen:
            engines.append(engine_of(plugin, options, folder, parts, environment))
            if not at_once:
                run.start(plugin, engines[-1], start_limit)
        for plugin, engine in zip(chosen, engines, strict=True) if at_once else ():
            run.start(plugin, engine, start_limit, is_alone=False)
        for count, length in cases:
            run.measure(count, length)
        for count, length in cases if profile is not None else ():
            run.profile(count, length, profile / f"{count}x{length}")
    finally:
        for engine in engines:
            engine.close()
    if not report["cases"]:
        raise click.ClickException("no engine was measured")
    Console(width=WIDTH).print(table_of(report))


def ratio(values: Mapping[str, float]) -> str:
    """dsv4attn's value as a multiple of vLLM's, or empty where one is missing. values: by plugin."""
    return f"{values[OF_DSV4ATTN] / values[OF_VLLM]:.3f}" if {OF_DSV4ATTN, OF_VLLM} <= values.keys() else ""


def rows_of(report: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table of a report, heads first: of each figure those of both engines, and the ratio."""
    present = {name for case in report["cases"] for plugin in PLUGINS for name in case.get(plugin, ())}
    shown = {name: figure for name, figure in FIGURES.items() if name in present}
    heads = [[f"{head}: dsv4attn", "vLLM", "ratio"] for head, _ in shown.values()]
    rows = [["requests", "prompt", *chain.from_iterable(heads)]]
    for case in report["cases"]:
        row = [str(case["requests"]), str(case["prompt"])]
        for name, (_, decimals) in shown.items():
            values = {plugin: case[plugin][name] for plugin in PLUGINS if name in case.get(plugin, ())}
            row += [f"{values[p]:,.{decimals}f}" if p in values else "" for p in PLUGINS]
            row.append(ratio(values))
        rows.append(row)
    return rows


def started(report: Mapping[str, Any]) -> str:
    """How long both engines took to start."""
    names = {OF_DSV4ATTN: "with dsv4attn", OF_VLLM: "with vLLM's own attention"}
    ready, failed = report["ready_s"], [*report["failed"]]
    parts = [f"{ready[plugin]:.1f} s {name}" for plugin, name in names.items() if plugin in ready]
    text = "Start-up: " + ", ".join(parts) + (f" (ratio {ratio(ready)})" if ratio(ready) else "") if parts else ""
    return " ".join([text + "."] * bool(text) + [f"The engine {names[plugin]} failed." for plugin in failed])


def table_of(report: Mapping[str, Any]) -> Table:
    """The results as a table."""
    device = f"{report.get('gpus', 1)} x {report.get('device', 'no device')}".removeprefix("1 x ")
    rank = f" of one of {report['rank_of']} ranks" if "rank_of" in report else ""
    title = f"{report['model']}, {len(report['layers'])} layers{rank}, {device}, {report['date']}"
    heads, *rows = rows_of(report)
    caption = f"{started(report)} vLLM: with its own attention; ratio: dsv4attn / vLLM"
    table = Table(title=title, caption=caption)
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    main()
