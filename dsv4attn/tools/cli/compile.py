"""`dsv4attn compile`: compiles every kernel for named devices and lists registers, shared memory and spills."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from attrs import asdict, evolve, field, frozen

from dsv4attn.config import AUTO, PHASES, load_settings
from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.contract.devices import unknown
from dsv4attn.core.contract.limits import Limits
from dsv4attn.errors import ArgumentError, Dsv4AttnError, UnknownNameError
from dsv4attn.integrations.engines import ENGINES, VLLM, Engine
from dsv4attn.tools.cli import FAILED, OK, complete, print_json
from dsv4attn.tools.cli.common import (
    COMPILED_FOR,
    RECORDS,
    check_folder,
    check_request,
    console,
    device_facts,
    epilog,
    geometry_of,
    grid,
    layouts_of,
    longest_context,
    reason_json,
    require_torch,
    simple_table,
)
from dsv4attn.tools.cli.options import (
    JSON,
    PATH,
    backend_option,
    choice,
    command_line,
    integer,
    options,
    text,
    token_count,
)
from dsv4attn.tools.cli.progress import progress_bar
from dsv4attn.tools.cli.threads import check_number

if TYPE_CHECKING:
    from rich.table import Table

    from dsv4attn.backends._triton.compiling.aot import Outcome
    from dsv4attn.backends._triton.compiling.targets import Target
    from dsv4attn.backends._triton.compiling.variant import Variant
    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.core.contract.warmup import WarmupSpec
    from dsv4attn.core.model.geometry import ModelGeometry
    from dsv4attn.plugins import Registered

__all__ = ["bounds_of", "compile_", "rank_of"]

_SAID = {"spills": "spill", "limit": "break a limit", "failed": "do not compile"}
"""Words of the summary for each verdict but "ok"."""
_STYLES = {"ok": "green", "spills": "yellow", "limit": "bold red", "failed": "bold red"}
_DTYPES = ("e4m3fn", "e4m3fnuz", "bfloat16", "float32", *RECORDS)


@frozen
class _Job:
    """The kernels of one backend on one target, and the outcomes of their compilation."""

    target: Target
    backend: str
    variants: list[Variant]
    outcomes: list[Outcome] = field(factory=list)

    @property
    def faulty(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.reasons]

    def __str__(self) -> str:
        """One line."""
        count, unit = len(self.outcomes), "SM" if self.target.is_cuda else "CU"
        kernels = f"{count} kernel{'s' * (count != 1)} of {self.backend} for {self.target.name}"
        needed = [outcome.resources for outcome in self.outcomes if outcome.resources]
        if self.faulty or not needed:
            verdicts = [outcome.verdict for outcome in self.faulty]
            faults = [f"{verdicts.count(verdict)} {said}" for verdict, said in _SAID.items() if verdict in verdicts]
            return f"{kernels}: {', '.join(faults) or 'nothing to compile'}"
        shared = f"{max(r.shared for r in needed):,} of {self.target.shared_per_block:,} bytes"
        fewest = min(r.occupancy for r in needed)
        blocks = f"{fewest} block{'s' if fewest > 1 else ''} per {unit}"
        admitted = sum(r.spill_stores + r.spill_loads > 0 for r in needed)
        spills = f"{admitted} spill{'s' if admitted == 1 else ''} no more than expected" if admitted else "no spills"
        return f"{kernels}: {spills}, largest shared memory {shared}, at least {blocks}"


@click.command("compile", epilog=epilog(COMPILED_FOR))
@options(
    text(
        "--target",
        "--device",
        "targets",
        multiple=True,
        required=True,
        shell_complete=complete.targets,
        help="Device to compile for, such as h200, mi300x or sm_90; may be repeated. All names are below.",
    ),
    text(
        "--backend",
        help="Backend whose kernels are compiled.  [default: with --engine those of DSV4ATTN_BACKEND or dsv4attn.toml, "
        "else those native to the device; without --engine every one that runs there]",
        shell_complete=complete.backends,
    ),
    text(
        "--model",
        "--preset",
        default="flash",
        help="Model: flash, pro, or the path of a config.json.",
        shell_complete=complete.models,
    ),
    choice(
        "--dtype",
        "dtypes",
        words=_DTYPES,
        multiple=True,
        default=_DTYPES[:1],
        help="Element type of both caches, or their record, where a window of v41_fp4 is v41_fp8; may be repeated.",
    ),
    integer(
        "--tensor-parallel",
        default=1,
        help="Ranks that divide the heads. Kernels are those of one "
        "rank, with --engine sglang of 64 heads at least, to which SGLang fills up.",
    ),
    token_count(
        "--max-model-len",
        help="Longest context that is served: vLLM's option of this name, SGLang's --context-length. Forms of "
        "selection in captured graphs follow from it.  [default: the model's longest context]",
    ),
    integer(
        "--num-speculative-tokens",
        least=0,
        default=0,
        help="Draft tokens that each request verifies in a decode step: vLLM's option of this name; SGLang's "
        "--speculative-num-draft-tokens counts one more.",
    ),
    backend_option("the configuration's; with --engine vllm also projection=fp8, as vLLM's wheel has it"),
    text(
        "--kernel",
        "kernels",
        multiple=True,
        help="Kernel to compile, as the table names it; may be repeated. An unknown name, such as --kernel names, "
        "is answered with all names.  [default: all]",
    ),
    text(
        "--cache",
        "folder",
        metavar="FOLDER",
        type=PATH,
        help="Folder of Triton's cache that gets the kernels.  [default: TRITON_CACHE_DIR, or Triton's own]",
    ),
    choice(
        "--engine",
        words=tuple(engine.package for engine in ENGINES),
        help="Engine that will launch the kernels: they go where it looks for them, unless --cache names a folder.",
    ),
    integer("--jobs", help="Threads that compile.  [default: one for each core, at most 16]"),
    JSON,
)
@click.pass_context
def compile_(
    ctx: click.Context,
    *,
    targets: tuple[str, ...],
    backend: str | None,
    model: str,
    dtypes: tuple[str, ...],
    tensor_parallel: int,
    max_model_len: int | None,
    num_speculative_tokens: int,
    backend_options: dict[str, str],
    kernels: tuple[str, ...],
    folder: Path | None,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Compile every kernel of a model for GPUs of NVIDIA and AMD, with the Triton that is installed.

    Nothing is launched, and no device or driver is needed. The table has, for each kernel: registers of a thread,
    bytes that a thread spills, shared memory of a block, warps of a block and threads of a warp, matrix
    instructions, and how many blocks fit an SM or CU. The number of blocks is computed here, and no compiler has
    confirmed it. A kernel that "spills" more than its backend expects is right, but slow. A kernel that exceeds a
    "limit" may not launch. A kernel that "failed" did not compile. Results go to Triton's cache,
    where a launch finds them: compile into a folder of an image, and set TRITON_CACHE_DIR to it there. vLLM and SGLang
    have folders of their own without this variable: see --engine. Compile with the Triton of the image.

    \b
    Exit codes:
      0    no more spills than expected, every block fits, matrix units are used
      1    a kernel spills more, exceeds a limit, does not compile, or does 16-bit
           products without the matrix unit
      2    bad input, or a folder of kernels that cannot be written
    """  # noqa: D301 - click wants the character
    # names first: torch takes seconds
    served = next((known for known in ENGINES if known.package == engine), None)
    geometry = rank_of(geometry_of(model), tensor_parallel, served)
    longest = longest_context(geometry, max_model_len, geometry.max_position)
    check_request(backend)
    archs = [_arch(name, served) for name in targets]
    workers = None if jobs is None else check_number("--jobs", jobs)
    if served is not None and folder is None:
        folder = served.kernel_folder()
    # without an engine, Triton's own folder, which is vLLM's
    check_folder(folder or VLLM.kernel_folder(), "folder of kernels", "name another one with --cache")
    require_torch(ctx)
    from dsv4attn.core.contract.device import DeviceFacts

    if folder is not None:
        # Triton reads it at each compilation, and so do the processes that it starts
        os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    if DeviceFacts.here("cpu").interpreted:
        ctx.exit(_elsewhere(ctx))
    bounds = [bounds_of(geometry, dtype, longest, num_speculative_tokens) for dtype in dict.fromkeys(dtypes)]
    _require_triton()
    loaded, failed = _loaded(backend, backend_options, served.options if served else {})
    tasks = _jobs(archs, loaded, bounds, kernels, None if served is None or backend else _asked(loaded))
    from dsv4attn.backends._triton.compiling.aot import compile_all

    total = sum(len(task.variants) * (1 if task.target.is_cuda else 2) for task in tasks)
    done = count(1)

    def line(completed: float, seconds: float, values: dict[str, Any]) -> str:
        return f"{completed:.0f}/{total} compiled, {values['kernel']}, {seconds:.0f} s"

    with progress_bar(total, "{task.fields[kernel]}", shown=not as_json, line=line, kernel="") as move:
        for task in tasks:

            def progress(outcome: Outcome, target: str = task.target.name) -> None:
                move(next(done), kernel=f"{outcome.variant.name} for {target}")

            task.outcomes.extend(compile_all(task.variants, task.target, progress=progress, workers=workers))
    ok = not any(task.faulty for task in tasks)
    if as_json:
        values = {"model": geometry.name, "jobs": [_as_json(task) for task in tasks], "failures": failed}
        print_json({"ok": ok, **values})
    else:
        for task in tasks:
            _show(task)
        _sum_up(tasks, failed)
        if folder is not None and all(outcome.resources for task in tasks for outcome in task.outcomes):
            _show_for_image(ctx, folder.resolve(), geometry.num_heads)
    ctx.exit(OK if ok else FAILED)


def _show_for_image(ctx: click.Context, folder: Path, heads: int) -> None:
    """Print lines of a Dockerfile. They name what follows from this machine: the folder, and the settings' backends."""
    settings, words = load_settings(), command_line(ctx, "folder", "jobs")
    asked = {phase: settings.request(phase).value for phase in PHASES}
    import triton

    if "--kernel" in words:
        click.echo("other kernels than those of --kernel are compiled at the start of an engine")
    click.echo(f"in a Dockerfile, whose image must have Triton {triton.__version__} (kernels of {heads} heads):")
    if "--engine" in words and "--backend" not in words and {*asked.values()} != {AUTO}:
        click.echo(f"  ENV DSV4ATTN_BACKEND={','.join(f'{phase}={name}' for phase, name in asked.items())}")
    click.echo(f"  RUN {shlex.join(['dsv4attn', 'compile', *words, '--cache', str(folder)])}")
    click.echo(f"  ENV TRITON_CACHE_DIR={shlex.quote(str(folder))}")


def _elsewhere(ctx: click.Context) -> int:
    """Run this command in another Python without TRITON_INTERPRET, which Triton reads only once."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "dsv4attn", "compile", *command_line(ctx)]
    return subprocess.run(command, env=environ, check=False).returncode  # noqa: S603 - our own command


def _require_triton() -> None:
    """Raise UsageError without Triton, and for a release that is not served."""
    from dsv4attn.backends._triton.support import require_release

    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise click.UsageError("triton is not installed -> pip install 'dsv4attn[triton]'") from error
    require_release()


def _jobs(
    archs: Iterable[str],
    loaded: Mapping[str, tuple[Registered, Backend]],
    bounds: Sequence[WarmupSpec],
    kernels: Collection[str],
    asked: Collection[str] | None,
) -> list[_Job]:
    """The jobs. loaded: the backends whose kernels can be compiled.

    asked: what the settings ask for in each phase; for AUTO backends are compiled for devices that they are native to.
    None: each backend is compiled for every device on which it runs.
    """
    from dsv4attn.backends._triton.compiling.targets import Target
    from dsv4attn.core.contract.device import DeviceFacts

    chosen = [Target.of(arch) for arch in archs]
    jobs, names, wanted = [], set[str](), {_short(name) for name in kernels}
    for target in dict.fromkeys(chosen):
        facts = DeviceFacts.named(target.name)
        devices = {
            name: r.info.runs_on if asked is None or name in asked else r.info.native if AUTO in asked else ()
            for name, (r, _) in loaded.items()
        }
        backends_here = {name: compiled for name, (_, compiled) in loaded.items() if facts.matches(devices[name])}
        if not backends_here:
            patterns = sorted({pattern for patterns in devices.values() for pattern in patterns})
            expected = f"a device of {' or '.join(filter(devices.get, devices))}: {', '.join(patterns)}"
            raise ArgumentError("--target", expected=expected, actual=target.name)
        for name, compiled in backends_here.items():
            variants = [_checked(name, v) for b in bounds for v in compiled.kernel_variants(b, facts)]
            names |= {_short(variant.name) for variant in variants}
            chosen_variants = [v for v in dict.fromkeys(variants) if not kernels or _short(v.name) in wanted]
            jobs.append(_Job(target, name, chosen_variants))
    for name in kernels:
        if _short(name) not in names:
            raise UnknownNameError("kernel", name, names)
    return jobs


def _asked(loaded: Collection[str]) -> set[str]:
    """What the settings ask for in each phase: names of backends, or AUTO.

    Raises UnknownNameError for a backend that does not exist, ArgumentError if none is asked for that has kernels.
    """
    from dsv4attn.selection import registered

    settings = [load_settings().request(phase) for phase in PHASES]
    asked = {setting.value for setting in settings}
    for name in asked - {AUTO}:
        registered(name)
    if asked.isdisjoint({AUTO, *loaded}):
        expected, hint = "a backend with kernels to compile", "name one with --backend"
        raise ArgumentError(settings[0].source, expected=expected, actual=repr(settings[0].value), hint=hint)
    return asked


def _arch(name: str, engine: Engine | None) -> str:
    """The architecture of a device's name. Raises unless kernels can be compiled for it, and the engine calls them."""
    try:
        facts = device_facts(name)
    except UnknownNameError as error:
        known = [spelling for device in COMPILED_FOR for spelling in device.spellings]
        meant = [near for near in known if f"{near!r}" in str(error).partition(" (known: ")[0]]
        raise unknown("target", name, COMPILED_FOR, str(error).split("\n  ")[1:], near=meant) from None
    makers = {d.kind: d.text.split()[0] for d in COMPILED_FOR if engine is None or d.kind in engine.kinds}
    if facts.kind not in makers:
        hint = "its kernels are compiled on the device, at their first launch: `dsv4attn conform` runs all of them"
        if engine is not None and facts.kind == "hip":
            hint = f"leave --engine out, or compile for another engine: {engine.name} does not call dsv4attn there"
        expected = f"a GPU of {' or '.join(makers.values())}"
        actual, hint = (repr(name), "") if facts.kind == "cpu" else (f"{name!r} ({facts.name})", hint)
        raise ArgumentError("--target", expected=expected, actual=actual, hint=hint)
    return facts.arch


def _loaded(
    backend: str | None, options: Mapping[str, str], of_engine: Mapping[str, str]
) -> tuple[dict[str, tuple[Registered, Backend]], dict[str, str]]:
    """The backends whose kernels can be compiled, the one that is named must be; and the error of each other one.

    options: of the backends. of_engine: those that an engine sets for backends that have them, unless the settings do.
    """
    from dsv4attn.core.contract.backend import Backend
    from dsv4attn.selection import load_backend, registered, registry_for

    settings = load_settings()
    candidates = registry_for(settings).backends if backend is None else {backend: registered(backend)}
    loaded, failed = {}, {}
    for name, registration in candidates.items():
        try:
            usual = {key: value for key, value in of_engine.items() if key in registration.info.options}
            instance = load_backend(name, **{**usual, **settings.options.get(name, {}), **options})
        except Dsv4AttnError as error:
            if backend is not None:
                raise
            failed[name] = str(error).splitlines()[0]
            continue
        if getattr(instance.kernel_variants, "__func__", None) is not Backend.kernel_variants:
            loaded[name] = (registration, instance)
        elif backend is not None:
            raise ArgumentError("--backend", expected="one with kernels to compile", actual=repr(backend))
    if not loaded:
        known = {name: {*registration.info.options} for name, registration in candidates.items()}
        every = set[str]().union(*known.values())
        for option in sorted(options.keys() - every):
            raise UnknownNameError("option", option, every)
        having = [reason for name, reason in failed.items() if options.keys() <= known[name]]
        reasons = "".join(f"\n  {reason}" for reason in dict.fromkeys(having or failed.values()))
        raise click.UsageError(f"no backend has kernels to compile; `dsv4attn backends` lists them{reasons}")
    return loaded, failed


def rank_of(model: ModelGeometry, ranks: int, engine: Engine | None = None) -> ModelGeometry:
    """A rank's part of a model, with the heads that an engine gives to attention."""
    rank = model.tensor_parallel(ranks)
    return rank if engine is None else evolve(rank, num_heads=max(rank.num_heads, engine.least_heads))


def bounds_of(
    geometry: ModelGeometry, dtype: str, max_model_len: int | None = None, num_speculative_tokens: int = 0
) -> WarmupSpec:
    """Bounds of all calls of a model with caches of one type. Kernels do not depend on the number of requests.

    Rows of tensors are aligned to 16 bytes, as in engines. Variants for other alignments read and write narrower, in
    the same memory. max_model_len: tokens of the longest sequence; None: the model's longest context.
    num_speculative_tokens: drafts of a request in a decode.
    """
    from dsv4attn.core.contract.info import LAYER_PARTS
    from dsv4attn.core.contract.warmup import WarmupSpec

    window, compressed = layouts_of(geometry, dtype)
    record = KEY_RECORDS.get(dtype)
    # V4's compressor does not write V4.1's records
    writes = record is None or geometry.shared_latent or not record.codes_rope
    parts = tuple(part for part in LAYER_PARTS if part != "compressor" or writes)
    limits = Limits(256, 8192, max_model_len or geometry.max_position, num_speculative_tokens)
    caches = {"swa": window, "compressed": compressed}
    return WarmupSpec.of(geometry, limits, aligned_rows=True, layer_parts=True, parts=parts, **caches)


def _short(kernel: str) -> str:
    """The name of a kernel in the table."""
    return kernel.removesuffix("_kernel")


def _checked(backend: str, variant: object) -> Variant:
    from dsv4attn.backends._triton.compiling.variant import Variant

    if not isinstance(variant, Variant):
        raise ArgumentError(f"kernel_variants of {backend}", expected="Variants", actual=type(variant).__name__)
    return variant


def _described(job: _Job) -> list[tuple[Outcome, str]]:
    """Each outcome with the properties that distinguish its variant from others of the kernel, kernel by kernel."""
    from dsv4attn.backends._triton.compiling.aot import distinctions

    texts, order = distinctions(job.variants), [variant.kernel for variant in job.variants]
    outcomes = sorted(job.outcomes, key=lambda outcome: order.index(outcome.variant.kernel))
    return [(o, " ".join(filter(None, [texts[o.variant], "beyond 2 GB" if o.far else ""]))) for o in outcomes]


def _as_json(job: _Job) -> dict[str, Any]:
    kernels = [
        {
            "kernel": outcome.variant.name,
            "variant": difference,
            **(asdict(outcome.resources) if outcome.resources else {}),
            "verdict": outcome.verdict,
            "reasons": [reason_json(reason) for reason in outcome.reasons],
        }
        for outcome, difference in _described(job)
    ]
    return {"target": job.target.name, "backend": job.backend, "summary": str(job), "kernels": kernels}


def _show(job: _Job) -> None:
    from rich.padding import Padding

    out, described = console(), _described(job)
    out.print(grid([("target", [job.target.name]), ("backend", [job.backend])]))
    out.print(Padding(_table(described), (0, 0, 0, 1)))
    for outcome, difference in described:
        if outcome.reasons:
            rows: Sequence[str] = [str(reason) for reason in outcome.reasons]
            out.print(grid([(outcome.variant.name, [difference or "only variant"]), ("", rows)], ["", "red"]))


def _table(described: Iterable[tuple[Outcome, str]]) -> Table:
    from rich.padding import Padding
    from rich.text import Text

    caption = "warps: of a block, times their threads. mma: matrix instructions. fit: blocks that an SM or CU holds."
    table = simple_table(caption)
    table.add_column("kernel, variant", overflow="fold")
    for column in ("regs", "spill", "shared", "warps", "mma", "fit"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    name_above = ""
    for outcome, difference in described:
        need, name = outcome.resources, _short(outcome.variant.name)
        numbers = ["-"] * 6
        if need is not None:
            spilled = need.spill_stores + need.spill_loads
            counts = need.registers, spilled, need.shared, need.matrix, need.occupancy
            numbers = [f"{count:,}" for count in counts]
            numbers.insert(3, f"{need.threads // need.wave}x{need.wave}")
        if difference and name != name_above:
            # in a line of its own: beside the variants a narrow terminal has no room
            table.add_row(Text(name, style="bold"))
        first = Padding(Text(difference), (0, 0, 0, 2)) if difference else Text(name, style="bold")
        table.add_row(first, *numbers, Text(outcome.verdict, style=_STYLES[outcome.verdict]))
        name_above = name
    return table


def _sum_up(jobs: Iterable[_Job], failed: dict[str, str]) -> None:
    out = console()
    for error in failed.values():
        out.print(f"  not asked: {error}", style="yellow")
    for job in jobs:
        out.print(f"  {job}", style="bold red" if job.faulty else "bold green")
