"""Check, then time, everybody on every case; nobody who is wrong gets a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite, log

import torch
from attrs import asdict, evolve, field, frozen

from dsv4attn.core.contract import Backend, Products
from dsv4attn.errors import Dsv4AttnError
from dsv4attn.selection import explain, registry_of
from dsv4attn.tools.bench.attend import problem_of
from dsv4attn.tools.bench.cases import ATTENTION, Case
from dsv4attn.tools.bench.clock import Clock, Spread
from dsv4attn.tools.bench.inputs import make_inputs
from dsv4attn.tools.bench.overhead import overhead
from dsv4attn.tools.bench.peers import Peer, peer_subject
from dsv4attn.tools.bench.reference import Error, error, limit
from dsv4attn.tools.bench.roofline import Roofline
from dsv4attn.tools.bench.step import make_step, products
from dsv4attn.tools.bench.subjects import Subject, Task, make_task

__all__ = ["FAILED", "MEASURED", "REFUSED", "WRONG", "Row", "Runner", "geomeans"]

MEASURED, WRONG, FAILED, REFUSED = "measured", "wrong", "failed", "refused"
"""States of a row. failed: it raised. refused: it said beforehand that it cannot."""


@frozen
class Row:
    """What came out for one case and one who ran it. Times in seconds; None wherever there is no time."""

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
    """Whether the host's own time is part of it."""
    flops: int = 0
    bytes: int = 0
    least: float = 0.0
    """What the roofline allows."""
    vs: Mapping[str, float] = field(factory=dict)
    """Speed by that of each peer: 2 is twice as fast."""
    series: str = ""
    x: int = 0

    @property
    def roofline(self) -> float | None:
        """Fraction of what the machine could do."""
        return self.least / self.median if self.median else None

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the products."""
        return self.flops / self.median / 1e12 if self.median and self.flops else None

    @property
    def gbytes(self) -> float | None:
        """GB/s of what has to be moved."""
        return self.bytes / self.median / 1e9 if self.median else None

    def as_json(self) -> dict[str, object]:
        """Plain values; a number that is none is null."""
        derived = {"roofline": self.roofline, "tflops": self.tflops, "gbytes": self.gbytes}
        told = {**asdict(self), **derived}
        return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in told.items()}

    @classmethod
    def from_json(cls, told: Mapping[str, object]) -> Row:
        """The inverse of `as_json`; raises KeyError or TypeError where something is missing."""
        names = cls.__annotations__
        return cls(**{name: told[name] for name in names})  # type: ignore[arg-type]


class Runner:
    """Who is measured, where, and how often."""

    def __init__(
        self, device: torch.device, backends: Mapping[str, Backend], peers: Sequence[Peer], rounds: int
    ) -> None:
        """Ask the peers whether they are here, and measure what the machine can do."""
        self.device, self.backends, self.rounds = device, dict(backends), rounds
        asked = {peer.name: peer.available() for peer in peers}
        self.unavailable = {name: why for name, why in asked.items() if why}
        self.peers = [peer for peer in peers if not asked[peer.name]]
        self.clock = Clock(device)
        self.roofline = Roofline.measure(self.clock)

    def run(self, case: Case) -> list[Row]:
        """Rows of one case, ours first."""
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
        """Times of all in turn; if somebody breaks, of each alone, and of that one what it raised."""
        if not running:
            return []
        try:
            return [*self.clock.times([one.run for one in running], self.rounds)]
        except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
            return [broken] if len(running) == 1 else [s for one in running for s in self._spreads([one])]

    def settled(self, rows: Sequence[Row]) -> tuple[Roofline, list[Row]]:
        """What the machine can do, measured once more at the end: whichever was more counts, for all rows."""
        roof = self.roofline.best(Roofline.measure(self.clock))
        return roof, [evolve(row, least=roof.seconds(row.flops, row.bytes)) for row in rows]

    def host(self, case: Case) -> tuple[list[Mapping[str, object]], list[Row]]:
        """What core costs the host in one step of one token with each backend that takes it, and rows of failures."""
        told: list[Mapping[str, object]] = []
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
                told.append({"by": name, **share.as_json(), "text": str(share)})
        return told, failed

    def _subjects(self, task: Task) -> tuple[list[Row], list[tuple[Subject, Products, bool]]]:
        """Rows of those who cannot run, and those who can with their products and whether they are peers."""
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
        """Judge once more, what ran last: what was right at first may not have stayed so. The worse error is told."""
        if isinstance(spread, Exception):
            return evolve(row, state=FAILED, reason=f"while it was timed: {_line(spread)}")
        one, coarsest, is_peer = made
        again = self._checked(task, one, coarsest, is_peer)
        if again.state != MEASURED:
            return evolve(again, reason=f"after {self.rounds} calls: {again.reason}")
        least = self.roofline.seconds(task.flops, task.bytes)
        worse = again if (again.error or 0.0) > (row.error or 0.0) else row
        told = evolve(worse, flops=task.flops, bytes=task.bytes, least=least)
        return evolve(told, median=spread.median, p10=spread.p10, p90=spread.p90, exposed=spread.exposed)

    def _row(self, case: Case, by: str, state: str, *, is_peer: bool = False, reason: str = "") -> Row:
        return Row(case.kernel, case.name, by, state, is_peer, reason, series=case.series, x=case.x)


def _judged(row: Row, found: Error, coarsest: Products) -> Row:
    told, most = evolve(row, error=found.total, worst_row=found.worst), limit(coarsest)
    if found.within(most):
        return told
    why = f"worst row {found.worst:.1e}" if found.total <= most else f"error {found.total:.1e}, limit {most:.0e}"
    return evolve(told, state=WRONG, reason=why)


def _compared(rows: list[Row]) -> list[Row]:
    peers = {row.by.removesuffix(" + gather"): row.median for row in rows if row.is_peer and row.median}
    return [
        row if row.is_peer or not row.median else evolve(row, vs={p: t / row.median for p, t in peers.items()})
        for row in rows
    ]


def geomeans(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Geometric mean of the speed by a peer's over all cases of a kernel: (kernel, by, peer) -> ratio."""
    logs: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        for peer, ratio in row.vs.items():
            logs.setdefault((row.series or row.kernel, row.by, peer), []).append(log(ratio))
    return {key: exp(sum(values) / len(values)) for key, values in logs.items()}


def _line(error: BaseException) -> str:
    """The first line of an exception, with its type unless it is one of ours."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    ours = isinstance(error, Dsv4AttnError)
    return (first if ours else f"{type(error).__name__}: {first}")[:300]
