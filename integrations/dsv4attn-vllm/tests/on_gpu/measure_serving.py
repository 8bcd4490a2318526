"""Measure vLLM's engine with dsv4attn and with its own attention, by turns: `python measure_serving.py --help`.

Both engines hold a model with the sizes of DeepSeek-V4-Flash or Pro and fewer layers, in the released formats (fp8 with
a scale for each 128 x 128, experts in MXFP4) with random weights, and captured graphs. They are two processes on one
GPU, which serve the same requests one after the other. Each has caches of its own for what it compiles, so that both
start as on a new machine; but DeepGEMM's kernels, which both need, are compiled by the engine that starts first, that
with dsv4attn.

    first token   seconds from the arrival of all requests to the last first token
    per token     milliseconds between two tokens of a request, the median over requests
    tokens/s      generated tokens of all requests in a second, prompts included in the time
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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))
from released_sizes import FP8, MODELS, RELEASED

OF_DSV4ATTN, OF_VLLM = "dsv4attn", "vllm"
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
    """What an engine's process does: it serves each (prompts, tokens) that arrives, and sends (arrival, metrics)."""
    os.environ.update(environment)
    with open(log, "w") as file:  # noqa: PTH123 - a path that travels as text
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(**options)
    seconds = time.perf_counter() - begin
    llm.apply_model(give_values)
    few = SamplingParams(max_tokens=2, logprobs=1, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": [*range(1000, 2000)]}], few, use_tqdm=False)
    values = [entry.logprob for row in output.outputs[0].logprobs for entry in row.values()]
    assert all(map(math.isfinite, values)), values
    link.send(seconds)
    while (work := link.recv()) is not None:
        prompts, tokens = work
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        firsts = [output.metrics.first_token_latency for output in outputs]
        between = [(output.metrics.last_token_ts - output.metrics.first_token_ts) / (tokens - 1) for output in outputs]
        link.send(
            {
                "first_token_s": max(firsts),
                "per_token_ms": statistics.median(between) * 1e3,
                "tokens_per_s": tokens * len(outputs) / seconds,
            }
        )


class Engine:
    """A process with an engine. plugin: `OF_DSV4ATTN` or `OF_VLLM`."""

    def __init__(self, plugin: str, options: dict[str, Any], folder: Path, steps: str) -> None:
        common = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        chosen = {"DSV4ATTN_VLLM": "0"} if plugin == OF_VLLM else {"DSV4ATTN_VLLM": "1", "DSV4ATTN_VLLM_STEPS": steps}
        common |= {name: str(folder / f"{plugin}-caches" / name.lower()) for name in CACHES}
        common["DG_JIT_CACHE_DIR"] = str(folder / "deep-gemm")
        self.link, theirs = multiprocessing.Pipe()
        self.log = folder / f"{plugin}.log"
        inputs = theirs, str(self.log), {**common, **chosen}, options
        self.process = multiprocessing.get_context("spawn").Process(target=serve, args=inputs)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """What the process sends next. Raises ClickException with the end of its log if it has ended."""
        try:
            return self.link.recv()
        except EOFError:
            raise click.ClickException(f"{self.log}:\n" + self.log.read_text()[-3000:]) from None

    def measure(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
        """Serve these prompts at once."""
        self.link.send((prompts, tokens))
        result: dict[str, float] = self.receive()
        return result

    def close(self) -> None:
        """End the process."""
        self.link.send(None)
        self.process.join(30)


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
        "kv_cache_memory_bytes": 8 * 2**30,
        "max_model_len": 16384,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "linear_backend": linear_backend,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURED},
    }
    folder = Path(tempfile.mkdtemp(prefix="dsv4attn-vllm-"))
    print(f"logs: {folder}", file=sys.stderr)
    engines: dict[str, Engine] = {}
    ready: dict[str, float] = {}
    for plugin in (OF_DSV4ATTN, OF_VLLM) if only is None else (only,):
        engines[plugin] = Engine(plugin, options, folder, steps)
        ready[plugin] = engines[plugin].receive()
        print(f"{plugin}: ready after {ready[plugin]:.1f} s", file=sys.stderr, flush=True)
    results = []
    for text in cases.split(","):
        count, length = case_of(text)
        found: dict[str, list[dict[str, float]]] = {plugin: [] for plugin in engines}
        for turn in range(turns + 1):
            for plugin, engine in engines.items():
                figures = engine.measure(prompts_of(count, length, turn), tokens)
                if turn:
                    found[plugin].append(figures)
        medians = {
            plugin: {name: statistics.median(f[name] for f in several) for name in several[0]}
            for plugin, several in found.items()
        }
        results.append({"requests": count, "prompt": length, **medians})
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    for engine in engines.values():
        engine.close()
    import torch

    context = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    report = {
        **context,
        "model": model,
        "layers": kinds,
        "tokens": tokens,
        "linears": linear_backend,
        "ready_s": ready,
        "cases": results,
    }
    if out:
        out.write_text(json.dumps(report, indent=1) + "\n")
    Console().print(table_of(report))


def table_of(report: dict[str, Any]) -> Table:
    """The results as a table; ratios are those of dsv4attn to vLLM's own attention."""
    title = f"{report['model']}, {len(report['layers'])} layers, {report['device']}, {report['date']}"
    table = Table(title=title, caption="ratio: dsv4attn / vLLM's own attention")
    for name in ("requests", "prompt", "first token, s", "ratio", "per token, ms", "ratio", "tokens/s", "ratio"):
        table.add_column(name, justify="right")
    for case in report["cases"]:
        ours, own = case.get(OF_DSV4ATTN), case.get(OF_VLLM)
        shown = ours or own
        cells = []
        for name, digits in (("first_token_s", 3), ("per_token_ms", 2), ("tokens_per_s", 0)):
            ratio = f"{ours[name] / own[name]:.3f}" if ours and own else ""
            cells += [f"{shown[name]:.{digits}f}", ratio]
        table.add_row(str(case["requests"]), str(case["prompt"]), *cells)
    return table


if __name__ == "__main__":
    main()
