"""Measure SGLang's engine with dsv4attn and with its own attention, by turns: `python measure_serving.py --help`.

The engines hold a model with the sizes of DeepSeek-V4-Flash and fewer layers and experts, in bf16, with random weights
that are equal in all, and decode in captured graphs. SGLang spreads tokens over experts evenly. Each engine is a
process on the same GPUs, and they serve the same requests one after the other. Decodes begin after all prompts.

By default dsv4attn, with the parts that it takes by itself, is measured beside SGLang with its own attention, to which
all ratios are. `--engine`, once for each engine, names others: `dsv4attn:all` is dsv4attn with the parts
(DSV4ATTN_SGLANG_PARTS) after the colon.

- first token: seconds until each request has one token.

- per token: milliseconds of a decode step, the time of the other tokens divided by their number.

- tokens/s: generated tokens of all requests in a second, prompts included in the time.

Each is the median of the turns, after one that is not counted.

With `--profile FOLDER` each engine then serves each case once more, under SGLang's profiler: FOLDER/CASE/ENGINE has its
traces, and decode.txt and extend.txt with the time that each kernel took in steps of decode and of prompts.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dsv4attn.tools.cli.options import PATH, target_file, target_folder

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parents[2] / "dsv4attn-vllm" / "tests")]

import measuring
from measuring import Engine, EngineError, check_cases, kinds_of, medians, object_of, prompts_of, say
from released_sizes import MODELS

OF_SGLANG = "sglang"
ENGINES = [OF_SGLANG, "dsv4attn", *(f"dsv4attn:{parts}" for parts in ("all", "none", "indexer", "gather"))]
LAYERS = "swa c4a c128a c4a c128a c4a c128a c4a c128a c4a"
PROFILED = 8
"""Steps of a profile, at most."""
FIGURES = {name: measuring.FIGURES[name] for name in ("first_token_s", "per_token_ms", "tokens_per_s")}
VOCABULARY = 100000
"""Tokens of prompts are below it."""


def write_model(folder: Path, kinds: list[str], experts: int) -> None:
    """Write the configuration of a model of these layers into a folder."""
    from small_model import write_as_released

    from on_gpu.scenarios import write_for_sglang

    sizes = {**MODELS["flash"], "n_routed_experts": experts, "moe_intermediate_size": 2048}
    measuring.write_configuration(folder, kinds, sizes)
    write_as_released(folder)
    write_for_sglang(folder)


def serve(link: Connection, log: str, environment: dict[str, str], options: dict[str, Any]) -> None:
    """What an engine's process does: serve each (prompts, tokens, profile) that arrives, and send the seconds.

    profile: a folder for traces, or None.
    """
    measuring.begin_engine(log, environment)
    from sglang.srt.entrypoints.engine import Engine as SGLangEngine

    engine = SGLangEngine(**options)
    link.send(None)
    with suppress(EOFError):
        while (work := link.recv()) is not None:
            prompts, tokens, profile = work
            if profile:
                asked = {"num_steps": PROFILED, "activities": ["GPU"], "profile_by_stage": True, "with_stack": False}
                engine.start_profile(output_dir=profile, **asked)
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            begin = time.perf_counter()
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
            seconds = time.perf_counter() - begin
            assert all(len(output["output_ids"]) == tokens for output in outputs)
            link.send(seconds)
    engine.shutdown()


def engine_of(name: str, options: dict[str, Any], folder: Path) -> Engine:
    """An engine's process, which ends with the command."""
    environment = {
        "DSV4ATTN_SGLANG": str(int(name != OF_SGLANG)),
        "DSV4ATTN_SGLANG_PARTS": name.partition(":")[2] or "auto",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": "1",
    }
    engine = Engine(serve, folder / f"{name}.log", environment, options)
    click.get_current_context().call_on_close(engine.close)
    return engine


def measured(engines: dict[str, Engine], count: int, length: int, tokens: int, turns: int) -> dict[str, Any]:
    """Figures of each engine, by its name: medians of the turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        prompts = prompts_of(count, length, turn, VOCABULARY)
        for name, engine in engines.items():
            first, whole = (engine.ask(prompts, number, None) for number in (1, tokens))
            decode = (whole - first) / (tokens - 1)
            figures = {"first_token_s": first, "per_token_ms": decode * 1e3, "tokens_per_s": count * tokens / whole}
            found[name] += [figures] * (turn > 0)
    return {name: medians(of_turns) for name, of_turns in found.items()}


def profiled(engines: dict[str, Engine], count: int, length: int, folder: Path) -> None:
    """Let each engine serve a case once more with a profile, and leave what `kernels_of` says beside the traces."""
    for name, engine in engines.items():
        of_engine = folder / f"{count}x{length}" / name
        of_engine.mkdir(parents=True)
        engine.ask(prompts_of(count, length, 0, VOCABULARY), 2 * PROFILED, str(of_engine))
        # of several ranks, the first
        for trace in of_engine.glob("*-TP-0-*.trace.json.gz"):
            stage = trace.name.removesuffix(".trace.json.gz").rpartition("-")[2].lower()
            with gzip.open(trace) as file:
                (of_engine / f"{stage}.txt").write_text(kernels_of(json.load(file)["traceEvents"]))


def kernels_of(events: list[dict[str, Any]]) -> str:
    """How long the device worked, and on which kernels: a line each of microseconds, launches and the name, in all."""
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ends = max((e["ts"] + e["dur"] for e in kernels), default=0)
    span = ends - min((e["ts"] for e in kernels), default=0)
    times, launches = Counter[str](), Counter[str]()
    for kernel in kernels:
        times[kernel["name"]] += kernel["dur"]
        launches[kernel["name"]] += 1
    head = f"{span:.0f} us in up to {PROFILED} steps, of which kernels take {times.total():.0f}\n"
    return head + "".join(f"{time:12.0f} {launches[name]:8}  {name}\n" for name, time in times.most_common())


def table_of(report: dict[str, Any]) -> Table:
    """The figures of each engine in each case, and their ratios to SGLang's own."""
    title = f"Flash's sizes, {len(report['layers'])} layers, {report['gpus']} x {report['device']}, {report['date']}"
    table = Table(title=title, caption="sglang: with its own attention; ratio: to sglang")
    for column in ("requests x prompt", "engine"):
        table.add_column(column)
    for head, _ in FIGURES.values():
        for column in (head, "ratio"):
            table.add_column(column, justify="right")
    for case in report["cases"]:
        of_sglang = case["figures"].get(OF_SGLANG, {})
        for engine, figures in case["figures"].items():
            row = [f"{case['requests']} x {case['prompt']:,}", engine]
            for name, (_, decimals) in FIGURES.items():
                is_ratio = engine != OF_SGLANG and bool(of_sglang)
                row += [f"{figures[name]:,.{decimals}f}", f"{figures[name] / of_sglang[name]:.3f}" if is_ratio else ""]
            table.add_row(*row)
    return table


def new_folder(ctx: click.Context, parameter: click.Parameter, folder: Path | None) -> Path | None:
    """A folder that does not exist yet, and can be made."""
    if folder and folder.exists():
        raise click.BadParameter(f"expected a folder that does not exist yet, got {folder}")
    return target_folder(ctx, parameter, folder)


@click.command(help=__doc__)
@click.option("--layers", default=LAYERS, show_default=True, callback=kinds_of, help="kinds, with spaces between them")
@click.option("--experts", type=click.IntRange(6), default=32, show_default=True, help="in a layer")
@click.option(
    "--cases",
    default="8x1024,64x1024,256x1024,8x8192",
    show_default=True,
    callback=measuring.cases_of,
    help="REQUESTSxTOKENS, with commas between them",
)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="that each request generates")
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True, help="counted turns of each engine")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="that share each layer")
@click.option("--engine", "names", type=click.Choice(ENGINES), multiple=True, help="to measure, see above")
@click.option("--start-limit", default=400.0, show_default=True, help="seconds that all engines may take to start")
@click.option(
    "--options", "more", default="{}", callback=object_of, help="of SGLang's Engine, more for all engines, as JSON"
)
@click.option("--folder", type=PATH, callback=target_folder, help="for logs")
@click.option("--profile", type=PATH, callback=new_folder, help="new folder for profiles of each engine in each case")
@click.option("--json", "out", callback=target_file, help="file for the results")
def main(
    *,
    layers: list[str],
    experts: int,
    cases: list[tuple[int, int]],
    tokens: int,
    turns: int,
    gpus: int,
    names: tuple[str, ...],
    start_limit: float,
    more: dict[str, Any],
    folder: Path | None,
    profile: Path | None,
    out: Path | None,
) -> None:
    """See the module."""
    import torch

    folder = folder or Path(tempfile.mkdtemp(prefix="dsv4attn-sglang-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"logs: {folder}")
    write_model(folder / "model", layers, experts)
    options = {
        "model_path": str(folder / "model"),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "tp_size": gpus,
        "context_length": 16384,
        "max_running_requests": 256,
        "max_total_tokens": 2**19,
        "swa_full_tokens_ratio": 0.6,
        # the engines share the GPU: the number of tokens limits the caches
        "mem_fraction_static": 0.9,
        "chunked_prefill_size": 8192,
        "disable_radix_cache": True,
        "cuda_graph_bs_decode": [1, 8, 64, 256],
        "cuda_graph_backend_prefill": "disabled",
        "random_seed": 0,
        **more,
    }
    check_cases(cases, tokens, options["max_running_requests"], options["context_length"])
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layers": layers,
        "experts": experts,
        "tokens": tokens,
        "turns": turns,
        "gpus": gpus,
        "options": more,
        "cases": [],
    }
    engines = {name: engine_of(name, options, folder) for name in dict.fromkeys(names or ("dsv4attn", OF_SGLANG))}
    limit = time.monotonic() + start_limit
    try:
        for engine in engines.values():
            engine.receive(max(0.0, limit - time.monotonic()))
        for count, length in cases:
            figures = measured(engines, count, length, tokens, turns)
            report["cases"].append({"requests": count, "prompt": length, "figures": figures})
            say(json.dumps(report["cases"][-1]))
            if out:
                out.write_text(json.dumps(report, indent=1) + "\n")
        Console(width=160).print(table_of(report))
        for count, length in cases if profile else ():
            profiled(engines, count, length, profile)
    except EngineError as error:
        raise click.ClickException(f"an engine failed, see the logs in {folder}: {error}") from error


if __name__ == "__main__":
    main()
