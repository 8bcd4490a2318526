"""`dsv4attn bench`: times of every kernel, with the roofline of the machine and the times of other libraries."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import evolve

from dsv4attn.config import load_settings
from dsv4attn.errors import NoBackendError
from dsv4attn.tools.cli import FAILED, INTERRUPTED, OK, complete, print_json
from dsv4attn.tools.cli.bench_device import device_named
from dsv4attn.tools.cli.common import check_matplotlib, check_request, console, require_torch, write_file
from dsv4attn.tools.cli.options import (
    JSON,
    PATH,
    SAVE,
    command_line,
    integer,
    named_words,
    number_list,
    options,
    target_folder,
    text,
    torch_device,
)
from dsv4attn.tools.cli.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.tools.bench.attention_peers import Peer
    from dsv4attn.tools.bench.cases import CaseSizes, KernelCase
    from dsv4attn.tools.bench.layer_ops import LayerOpCase
    from dsv4attn.tools.bench.result import Run

__all__ = ["bench"]

ALL = "all"


@click.command()
@click.argument("what", nargs=-1, callback=named_words, shell_complete=complete.measurements)
@options(
    text(
        "--backend",
        "--backends",
        "backends",
        metavar="NAMES",
        callback=named_words,
        shell_complete=complete.several(complete.backends),
        help="Backends to time, with commas.  [default: those that are native to the device]",
    ),
    text(
        "--cases",
        metavar="NAMES",
        callback=named_words,
        shell_complete=complete.bench_cases,
        help="Layers: flash_c4, pro_c4, flash_c128, pro_c128, flash_swa, v41_r1, v41_r2, with commas.  [default: all]",
    ),
    text("--batches", metavar="NUMBERS", callback=number_list, help="Numbers of requests in decodes, as in 8,64,256."),
    text("--heads", metavar="NUMBERS", callback=number_list, help="Query heads of a rank, as in 8,16.  [default: all]"),
    integer("--drafts", metavar=None, least=0, help="Draft tokens of each request in a decode step.  [default: 0]"),
    integer("--tokens", metavar=None, help="Number of query tokens in prefills."),
    integer("--rounds", metavar=None, help="Number of rounds. A time is the median of the rounds."),
    integer("--threads", metavar=None, help="Threads of the CPU.  [default: OMP_NUM_THREADS, or cores of the process]"),
    torch_device("Torch device.  [default: the first accelerator, or cpu]"),
    text(
        "--peers",
        metavar="[NAMES]",
        callback=named_words,
        is_flag=False,
        flag_value=ALL,
        shell_complete=complete.peers,
        help="Also time other libraries: flash_mla, vllm, flashinfer, deep_gemm, flashinfer_topk, "
        "sglang_topk, vllm_topk, vllm_auto_topk. Without NAMES: all.",
    ),
    JSON,
    SAVE,
    text(
        "--compare",
        metavar="OLD",
        type=PATH,
        help="List what is slower than in the file OLD, which --save has written.",
    ),
    text("--plot", metavar="DIR", type=PATH, callback=target_folder, help="Draw pictures into the folder DIR."),
    text(
        "--from",
        "sources",
        metavar="FILE",
        type=PATH,
        multiple=True,
        help="Measure nothing, and show FILE, which --save has written. Given several times: show all of them, and "
        "--plot draws them together.",
    ),
)
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    what: tuple[str, ...],
    save: Path | None,
    compare: Path | None,
    plot: Path | None,
    sources: tuple[Path, ...],
    *,
    as_json: bool,
    **asked: Any,  # noqa: ANN401 - what `_measured` takes
) -> None:
    """Time WHAT, and compare it with the roofline and with other libraries.

    \b
    decode, prefill, prefill-rows, insert, quantize, gather
                  kernels of attention and caches; the default
    step          whole steps of forward_mqa, and their matrix products alone
    scaling       decodes while batch, context, top-k and requests grow; cliffs,
                  where time grows faster than work, are listed
    host          time that a bound layer takes on the host
    layer         whole layers, also deterministic ones, and the time and the
                  launches of each part of a layer
    index         index logits, on pages and on gathered keys
    select        scores and selection in one step
    compress      states saved, entries stored, index queries
    mhc           hyper-connections
    products      products with the weights of deterministic layers, and torch's

    Every result is compared with that of the reference backend, before and after it is timed. The reference computes in
    fp32, and `dsv4attn conform reference` proves it. A wrong result gets no time. Times are medians of rounds in which
    all calls run in turn. The roofline is measured in the same run. --cases, --batches, --heads, --drafts and --tokens
    do not change scaling, host, index, compress, mhc and products. Of these options layer takes --heads, and
    --cases of Flash.

    select has a short list of cases. `--cases flash_c4,pro_c4` asks for selections of 512 or 1,024 entries from 8,192
    to 262,144 index keys: prompts of --tokens, 2,048 by default, and decodes of --batches, 1, 8 and 64 by default.

    v41_r1 and v41_r2 are layers of DeepSeek-V4.1. Calls that read pages are timed there with records of 584/584,
    528/528 and 528/288 bytes (window/compressed). A second table has the speedup over 584/584.

    --peers calls other libraries through their public functions, if they can be imported. A second table has the
    speedups over them, the fastest first. Files of --save are read by --compare and --from, on any machine.

    --plot draws a picture of each kernel, and one of speeds relative to FlashMLA's, decodes above prompts. Runs of
    several commands on one machine get one picture of speeds with --from A --from B --plot DIR.

    \b
    Exit codes:
      0    all results are right, and with --compare nothing is slower
      1    a result is wrong, something is slower by more than noise, or
           --compare finds nothing that both runs measured
      2    bad input
      130  interrupted; what was measured is shown, marked incomplete
    """  # noqa: D301 - click wants the character
    from dsv4attn.tools.bench.cases import KERNELS, MEASUREMENTS, named

    measurements = named("measurement", ",".join(what), MEASUREMENTS, KERNELS)
    _names_of(asked["backends"])
    require_torch(ctx)
    from dsv4attn.tools.bench import compare as comparing
    from dsv4attn.tools.bench import report
    from dsv4attn.tools.bench.result import load

    _check_sources(sources, measures=bool(what or any(asked.values())), one_run=bool(save or as_json or compare))
    old = load(compare, "--compare") if compare else None
    if plot:
        from dsv4attn.tools.bench.plots import check_together

        check_matplotlib(", or save with --save FILE and draw it elsewhere with --from FILE")
    runs = [load(source, "--from") for source in sources]
    if plot:
        check_together(runs)
    if not runs:
        run = _measured(measurements, shown=not as_json, **asked)
        words = command_line(ctx, "as_json", "save", "compare", "plot")
        runs = [evolve(run, command=shlex.join(["dsv4attn", "bench", *words]))]
    run = runs[0]
    compared = comparing.compare(old, run) if old else None
    if save:
        write_file(save, json.dumps(run.as_json(), indent=1, allow_nan=False) + "\n")
    if as_json:
        both = {"ok": run.ok and compared.ok, "compared": compared.as_json()} if compared else {}
        print_json({**run.as_json(), **both})
    else:
        out = console()
        for shown in runs:
            out.print(report.run_text(shown), crop=False)
        if compared:
            out.print(report.comparison_text(compared))
    if plot:
        _draw(runs, plot)
    if run.ran is not None and not sources:
        ctx.exit(INTERRUPTED)
    ctx.exit(OK if all(run.ok for run in runs) and (compared is None or compared.ok) else FAILED)


def _check_sources(sources: Sequence[Path], *, measures: bool, one_run: bool) -> None:
    """Refuse options that contradict --from. measures: of a measurement. one_run: that take one run."""
    if sources and measures:
        raise click.UsageError("--from shows a saved run: it goes with --json, --save, --compare and --plot only")
    if len(sources) > 1 and one_run:
        raise click.UsageError("--json, --save and --compare go with one --from")


def _draw(runs: Sequence[Run], folder: Path) -> None:
    from dsv4attn.tools.bench.plots import draw

    paths = draw(runs, folder)
    for path in paths:
        click.echo(f"drawn: {path}", err=True)
    if not paths:
        click.echo("nothing drawn: there are pictures of kernels only", err=True)


def _measured(
    what: Sequence[str],
    *,
    shown: bool,
    backends: str | None,
    cases: str | None,
    device: str | None,
    peers: str | None,
    threads: int | None,
    **counts: Any,  # noqa: ANN401 - fields of `CaseSizes`, None for its default
) -> Run:
    """Check all options before anything slow, and measure."""
    from dsv4attn.tools.bench.cases import PRESETS, host_cases, named, sizes, together
    from dsv4attn.tools.bench.result import Run, now, peer_versions, this_machine
    from dsv4attn.tools.bench.runner import Runner
    from dsv4attn.tools.bench.scaling import cliffs
    from dsv4attn.tools.bench.whole_layer import layer_cases
    from dsv4attn.tools.cli.threads import Threads

    presets = named("case", cases, list(PRESETS), list(PRESETS))
    place = device_named(device)
    timed = _backends(backends, place)
    counts["inserted"] = counts["tokens"]
    size = evolve(sizes(place.type), **{name: value for name, value in counts.items() if value})
    small = place.type == "cpu"
    selected = [PRESETS[name].topk for name in presets if cases and PRESETS[name].selects]
    kernel_cases = _cases(what, presets, size, selected, counts["batches"], small=small)
    asked_peers = _peers(peers, {case.kernel for case in kernel_cases})
    hosts = host_cases() if "host" in what else []
    layers = layer_cases(size.heads, presets, small=small) if "layer" in what else []
    total = len(kernel_cases) + len(hosts) + len(layers)
    rows, ran, stopped = [], 0, False
    host_times, layer_times = list[Mapping[str, object]](), list[Mapping[str, object]]()
    # the CPU's threads do not matter for times on an accelerator
    cpu_threads = Threads.chosen(threads) if place.type == "cpu" else None
    bar = progress_bar(1 + total, "{task.fields[case]}", shown=shown, between_calls=True, case="")
    with cpu_threads.used() if cpu_threads else nullcontext(), bar as move:
        move(0, case="roofline")
        runner = Runner(place, timed, asked_peers, size.rounds)
        whole = [(case.name, partial(runner.host, case), host_times) for case in hosts]
        whole += [(layer.name, partial(runner.layer, layer), layer_times) for layer in layers]
        try:
            for group in together(kernel_cases):
                move(1 + ran, case=group[0].name)
                rows += runner.run(*group)
                ran += len(group)
            for name, measure, times in whole:
                move(1 + ran, case=name)
                measured, failed = measure()
                times.extend(measured)
                rows += failed
                ran += 1
        except KeyboardInterrupt:
            # rows up to now stay; the first measurement of the roofline applies to them
            stopped = True
        roofline, rows = (runner.roofline, rows) if stopped else runner.settled(rows)
        machine = this_machine(place, cpu_threads.cores, cpu_threads.source) if cpu_threads else this_machine(place)
    return Run(
        machine=machine,
        date=now(),
        rounds=size.rounds,
        roofline=roofline,
        rows=tuple(rows),
        cliffs=tuple(cliffs(rows)),
        unavailable=runner.unavailable,
        versions=peer_versions([peer.name for peer in runner.peers]),
        host=tuple(host_times),
        asked=total,
        ran=ran if stopped else None,
        layers=tuple(layer_times),
        reference_ops=load_settings().reference_ops,
    )


def _cases(
    what: Sequence[str],
    presets: Sequence[str],
    size: CaseSizes,
    selected: Sequence[int],
    batches: Sequence[int] | None,
    *,
    small: bool,
) -> list[KernelCase | LayerOpCase]:
    """Cases whose results are rows: all but the host's and those of whole layers.

    selected: numbers of entries that selections take; empty for the short list of them. batches: of `--batches`.
    """
    from dsv4attn.tools.bench.cases import LAYER_OPS, cases_of
    from dsv4attn.tools.bench.layer_ops import layer_op_cases, selections
    from dsv4attn.tools.bench.scaling import scaling_cases

    kernels = [kernel for kernel in what if kernel not in (*LAYER_OPS, "scaling", "host", "layer")]
    lines = scaling_cases(small=small) if "scaling" in what else []
    around = [kernel for kernel in what if kernel in LAYER_OPS and not (kernel == "select" and selected)]
    long = selections(selected, batches, size.tokens, small=small) if "select" in what else []
    return [*cases_of(kernels, presets, size), *lines, *layer_op_cases(around, small=small), *long]


def _peers(names: str | None, kernels: set[str]) -> list[Peer]:
    """The named peers; without names, those that have one of the kernels."""
    from dsv4attn.tools.bench.cases import named
    from dsv4attn.tools.bench.peers import PEERS

    if names is None:
        return []
    concerned = [name for name, peer in PEERS.items() if kernels.intersection(peer.kernels)]
    return [PEERS[name] for name in named("peer", None if names == ALL else names, list(PEERS), concerned)]


def _names_of(backends: str | None) -> list[str]:
    """The names of `--backends`, each once; empty if nothing is named. Raises for a name that no backend has."""
    names = list(dict.fromkeys(name.strip() for name in backends.split(","))) if backends else []
    for name in names:
        check_request(name)
    return names


def _backends(names: str | None, place: torch.device) -> dict[str, Backend]:
    """The named backends, all of which must load, or all that are native to the device and load."""
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.selection import backend_names, load_backend, registered

    if names:
        return {name: load_backend(name) for name in _names_of(names)}
    facts, backends = DeviceFacts.here(place), {}
    for name in backend_names():
        if facts.matches(registered(name).info.native):
            try:
                backends[name] = load_backend(name)
            except NoBackendError as broken:
                click.echo(f"left out: {name}: {str(broken).splitlines()[0]}", err=True)
    return backends
