"""`dsv4attn run`: serves a request trace through the attention layers of a model, and checks rows while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from dsv4attn.tools.cli import FAILED, INTERRUPTED, OK, print_json
from dsv4attn.tools.cli.options import MODEL, OPTION, flag, integer, options, text
from dsv4attn.tools.cli.progress import progress_bar

if TYPE_CHECKING:
    from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
    from dsv4attn.serving.request import Request
    from dsv4attn.tools.replay.engine import Progress

__all__ = ["run"]


_KV_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@click.command(short_help="Serve a request trace through attention layers, checked while it runs.")
@options(
    MODEL,
    text("--trace", metavar="FILE", help="Mooncake JSONL, or Azure or BurstGPT CSV.  [default: a small built-in one]"),
    text("--backend", help="Backend to run.  [default: as `dsv4attn explain` says]"),
    OPTION,
    text("--layers", metavar="KINDS", help="Of swa,c4a,c128a.  [default: all that the model has]"),
    text("--indexer", default="real", help="real: whole layers; random: attention alone."),
    text("--cache", default="fp8_ds_mla", help="fp8_ds_mla, bf16 or fp32."),
    integer("--max-requests", help="Read at most this many requests of the trace."),
    integer("--max-tokens", least=2, help="Longest request; longer ones are shrunk."),
    integer("--max-num-batched-tokens", default=1024, help="Tokens of a step."),
    integer("--max-num-seqs", default=32, help="Requests running at once."),
    integer("--max-kv-mib", default=2048, help="Memory for KV pages."),
    integer("--block-size", default=64, help="Records in a window page."),
    integer("--check-rows", least=0, default=2, help="Rows checked per step; 0: none."),
    integer("--seed", least=0, most=2**32 - 1, default=0, help="Of every number."),
    integer("--threads", help="Of the CPU.  [default: OMP_NUM_THREADS, or cores of the process]"),
    integer(
        "--context-parallel",
        least=2,
        help="Divide compressed entries over the N processes that torchrun has started.",
    ),
    integer("--interleave", help="Consecutive entries of one rank, with --context-parallel.  [default: 1]"),
    flag("--json", "as_json", help="Print one JSON object, and no progress."),
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    model: str,
    trace: str | None,
    backend: str | None,
    backend_options: dict[str, str],
    layers: str | None,
    max_requests: int | None,
    max_tokens: int | None,
    threads: int | None,
    context_parallel: int | None,
    interleave: int | None,
    as_json: bool,
    **settings: Any,  # noqa: ANN401 - what `ReplayConfig` takes
) -> None:
    """Serve the requests of a trace through the attention layers of a model: paged caches, chunked prefill, decode.

    One layer of each type is run, from hidden states to hidden states, with random weights of the model's sizes:
    projections, compressor, indexer, attention, output projection. With --indexer random it is attention alone, on
    random inputs; the built-in trace has more and shorter requests then. In every step --check-rows rows are
    computed again in float64, stage by stage, from raw inputs. There is one thread for each core that the process may
    use. With --context-parallel, under torchrun, every rank serves the trace over its part of the compressed
    entries and checks its own outputs; the first rank prints what all have found. Exit code 0: all rows agree; 1: some
    do not; 2: bad input; 130: interrupted, with a report of what has run.
    """
    from dsv4attn.tools.cli.threads import Threads, wait_passively

    wait_passively()
    from attrs import evolve

    from dsv4attn.errors import ArgumentError
    from dsv4attn.tools.cli.common import chosen_backend, console, geometry_of
    from dsv4attn.tools.cli.ranks import check_ranks, joined
    from dsv4attn.tools.replay.engine import Replay, ReplayConfig
    from dsv4attn.tools.replay.report import as_json as report_json
    from dsv4attn.tools.replay.report import as_text

    geometry = geometry_of(model)
    if context_parallel is not None:
        check_ranks(context_parallel, geometry)
    elif interleave is not None:
        hint = "add --context-parallel, or leave out --interleave"
        raise ArgumentError("--interleave", expected="several ranks", actual="one process", hint=hint)
    max_kv_mib = settings.pop("max_kv_mib")
    config = ReplayConfig(kinds=_kinds(layers), max_kv_bytes=max_kv_mib * 2**20, **settings)
    selecting = _tokens_to_select(geometry) if config.indexer == "real" else None
    requests = _requests(trace, max_requests, max_tokens, config.seed, selecting)
    facts: dict[str, object] = {
        "swa_page_size": config.block_size,
        "dtype": _KV_DTYPES.get(config.cache, "e4m3fn"),
        "lse": True,
    }
    facts["q_dtype"] = "float32" if config.cache == "fp32" else "bfloat16"
    chosen = chosen_backend(backend, backend_options, geometry, config.kinds or geometry.kinds, **facts)
    with joined(context_parallel, interleave or 1) if context_parallel else nullcontext() as context:
        try:
            replay = Replay(geometry, chosen, requests, config, context)
        except ArgumentError as error:
            if error.argument == "interleave":
                actual, hint = error.actual, "larger pages have more records: --block-size"
                raise ArgumentError("--interleave", expected=error.expected, actual=actual, hint=hint) from error
            if error.argument != "max_kv_bytes":
                raise
            # named and in the unit of the command line's option
            expected = re.sub(r"\d+", lambda number: str(-(-int(number[0]) // 2**20)), error.expected, count=1)
            raise ArgumentError("--max-kv-mib", expected=expected, actual=max_kv_mib, hint=error.hint) from error
        prints = context is None or context.ownership.rank == 0
        cpu_threads = Threads.chosen(threads)
        with cpu_threads.used(), _progress(replay.total_tokens, shown=prints and not as_json) as progress:
            report = replay.run(progress)
    setting = {**cpu_threads.as_json(), "text": str(cpu_threads)}
    report = evolve(report, trace=trace or "generated", options=backend_options, threads=setting)
    if prints and as_json:
        print_json(report_json(report))
    elif prints:
        console().print(as_text(report))
    ctx.exit(INTERRUPTED if report.interrupted else OK if report.ok else FAILED)


def _kinds(layers: str | None) -> list[LayerKind] | None:
    """Layer types in the order swa, c4a, c128a, each once."""
    if layers is None:
        return None
    from dsv4attn.core.model.geometry import LayerKind
    from dsv4attn.errors import UnknownNameError

    names = [kind.value for kind in LayerKind]
    words = [name.strip().lower() for name in layers.split(",")]
    for name in words:
        if name not in names:
            raise UnknownNameError("layer kind", name, names)
    return [kind for kind in LayerKind if kind.value in words]


def _tokens_to_select(geometry: ModelGeometry) -> int | None:
    """Tokens from which on an indexer leaves entries out; None without an indexer."""
    from dsv4attn.core.model.geometry import LayerKind

    if LayerKind.CSA not in geometry.kinds:
        return None
    layers = (layer for layer in geometry.distinct_layers if layer.kind is LayerKind.CSA)
    return max(layer.compress_ratio * (layer.topk + 1) for layer in layers)


def _requests(
    trace: str | None, max_requests: int | None, max_tokens: int | None, seed: int, selecting: int | None
) -> list[Request]:
    """Requests of a file, or of the built-in trace. selecting: tokens of its longest prompt, for whole layers."""
    from dsv4attn.tools.replay.trace import generated_trace, read_trace, selecting_trace, shrink

    if trace is None and selecting is not None:
        requests = selecting_trace(seed, selecting, max_requests or 4)
    elif trace is None:
        requests = generated_trace(seed, max_requests or 6)
    else:
        requests = read_trace(trace, max_requests=max_requests)
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
