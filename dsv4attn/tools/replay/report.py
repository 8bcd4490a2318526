"""Results of a replay: errors, times and memory of each layer type, as plain data, as JSON, and as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict, define, field, frozen

__all__ = ["SHOWN_FAILURES", "CheckResult", "Errors", "LayerReport", "Report", "Seconds", "as_json", "as_text"]

SHOWN_FAILURES = 5
"""Failed rows of a layer type that are described; all are counted."""


@frozen
class Errors:
    """Errors of checked rows, or their limits; `replay.check` defines and derives them.

    out: relative error of the output.
    lse: absolute error of the lse.
    projection: relative error of the projected values.
    """

    out: float = 0.0
    lse: float = 0.0
    projection: float = 0.0

    def worst(self, other: Errors) -> Errors:
        """The larger of each."""
        pairs = zip(self, other, strict=True)
        return Errors(*(max(a, b) for a, b in pairs))

    def beyond(self, limit: Errors) -> list[str]:
        """Names of the errors that exceed their limit."""
        return [name for name, a, b in zip(asdict(self), self, limit, strict=True) if not a <= b]

    def __iter__(self) -> Iterator[float]:
        """Iterate in the order of the fields."""
        return iter((self.out, self.lse, self.projection))


@define
class CheckResult:
    """Checked rows of one layer type.

    tolerance: largest errors allowed.
    rows: rows that were checked.
    failed: rows beyond a tolerance.
    worst: largest errors.
    failures: one line for each failed row, at most SHOWN_FAILURES.
    """

    tolerance: Errors
    rows: int = 0
    failed: int = 0
    worst: Errors = field(factory=Errors)
    failures: list[str] = field(factory=list)

    def add(self, errors: Errors, where: str) -> None:
        """Account for one row."""
        self.rows += 1
        self.worst = self.worst.worst(errors)
        beyond = errors.beyond(self.tolerance)
        if beyond:
            self.failed += 1
            if len(self.failures) < SHOWN_FAILURES:
                said = ", ".join(f"{name} {getattr(errors, name):.2g}" for name in beyond)
                self.failures.append(f"{where}: {said}")

    @property
    def ok(self) -> bool:
        """Whether no row failed; also true when none was checked."""
        return not self.failed


@define
class Seconds:
    """Seconds of one layer type, by operation.

    insert: q-norm, RoPE and insertion of keys and of compressed entries.
    attend: `forward_mqa`: index arithmetic, gathering, attention.
    project: inverse RoPE and grouped output projection.
    """

    insert: float = 0.0
    attend: float = 0.0
    project: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all operations."""
        return self.insert + self.attend + self.project

    def add(self, insert: float, attend: float, project: float) -> None:
        """Account for a step."""
        self.insert += insert
        self.attend += attend
        self.project += project


@define
class LayerReport:
    """One layer that represents all layers of its type.

    kind: layer type.
    layers_in_model: layers of this type in the model.
    kv_bytes_per_token: bytes of a page of the compressed cache per token; the part that grows with the context.
    window_bytes_per_sequence: bytes of the window pages that one idle sequence can hold; the part that does not grow.
    kv_bytes_peak: most bytes of pages of both caches in use at once.
    workspace_bytes_peak: most bytes of the workspace in one call.
    workspace_bytes_planned: bytes of the workspace plan.
    transient_bytes_bound: bytes that a call may take from the framework's allocator besides the workspace; 0 for
    backends with kernels.
    tokens: tokens served.
    seconds: time by operation.
    check: checked rows, or None.
    """

    kind: str
    layers_in_model: int
    kv_bytes_per_token: float
    window_bytes_per_sequence: int
    kv_bytes_peak: int = 0
    workspace_bytes_peak: int = 0
    workspace_bytes_planned: int = 0
    transient_bytes_bound: int = 0
    tokens: int = 0
    seconds: Seconds = field(factory=Seconds)
    check: CheckResult | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the time spent in this layer."""
        return self.tokens / self.seconds.total if self.seconds.total else 0.0


@define
class Report:
    """A whole replay, finished or interrupted.

    model: name of the model.
    backend: name of the backend.
    cache: name of the cache layout.
    seed: seed of the replay.
    block_size: records in a page of the window cache.
    max_num_batched_tokens: most tokens of a step.
    max_num_seqs: most requests that run at once.
    requests: requests of the trace.
    layers: one report for each layer type.
    finished: requests that were finished.
    steps: steps that ran.
    prefill_tokens: tokens served by the prefill parts of steps.
    decode_tokens: tokens served by the decode parts of steps.
    recomputed_tokens: tokens that were served again after a preemption.
    preemptions: number of preemptions.
    wall_s: duration in seconds.
    other_s: seconds outside the layers: making inputs, scheduling and metadata, checking.
    interrupted: whether Ctrl-C ended the run.
    trace: name of the trace.
    options: options of the backend.
    threads: threads of the CPU, cores that may be used, and where the number comes from; `text` has all in words.
    """

    model: str
    backend: str
    cache: str
    seed: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    requests: int
    layers: list[LayerReport]
    finished: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    wall_s: float = 0.0
    other_s: dict[str, float] = field(factory=dict)
    interrupted: bool = False
    trace: str = "generated"
    options: Mapping[str, str] = field(factory=dict)
    threads: Mapping[str, object] = field(factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the replay ran to its end and no checked row failed."""
        return not self.interrupted and all(layer.check is None or layer.check.ok for layer in self.layers)

    def shares(self) -> list[float]:
        """Share of each layer type in the time of those that were run, one layer each."""
        return _shares([layer.seconds.total for layer in self.layers])

    def model_shares(self) -> list[float]:
        """The same with every layer of the model counted."""
        return _shares([layer.seconds.total * layer.layers_in_model for layer in self.layers])


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 0.0 for value in values]


def as_json(report: Report) -> dict[str, Any]:
    """Plain values under the names of the fields; an error that is not a number is null."""
    plain = {"ok": report.ok, **asdict(report)}
    for values, layer, share in zip(plain["layers"], report.layers, report.shares(), strict=True):
        values |= {"tokens_per_s": layer.tokens_per_s, "share_of_time": share}
        if layer.check is not None:
            values["check"]["ok"] = layer.check.ok
            worst = values["check"]["worst"]
            if not layer.check.rows:
                values["check"]["ok"] = None  # nothing was checked
            checked = layer.check.rows > 0
            worst |= {name: value if checked and math.isfinite(value) else None for name, value in worst.items()}
    return plain


def as_text(report: Report) -> Any:  # noqa: ANN401 - a rich renderable; rich is imported when something is shown
    """A report as text: totals, a table with a column for each layer type, and failed rows."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("one layer of each type", style="default", no_wrap=True)
    for layer in report.layers:
        table.add_column(layer.kind, justify="right", no_wrap=True)
    for title, lines in _sections(report):
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for name, cells in lines:
            table.add_row(f"  {name}", *(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    failures = [
        Text(f"{layer.kind}: {line}", style="red")
        for layer in report.layers
        if layer.check is not None
        for line in [*layer.check.failures, *_more(layer.check)]
    ]
    return Group(*map(Text, _head(report)), Text(), table, Text(), *failures, _verdict(report))


_STYLES = {"ok": "green", "FAIL": "bold red", "not checked": "yellow"}


def _more(check: CheckResult) -> list[str]:
    hidden = check.failed - len(check.failures)
    return [f"and {hidden} more rows"] if hidden > 0 else []


def _head(report: Report) -> list[str]:
    options = ", ".join(f"{name}={value}" for name, value in report.options.items())
    total = report.prefill_tokens + report.decode_tokens
    again = f"; {report.preemptions} preemptions, {report.recomputed_tokens:,} tokens served again"
    phases = f"{report.prefill_tokens:,} prefill, {report.decode_tokens:,} decode"
    spent = {"layers": sum(layer.seconds.total for layer in report.layers), **report.other_s}
    return [
        f"{report.model} on backend {report.backend}{f' ({options})' if options else ''}, cache {report.cache}",
        f"trace {report.trace}",
        *([str(report.threads["text"])] if report.threads else []),
        f"{report.finished} of {report.requests} requests finished in {report.steps:,} steps",
        f"{total:,} tokens: {phases}{again if report.preemptions else ''}",
        f"{report.wall_s:.1f} s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in spent.items())}",
    ]


def _sections(report: Report) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    layers = report.layers

    def row(name: str, cell: Callable[[LayerReport], str]) -> tuple[str, list[str]]:
        return name, [cell(layer) for layer in layers]

    def shares(name: str, values: Sequence[float]) -> tuple[str, list[str]]:
        return name, [f"{value:.1%}" for value in values]

    speed = [
        row("tokens/s", lambda x: f"{x.tokens_per_s:,.0f}" if x.tokens else "-"),
        shares("share of time", report.shares()),
        row("  q-norm, RoPE, insert", lambda x: f"{x.seconds.insert:.2f} s" if x.tokens else "-"),
        row("  attention", lambda x: f"{x.seconds.attend:.2f} s" if x.tokens else "-"),
        row("  inverse RoPE, projection", lambda x: f"{x.seconds.project:.2f} s" if x.tokens else "-"),
        row("layers in the model", lambda x: str(x.layers_in_model)),
        shares("share with all layers", report.model_shares()),
    ]
    memory = [
        row("KV bytes per token", lambda x: f"{x.kv_bytes_per_token:,.2f}"),
        row("  and per sequence, window", lambda x: _size(x.window_bytes_per_sequence)),
        row("KV pages in use, peak", lambda x: _size(x.kv_bytes_peak)),
        row("workspace, peak", lambda x: _size(x.workspace_bytes_peak)),
        row("  planned", lambda x: _size(x.workspace_bytes_planned)),
        row("  temporaries beside it, at most", lambda x: _size(x.transient_bytes_bound)),
    ]
    checks = [
        row("rows", lambda x: f"{x.check.rows:,}" if x.check else "0"),
        *(_error_row(name, layers) for name in ("out", "lse", "projection")),
        row("verdict", _layer_verdict),
    ]
    return [("speed", speed), ("memory", memory), ("checked against the float64 oracle", checks)]


def _layer_verdict(layer: LayerReport) -> str:
    if layer.check is None or not layer.check.rows:
        return "not checked"
    return "ok" if layer.check.ok else "FAIL"


def _error_row(name: str, layers: Sequence[LayerReport]) -> tuple[str, list[str]]:
    checks = [layer.check for layer in layers]
    limit = next((getattr(check.tolerance, name) for check in checks if check), None)
    cells = [f"{getattr(check.worst, name):.1e}" if check and check.rows else "-" for check in checks]
    return f"worst error of {name}" + (f" (≤{limit:.1e})" if limit else ""), cells


def _size(size: float) -> str:
    """At most 11 characters: three columns of them fit a narrow terminal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def _verdict(report: Report) -> Any:  # noqa: ANN401 - as `as_text`
    from rich.text import Text

    rows = sum(layer.check.rows for layer in report.layers if layer.check)
    failed = sum(layer.check.failed for layer in report.layers if layer.check)
    text = Text()
    if report.interrupted:
        text.append("interrupted; the above is what had run until then. ", style="bold yellow")
    if failed:
        text.append(f"FAILED: {failed:,} of {rows:,} checked rows are beyond a limit", style="bold red")
    elif rows:
        text.append(f"ok: all {rows:,} checked rows are within their limits", style="green")
    else:
        text.append("nothing was checked", style="yellow")
    return text
