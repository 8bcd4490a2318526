"""`dsv4attn bench-context`: decode over the ranks of torchrun, compared with one rank that has all entries."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import evolve

from dsv4attn.config import load_settings
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import FAILED, OK, complete, print_json
from dsv4attn.tools.cli.bench_device import device_of_rank
from dsv4attn.tools.cli.common import console, require_torch, write_file
from dsv4attn.tools.cli.options import (
    DECIDED_BACKEND,
    JSON,
    OPTION,
    SAVE,
    command_line,
    flag,
    integer,
    number_list,
    options,
    text,
)
from dsv4attn.tools.cli.ranks import joined, launched

if TYPE_CHECKING:
    import torch

    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.tools.bench.context import ContextRun
    from dsv4attn.tools.bench.context_cases import ContextCase
    from dsv4attn.tools.replay.over_ranks import MeteredContext


@click.command()
@options(
    DECIDED_BACKEND,
    OPTION,
    text(
        "--cases",
        metavar="NAMES",
        help="Layers: flash_c4, pro_c4, flash_c128, pro_c128, with commas.  [default: those of Flash]",
        shell_complete=complete.context_cases,
    ),
    integer("--requests", metavar=None, help="Number of requests in a step.  [default: 8; on a CPU 2]"),
    text(
        "--context",
        "contexts",
        metavar="NUMBERS",
        callback=number_list,
        help="Numbers of tokens of each request, with commas.  [default: 8192,1048576; on a CPU 8192]",
    ),
    integer("--interleave", metavar=None, default=1, help="Consecutive entries on one rank."),
    integer(
        "--rounds",
        metavar=None,
        help="Number of rounds. A time is the median of the rounds.  [default: 20; on a CPU 5]",
    ),
    text(
        "--device",
        metavar="KIND",
        help="Kind of device: cpu or cuda.  [default: the accelerator of this machine, or cpu]",
        shell_complete=complete.words("cpu", "cuda"),
    ),
    flag("--graph", help="Time replays of captured graphs."),
    JSON,
    SAVE,
)
@click.pass_context
def bench_context(
    ctx: click.Context,
    *,
    backend: str | None,
    backend_options: dict[str, str],
    cases: str | None,
    requests: int | None,
    contexts: tuple[int, ...] | None,
    interleave: int,
    rounds: int | None,
    device: str | None,
    graph: bool,
    as_json: bool,
    save: Path | None,
) -> None:
    """Time decode over the ranks that torchrun has started, and on one rank with all entries, in the same run.

    Start the command with torchrun: `torchrun --standalone --nproc-per-node 2 -m dsv4attn bench-context`.

    A measurement has scores, selection, attention and merge for one token of each request, in one layer. With --device
    cuda, rank r of a host uses device r, and the ranks exchange over NCCL. With --device cpu they exchange over gloo.
    Before and after the times, attention and selected entries of all ranks are compared with those of one rank. If a
    rank differs, there are no times. Rank 0 measures one rank while the others wait, and prints. A time over ranks is
    that of the slowest rank. All ranks end with the same exit code; torchrun then ends with 0 or 1.

    \b
    Exit codes:
      0    all ranks agree
      1    a rank differs
      2    bad input
    """  # noqa: D301 - click wants the character
    require_torch(ctx)
    ranks = launched("bench-context")
    place, group_backend = device_of_rank(device)
    if graph and place.type == "cpu":
        raise ArgumentError("--graph", expected="a device that captures graphs, with NCCL", actual="cpu with gloo")
    from dsv4attn.tools.bench.cases import CONTEXT_CASES, named
    from dsv4attn.tools.bench.context import ContextRun
    from dsv4attn.tools.bench.context_cases import context_cases
    from dsv4attn.tools.bench.result import now, this_machine

    on_cpu, default = place.type == "cpu", [name for name in CONTEXT_CASES if name.startswith("flash")]
    names = named("case", cases, list(CONTEXT_CASES), default)
    requests, contexts = requests or (2 if on_cpu else 8), contexts or ((8192,) if on_cpu else (8192, 1048576))
    decodes = context_cases(names, requests, contexts, ranks, interleave)
    name, chosen = _backend(backend, backend_options, decodes, place, capture=graph)
    facts = ContextRun(
        machine=this_machine(place),
        date=now(),
        command=shlex.join(["dsv4attn", "bench-context", *command_line(ctx, "as_json", "save")]),
        backend=name,
        process_group=group_backend,
        ranks=ranks,
        interleave=interleave,
        rounds=rounds or (5 if on_cpu else 20),
        graph=graph,
        results=(),
        reference_ops=load_settings().reference_ops,
    )
    with joined(ranks, interleave, backend=group_backend, device=None if on_cpu else place) as group:
        run = _measured(group, facts, chosen, decodes, place)
    if group.ownership.rank == 0:
        _show(run, save, as_json=as_json)
    ctx.exit(OK if run.ok else FAILED)


def _measured(
    group: MeteredContext, run: ContextRun, backend: Backend, cases: list[ContextCase], place: torch.device
) -> ContextRun:
    """The run with the results of all cases. place: device of this rank."""
    from dsv4attn.tools.bench.context import measure
    from dsv4attn.tools.bench.context_cases import check_memory
    from dsv4attn.tools.bench.rank_clock import RankClock

    group.check_same("bench-context", {"backend": run.backend, "command": run.command})
    with group.together("bench-context"):
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        check_memory(cases, run.ranks, run.interleave, place, sharing=sharing)
        clock = RankClock(place, group)
    results = []
    for case in cases:
        if group.ownership.rank == 0 and sys.stderr.isatty():
            click.echo(f"{case.name} ...", err=True)
        results.append(measure(case, backend, group, group.sent, clock, run.rounds, graph=run.graph))
    return evolve(run, results=tuple(results))


def _show(run: ContextRun, save: Path | None, *, as_json: bool) -> None:
    from dsv4attn.tools.bench.report import context_text

    if save:
        write_file(save, json.dumps(run.as_json(), indent=1, allow_nan=False) + "\n")
    if as_json:
        print_json(run.as_json())
    else:
        console().print(context_text(run), crop=False)


def _backend(
    name: str | None, options: dict[str, str], cases: list[ContextCase], place: torch.device, *, capture: bool
) -> tuple[str, Backend]:
    """The named backend, or the one that selection gives for all cases. Raises NoBackendError with reasons."""
    from dsv4attn.selection import load_backend, resolve
    from dsv4attn.tools.bench.attention_call import problem_of

    problems = [evolve(problem_of(case.case), lse=True, capture=capture) for case in cases]
    chosen = resolve(problems, backend=name, device=place).require().info.name
    return chosen, load_backend(chosen, **options)
