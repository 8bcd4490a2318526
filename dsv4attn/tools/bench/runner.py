"""Checks, then times, every backend and peer on every case. A wrong result gets no time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log

import torch
from attrs import asdict, evolve, field, frozen

from dsv4attn.core.contract import Backend, Products
from dsv4attn.errors import Dsv4AttnError
from dsv4attn.selection import explain, load_backend, registered, registry_of
from dsv4attn.tools.bench.attend import problem_of
from dsv4attn.tools.bench.cases import ATTENTION, Case
from dsv4attn.tools.bench.clock import Clock, Spread
from dsv4attn.tools.bench.inputs import make_inputs
from dsv4attn.tools.bench.layer import LayerCase, layer_time
from dsv4attn.tools.bench.overhead import overhead
from dsv4attn.tools.bench.peers import Peer, peer_subject
from dsv4attn.tools.bench.reference import Error, error, limit
from dsv4attn.tools.bench.roofline import Roofline
from dsv4attn.tools.bench.step import make_step, products
from dsv4attn.tools.bench.subjects import Subject, Task, make_task

__all__ = ["FAILED", "MEASURED", "REFUSED", "WRONG", "Row", "Runner", "geomeans"]

MEASURED, WRONG, FAILED, REFUSED = "measured", "wrong", "failed", "refused"
"""States of a row. wrong: its error is above the limit. failed: it raised. refused: its support said no."""


@frozen
class Row:
    """Result of one backend or peer on one case. Times are in seconds, and None without a measurement.

    kernel: kernel of the case.
    case: name of the case.
    by: name of the backend or peer.
    state: one of MEASURED, WRONG, FAILED, REFUSED.
    is_peer: whether it is another library.
    reason: why there is no time, or a note.
    error: relative error of the whole output.
    worst_row: relative error of the worst row.
    median: median of the rounds.
    p10: 10th percentile of the rounds.
    p90: 90th percentile of the rounds.
    exposed: whether the host's own time is part of the times.
    flops: operations of the products.
    bytes: least bytes to move.
    least: time that the roofline allows.
    vs: speed relative to each peer; 2 is twice as fast.
    series: scaling line of the case, or "".
    x: size of the case in that line.
    """

    kernel: str
    case: str
    by: str
    state: str
    is_peer: bool = False
    reason: str = ""
    error: float | None = None
    worst_row: float | None = None
    median: float | None = None
    p10: float | None = None
    p90: float | None = None
    exposed: bool = False
    flops: int = 0
    bytes: int = 0
    least: float = 0.0
    vs: Mapping[str, float] = field(factory=dict)
    series: str = ""
    x: int = 0

    @property
    def roofline(self) -> float | None:
        """Time that the roofline allows, as a fraction of the measured time."""
        return self.least / self.median if self.median else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the products."""
        return self.flops / self.median / 1e12 if self.median and self.flops else None

    @property
    def gbytes(self) -> float | None:
        """GB/s of the least bytes to move."""
        return self.bytes / self.median / 1e9 if self.median else None

    def as_json(self) -> dict[str, object]:
        """Plain values. Numbers that are not finite are null."""
        derived = {"roofline": self.roofline, "tflops": self.tflops, "gbytes": self.gbytes}
        values = {**asdict(self), **derived}
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Row:
        """The inverse of `as_json`. Raises KeyError or TypeError for a missing field."""
        names = cls.__annotations__
        return cls(**{name: values[name] for name in names})  # type: ignore[arg-type]


class Runner:
    """Runs cases on a device with a set of backends and peers, for a number of rounds."""

    def __init__(
        self, device: torch.device, backends: Mapping[str, Backend], peers: Sequence[Peer], rounds: int
    ) -> None:
        """Check which peers are available, and measure the roofline."""
        self.device, self.backends, self.rounds = device, dict(backends), rounds
        asked = {peer.name: peer.available() for peer in peers}
        self.unavailable = {name: why for name, why in asked.items() if why}
        self.peers = [peer for peer in peers if not asked[peer.name]]
        self.clock = Clock(device)
        self.roofline = Roofline.measure(self.clock)

    def run(self, case: Case) -> list[Row]:
        """Rows of one case, backends first."""
        with torch.inference_mode():
            try:
                task = make_task(case, self.device)
            except (torch.OutOfMemoryError, MemoryError) as full:
                why = f"inputs do not fit this machine: {_line(full)}"
                return [self._row(case, name, REFUSED, reason=why) for name in self.backends]
            rows, made = self._subjects(task)
            ready = [self._checked(task, *one) for one in made]
            running = [one for (one, _, _), row in zip(made, ready, strict=True) if row.state == MEASURED]
            spreads = iter(self._spreads(running))
            timed = [
                self._timed(task, one, row, next(spreads)) if row.state == MEASURED else row
                for one, row in zip(made, ready, strict=True)
            ]
        return _compared([*timed, *rows])

    def _spreads(self, running: Sequence[Subject]) -> list[Spread | Exception]:
        """Times of all subjects in turn. If one raises, each is timed alone, and that one gives its exception."""
        if not running:
            return []
        try:
            return [*self.clock.times([one.run for one in running], self.rounds)]
        except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
            return [broken] if len(running) == 1 else [s for one in running for s in self._spreads([one])]

    def settled(self, rows: Sequence[Row]) -> tuple[Roofline, list[Row]]:
        """Measure the roofline again at the end. The higher rates apply to all rows."""
        roof = self.roofline.best(Roofline.measure(self.clock))
        return roof, [evolve(row, least=roof.seconds(row.flops, row.bytes)) for row in rows]

    def host(self, case: Case) -> tuple[list[Mapping[str, object]], list[Row]]:
        """Host overhead of a step of one token with each backend that supports it, and rows of failures."""
        shares: list[Mapping[str, object]] = []
        failed = []
        inputs = make_inputs(case, self.device)
        for name, backend in self.backends.items():
            if self._why_not(case, name, backend):
                continue
            try:
                share = overhead(make_step(inputs, backend))
            except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
                failed.append(self._row(case, name, FAILED, reason=_line(broken)))
            else:
                shares.append({"by": name, **share.as_json(), "text": str(share)})
        return shares, failed

    def layer(self, case: LayerCase) -> tuple[list[Mapping[str, object]], list[Row]]:
        """Times of a whole layer with each backend, everyday and deterministic, and rows of failures."""
        times: list[Mapping[str, object]] = []
        failed = []
        for name, backend in self.backends.items():
            try:
                may = "deterministic" in registered(name).info.options
                exact = load_backend(name, deterministic=True) if may else None
                time = layer_time(case, backend, exact, self.clock, self.rounds)
            except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
                failed.append(Row("layer", case.name, name, FAILED, reason=_line(broken)))
            else:
                times.append({"by": name, **time.as_json(), "text": str(time)})
        return times, failed

    def _subjects(self, task: Task) -> tuple[list[Row], list[tuple[Subject, Products, bool]]]:
        """Rows of subjects that cannot run, and (subject, type of its products, whether it is a peer) of the others."""
        case, refused = task.case, []
        made: list[tuple[Subject, Products, bool]] = []
        able: list[Backend] = []
        for name, backend in self.backends.items():
            why = self._why_not(case, name, backend)
            if why:
                refused.append(self._row(case, name, REFUSED, reason=why))
                continue
            able.append(backend)
            try:
                made.append((task.subject(name, backend), backend.forms.products, False))
            except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
                refused.append(self._row(case, name, FAILED, reason=_line(broken)))
        if case.kernel == "step" and task.inputs is not None:
            made.append((Subject("products", products(task.inputs), lambda: None, list), Products.BF16, True))
        for peer in self.peers if case.kernel in ATTENTION else ():
            coarsest = Products.FP8 if peer.name == "flashinfer" else Products.BF16
            try:
                made.append((peer_subject(peer, task, able[:1]), coarsest, True))
            except Dsv4AttnError as refusal:
                refused.append(self._row(case, peer.name, REFUSED, is_peer=True, reason=_line(refusal)))
            except Exception as broken:  # noqa: BLE001
                refused.append(self._row(case, peer.name, FAILED, is_peer=True, reason=_line(broken)))
        return refused, made

    def _why_not(self, case: Case, name: str, backend: Backend) -> str:
        form = backend.forms.prefill_keys
        selection = explain(problem_of(case, form), backend=name, device=self.device, registry=registry_of(name))
        if selection.chosen is not None:
            return ""
        return " ".join(" ".join(line.split()) for c in selection.trace if c.name == name for line in c.lines)

    def _checked(self, task: Task, one: Subject, coarsest: Products, is_peer: bool) -> Row:  # noqa: FBT001
        """Run once over spoilt results, and judge them."""
        row = self._row(task.case, one.name, MEASURED, is_peer=is_peer, reason=one.note)
        try:
            one.reset()
            one.run()
            results = one.results()
            if not results:  # matrix products alone compute nothing that could be right
                return row
            return _judged(row, error(list(zip(results, task.expected, strict=True))), coarsest)
        except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
            return evolve(row, state=FAILED, reason=_line(broken))

    def _timed(self, task: Task, made: tuple[Subject, Products, bool], row: Row, spread: Spread | Exception) -> Row:
        """Check again after timing, because later calls may give other results. The row has the larger error."""
        if isinstance(spread, Exception):
            return evolve(row, state=FAILED, reason=f"while it was timed: {_line(spread)}")
        one, coarsest, is_peer = made
        again = self._checked(task, one, coarsest, is_peer)
        if again.state != MEASURED:
            return evolve(again, reason=f"after {self.rounds} calls: {again.reason}")
        least = self.roofline.seconds(task.flops, task.bytes)
        worse = again if (again.error or 0.0) > (row.error or 0.0) else row
        sized = evolve(worse, flops=task.flops, bytes=task.bytes, least=least)
        return evolve(sized, median=spread.median, p10=spread.p10, p90=spread.p90, exposed=spread.exposed)

    def _row(self, case: Case, by: str, state: str, *, is_peer: bool = False, reason: str = "") -> Row:
        return Row(case.kernel, case.name, by, state, is_peer, reason, series=case.series, x=case.x)


def _judged(row: Row, found: Error, coarsest: Products) -> Row:
    judged, most = evolve(row, error=found.total, worst_row=found.worst), limit(coarsest)
    if found.within(most):
        return judged
    why = f"worst row {found.worst:.1e}" if found.total <= most else f"error {found.total:.1e}, limit {most:.0e}"
    return evolve(judged, state=WRONG, reason=why)


def _compared(rows: list[Row]) -> list[Row]:
    peers = {row.by.removesuffix(" + gather"): row.median for row in rows if row.is_peer and row.median}
    return [
        row if row.is_peer or not row.median else evolve(row, vs={p: t / row.median for p, t in peers.items()})
        for row in rows
    ]


def geomeans(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Geometric mean of the speed relative to a peer over all cases of a kernel: (kernel, by, peer) -> ratio."""
    logs: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        for peer, ratio in row.vs.items():
            logs.setdefault((row.series or row.kernel, row.by, peer), []).append(log(ratio))
    return {key: exp(sum(values) / len(values)) for key, values in logs.items()}


def _line(error: BaseException) -> str:
    """The first line of an exception, with its type unless it is a Dsv4AttnError."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    ours = isinstance(error, Dsv4AttnError)
    return (first if ours else f"{type(error).__name__}: {first}")[:300]
