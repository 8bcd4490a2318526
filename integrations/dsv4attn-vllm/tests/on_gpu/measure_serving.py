"""Measure vLLM's engine with dsv4attn and with its own attention, by turns: `python measure_serving.py --help`.

Both engines hold a model with the sizes of DeepSeek-V4-Flash or Pro and fewer layers, in the released formats (fp8 with
a scale for each 128 x 128, experts in MXFP4) with random weights, and captured graphs. They are two processes on one
GPU, which serve the same requests one after the other. Each has caches of its own for what it compiles, so that both
start as on a new machine; but DeepGEMM's kernels, which both need, are compiled by the engine that starts first, that
with dsv4attn.

    first token   seconds from the arrival of all requests to the last first token
    per token     milliseconds between two tokens of a request, the median over requests; prompts of others included
    in decode     milliseconds between two tokens of the request whose first token came last: all prompts are done then
    tokens/s      generated tokens of all requests in a second, prompts included in the time

An engine that does not start, or ends, is left out: the end of its log is printed, and the other one is measured. The
file of results is written after each case.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from attrs import define, field
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))
from released_sizes import FP8, MODELS, RELEASED

PLUGINS = OF_DSV4ATTN, OF_VLLM = "dsv4attn", "vllm"
KINDS = {
    "swa": "sliding_attention",
    "c4a": "compressed_sparse_attention",
    "c128a": "heavily_compressed_attention",
}
ENTRIES: dict[str, Any] = {
    **RELEASED,
    "head_dim": 512,
    "num_experts_per_tok": 6,
    "vocab_size": 129280,
    "architectures": ["DeepseekV4ForCausalLM"],
    "dtype": "bfloat16",
}
EXPERTS = {
    "flash": {"n_routed_experts": 256, "moe_intermediate_size": 2048},
    "pro": {"n_routed_experts": 384, "moe_intermediate_size": 3072},
}
LAYERS = {"flash": "swa c4a c128a c4a c128a c4a", "pro": "c4a c128a"}
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256]
"""Numbers of tokens for which graphs are captured."""
CACHES = "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TILELANG_TMP_DIR", "VLLM_CACHE_ROOT"
"""Variables that name a folder for compiled code."""
LOG_CHARACTERS = 3000
"""At the end of the log of an engine that failed, which are printed and saved."""
WIDTH = 160
"""Characters in a line of the table."""
FIGURES = {
    "first_token_s": ("first token, s", 3),
    "per_token_ms": ("per token, ms", 2),
    "decode_ms": ("in decode, ms", 2),
    "tokens_per_s": ("tokens/s", 0),
}
"""Figures of a case: the head of the column, and how many decimals are shown."""


def model_folder(model: str, kinds: Sequence[str]) -> str:
    """A folder with the configuration of a model of these layers."""
    from transformers import DeepseekV4Config

    types = [KINDS[kind] for kind in kinds]
    sizes = {**ENTRIES, **MODELS[model], **EXPERTS[model]}
    layers = {"layer_types": types, "mlp_layer_types": ["moe"] * len(types)}
    config = DeepseekV4Config(**sizes, **layers, num_hidden_layers=len(types))
    folder = tempfile.mkdtemp(prefix="dsv4attn-vllm-")
    config.save_pretrained(folder)
    file = Path(folder, "config.json")
    released = {"quantization_config": FP8, "expert_dtype": "fp4", "topk_method": "noaux_tc"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **released}))
    return folder


def give_values(model: Any) -> None:
    """Give fp8 and MXFP4 weights random values and small scales, as those of `load_format="dummy"` may not be finite.

    All scales become one power of two, as kernels keep them in various orders.
    """
    import torch

    for name, weight in model.named_parameters():
        data = weight.data
        if "tid2eid" in name:
            continue
        if "scale" in name and data.dtype in (torch.uint8, torch.float8_e8m0fnu):
            data.view(torch.uint8).fill_(127 - 8)
        elif "scale" in name and data.is_floating_point():
            data.fill_(2.0**-12)
        elif data.dtype is torch.float8_e4m3fn:
            codes = data.view(torch.uint8)
            # of either sign, and below 127, which is NaN
            codes.random_(0, 127).add_(torch.randint_like(codes, 2) * 128)
        elif data.dtype in (torch.uint8, torch.int32) and data.dim() > 1:
            data.view(torch.uint8).random_(0, 256)


def serve(link: Connection, log: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    """What an engine's process does.

    It sends the device, versions, and seconds until it was ready. Then it serves each (prompts, tokens) that arrives,
    and sends figures.
    """
    os.environ.update(environment)
    with open(log, "w") as file:  # noqa: PTH123 - a path that travels as text
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    import torch
    import triton
    import vllm
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(**options)
    seconds = time.perf_counter() - begin
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    versions = {"triton": triton.__version__, "vllm": vllm.__version__}
    llm.apply_model(give_values)
    few = SamplingParams(max_tokens=2, logprobs=1, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": [*range(1000, 2000)]}], few, use_tqdm=False)
    values = [entry.logprob for row in output.outputs[0].logprobs for entry in row.values()]
    assert all(map(math.isfinite, values)), values
    link.send((seconds, {**machine, **versions}))
    while (work := link.recv()) is not None:
        prompts, tokens = work
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        firsts = [output.metrics.first_token_latency for output in outputs]
        between = [(output.metrics.last_token_ts - output.metrics.first_token_ts) / (tokens - 1) for output in outputs]
        last = max(range(len(outputs)), key=lambda i: outputs[i].metrics.first_token_ts)
        link.send(
            {
                "first_token_s": max(firsts),
                "per_token_ms": statistics.median(between) * 1e3,
                "decode_ms": between[last] * 1e3,
                "tokens_per_s": tokens * len(outputs) / seconds,
            }
        )


class EngineError(Exception):
    """An engine did not start, or ended. It has the end of its log."""


class Engine:
    """A process with an engine. plugin: `OF_DSV4ATTN` or `OF_VLLM`.

    start: wait until it is ready. ready_s: seconds that its constructor took. context: the device, and versions.
    """

    def __init__(self, plugin: str, options: dict[str, Any], folder: Path, steps: str) -> None:
        common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        chosen = {"DSV4ATTN_VLLM": "0"} if plugin == OF_VLLM else {"DSV4ATTN_VLLM": "1", "DSV4ATTN_VLLM_STEPS": steps}
        common |= {name: str(folder / f"{plugin}-caches" / name.lower()) for name in CACHES}
        common["DG_JIT_CACHE_DIR"] = str(folder / "deep-gemm")
        self.ready_s, self.context = math.nan, dict[str, str]()
        self.link, theirs = multiprocessing.Pipe()
        self.log = folder / f"{plugin}.log"
        inputs = theirs, str(self.log), {**common, **chosen}, options
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=inputs)
        self.process.start()
        theirs.close()

    def _error(self, reason: str) -> EngineError:
        """The error to raise. The process is ended."""
        self.process.terminate()
        self.process.join(30)
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return EngineError(f"{reason}\n{text[-LOG_CHARACTERS:]}".strip())

    def _receive(self, limit: float | None) -> Any:
        """What the process sends next, after this number of seconds at most."""
        try:
            if not self.link.poll(limit):
                raise self._error(f"no answer after {limit:.0f} s")
            return self.link.recv()
        except (EOFError, ConnectionError):
            raise self._error("the process ended") from None

    def start(self, limit: float) -> None:
        """Wait until the engine is ready, for this number of seconds at most. Raises EngineError."""
        self.ready_s, self.context = self._receive(limit)

    def measure(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """Serve these prompts at once. Raises EngineError."""
        try:
            self.link.send((prompts, tokens))
        except ConnectionError:
            raise self._error("the process ended") from None
        figures: dict[str, float] = self._receive(None)
        return figures

    def close(self) -> None:
        """End the process."""
        with suppress(ConnectionError):
            self.link.send(None)
        self.process.join(30)
        self.process.terminate()


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
            engine.start(limit)
        except EngineError as error:
            self.leave_out(plugin, error)
        else:
            self.engines[plugin] = engine
            self.report |= engine.context
            if is_alone:
                self.report["ready_s"][plugin] = engine.ready_s
            say(f"{plugin}: ready after {engine.ready_s:.1f} s")
        self.save()

    def measure(self, count: int, length: int) -> None:
        """Serve so many prompts of this length. The first turn is not counted."""
        measured: dict[str, list[dict[str, float]]] = {plugin: [] for plugin in self.engines}
        for turn in range(self.report["turns"] + 1):
            for plugin, engine in [*self.engines.items()]:
                try:
                    figures = engine.measure(prompts_of(count, length, turn), self.report["tokens"])
                except EngineError as error:
                    self.leave_out(plugin, error)
                else:
                    measured[plugin] += [figures] * (turn > 0)
        medians = {
            plugin: {name: statistics.median(figures[name] for figures in several) for name in FIGURES}
            for plugin, several in measured.items()
            if several
        }
        if medians:
            self.report["cases"].append({"requests": count, "prompt": length, **medians})
            say(json.dumps(self.report["cases"][-1]))
        self.save()


def prompts_of(count: int, length: int, turn: int) -> list[list[int]]:
    """Random prompts that no earlier turn had, so that nothing is in a prefix cache."""
    import random

    draw = random.Random(f"{count} {length} {turn}")
    return [[draw.randrange(1000, 100000) for _ in range(length)] for _ in range(count)]


def case_of(text: str) -> tuple[int, int]:
    """(requests, tokens of a prompt) of a text such as 64x1024."""
    count, _, length = text.partition("x")
    return int(count), int(length)


@click.command(help=__doc__)
@click.option("--model", type=click.Choice([*MODELS]), default="flash", show_default=True)
@click.option("--layers", help="kinds of layers, with spaces between them; by default those that fit twice in 80 GB")
@click.option(
    "--cases", default="1x1024,8x1024,64x1024,256x1024,1x8192,8x8192,64x8192", show_default=True, help="REQUESTSxTOKENS"
)
@click.option("--tokens", default=64, show_default=True, help="that each request generates")
@click.option("--turns", default=3, show_default=True, help="of each engine, after one that is not counted")
@click.option("--steps", default="all", show_default=True, help="DSV4ATTN_VLLM_STEPS")
@click.option("--linear-backend", default="auto", show_default=True, help="of vLLM, in both engines")
@click.option("--max-num-batched-tokens", default=8192, show_default=True, help="of a step")
@click.option("--memory", default=8.0, show_default=True, help="GiB of the caches of keys of each engine")
@click.option("--start-limit", default=400.0, show_default=True, help="seconds that an engine may take to start")
@click.option("--at-once", is_flag=True, help="start both engines at once; how long they take is then not measured")
@click.option("--options", "more", default="{}", help="of vLLM's LLM, more for both engines, as JSON")
@click.option("--folder", type=Path, help="for logs and compiled code; with that of an earlier run, both start warm")
@click.option("--only", type=click.Choice([OF_DSV4ATTN, OF_VLLM]), help="one engine alone")
@click.option("--json", "out", type=Path, help="file for the results")
def main(
    *,
    model: str,
    layers: str | None,
    cases: str,
    tokens: int,
    turns: int,
    steps: str,
    linear_backend: str,
    max_num_batched_tokens: int,
    memory: float,
    start_limit: float,
    at_once: bool,
    more: str,
    folder: Path | None,
    only: str | None,
    out: Path | None,
) -> None:
    """See the module."""
    kinds = (layers or LAYERS[model]).split()
    options = {
        "model": model_folder(model, kinds),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "disable_log_stats": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": round(memory * 2**30),
        "max_model_len": 16384,
        "max_num_seqs": 256,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": False,
        "linear_backend": linear_backend,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
        **json.loads(more),
    }
    folder = folder or Path(tempfile.mkdtemp(prefix="dsv4attn-vllm-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"logs: {folder}")
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "model": model,
        "layers": kinds,
        "tokens": tokens,
        "turns": turns,
        "steps": steps,
        "linears": linear_backend,
        "max_num_batched_tokens": max_num_batched_tokens,
        "memory_gib": memory,
        "options": json.loads(more),
        "ready_s": {},
        "failed": {},
        "cases": [],
    }
    run = Run(report, out)
    try:
        engines = ((plugin, Engine(plugin, options, folder, steps)) for plugin in PLUGINS if only in (None, plugin))
        for plugin, engine in [*engines] if at_once else engines:
            run.start(plugin, engine, start_limit, is_alone=not at_once)
        for case in cases.split(","):
            run.measure(*case_of(case))
    finally:
        for engine in run.engines.values():
            engine.close()
    Console(width=WIDTH).print(table_of(report))
    if not report["cases"]:
        raise click.ClickException("no engine was measured")


def say(text: str) -> None:
    """Print a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def ratio(values: Mapping[str, float]) -> str:
    """dsv4attn's value as a multiple of vLLM's, or empty where one is missing. values: by plugin."""
    return f"{values[OF_DSV4ATTN] / values[OF_VLLM]:.3f}" if {OF_DSV4ATTN, OF_VLLM} <= values.keys() else ""


def rows_of(report: Mapping[str, Any]) -> list[list[str]]:
    """Cells of the table of a report, heads first: of each figure those of both engines, and the ratio."""
    heads = [[f"{head}: dsv4attn", "vLLM", "ratio"] for head, _ in FIGURES.values()]
    rows = [["requests", "prompt", *chain.from_iterable(heads)]]
    for case in report["cases"]:
        row = [str(case["requests"]), str(case["prompt"])]
        for name, (_, decimals) in FIGURES.items():
            values = {plugin: case[plugin][name] for plugin in (OF_DSV4ATTN, OF_VLLM) if plugin in case}
            row += [f"{values[p]:,.{decimals}f}" if p in values else "" for p in (OF_DSV4ATTN, OF_VLLM)]
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
    title = f"{report['model']}, {len(report['layers'])} layers, {report.get('device', 'no device')}, {report['date']}"
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
