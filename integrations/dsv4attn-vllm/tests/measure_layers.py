"""Measure vLLM's DeepSeek-V4 layers and dsv4attn's on one CUDA GPU: `python tests/measure_layers.py --help`.

Both kinds of layer are built in one process from the same random fp8 weights, and work on the same caches: vLLM's
planner lays them out and vLLM's builders describe the steps. `engine.py` has the part of vLLM's scheduler and runner.

    insert, attention, output   the three methods that dsv4attn-vllm replaces; output is inverse RoPE, wo_a and wo_b
    served                      the three of them
    layer                       vLLM's `forward`: hidden states in, hidden states out

A time is that of one layer. Decode: in a captured graph of twenty layers of a kind, four with caches of their own; or
in vLLM's piecewise graphs, whose attention runs eagerly between replays, by the clock of the host. Prefill: eagerly.
Engines run in turn; times are medians. Exit code 1 if a result is further from vLLM's than `budgets.py` allows.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_PLUGINS", "dsv4attn")

import click
import torch
from budgets import excesses
from engine import Request
from released import GPU, KINDS, LAYERS, MODELS, TIMES, GPUEngine, engines, fill, of_kind
from rich.console import Console
from rich.table import Table
from torch import Tensor
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context


def captured(step: Step, kind: str, call: Callable[[Any], Any]) -> Callable[[], Any]:
    """A captured graph of the layers of a kind, to be replayed."""
    layers, graph = of_kind(step.engine, kind), torch.cuda.CUDAGraph()
    with step.context(CUDAGraphMode.FULL), torch.cuda.stream(torch.cuda.Stream()):
        for layer in layers:
            call(layer)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for layer in layers:
                call(layer)
    return graph.replay


def pieces(step: Step, kind: str, steps: int = 8) -> Callable[[], Any]:
    """Steps in vLLM's piecewise graphs, each with other metadata: a call runs one.

    Metadata come round again, and dsv4attn prepares its calls anew, as for a new step.
    """
    layers, engine = of_kind(step.engine, kind), step.engine
    metadata = [engine.describe(step.work) for _ in range(steps)]
    described = itertools.cycle([(by_prefix, prepared_in(by_prefix)) for by_prefix in metadata])
    with step.context(CUDAGraphMode.PIECEWISE), torch.cuda.stream(torch.cuda.Stream()):
        for layer in layers:
            step.parts["layer"](layer)
        torch.cuda.synchronize()
        with BreakableCUDAGraphCapture() as capture:
            for layer in layers:
                step.parts["layer"](layer)

    def run() -> None:
        metadata, prepared = next(described)
        for calls in prepared:
            calls.clear()
        with set_forward_context(metadata, engine.config, step.rows, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE):
            capture.replay()

    return run


def prepared_in(metadata: dict[str, Any]) -> list[Any]:
    """The calls that dsv4attn has prepared for a step, which the caller clears. vLLM's own metadata have none."""
    described = (getattr(value, "dsv4attn", None) for value in metadata.values())
    return list({id(window.prepared): window.prepared for window in described if hasattr(window, "prepared")}.values())


def in_turn(
    calls: dict[str, Callable[[], Any]], layers: int, *, repeat: int, rounds: int = 9, host: bool = False
) -> dict[str, float]:
    """Microseconds of a layer by each call, which run in turn: medians, of the GPU's clock or the host's."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            clock = time.perf_counter()
            begin.record()
            for _ in range(repeat):
                call()
            end.record()
            torch.cuda.synchronize()
            spent = (time.perf_counter() - clock) * 1e6 if host else begin.elapsed_time(end) * 1e3
            times[name].append(spent / repeat / layers)
    return {name: statistics.median(durations[1:]) for name, durations in times.items()}


class Step:
    """One step of an engine, and the inputs of each part of a layer."""

    PARTS = ("insert", "attention", "output", "served", "layer")

    def __init__(self, engine: GPUEngine, work: Sequence[tuple[Request, int]], seed: int = 3) -> None:
        self.engine, self.work, self.metadata = engine, work, engine.describe(work)
        self.rows, layer = sum(count for _, count in work), engine.layers[0]
        random = torch.Generator(GPU).manual_seed(seed)
        size = self.rows, layer.n_local_heads, 512
        self.hidden = torch.randn(self.rows, layer.hidden_size, generator=random, device=GPU).bfloat16()
        self.q, self.kv = (torch.randn(s, generator=random, device=GPU).bfloat16() for s in (size, size[::2]))
        # an insert of dsv4attn works in place
        self.scratch = self.q.clone()
        self.positions = engine.positions[: self.rows].clone()
        engine.topk.fill_(-1)
        most = engine.topk.shape[1]
        visible = ((self.positions + 1) // 4).clamp(min=1)
        # a permutation of the first entries would be too regular: multiples of an odd number, distinct below the length
        picks = torch.arange(most, device=GPU)[None] * 7919 % visible[:, None]
        engine.topk[: self.rows] = torch.where(torch.arange(most, device=GPU) < visible[:, None], picks, -1).int()
        self.out = torch.empty(self.rows, layer.padded_heads, 512, dtype=torch.bfloat16, device=GPU)
        self.parts: dict[str, Callable[[Any], Any]] = {
            "insert": self.insert,
            "attention": lambda layer: layer.forward_mqa(self.q, self.kv, self.positions, self.out),
            "output": lambda layer: layer._o_proj(self.out[:, : layer.n_local_heads], self.positions),
            "served": self.served,
            "layer": lambda layer: layer(self.positions, self.hidden),
        }

    def insert(self, layer: Any) -> Tensor:
        """The normalised and rotated q: of vLLM a tensor of its own, of dsv4attn the one that was given."""
        return layer._fused_qnorm_rope_kv_insert(self.scratch, self.kv, self.positions, self.metadata)

    def served(self, layer: Any) -> Tensor:
        """What dsv4attn replaces."""
        q = self.insert(layer)
        layer.forward_mqa(q, self.kv, self.positions, self.out)
        return layer._o_proj(self.out[:, : layer.n_local_heads], self.positions)

    def context(self, mode: CUDAGraphMode = CUDAGraphMode.NONE) -> Any:
        """The forward context in which vLLM runs the step."""
        return set_forward_context(self.metadata, self.engine.config, self.rows, cudagraph_runtime_mode=mode)


def compare(steps: dict[str, Step], kind: str) -> dict[str, float]:
    """How far outputs are from those of the first, in norms, and how many bytes of inserted records differ."""
    attended = {name: attend(step, kind) for name, step in steps.items()}
    # these change the caches, so they come when all have attended
    outputs = {name: {"layer": forward(step, kind)} for name, step in steps.items()}
    (name, base), *others = ((name, attended[name] | outputs[name]) for name in steps)
    results: dict[str, float] = {}
    for name, values in others:
        for part, value in values.items():
            of_vllm = base[part]
            results[f"{name}, {part}"] = (
                (value != of_vllm).sum().item()
                if value.dtype == torch.uint8
                else ((value.float() - of_vllm.float()).norm() / of_vllm.float().norm()).item()
            )
    return results


def attend(step: Step, kind: str) -> dict[str, Tensor]:
    """The records that a kind's first layer writes, its q after the insert, attention, and the output projection."""
    layer = of_kind(step.engine, kind)[0]
    with step.context():
        slots = step.metadata[layer.swa_cache_layer.prefix].slot_mapping[: step.rows]
        q = layer._fused_qnorm_rope_kv_insert(step.q.clone(), step.kv, step.positions, step.metadata)
        records, out = records_at(layer.swa_cache_layer.kv_cache, slots), torch.empty_like(step.out)
        layer.forward_mqa(q, step.kv, step.positions, out)
        attended = out[:, : layer.n_local_heads]
        results = {"records": records, "q": q[:, : layer.n_local_heads].clone(), "attention": attended.clone()}
        return results | {"output": layer._o_proj(attended, step.positions).clone()}


def forward(step: Step, kind: str) -> Tensor:
    """What the `forward` of a kind's first layer returns. The selection of the step stays."""
    saved = step.engine.topk.clone()
    with step.context():
        out = of_kind(step.engine, kind)[0](step.positions, step.hidden).clone()
    step.engine.topk.copy_(saved)
    return out


def records_at(pages: Tensor, slots: Tensor) -> Tensor:
    """The bytes of these slots, [T, 584]: codes and RoPE dims, then scales, which a page has after its data."""
    count, size, _ = pages.shape
    flat = pages.as_strided((count, size * 584), (pages.stride(0), 1))
    page, row = slots // size, slots % size
    data = flat[page[:, None], row[:, None] * 576 + torch.arange(576, device=GPU)]
    # the last scale byte is padding
    return torch.cat([data, flat[page[:, None], size * 576 + row[:, None] * 8 + torch.arange(7, device=GPU)]], 1)


def classes_of(names: Sequence[str]) -> dict[str, tuple[type, str]]:
    """Layer classes by name: vLLM's FlashMLA class, and dsv4attn's with its parts."""
    from dsv4attn_vllm.cuda import CUDAAttention
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

    known = {"vLLM": (DeepseekV4FlashMLAAttention, "none")}
    known |= {f"dsv4attn {parts}": (CUDAAttention, parts) for parts in ("auto", "none", "all")}
    return {name: known[name] for name in names}


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="flash", show_default=True)
@click.option("--tokens", default="64,256", show_default=True, help="decoded tokens, one a request")
@click.option("--prompts", default="2x1024,1x8192", show_default=True, help="steps of prefill: requests x tokens")
@click.option("--with", "names", default="vLLM,dsv4attn auto,dsv4attn none", show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--profile", is_flag=True, help="kernels of a layer's forward too, with their times")
@click.option("--json", "file", type=click.Path(path_type=Path), help="write all rows here")
def main(model: str, tokens: str, prompts: str, names: str, kinds: str, profile: bool, file: Path | None) -> None:
    """Compare and time vLLM's FlashMLA layers and dsv4attn's, decode and prefill."""
    decodes = [int(count) for count in tokens.split(",") if count]
    prefills = [tuple(map(int, shape.split("x"))) for shape in prompts.split(",") if shape]
    most = max([8192, *(requests * count for requests, count in prefills)])
    limits = {"max_num_seqs": max([8, *decodes]), "max_num_batched_tokens": most}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), engines(model, classes_of(names.split(",")), **limits) as by_name:
        for count in decodes:
            rows += decode_rows(by_name, count, kinds.split(","), profile=profile)
        for shape in prefills:
            rows += prefill_rows(by_name, *shape, kinds.split(","))
        if file:
            results = {"device": torch.cuda.get_device_name(), "model": model, "rows": rows}
            file.write_text(json.dumps(results, indent=1))
    show(rows, list(by_name))
    if wrong := excesses(rows):
        raise click.ClickException("\n".join(wrong))


def steps_of(by_name: dict[str, GPUEngine], contexts: Sequence[int], count: int) -> dict[str, Step]:
    """The same step of every engine: requests with these contexts, and `count` new tokens each."""
    first = next(iter(by_name.values()))
    free = list(first._free)
    work = [(first.at(context), count) for context in contexts]
    results = {}
    for name, engine in by_name.items():
        engine._free = first._free
        results[name] = Step(engine, work)
    first._free = free
    fill(first, next(engine for name, engine in by_name.items() if name != "vLLM"), work)
    return results


def decode_rows(
    by_name: dict[str, GPUEngine], count: int, kinds: Sequence[str], *, profile: bool = False
) -> list[dict[str, Any]]:
    """One token for each of `count` requests of 2,048 to 16,384 tokens."""
    lengths = torch.randint(2048, 16384, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    steps, rows = steps_of(by_name, lengths, 1), []
    for kind in kinds:
        row: dict[str, Any] = {"phase": "decode", "tokens": count, "kind": kind, "apart": compare(steps, kind)}
        layers = LAYERS * TIMES
        for part in Step.PARTS:
            graphs = {name: captured(step, kind, step.parts[part]) for name, step in steps.items()}
            row[part] = in_turn(graphs, layers, repeat=5)
        runs = {name: pieces(step, kind) for name, step in steps.items()}
        row["layer, piecewise"] = in_turn(runs, layers, repeat=4, host=True)
        rows.append(row)
        if profile:
            for name, step in steps.items():
                show_kernels(f"decode {count}, {kind}, {name}", step, kind)
    return rows


def prefill_rows(
    by_name: dict[str, GPUEngine], requests: int, count: int, kinds: Sequence[str]
) -> list[dict[str, Any]]:
    """Prompts, eagerly; those of several requests continue a context of 4,096 tokens."""
    steps, rows = steps_of(by_name, [4096 if requests > 1 else 0] * requests, count), []
    for kind in kinds:
        row: dict[str, Any] = {"phase": "prefill", "tokens": requests * count, "kind": kind}
        row["apart"] = compare(steps, kind)
        for part in Step.PARTS:
            calls = {name: eager(step, kind, part) for name, step in steps.items()}
            row[part] = in_turn(calls, LAYERS * TIMES, repeat=1, rounds=5)
        rows.append(row)
    return rows


def eager(step: Step, kind: str, part: str) -> Callable[[], Any]:
    """A part of the layers of a kind without a graph, as vLLM runs a step with prefill."""

    def run() -> None:
        with step.context():
            for layer in of_kind(step.engine, kind):
                step.parts[part](layer)

    return run


def show_kernels(title: str, step: Step, kind: str) -> None:
    """Print the kernels of one `forward`, in order, with mean times."""
    layers = of_kind(step.engine, kind)
    with step.context(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for layer in layers:
            layer(step.positions, step.hidden)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        times.setdefault(event.name, []).append(event.device_time)
    print(title)
    for name, durations in times.items():
        if len(durations) >= TIMES:
            print(f"  {len(durations) / len(layers):4.1f} x {statistics.median(durations):7.2f} us  {name[:110]}")


def show(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Print the rows."""
    console = Console(width=150)
    table = Table("step", "kind", "part", *(f"{name}, us" for name in names), title=torch.cuda.get_device_name())
    for row in rows:
        for part in (*Step.PARTS, "layer, piecewise"):
            if part in row:
                base, *times = (row[part][name] for name in names)
                cells = [f"{base:.1f}", *(f"{spent:.1f} ({base / spent:.2f}x)" for spent in times)]
                table.add_row(f"{row['phase']} {row['tokens']}", row["kind"], part, *cells)
    console.print(table)
    for row in rows:
        apart = ", ".join(f"{name} {value:.3g}" for name, value in row["apart"].items())
        console.print(f"{row['phase']} {row['tokens']} {row['kind']}: {apart}")


if __name__ == "__main__":
    main()
