"""`dsv4attn bench-memory`: memory of selections of growing contexts."""

from __future__ import annotations

import click
from attrs import asdict

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import FAILED, OK, complete, print_json
from dsv4attn.tools.cli.bench_device import device_named
from dsv4attn.tools.cli.common import console, require_torch
from dsv4attn.tools.cli.options import JSON, flag, options, text


@click.command()
@options(
    text("--backend", default="triton", help="Backend whose ops run.", shell_complete=complete.backends),
    flag("--deterministic", help="Run deterministic ops."),
    JSON,
)
@click.pass_context
def bench_memory(ctx: click.Context, *, backend: str, deterministic: bool, as_json: bool) -> None:
    """Run selections of growing contexts, and print by how much the memory grows that torch reserves.

    A prompt of 1,024 tokens grows to 189,440 entries (757,760 tokens in DeepSeek-V4), and 64 decodes to 262,144. PLAN
    is what the backend plans for temporaries, PEAK the most that one call allocates, GROWTH what torch reserves more
    after all calls of a line.

    \b
    Exit codes:
      0    all lines together grow by no more than the plan
      1    they grow by more
      2    bad input
    """  # noqa: D301 - click wants the character
    require_torch(ctx)
    from dsv4attn.selection import load_backend
    from dsv4attn.tools.bench.selection_memory import growing_calls, measure

    device = device_named(None)
    if device.type == "cpu":
        raise ArgumentError("device", expected="an accelerator, whose allocator counts", actual="cpu")
    ops = load_backend(backend, **({"deterministic": True} if deterministic else {})).layer_ops
    lines = [measure(ops, calls, device) for calls in growing_calls(small=False)]
    ok, mib = sum(line.reserved for line in lines) <= max(line.planned for line in lines), 2**20
    if as_json:
        print_json({"ok": ok, "lines": [asdict(line) for line in lines]})
    for line in () if as_json else lines:
        sizes = f"plan {line.planned / mib:,.0f} MiB, peak {line.peak / mib:,.0f}, growth {line.reserved / mib:,.0f}"
        console().print(f"{line.name}: {sizes}", soft_wrap=True)
    ctx.exit(OK if ok else FAILED)
