"""`dsv4attn run`: serves a request trace through the attention layers of a model, and checks rows while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve

from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, UnknownNameError
from dsv4attn.tools.cli import FAILED, INTERRUPTED, OK, complete, print_json
from dsv4attn.tools.cli.common import check_request, chosen_backend, console, geometry_of, require_torch, write_file
from dsv4attn.tools.cli.options import (
    DECIDED_BACKEND,
    HTML,
    MODEL,
    OPTION,
    choice,
    flag,
    integer,
    options,
    text,
    token_count,
    torch_device,
)
from dsv4attn.tools.cli.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.serving.request import Request
    from dsv4attn.tools.replay.engine import Progress, Replay, ReplayConfig
    from dsv4attn.tools.replay.over_ranks import MeteredContext
    from dsv4attn.tools.replay.results import Report


_KV_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_SHORT, _LONG = "short", "long"
"""Names of the built-in traces."""
_SHORT_TOPK = 64
"""Most entries that an indexer selects with the short built-in trace, so that its longest prompt has more."""
_TOKENS_OF_A_STEP, _TOKENS_OF_A_SHORT_STEP = 1024, 192
"""Defaults of --max-num-batched-tokens; the second is that of the short built-in trace of whole layers."""


@click.command()
@options(
    MODEL,
    text(
        "--trace",
        metavar="FILE",
        default=_SHORT,
        shell_complete=complete.traces,
        help="A file (Mooncake JSONL, Azure or BurstGPT CSV), - for standard input, or a built-in trace: short, or "
        "long, whose prompts are longer than what the model's indexer selects.",
    ),
    choice(
        "--trace-time-unit",
        words=("ms", "s"),
        help="Unit of timestamps in a Mooncake JSONL.  [default: ms, and timestamps that are not whole are refused]",
    ),
    integer("--trace-block-tokens", help="Tokens of a block of `hash_ids` in a Mooncake JSONL.  [default: 512]"),
    DECIDED_BACKEND,
    OPTION,
    torch_device(
        "Torch device that serves the trace, such as cuda or cuda:1; selection chooses the backend for it.",
        default="cpu",
    ),
    text(
        "--layers",
        metavar="KINDS",
        help="Kinds of layers: swa, c4a, c128a, with commas.  [default: all kinds of the model]",
        shell_complete=complete.several(complete.layers),
    ),
    text(
        "--cache",
        default="fp8_ds_mla",
        help="Format of the KV caches: fp8_ds_mla, bf16 or fp32.",
        shell_complete=complete.cache_formats,
    ),
    integer("--max-requests", help="Read at most this many requests of the trace."),
    token_count(
        "--max-tokens",
        least=2,
        help="Tokens of the longest request. Longer requests are shrunk. N may end with k or M.",
    ),
    token_count(
        "--max-num-batched-tokens",
        help=f"Most tokens of a step.  [default: {_TOKENS_OF_A_STEP}; {_TOKENS_OF_A_SHORT_STEP} with the short trace]",
    ),
    integer(
        "--index-topk",
        help="Entries that the indexer selects.  [default: as the model says; at most "
        f"{_SHORT_TOPK} with the short trace]",
    ),
    integer("--max-num-seqs", default=32, help="Most requests that run at once."),
    integer("--max-kv-mib", default=2048, help="Memory for KV pages in MiB."),
    integer("--block-size", default=64, help="Records of a page of the window cache."),
    integer(
        "--check-rows", least=0, default=2, help="Rows that are checked in each step and kind of layer. 0 checks none."
    ),
    integer("--seed", least=0, most=2**32 - 1, default=0, help="Seed of all random numbers."),
    integer("--threads", help="Threads of the CPU.  [default: OMP_NUM_THREADS, or cores of the process]"),
    integer(
        "--context-parallel",
        least=2,
        help="Divide the compressed entries over the N processes that torchrun has started.",
    ),
    integer("--interleave", help="Consecutive entries on one rank, with --context-parallel.  [default: 1]"),
    flag("--verbose", "-v", help="Also print the time of every operation, all memory, and the details of ranks."),
    HTML,
    flag("--json", "as_json", help="Print one JSON object, and show no progress."),
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    model: str,
    trace: str,
    trace_time_unit: str | None,
    trace_block_tokens: int | None,
    backend: str | None,
    backend_options: dict[str, str],
    device: str,
    layers: str | None,
    max_requests: int | None,
    max_tokens: int | None,
    max_num_batched_tokens: int | None,
    index_topk: int | None,
    threads: int | None,
    context_parallel: int | None,
    interleave: int | None,
    verbose: bool,
    page: Path | None,
    as_json: bool,
    **settings: Any,  # noqa: ANN401 - what `ReplayConfig` takes
) -> None:
    """Serve the requests of a trace through the attention layers of a model, and check the results.

    One layer of each kind runs, from hidden states to hidden states, with random weights of the model's sizes:
    projections, compressor, indexer, attention and output projection, over paged caches. In every step some rows are
    computed again in float64, stage by stage. The report begins with the verdict and fits a screen.

    With --device, caches, weights and kernels are on that device. The checks run on the CPU.

    Under torchrun with --context-parallel, every rank serves the trace with its part of the compressed entries and
    checks its own outputs. The first rank prints the results of all ranks.

    \b
    Exit codes:
      0    all checked rows agree
      1    a checked row does not agree
      2    bad input
      130  interrupted; the report of what has run is printed
    """  # noqa: D301 - click wants the character
    from dsv4attn.tools.cli.threads import Threads, wait_passively

    # names first: torch takes seconds
    geometry, kinds = geometry_of(model), _kinds(layers)
    check_request(backend)
    wait_passively()
    require_torch(ctx)
    from dsv4attn.tools.cli.bench_device import device_named
    from dsv4attn.tools.cli.ranks import joined
    from dsv4attn.tools.replay.engine import ReplayConfig

    cpu_threads = Threads.chosen(threads)
    place = device_named(device)
    _check_ranks(context_parallel, interleave, geometry, trace, place)
    is_short, model_topk = trace == _SHORT, geometry.index_topk
    index_topk = index_topk or (min(_SHORT_TOPK, model_topk) if is_short else model_topk)
    geometry = evolve(geometry, index_topk=index_topk)
    if max_num_batched_tokens is None:
        max_num_batched_tokens = _TOKENS_OF_A_SHORT_STEP if is_short else _TOKENS_OF_A_STEP
    max_kv_bytes = settings.pop("max_kv_mib") * 2**20
    settings |= {"max_num_batched_tokens": max_num_batched_tokens, "max_kv_bytes": max_kv_bytes}
    config = ReplayConfig(kinds=kinds, device=place, **settings)
    units = {"time_unit": trace_time_unit, "block_tokens": trace_block_tokens}
    requests = _requests(trace, units, max_requests, max_tokens, config, geometry)
    facts: dict[str, object] = {
        "swa_page_size": config.block_size,
        "dtype": _KV_DTYPES.get(config.cache, "e4m3fn"),
        "lse": True,
        "q_dtype": "float32" if config.cache == "fp32" else "bfloat16",
    }
    chosen = chosen_backend(backend, backend_options, geometry, config.kinds or geometry.kinds, place, **facts)
    with joined(context_parallel, interleave or 1) if context_parallel else nullcontext() as context:
        replay = _replay(geometry, chosen, requests, config, context)
        prints = context is None or context.ownership.rank == 0
        with cpu_threads.used(), _progress(replay.total_tokens, shown=prints and not as_json) as progress:
            report = replay.run(progress)
    # the CPU's threads do not matter for times on an accelerator
    setting = {**asdict(cpu_threads), "text": str(cpu_threads)} if place.type == "cpu" else {}
    name = {_SHORT: "generated", _LONG: "generated, long"}.get(trace, trace)
    other_topk = model_topk if model_topk != index_topk else None
    report = evolve(report, trace=name, options=backend_options, threads=setting, model_topk=other_topk)
    if prints:
        _show(report, page, verbose=verbose, as_json=as_json)
    ctx.exit(INTERRUPTED if report.interrupted else OK if report.ok else FAILED)


def _check_ranks(
    ranks: int | None, interleave: int | None, geometry: ModelGeometry, trace: str, device: torch.device
) -> None:
    """Refuse options that contradict the number of processes."""
    from dsv4attn.tools.cli.ranks import check_ranks
    from dsv4attn.tools.replay.trace import STDIN

    if ranks is not None:
        check_ranks(ranks, geometry)
        if trace == STDIN:
            raise ArgumentError("--trace", expected="a file that every rank can read", actual="standard input")
        if device.type != "cpu":
            hint = "`dsv4attn bench-context --device cuda` measures ranks on GPUs"
            raise ArgumentError("--device", expected="cpu, with --context-parallel", actual=str(device), hint=hint)
    elif interleave is not None:
        hint = "add --context-parallel, or leave out --interleave"
        raise ArgumentError("--interleave", expected="several ranks", actual="one process", hint=hint)


def _replay(
    geometry: ModelGeometry,
    backend: Backend,
    requests: list[Request],
    config: ReplayConfig,
    context: MeteredContext | None,
) -> Replay:
    """A replay that has its memory. Errors name the options of the command line, in their units."""
    from dsv4attn.tools.replay.engine import Replay

    try:
        return Replay(geometry, backend, requests, config, context)
    except ArgumentError as error:
        if error.argument == "interleave":
            actual, hint = error.actual, "larger pages have more records: --block-size"
            raise ArgumentError("--interleave", expected=error.expected, actual=actual, hint=hint) from error
        if error.argument != "max_kv_bytes":
            raise
        expected = re.sub(r"\d+", lambda number: str(-(-int(number[0]) // 2**20)), error.expected, count=1)
        actual = config.max_kv_bytes // 2**20
        raise ArgumentError("--max-kv-mib", expected=expected, actual=actual, hint=error.hint) from error


def _show(report: Report, page: Path | None, *, verbose: bool, as_json: bool) -> None:
    """Print a report, and write its page."""
    from dsv4attn.tools.replay.page import as_html
    from dsv4attn.tools.replay.report import as_json as report_json
    from dsv4attn.tools.replay.report import as_text

    if as_json:
        print_json(report_json(report))
    else:
        console().print(as_text(report, verbose=verbose))
    if page:
        write_file(page, as_html(report))
    if page and not as_json:
        console().print(f"page: {page}", soft_wrap=True)


def _kinds(layers: str | None) -> list[LayerKind] | None:
    """Layer types in the order swa, c4a, c128a, each once."""
    if layers is None:
        return None
    names = [kind.value for kind in LayerKind]
    words = [name.strip().lower() for name in layers.split(",")]
    for name in words:
        if name not in names:
            raise UnknownNameError("layer kind", name, names)
    return [kind for kind in LayerKind if kind.value in words]


def _requests(
    trace: str,
    units: dict[str, Any],
    max_requests: int | None,
    max_tokens: int | None,
    config: ReplayConfig,
    geometry: ModelGeometry,
) -> list[Request]:
    """Requests of a file, of standard input, or of a built-in trace. units: of a file, None where nothing is said."""
    from dsv4attn.tools.replay.check_layer import selecting_tokens
    from dsv4attn.tools.replay.trace import generated_trace, read_trace, selecting_trace, short_trace, shrink

    # tokens from which on an indexer leaves entries out
    selecting = [selecting_tokens(layer) for layer in geometry.distinct_layers if layer.kind is LayerKind.CSA]
    if trace not in (_SHORT, _LONG):
        requests = read_trace(trace, max_requests=max_requests, **units)
    elif any(units.values()):
        option = "--trace-time-unit" if units["time_unit"] else "--trace-block-tokens"
        raise ArgumentError(option, expected="a file with --trace", actual=f"the built-in trace {trace}")
    elif trace == _SHORT:
        requests = short_trace(config.seed, max_requests or 4)
    elif selecting:
        requests = selecting_trace(config.seed, max(selecting), max_requests or 4)
    else:
        requests = generated_trace(config.seed, max_requests or 6)
    return shrink(requests, max_tokens) if max_tokens else requests


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[Progress], None]]:
    """Tokens, speed and the current step, on stderr."""
    columns = (
        "{task.completed:,.0f}/{task.total:,.0f} tokens",
        "{task.fields[speed]:,.0f}/s",
        "step {task.fields[step]}: {task.fields[running]} running, {task.fields[waiting]} waiting",
    )
    began = time.perf_counter()

    def line(tokens: float, seconds: float, values: dict[str, Any]) -> str:
        step = "step {step}: {running} running, {waiting} waiting".format(**values)
        return f"{tokens:,}/{total:,} tokens, {values['speed']:,.0f}/s, {step}, {seconds:.0f} s"

    start: dict[str, Any] = {"speed": 0.0, "step": 0, "running": 0, "waiting": 0}
    with progress_bar(total, *columns, shown=shown, counted=False, line=line, **start) as move:

        def advance(state: Progress) -> None:
            seconds = time.perf_counter() - began
            speed = state.tokens / seconds if seconds > 0 else 0.0
            move(state.tokens, speed=speed, step=state.step, running=state.running, waiting=state.waiting)

        yield advance
