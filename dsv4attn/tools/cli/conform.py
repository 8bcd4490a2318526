"""`dsv4attn conform`: runs the conformance kit on a backend and writes a certificate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from dsv4attn.errors import BrokenBackendError
from dsv4attn.tools.cli import FAILED, INTERRUPTED, OK, complete, print_json
from dsv4attn.tools.cli.common import check_request, console, grid, require_torch, simple_table, write_file
from dsv4attn.tools.cli.options import FILTER, HTML, OPTION, flag, integer, options, output_file, torch_device
from dsv4attn.tools.cli.progress import progress_bar
from dsv4attn.tools.cli.threads import check_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dsv4attn.testing.case import Case
    from dsv4attn.testing.conform import Certificate, Outcome, Subject
    from dsv4attn.testing.parity import Parity


SHOWN = 8
"""Kinds of failures shown in full, and cases named of each; the certificate has all of them."""


@click.command()
@click.argument("backend", required=False, shell_complete=complete.backends)
@options(
    torch_device("Torch device.  [default: the first accelerator it runs on, or cpu]"),
    OPTION,
    FILTER,
    flag("--list", "only_list", help="List the cases with their clauses, and run nothing. No BACKEND is needed."),
    flag("--fail-fast", help="Stop after the first case that fails."),
    integer(
        "--jobs", default=1, help="Processes that run cases. On a GPU one is best, because all of them share the GPU."
    ),
    integer(
        "--repeat",
        most=10**6,
        default=1,
        help="Run each case N times, to find races. A case ends with its first run that fails.",
    ),
    integer(
        "--timeout",
        metavar="SECONDS",
        most=10**6,
        default=900,
        help="Seconds that a case may take, with all its runs. A case that takes longer has failed; the others run on.",
    ),
    flag("--json", "as_json", help="Print the certificate as one JSON object, and nothing else."),
    output_file(
        "--certificate",
        help="File of the certificate.  [default: dsv4attn-BACKEND.json, unless --filter or --json is given]",
    ),
    output_file("--summary", help="File of a summary of the certificate, about 90 lines."),
    HTML,
)
@click.pass_context
def conform(
    ctx: click.Context,
    backend: str | None,
    device: str | None,
    backend_options: dict[str, str],
    chosen: str | None,
    jobs: int,
    repeat: int,
    timeout: int,
    certificate: Path | None,
    summary: Path | None,
    page: Path | None,
    *,
    only_list: bool,
    fail_fast: bool,
    as_json: bool,
) -> None:
    """Run the conformance kit on BACKEND, on this machine, and write a certificate.

    A float64 oracle, which shares no code with any backend, judges every case. The limits of errors follow from the
    formats of the caches. docs/contract.md has the clauses. Cases that the backend's support refuses are not run, and
    the reasons are shown.

    Cases run in a process of their own. A case that ends the process, by a signal for instance, or that takes longer
    than --timeout, has failed. The other cases then run in a new process.

    All cases take about 40 seconds with the reference on one quiet core of a CPU. A backend that compiles its kernels
    on first use takes longer the first time. After Ctrl-C, and after --fail-fast with cases left, the certificate is
    marked incomplete.

    \b
    Exit codes:
      0    every case that ran has passed
      1    a case has failed, or no case has run
      2    bad input
      130  interrupted; the certificate has what has run
    """  # noqa: D301 - click wants the character
    check_number("--jobs", jobs)
    check_request(backend)
    require_torch(ctx)
    from dsv4attn.testing.case import chosen as matching
    from dsv4attn.testing.cases.table import CASES
    from dsv4attn.testing.certificates import certificate_text, summary_text
    from dsv4attn.testing.conform import Subject
    from dsv4attn.testing.parity import Parity

    cases = matching(CASES, chosen)
    if only_list:
        _list(cases, as_json=as_json)
        return
    if backend is None:
        raise click.MissingParameter(ctx=ctx, param_hint="'BACKEND'", param_type="argument")

    def subjects() -> list[Subject]:
        return [Subject.named(backend, device=device, options=backend_options)]

    (result,) = run_kit(
        subjects, cases, chosen, jobs=jobs, repeat=repeat, timeout=timeout, shown=not as_json, fail_fast=fail_fast
    )
    result = attrs.evolve(result, repeat=repeat)
    values = result.as_json()
    # an incomplete certificate does not replace a complete one unasked
    usual = f"dsv4attn-{backend}{'' if result.complete else '.incomplete'}.json"
    target = certificate or (None if chosen or as_json else Path(usual))
    if target:
        write_file(target, certificate_text(values))
    if summary:
        write_file(summary, summary_text(values))
    if page:
        write_page(page, Parity((result,), tuple(cases)))
    if as_json:
        print_json(values)
    else:
        _show(result, target, page)
    ctx.exit(INTERRUPTED if result.interrupted else OK if result.ok else FAILED)


def _list(cases: Sequence[Case], *, as_json: bool) -> None:
    """Print the name and the clauses of each case, one case a line."""
    if as_json:
        print_json({"ok": True, "cases": [case.as_json() for case in cases]})
        return
    width = max(len(case.name) for case in cases)
    for case in cases:
        click.echo(f"{case.name:<{width}}  {' '.join(case.clauses)}")


def run_kit(
    subjects: Callable[[], Sequence[Subject]],
    cases: Sequence[Case],
    chosen: str | None,
    *,
    shown: bool,
    jobs: int = 1,
    repeat: int = 1,
    timeout: float = 900,
    fail_fast: bool = False,
) -> tuple[Certificate, ...]:
    """Run cases on backends, and show the progress. A backend that exists but cannot be made is exit code 1, not 2."""
    from dsv4attn.testing.conform import certificates_of
    from dsv4attn.testing.processes import outcomes_in_processes

    try:
        trials = subjects()
    except BrokenBackendError as error:
        raise click.ClickException(str(error)) from error
    outcomes = outcomes_in_processes(trials, cases, jobs, seconds=timeout, repeat=repeat)
    with _case_progress(len(cases) * len(trials), shown=shown) as progress:
        return certificates_of(trials, cases, outcomes, chosen=chosen, progress=progress, fail_fast=fail_fast)


def write_page(path: Path, parity: Parity) -> None:
    """Write the outcomes as a page of HTML."""
    from dsv4attn.testing.page import as_html

    write_file(path, as_html(parity))


@contextmanager
def _case_progress(total: int, *, shown: bool) -> Iterator[Callable[[Outcome], None]]:
    """The case that ran last, on stderr."""
    done = failed = 0

    def line(completed: float, seconds: float, values: dict[str, Any]) -> str:
        return f"{completed}/{total} cases, {values['failed']} failed, {values['case']}, {seconds:.0f} s"

    columns = ("{task.fields[failed]} failed", "red"), "{task.fields[case]}"
    with progress_bar(total, *columns, shown=shown, line=line, failed=0, case="") as move:

        def advance(outcome: Outcome) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + (outcome.state == "failed")
            move(done, failed=failed, case=outcome.case.name)

        yield advance


def _show(certificate: Certificate, target: Path | None, page: Path | None) -> None:
    from rich.padding import Padding

    from dsv4attn.testing.case import Area

    subject, out = certificate.subject, console()
    owner = f"{subject.distribution} {subject.version}".strip() or "not registered"
    head = [("backend", [f"{subject.label}  ({owner})"]), ("device", [f"{subject.device}: {subject.facts}"])]
    if any(outcome.case.area is Area.LAYER for outcome in certificate.outcomes):
        parts = {part.replace("_", "-"): source for part, source in certificate.layer_parts.items()}
        head += [("layer", _by_source(parts)), ("of V4.1", _by_source(certificate.v41_ops))]
    out.print(grid(head))
    out.print(Padding(_table(certificate), (0, 0, 0, 1)))
    for state in ("refused", "skipped"):
        if lines := grouped(certificate.of(state)):
            out.print(grid([(state, lines)], ["yellow" if state == "refused" else "dim"]))
    show_failures(out, certificate.outcomes)
    out.print()
    style = "bold green" if certificate.ok else "bold red"
    out.print(Padding(f"{certificate.verdict}  ({certificate.seconds:.0f} s)", (0, 0, 0, 2)), style=style)
    if target:
        out.print(f"  certificate: {target}", soft_wrap=True)
    else:
        out.print("  no certificate with --filter; --certificate FILE writes one")
    if page:
        out.print(f"  report: {page}", soft_wrap=True)


def _by_source(sources: Mapping[str, str]) -> list[str]:
    """A line for each source, with what comes from it."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        names[source].append(name)
    return [f"{', '.join(of_source)}: {source}" for source, of_source in names.items()]


def show_failures(out: Console, outcomes: Iterable[Outcome], title: str = "failed") -> None:
    """Print equal failures once: the first case with its message, then number and names of the others."""
    from rich.padding import Padding

    from dsv4attn.testing.conform import Failures

    groups = Failures.grouped(outcomes)
    for group in groups[:SHOWN]:
        case, others = group.first.case, [o.case.name for o in group.outcomes[1:]]
        out.print(f"  {title}  {case.id}", style="bold red", soft_wrap=True)
        out.print(Padding(case.says, (0, 0, 0, 10)), style="dim")
        out.print(Padding(group.first.message, (0, 0, 0, 10)))
        if others:
            remainder = "" if len(others) <= SHOWN else f" and {len(others) - SHOWN} more"
            names = ", ".join(others[:SHOWN])
            out.print(
                Padding(f"{len(group.outcomes)} cases fail alike: also {names}{remainder}", (0, 0, 0, 10)), style="red"
            )
    if rest := groups[SHOWN:]:
        names = ", ".join(f"{group.first.case.name} ({len(group.outcomes)})" for group in rest)
        count = sum(len(group.outcomes) for group in rest)
        text = f"and {count} more, of {len(rest)} other kinds: {names}"
        out.print(Padding(text, (0, 0, 0, 2)), style="red")


def grouped(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each reason, with the number of its cases."""
    cases: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        for reason in outcome.reasons:
            cases[reason].append(outcome.case.name)
    return [f"{len(names):>3} x {reason}" for reason, names in sorted(cases.items(), key=lambda item: -len(item[1]))]


def _table(certificate: Certificate) -> Table:
    from rich.text import Text

    from dsv4attn.testing.cases.table import GROUPS
    from dsv4attn.testing.conform import STATES

    caption = (
        "A case counts under each of its clauses. Nearest: largest error as a fraction of its budget, and its case."
    )
    table = simple_table(caption, padding=(0, 0, 0, 0))
    table.add_column("clauses", no_wrap=True, min_width=21)
    for column in STATES:
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    table.add_column("nearest to its budget", overflow="fold")
    for letter, title in GROUPS.items():
        of_letter = [o for o in certificate.outcomes if any(clause[0] == letter for clause in o.case.clauses)]
        if not of_letter:
            continue
        counts = [sum(o.state == state for o in of_letter) for state in STATES]
        measured = [o for o in of_letter if o.measure and o.measure.budget]
        worst = max(measured, key=lambda o: o.measure.fraction if o.measure else 0.0, default=None)
        near = " same bits" if counts[0] else ""
        if worst and worst.measure:
            near = f"{worst.measure.shown:>5} {worst.case.name}"
        style = "red" if counts[1] else "" if counts[0] else "yellow"
        cells = [Text(str(n or "-"), style="bold red" if i == 1 and n else "") for i, n in enumerate(counts)]
        table.add_row(Text(f"{letter}  {title}", style=style), *cells, Text(near, style=style, overflow="fold"))
    return table
