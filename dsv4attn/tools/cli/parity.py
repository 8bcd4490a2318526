"""`dsv4attn parity`: runs the conformance cases on several backends and shows their errors side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dsv4attn.tools.cli import FAILED, INTERRUPTED, OK, complete, print_json
from dsv4attn.tools.cli.common import check_request, console, grid, require_torch, simple_table
from dsv4attn.tools.cli.conform import grouped, run_kit, show_failures, write_page
from dsv4attn.tools.cli.options import FILTER, HTML, JSON, options, text, torch_device

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from dsv4attn.testing.parity import Parity

_NOT_RUN = "skipped"
_STYLES = {"passed": "", "failed": "bold red", "refused": "yellow", "skipped": "dim"}
_FORMS = "reference,reference:prefill_keys=paged,reference:decode_indices=ragged:prefill_indices=ragged"


@click.command()
@options(
    text(
        "--backends",
        metavar="NAME[:OPTION=VALUE],...",
        default=_FORMS,
        show_default=False,
        shell_complete=complete.several(complete.backends),
        help="Backends to compare, with commas.  [default: the reference with three sets of options]",
    ),
    torch_device("Torch device.  [default: the first accelerator each runs on, or cpu]"),
    FILTER,
    JSON,
    HTML,
)
@click.pass_context
def parity(
    ctx: click.Context, backends: str, device: str | None, chosen: str | None, page: Path | None, *, as_json: bool
) -> None:
    """Run the cases of the conformance kit on several backends, and compare the errors.

    Each number is the largest error of a case against a float64 oracle, as a fraction of the limit that follows from
    the formats of the caches. "same" means equal bits.

    \b
    Exit codes:
      0    every case that ran has passed
      1    a case has failed, or a backend ran no case
      2    bad input
      130  interrupted; what has run is shown, marked incomplete
    """  # noqa: D301 - click wants the character
    for request in backends.split(","):
        if name := request.strip().partition(":")[0]:
            check_request(name)
    require_torch(ctx)
    from dsv4attn.testing.case import chosen as matching
    from dsv4attn.testing.cases.table import CASES
    from dsv4attn.testing.parity import Parity, subjects

    cases = matching(CASES, chosen)
    certificates = run_kit(lambda: subjects(backends, device=device), cases, chosen, shown=not as_json)
    result = Parity(certificates, tuple(cases))
    if page:
        write_page(page, result)
    if as_json:
        print_json(result.as_json())
    else:
        _show(result, page)
    ctx.exit(INTERRUPTED if result.interrupted else OK if result.ok else FAILED)


def _show(result: Parity, page: Path | None) -> None:
    from rich.padding import Padding

    out = console()
    devices = dict.fromkeys(f"{c.subject.device}: {c.subject.facts}" for c in result.certificates)
    names = [(chr(ord("A") + i), [c.subject.label]) for i, c in enumerate(result.certificates)]
    out.print(grid([("device", list(devices)), *names]))
    out.print(Padding(_table(result), (0, 0, 0, 1)))
    for (letter, _), certificate in zip(names, result.certificates, strict=True):
        for state in ("refused", "skipped"):
            if lines := grouped(certificate.of(state)):
                out.print(grid([(f"{letter} {state}", lines)], [_STYLES[state]]))
        show_failures(out, certificate.outcomes, f"{letter} failed")
    out.print()
    for certificate in result.certificates:
        style = "bold green" if certificate.ok else "bold red"
        out.print(Padding(certificate.verdict, (0, 0, 0, 2)), style=style)
    if page:
        out.print(f"  report: {page}", soft_wrap=True)


def _table(result: Parity) -> Table:
    from rich.text import Text

    from dsv4attn.testing.parity import cell

    caption = "Largest error as a fraction of its budget; same: equal bits."
    table = simple_table(caption)
    table.add_column("clauses", max_width=14)
    table.add_column("case", no_wrap=True)
    for i in range(len(result.names)):
        table.add_column(chr(ord("A") + i), justify="right", no_wrap=True)
    for case, outcomes in result.rows:
        cells = [Text(cell(outcome), style=_STYLES[outcome.state if outcome else _NOT_RUN]) for outcome in outcomes]
        table.add_row(Text(" ".join(case.clauses), style="dim"), case.name, *cells)
    return table
