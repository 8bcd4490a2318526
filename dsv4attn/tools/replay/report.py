"""The report of a replay, as JSON and as text. `page` makes a page of the same parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import asdict

from dsv4attn.core.reprs import counted
from dsv4attn.tools.replay.over_ranks import RanksReport, Traffic
from dsv4attn.tools.replay.results import CheckResult, Errors, LayerReport, Report


def as_json(report: Report) -> dict[str, Any]:
    """Plain values under the names of the fields; an error that is not a number is null."""
    plain = {"ok": report.ok, **asdict(report)}
    shares = zip(report.shares(), report.model_shares(), report.operation_shares(), strict=True)
    for values, layer, (share, model_share, operations) in zip(plain["layers"], report.layers, shares, strict=True):
        values |= {"tokens_per_s": layer.tokens_per_s, "share_of_time": share, "share_with_all_layers": model_share}
        values["operations_with_all_layers"] = operations
        if layer.check is not None:
            values["check"]["ok"] = layer.check.ok
            if not layer.check.rows:
                values["check"]["ok"] = None  # nothing was checked
            checked, compared = layer.check.rows > 0, asdict(layer.check.tolerance, filter=lambda _, x: x is not None)
            worst = {name: values["check"]["worst"][name] for name in compared}
            worst = {name: error if checked and _is_number(error) else None for name, error in worst.items()}
            values["check"] |= {"tolerance": compared, "worst": worst}
    return plain


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def as_text(report: Report, *, verbose: bool = False) -> Any:  # noqa: ANN401 - a rich renderable; rich is imported late
    """A report as text: the verdict, failed rows, totals, and a table with a column for each layer type.

    verbose: False: at most 40 lines of 80 columns for three layer types: one failed row of each layer type, and the
    most important rows of the table.
    """
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("one layer of each type", style="default", no_wrap=True)
    for layer in report.layers:
        table.add_column(layer.kind, justify="right", no_wrap=True)
    for title, lines in sections(report, verbose=verbose):
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for name, cells in lines:
            table.add_row(f"  {name}", *(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    failed = [Text(line, style="red") for line in failures(report, most=None if verbose else 1)]
    remarks = [Text(note, style="yellow") for note in notes(report)]
    return Group(verdict(report), *failed, *map(Text, head(report, verbose=verbose)), *remarks, Text(), table)


OPERATIONS = {
    "projections": "projections of q and keys",
    "insert": "q-norm, RoPE, insert",
    "compressor": "compressor",
    "indexer": "indexer: scores, selection",
    "attend": "attention",
    "project": "inverse RoPE, projection",
}
"""Names of operations."""
SHARES = {
    "key": "window keys",
    "query": "queries",
    "entry": "entries",
    "index_key": "index keys",
    "index_query": "index queries",
    "selection": "selection, of what fp32 sums allow",
}
"""Rows of errors whose limit is 1, under a title that says so."""
ERRORS = {
    "out": "out, relative",
    "lse": "lse, absolute",
    "projection": "projection, relative",
}
"""Rows of errors that have a limit of their own."""
_STYLES = {"ok": "green", "FAIL": "bold red", "not checked": "yellow"}


def failures(report: Report, *, most: int | None = None) -> list[str]:
    """Failed rows. most: rows of a layer type that are described; the others are counted. None: all that are known."""
    lines = [
        f"{layer.kind}: {line}"
        for layer in report.layers
        if layer.check is not None
        for line in _described(layer.check, most)
    ]
    of_ranks = _of_ranks(report.ranks)
    return [*lines, *(of_ranks if most is None else of_ranks[: most * len(report.layers)])]


def _described(check: CheckResult, most: int | None) -> list[str]:
    shown = check.failures[:most]
    hidden = check.failed - len(shown)
    if not hidden:
        return shown
    if most is None:
        return [*shown, f"and {hidden} more rows"]
    return [*shown[:-1], f"{shown[-1]}; and {counted(hidden, 'more row')}"]


def _of_ranks(ranks: RanksReport | None) -> list[str]:
    """Failures on other ranks than the first, which prints its own in full."""
    if ranks is None:
        return []
    failed = [
        f"rank {rank.rank}, {layer.kind}: {line}"
        for rank in ranks.ranks[1:]
        for layer in rank.layers
        for line in layer.failures
    ]
    return [*failed, *(f"{kind}: attention is not the same bits on all ranks" for kind in ranks.differing)]


def notes(report: Report) -> list[str]:
    """One line if no step computed the indexer's scores."""
    return [
        f"selection was not exercised: no token saw more than {layer.topk:,} entries -> "
        + ("--trace long" if report.trace == "generated" else f"serve a prompt of {layer.selecting_tokens:,} tokens")
        for layer in report.layers
        if layer.selection_not_exercised
    ]


def head(report: Report, *, verbose: bool = True) -> list[str]:
    """What has run, where, in what time, and the limits of errors."""
    count = report.threads.get("count")
    threads = f" ({counted(count, 'thread')})" if isinstance(count, int) else ""
    limits = next((layer.check.tolerance for layer in report.layers if layer.check), None)
    options = ", ".join(f"{name}={value}" for name, value in report.options.items())
    total = report.prefill_tokens + report.decode_tokens
    again = f"; {report.preemptions} preemptions, {report.recomputed_tokens:,} tokens served again"
    phases = f"{report.prefill_tokens:,} prefill, {report.decode_tokens:,} decode"
    spent = {"layers": sum(layer.total_s for layer in report.layers), **report.other_s}
    return [
        f"backend {report.backend}{f' ({options})' if options else ''} on {report.device}{threads}",
        *([f"limits of errors: {_limits(limits)}"] if limits else []),
        f"{report.model}{_selected(report)}, cache {report.cache}",
        "whole layers, with random weights",
        *(_cache_lines(report) if verbose else []),
        *([] if report.ranks is None else [f"compressed entries over {report.ranks.size} ranks"]),
        f"trace {report.trace} ({counted(report.requests, 'request')}, longest {report.longest_request:,} tokens)",
        *([str(report.threads["text"])] if report.threads and verbose else []),
        f"{report.finished} of {report.requests} requests finished in {report.steps:,} steps",
        f"{total:,} tokens: {phases}{again if report.preemptions else ''}",
        f"{report.wall_s:.1f} s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in spent.items())}",
    ]


def _selected(report: Report) -> str:
    """How many entries the indexer selects, if the model says another number."""
    topk = next((layer.topk for layer in report.layers if layer.topk), None)
    if topk is None or report.model_topk is None:
        return ""
    return f" with index_topk {topk} instead of {report.model_topk}"


def _limits(tolerance: Errors) -> str:
    """The largest errors that are allowed, in one line. Limits of shares are 1, which the title of their table says."""
    return ", ".join(f"{name} {getattr(tolerance, name):.1e}" for name in ERRORS)


def _cache_lines(report: Report) -> list[str]:
    """What a token of context costs in the whole network, and which layers were not run."""
    lines = []
    if report.records_per_token:
        keys = " and as many index keys" if report.readers else ""
        records = f"{report.records_per_token:g} compressed records{keys}"
        lines.append(f"{report.kv_bytes_per_token:,.0f} bytes of KV per token of context, in all layers: {records}")
    if report.readers:
        lines.append(f"{report.readers} layers read the compressed caches of others; such layers are not run")
    return lines


Line = tuple[str, list[str]]
"""A line of the table: its name, and a cell for each layer type."""


def sections(report: Report, *, verbose: bool = True) -> list[tuple[str, list[Line]]]:
    """Titles of the table and the lines under each title.

    verbose: False leaves out the indented lines, and speed and memory if a row failed.
    """
    layers = report.layers

    def row(name: str, cell: Callable[[LayerReport], str]) -> tuple[str, list[str]]:
        return name, [cell(layer) for layer in layers]

    def shares(name: str, values: Sequence[float]) -> tuple[str, list[str]]:
        return name, [f"{value:.1%}" for value in values]

    totals = {name: sum(part[name] for part in report.operation_shares()) for name in layers[0].seconds}

    def operation(name: str) -> tuple[str, list[str]]:
        return row(f"  {OPERATIONS[name]}", lambda x: f"{x.seconds[name]:.2f} s" if x.tokens else "-")

    count = sum(layer.layers_in_model for layer in layers)
    alike = "layers that own what they read" if report.readers else "layers in the model"
    speed = [
        row("tokens/s", lambda x: f"{x.tokens_per_s:,.0f}" if x.tokens else "-"),
        shares("share of time", report.shares()),
        *map(operation, totals),
        row(alike, lambda x: str(x.layers_in_model)),
        shares(f"share of time in {'all ' * (count > 1)}{counted(count, 'layer')}", report.model_shares()),
        *(
            shares(f"  {OPERATIONS[name]}: {total:.1%}", [part[name] for part in report.operation_shares()])
            for name, total in totals.items()
        ),
    ]
    memory = [
        row("KV bytes per token", lambda x: f"{x.kv_bytes_per_token:,.2f}"),
        row("  and per sequence, window", lambda x: _size(x.window_bytes_per_sequence)),
        row("  and compressor states", lambda x: _size(x.state_bytes_per_sequence)),
        row("KV pages in use, peak", lambda x: _size(x.kv_bytes_peak)),
        row("workspace, peak", lambda x: _size(x.workspace_bytes_peak)),
        row("  planned", lambda x: _size(x.workspace_bytes_planned)),
        row("  temporaries in addition, at most", lambda x: _size(x.transient_bytes_bound)),
    ]
    checks = [row("rows checked", lambda x: f"{x.check.rows:,}" if x.check else "0"), row("verdict", _layer_verdict)]
    stages = [(SHARES[name], [_error(x.check, name, ".2f") for x in layers]) for name in SHARES if _any(layers, name)]
    errors = [_error_row(name, layers) for name in ERRORS if any(layer.check for layer in layers)]
    table = [
        ("checks against the float64 oracle", checks),
        ("error, share of allowed rounding (≤1)", stages),
        ("largest error (≤limit)", errors),
        *([] if report.ranks is None else [_ranks_section(report.ranks)]),
    ]
    if verbose or not any(layer.check and layer.check.failed for layer in layers):
        table += [("speed", speed), ("memory", memory)]
    shown = [(title, [line for line in lines if verbose or not line[0].startswith(" ")]) for title, lines in table]
    return [(title, lines) for title, lines in shown if lines]


def _ranks_section(ranks: RanksReport) -> tuple[str, list[Line]]:
    """What each rank holds, and the bytes that the first one sends: those of all ranks are equal."""
    pages, (first, *_) = list[Line](), ranks.ranks
    for rank in ranks.ranks:
        name = f"rank {rank.rank}: entries, index keys"
        pages.append((name, [_size(x.compressed_bytes) if x.compressed_bytes else "-" for x in rank.layers]))
        pages.append(("  windows, compressor states", [_size(x.other_bytes) for x in rank.layers]))

    def sent(name: str, value: Callable[[Traffic], float], mean: Callable[[Traffic], float]) -> list[Line]:
        of_layers = [(value(layer.traffic), mean(layer.traffic)) for layer in first.layers]
        lines = zip(*((f"{a:,.0f} B", f"{b:,.0f} B") if a else ("-", "-") for a, b in of_layers), strict=True)
        return [(f"sent per token: {name}", [*next(lines)]), ("  in this run, mean", [*next(lines)])]

    traffic = sent("attention", lambda x: x.attention, lambda x: x.attention_sent)
    keys = [x.traffic.keys_sent for x in first.layers]
    traffic.append(("  keys for prefill, mean", [f"{n:,.0f} B" if n else "-" for n in keys]))
    traffic += sent("selection", lambda x: x.selection, lambda x: x.selection_sent)
    same = ["-" if not x.digest else "no" if x.kind in ranks.differing else "yes" for x in first.layers]
    checked = f"of {sum(x.rows for r in ranks.ranks for x in r.layers):,} rows on all ranks, failed"
    failed = [str(sum(rank.layers[i].failed for rank in ranks.ranks)) for i in range(len(first.layers))]
    title = f"{ranks.size} ranks, interleave {ranks.interleave}, peak of pages"
    return title, [*pages, *traffic, ("attention has the same bits on all", same), (checked, failed)]


def _layer_verdict(layer: LayerReport) -> str:
    if layer.check is None or not layer.check.rows:
        return "not checked"
    return "ok" if layer.check.ok else "FAIL"


def _any(layers: Sequence[LayerReport], name: str) -> bool:
    """Whether rows of some layer type were compared in this respect, or should have been."""
    if name == "selection" and any(layer.selection_not_exercised for layer in layers):
        return True
    return any(layer.check is not None and getattr(layer.check.worst, name, None) is not None for layer in layers)


def _error_row(name: str, layers: Sequence[LayerReport]) -> tuple[str, list[str]]:
    limit = next((getattr(layer.check.tolerance, name) for layer in layers if layer.check), None)
    return ERRORS[name] + (f" (≤{limit:.1e})" if limit else ""), [_error(x.check, name, ".1e") for x in layers]


def _error(check: CheckResult | None, name: str, form: str) -> str:
    value = getattr(check.worst, name) if check and check.rows else None
    return "-" if value is None else format(value, form)


def _size(size: float) -> str:
    """At most 11 characters: three columns of them fit a narrow terminal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def verdict(report: Report) -> Any:  # noqa: ANN401 - as `as_text`
    """The first line of a report, as rich text: whether all is well, and of how many rows."""
    from rich.text import Text

    rows = sum(layer.check.rows for layer in report.layers if layer.check)
    failed = sum(layer.check.failed for layer in report.layers if layer.check)
    selecting = sum(layer.check.selecting for layer in report.layers if layer.check)
    if report.ranks is not None:
        layers = [layer for rank in report.ranks.ranks for layer in rank.layers]
        rows, failed = sum(layer.rows for layer in layers), sum(layer.failed for layer in layers)
    on_ranks = f", on {report.ranks.size} ranks" if report.ranks is not None else ""
    text = Text()
    if report.interrupted:
        text.append("interrupted; the report is what had run until then. ", style="bold yellow")
    if failed:
        text.append(f"not ok: {failed:,} of {rows:,} checked rows are beyond a limit", style="bold red")
    elif report.ranks is not None and report.ranks.differing:
        text.append("not ok: ranks differ", style="bold red")
    elif rows:
        said = f"; {selecting:,} of them selected entries" if selecting and report.ranks is None else ""
        text.append(f"ok: all {rows:,} checked rows are within their limits{said}{on_ranks}", style="green")
    else:
        text.append("nothing was checked", style="yellow")
    return text
