"""`dsv4attn bench`: how far a backend is from the matrix products it cannot avoid."""

from __future__ import annotations

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dsv4attn.bench.measure import Measurement, measure
from dsv4attn.bench.overhead import overhead
from dsv4attn.bench.problem import make_problem
from dsv4attn.cli import print_json
from dsv4attn.cli.common import chosen_backend, geometry_of


@click.command()
@click.option("--backend", metavar="NAME", help="Backend to measure.  [default: as `dsv4attn explain` says]")
@click.option("--model", default="flash", show_default=True, help="flash, pro, or a preset's full name.")
@click.option("--tokens", default=2048, show_default=True, type=click.IntRange(1), help="Query tokens of the prefill.")
@click.option("--prefix", default=8192, show_default=True, type=click.IntRange(0), help="Tokens before them.")
@click.option("--decodes", default=32, show_default=True, type=click.IntRange(1), help="Requests of the decode.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Rounds to take the median of.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    backend: str | None, model: str, tokens: int, prefix: int, decodes: int, rounds: int, *, as_json: bool
) -> None:
    """Time prefill and decode of each layer type beside their own matrix products, taken in turn in one run."""
    geometry = geometry_of(model)
    chosen = chosen_backend(backend, {}, geometry, geometry.kinds)
    measured: list[Measurement] = []
    cases = [[(0, tokens)], [(prefix, tokens)], [(prefix, 1)] * decodes]
    console = Console(stderr=True)
    for kind in geometry.kinds:
        for requests in cases:
            with console.status(f"measuring {kind.value}, {sum(n for _, n in requests)} tokens"):
                measured.append(measure(make_problem(geometry, kind, requests, chosen), rounds=rounds))
    with console.status("measuring the host's share"):
        shares = [overhead(make_problem(geometry, kind, [(prefix, 1)], chosen)) for kind in geometry.kinds]
    if as_json:
        rows = [m.as_json() for m in measured]
        host = [share.as_json() for share in shares]
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        print_json({"ok": True, "backend": chosen.name, "model": geometry.name, **facts, "results": rows, "host": host})
        return
    Console().print(_table(measured, f"{chosen.name}, {geometry.name}, {geometry.num_heads} heads", rounds))
    for share in shares:
        direct, plain, bound, idle = (share.us(name) for name in ("direct", "plain", "bound", "idle"))
        click.echo(
            f"one decode token, {share.layer}: {direct:.0f} us in the backend's own steps on arguments made before, "
            f"{plain:.0f} us ({share.percent('plain'):+.1f} %) through forward_mqa, {bound:.0f} us "
            f"({share.percent('bound'):+.1f} %) through a bound layer; {idle:.0f} us through one whose steps do nothing"
        )


def _table(measured: list[Measurement], title: str, rounds: int) -> Table:
    caption = (
        f"time and products: ms, medians of {rounds} rounds, taken in turn in this run.\n"
        "products: the same matrix products alone, fp32. ratio: time / products.\n"
        "context: tokens before the step. keys: per query."
    )
    table = Table(
        title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for column in ("layer", "phase"):
        table.add_column(column)
    for column in ("tokens", "context", "keys", "time", "products", "ratio", "GFLOP/s"):
        table.add_column(column, justify="right")
    for m in measured:
        counts = str(m.tokens), str(m.context), f"{m.keys_per_row:.0f}"
        times = f"{m.step_ms:.1f}", f"{m.products_ms:.1f}", f"{m.ratio:.2f}", f"{m.gflops:.0f}"
        table.add_row(m.layer, m.phase, *counts, *times)
    return table
