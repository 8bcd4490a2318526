"""`dsv4attn memory`: does a model fit a device, and what remains for the caches."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve, frozen

from dsv4attn.config import PHASES
from dsv4attn.core.contract.devices import DEVICES, MEMORY_GIB, memory_gib
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import PRESETS, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import FAILED, OK, complete, print_json
from dsv4attn.tools.cli.common import (
    RECORDS,
    check_matplotlib,
    check_request,
    console,
    device_facts,
    epilog,
    geometry_of,
    layouts_of,
    longest_context,
    require_torch,
    simple_table,
    with_layouts,
    write_file,
)
from dsv4attn.tools.cli.options import JSON, MODEL, SAVE, choice, integer, options, output_file, text, token_count

if TYPE_CHECKING:
    from rich.table import Table

    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.serving.memory import Deployment, MemoryPlan

_GIB = 2**30
_DTYPES = ("e4m3fn", "bfloat16", "float32", *RECORDS)
_MANY = 1_048_576
_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#E5E5E5")
"""Okabe and Ito's, and grey for what is left."""


@frozen
class Answer:
    """What is printed.

    limits: of the requests. plan: memory of the fullest rank. memory, budget, other: bytes of a device; those that may
    be used; and those assumed for what is not planned. longest, most: tokens and requests that fit. least: the
    smallest number of tensor-parallel ranks that fits, if this one does not; None: there is none.
    """

    deployment: Deployment
    limits: Limits
    plan: MemoryPlan
    device: str | None
    memory: int
    budget: int
    other: int
    longest: int
    most: int
    least: int | None

    @property
    def left(self) -> int:
        """Bytes that remain; below 0 if the model does not fit."""
        return self.budget - self.other - self.plan.total

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, in the order of the picture."""
        plan = self.plan
        workspace = {"workspace, temporaries": plan.workspace + plan.temporaries, "other, assumed": self.other}
        return {"weights": sum(plan.weights.values()), **plan.caches, **workspace}

    @property
    def verdict(self) -> str:
        """One sentence."""
        of, n = self.deployment, self.deployment.ranks
        size = f"{self.memory / _GIB:g} GiB"
        where = f"{of.geometry.name} on {n} x {f'{self.device} ({size})' if self.device else size}"
        if self.left >= 0:
            return f"{where}: fits, {_gib(self.left)} of a rank are left"
        cure = "" if self.least is None else f" -> it fits with --tensor-parallel {self.least}"
        return f"{where}: does not fit, a rank lacks {_gib(-self.left)}{cure}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; sizes are in bytes."""
        of = self.deployment
        ranks = {"tensor": of.tensor, "pipeline": of.pipeline, "context": of.context, "all": of.ranks}
        return {
            "ok": self.left >= 0,
            "verdict": self.verdict,
            "model": of.geometry.name,
            "device": self.device,
            "backend": of.backend.name,
            "engine": "vllm" if of.vllm else "own",
            "ranks": ranks,
            "limits": asdict(self.limits),
            "shared_tokens": of.shared_tokens,
            "memory": self.memory,
            "budget": self.budget,
            "other": self.other,
            "left": self.left,
            **asdict(self.plan),
            "longest_context": self.longest,
            "most_requests": self.most,
            "least_tensor_parallel": self.least,
            "left_out": list(of.sizes.left_out),
        }


def _sizes(_: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Parse a number of GiB, or a part of one."""
    if value is not None and not re.fullmatch(r"\d{1,6}(\.\d+)?|\.\d+", value):
        raise click.BadParameter(f"{value!r}: expected a number, as in 23.5", param=parameter)
    return None if value is None else float(value)


@click.command(epilog=epilog(DEVICES))
@options(
    MODEL,
    text("--device", help="Device, such as h200 or rtx4090: its memory, and its backend. All names are below.",
         shell_complete=complete.devices),
    text("--gib", metavar="N", callback=_sizes, help="Memory of a device in GiB.  [default: as the name says]"),
    integer("--tensor-parallel", default=1, help="Ranks that divide heads, experts, embedding and head."),
    integer("--pipeline-parallel", default=1, help="Stages that divide the layers."),
    integer(
        "--context-parallel",
        default=1,
        help="Ranks that share compressed entries: some of the tensor-parallel ranks if N divides their number, else N "
        "times as many ranks.",
    ),
    choice("--dtype", words=_DTYPES, default="e4m3fn", help="Element type of both caches, or their record, where a "
           "window of v41_fp4 is v41_fp8."),
    choice("--engine", words=("own", "vllm"), default="own", help="Which planner sizes the caches: CacheManager of "
           "this package, or vLLM 0.33 with its one pool of blocks."),
    token_count("--max-model-len", help="Length of each request in tokens.  [default: 131,072, or the model's longest "
                "context]"),
    integer("--max-num-seqs", default=8, help="Requests that run at once."),
    token_count("--max-num-batched-tokens", default=8192, help="Most tokens of a step."),
    token_count("--shared-tokens", least=0, default=0, help="First tokens that all requests have in common; their "
                "entries are kept once, as engines with prefix caching do."),
    integer("--drafts", least=0, default=0, help="Draft tokens that each request verifies in a decode step; "
            "the model's MTP layers make them."),
    text("--utilization", metavar="PART", default="0.9", callback=_sizes, help="Part of the memory that may be used."),
    text("--other-gib", metavar="N", default="2", callback=_sizes, help="GiB for what is not planned: activations of "
         "experts, graphs, communication, the driver. An assumption."),
    text("--backend", help="Backend whose workspace is planned.  [default: as `dsv4attn explain` says; triton without "
         "--device]", shell_complete=complete.backends),
    output_file("--plot", help="Draw one bar into FILE, such as memory.png or memory.svg."),
    SAVE,
    JSON,
)  # fmt: skip
@click.pass_context
def memory(
    ctx: click.Context,
    /,
    *,
    model: str,
    device: str | None,
    gib: float | None,
    dtype: str,
    engine: str,
    max_model_len: int | None,
    drafts: int,
    shared_tokens: int,
    utilization: float,
    other_gib: float,
    backend: str | None,
    plot: Path | None,
    save: Path | None,
    as_json: bool,
    **numbers: int,
) -> None:
    """Say whether a model fits a device, and what remains for the caches.

    This is arithmetic: nothing is allocated, and the device need not be here. Caches are those of `CacheManager`, the
    workspace is that of `plan_workspace`, and weights have the formats in which models are released. All sizes are of
    the rank that needs the most. GiB is 2^30 bytes.

    \b
    Exit codes:
      0    it fits
      1    it does not fit
      2    bad input
    """  # noqa: D301 - click wants the character
    # names first: torch takes seconds
    geometry, device_gib = geometry_of(model), _gib_of(device, gib)
    check_request(backend)
    require_torch(ctx)
    from dsv4attn.serving.memory import Deployment, ModelSizes

    if plot:
        check_matplotlib()
    if not 0 < utilization <= 1:
        raise ArgumentError("--utilization", expected="a part of the memory, above 0 and at most 1", actual=utilization)
    size = int(device_gib * _GIB)
    max_model_len = longest_context(geometry, max_model_len, 131_072)
    if engine == "vllm" and dtype != "e4m3fn":
        raise ArgumentError("--dtype", expected="e4m3fn with --engine vllm", actual=dtype)
    window, entries = layouts_of(geometry, dtype)
    tensor, rank = numbers["tensor_parallel"], geometry.tensor_parallel(numbers["tensor_parallel"])
    deployment = Deployment(
        geometry,
        ModelSizes.of(geometry, None if geometry in PRESETS.values() else model),
        _backend(rank, backend, device, dtype, max_model_len),
        window,
        entries,
        tensor,
        numbers["pipeline_parallel"],
        numbers["context_parallel"],
        shared_tokens,
        vllm=engine == "vllm",
    )
    limits = Limits(numbers["max_num_seqs"], numbers["max_num_batched_tokens"], max_model_len, drafts)
    budget, other = int(size * utilization), int(other_gib * _GIB)
    plan, free = deployment.plan(limits), budget - other
    answer = Answer(
        *(deployment, limits, plan, device, size, budget, other),
        longest=deployment.longest_context(limits, free),
        most=deployment.most_requests(limits, free),
        least=None if plan.total <= free else _least(deployment, limits, free),
    )
    values = answer.as_json()
    if save:
        write_file(save, json.dumps(values, indent=1) + "\n")
    if plot:
        _draw(answer, plot)
    if as_json:
        print_json(values)
    else:
        _show(answer)
    ctx.exit(OK if values["ok"] else FAILED)


def _gib_of(device: str | None, gib: float | None) -> float:
    """Memory of a device in GiB: as said, or by its name."""
    if gib is not None:
        if gib == 0:
            raise ArgumentError("--gib", expected="a size above 0", actual=0)
        return gib
    if device is None:
        raise click.UsageError("the size of the memory is missing -> add --device h200, or another name, or --gib 80")
    facts = device_facts(device)
    size = memory_gib(device)
    if size is None:
        hint = f"add --gib N; names with a size: {', '.join(sorted(MEMORY_GIB))}"
        raise ArgumentError("--device", expected="a product of one size", actual=f"{device}, {facts.name}", hint=hint)
    return size


def _backend(rank: ModelGeometry, name: str | None, device: str | None, dtype: str, max_model_len: int) -> Backend:
    """The named backend, or the one that runs the layers of a rank on the device."""
    from dsv4attn.selection import load_backend, select_backend

    if name is not None or device is None:
        return load_backend(name or "triton")
    window, entries = layouts_of(rank, dtype)
    problems = [
        with_layouts(Problem.of(layer, phase=phase, max_model_len=max_model_len), window, entries)
        for layer in rank.distinct_layers
        for phase in PHASES
    ]
    return select_backend(*problems, device=device_facts(device))


def _least(deployment: Deployment, limits: Limits, free: int) -> int | None:
    """The smallest number of tensor-parallel ranks above the deployment's own that fits."""
    geometry = deployment.geometry
    for ranks in range(deployment.tensor + 1, geometry.num_heads + 1):
        divides = geometry.num_heads % ranks == geometry.o_groups % ranks == 0
        if divides and evolve(deployment, tensor=ranks).plan(limits).total <= free:
            return ranks
    return None


def _gib(size: int) -> str:
    return f"{size / _GIB:,.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _show(answer: Answer) -> None:
    """Print the verdict, the table of sizes and what fits."""
    limits, out = answer.limits, console()
    out.print(answer.verdict, style="bold green" if answer.left >= 0 else "bold red")
    out.print(_table(answer))
    tokens, requests = f"{limits.max_model_len:,} tokens", f"{limits.max_num_reqs:,} requests"
    longest = f"{answer.longest:,} tokens" if answer.longest else "none fits"
    of_model = ", the model's longest" * (answer.longest == answer.deployment.geometry.max_position)
    out.print(f"longest context of {requests}: {longest}{of_model}")
    most = f"{answer.most:,}{' or more' * (answer.most == _MANY)}" if answer.most else "none fits"
    out.print(f"most requests of {tokens}: {most}")
    if left_out := answer.deployment.sizes.left_out:
        out.print(f"not counted: weights of {' and '.join(left_out)}")


def _table(answer: Answer) -> Table:
    plan, limits = answer.plan, answer.limits
    table = simple_table()
    first, end = plan.layers
    table.add_column("of a rank" if answer.deployment.pipeline == 1 else f"rank of layers {first} to {end - 1}")
    for head in ("a request", f"{limits.max_num_reqs:,} requests and a step"):
        table.add_column(head, justify="right")
    for name, size in plan.weights.items():
        table.add_row(f"weights: {name}", "", _gib(size))
    for name, size in plan.caches.items():
        table.add_row(f"cache: {name}", _mib(plan.request[name]), _gib(size))
    table.add_row(f"workspace of {answer.deployment.backend.name}", "", _gib(plan.workspace))
    table.add_row("temporaries", "", _gib(plan.temporaries))
    table.add_row("other, assumed", "", _gib(answer.other))
    table.add_section()
    table.add_row("together", _mib(sum(plan.request.values())), _gib(plan.total + answer.other))
    table.add_row(f"may be used, {answer.budget / answer.memory:.0%}", "", _gib(answer.budget))
    return table


def _draw(answer: Answer, path: Path) -> None:
    """Draw one bar: the parts of a rank's memory, and the line up to which it may be used."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes, start = figure.add_subplot(), 0.0
    parts = {**answer.parts, "left": max(answer.left, 0)}
    for (name, size), colour in zip(parts.items(), _COLOURS, strict=True):
        axes.barh([0], [size / _GIB], left=start, color=colour, label=f"{name} {_gib(size)}", height=0.5)
        start += size / _GIB
    for size, style in ((answer.budget, "--"), (answer.memory, "-")):
        axes.axvline(size / _GIB, color="#222222", linestyle=style, linewidth=1)
    axes.set(xlabel="GiB of a rank; dashed: may be used", yticks=[], title=answer.verdict.partition(" ->")[0])
    axes.title.set_fontsize(10)
    axes.spines[["left", "right", "top"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path} cannot be drawn: {error}") from error
