"""Checks, then times, every backend and peer on every case. A wrong result gets no time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import TypeAlias

import torch
from attrs import asdict, evolve, field, frozen

from dsv4attn.core.contract.backend import Backend, Products
from dsv4attn.errors import Dsv4AttnError, UnsupportedError
from dsv4attn.selection import explain, load_backend, registered, registry_of
from dsv4attn.tools.bench.accuracy import Error, error, limit
from dsv4attn.tools.bench.attention_call import problem_of
from dsv4attn.tools.bench.attention_peers import Peer
from dsv4attn.tools.bench.cases import PAIRS, PRESETS, KernelCase
from dsv4attn.tools.bench.clock import Clock, Spread
from dsv4attn.tools.bench.compressor import compressor_task
from dsv4attn.tools.bench.contenders import Contender, Task, make_task
from dsv4attn.tools.bench.forward_step import make_forward_step
from dsv4attn.tools.bench.hyper_connections import mhc_task
from dsv4attn.tools.bench.index_ops import index_task, select_task
from dsv4attn.tools.bench.inputs import make_inputs
from dsv4attn.tools.bench.layer_ops import LayerOpCase
from dsv4attn.tools.bench.layer_products import products_task
from dsv4attn.tools.bench.overhead import overhead
from dsv4attn.tools.bench.roofline import Roofline
from dsv4attn.tools.bench.saved import finite
from dsv4attn.tools.bench.whole_layer import LayerCase, layer_time

BEST = "the best peer"
"""Stands for the fastest peer of each case in means."""
MEASURED, WRONG, FAILED, REFUSED = "measured", "wrong", "failed", "refused"
"""States of a row. wrong: its error is above the limit. failed: it raised. refused: its support said no."""


@frozen
class BenchRow:
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
    fp8: whether operands of the products are fp8.
    flops: operations of the products.
    bytes: least bytes to move.
    least: time that the roofline allows.
    vs: speed relative to each peer; 2 is twice as fast.
    series: scaling line of the case, or "".
    x: size of the case in that line.
    records: bytes of the records of both caches, as "528/288", or "" where there is one pair only.
    vs_584: on other records than 584/584, speed relative to the same backend's on those, in the same rounds.
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
    fp8: bool = False
    flops: int = 0
    bytes: int = 0
    least: float = 0.0
    vs: Mapping[str, float] = field(factory=dict)
    series: str = ""
    x: int = 0
    records: str = ""
    vs_584: float | None = None

    @property
    def best_peer(self) -> str | None:
        """The fastest peer, if a peer was measured in the same rounds."""
        return min(self.vs, key=self.vs.__getitem__, default=None)

    @property
    def vs_best(self) -> float | None:
        """Speed relative to the fastest peer."""
        return min(self.vs.values(), default=None)

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
        derived = "roofline", "tflops", "gbytes", "vs_best", "best_peer"
        return finite({**asdict(self), **{name: getattr(self, name) for name in derived}})


_Case: TypeAlias = "KernelCase | LayerOpCase"
_Judged: TypeAlias = "tuple[Contender, float, bool]"
"""A contender, its largest error that is right, and whether it is a peer."""
_LAYER_OPS = {
    "index": index_task,
    "select": select_task,
    "compress": compressor_task,
    "mhc": mhc_task,
    "products": products_task,
}
_C4A = KernelCase("decode", PRESETS["flash_c4"], "", ((8191, 1),))


class Runner:
    """Runs cases on a device with a set of backends and peers, for a number of rounds."""

    def __init__(
        self, device: torch.device, backends: Mapping[str, Backend], peers: Sequence[Peer], rounds: int
    ) -> None:
        """Check which peers are available, and measure the roofline."""
        self.device, self.backends, self.rounds = device, dict(backends), rounds
        obstacles = {peer.name: peer.available() for peer in peers}
        self.unavailable = {name: why for name, why in obstacles.items() if why}
        self.peers = [peer for peer in peers if not obstacles[peer.name]]
        self.clock = Clock(device)
        self.roofline = Roofline.measure(self.clock)

    def run(self, *cases: _Case) -> list[BenchRow]:
        """Rows of one case, backends first; or of several, whose calls run in turn, one case after the other."""
        with torch.inference_mode():
            try:
                tasks = [self._task(case) for case in cases]
            except (torch.OutOfMemoryError, MemoryError) as full:
                why = f"inputs do not fit this machine: {_line(full)}"
                return [self._row(case, name, REFUSED, reason=why) for case in cases for name in self.backends]
            refused, entries = [], []
            for task in tasks:
                unable, contenders = self._contenders(task)
                refused.append(unable)
                entries += [(task, *contender) for contender in contenders]
            rows = [self._checked(*entry) for entry in entries]
            right = [i for i, row in enumerate(rows) if row.state == MEASURED]
            spreads = self._spreads([entries[i][1].run for i in right])
            # later calls may give other results, so these are checked again
            again = [self._checked(*entries[i]) for i in right]
        for i, spread, checked in zip(right, spreads, again, strict=True):
            rows[i] = self._timed(entries[i][0], rows[i], spread, checked)
        rows_of = {id(task): list[BenchRow]() for task in tasks}
        for (task, *_), row in zip(entries, rows, strict=True):
            rows_of[id(task)].append(row)
        rows_by_case = [_compared([*rows_of[id(task)], *rest]) for task, rest in zip(tasks, refused, strict=True)]
        return _relative_to_584([row for rows in rows_by_case for row in rows])

    def _task(self, case: _Case) -> Task:
        if isinstance(case, KernelCase):
            return make_task(case, self.device)
        return _LAYER_OPS[case.kernel](case, self.device)

    def _spreads(self, running: Sequence[Callable[[], None]]) -> list[Spread | Exception]:
        """Times of all calls in turn. If one raises, each is timed alone, and that one gives its exception."""
        if not running:
            return []
        try:
            return [*self.clock.times(running, self.rounds)]
        except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
            return [broken] if len(running) == 1 else [s for call in running for s in self._spreads([call])]

    def settled(self, rows: Sequence[BenchRow]) -> tuple[Roofline, list[BenchRow]]:
        """Measure the roofline again at the end. The higher rates apply to all rows."""
        roof = self.roofline.best(Roofline.measure(self.clock))
        return roof, [evolve(row, least=roof.seconds(row.flops, row.bytes, fp8=row.fp8)) for row in rows]

    def host(self, case: KernelCase) -> tuple[list[Mapping[str, object]], list[BenchRow]]:
        """Host overhead of a step of one token with each backend that supports it, and rows of failures."""
        shares: list[Mapping[str, object]] = []
        failed = []
        inputs = make_inputs(case, self.device)
        for name, backend in self.backends.items():
            if self._why_not(case, name, backend):
                continue
            try:
                share = overhead(make_forward_step(inputs, backend))
            except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
                failed.append(self._row(case, name, FAILED, reason=_line(broken)))
            else:
                shares.append({"by": name, **share.as_json(), "text": str(share)})
        return shares, failed

    def layer(self, case: LayerCase) -> tuple[list[Mapping[str, object]], list[BenchRow]]:
        """Times of a whole layer with each backend, everyday and deterministic, and rows of failures."""
        times: list[Mapping[str, object]] = []
        failed = []
        for name, backend in self.backends.items():
            try:
                may = "deterministic" in registered(name).info.options
                exact = load_backend(name, deterministic=True) if may else None
                time = layer_time(case, backend, exact, self.clock, self.rounds)
            except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
                failed.append(BenchRow("layer", case.name, name, FAILED, reason=_line(broken)))
            else:
                times.append({"by": name, **asdict(time), "text": str(time)})
        return times, failed

    def _contenders(self, task: Task) -> tuple[list[BenchRow], list[_Judged]]:
        """Rows of contenders that cannot run, and the others."""
        case = task.case
        reasons = {name: self._why_not(case, name, backend) for name, backend in self.backends.items()}
        refused = [self._row(case, name, REFUSED, reason=why) for name, why in reasons.items() if why]
        contenders: list[_Judged] = []
        able = {name: backend for name, backend in self.backends.items() if not reasons[name]}
        for name, is_peer, coarsest, make in _makers(task, able, self.peers):
            try:
                contender = make()
            except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
                state = REFUSED if isinstance(broken, UnsupportedError) else FAILED
                refused.append(self._row(case, name, state, is_peer=is_peer, reason=_line(broken)))
            else:
                contenders += [] if contender is None else [(contender, task.limit or limit(coarsest), is_peer)]
        return refused, contenders

    def _why_not(self, case: _Case, name: str, backend: Backend) -> str:
        # ops around attention are those of a backend that decodes on the layers with all of them
        kernel_case = case if isinstance(case, KernelCase) else _C4A
        problem = problem_of(kernel_case, backend.capabilities.prefill_keys)
        selection = explain(problem, backend=name, device=self.device, registry=registry_of(name))
        if selection.chosen is not None:
            return ""
        return " ".join(" ".join(line.split()) for c in selection.trace if c.name == name for line in c.lines)

    def _checked(self, task: Task, contender: Contender, most: float, is_peer: bool) -> BenchRow:  # noqa: FBT001
        """Run once over spoilt results, and judge them."""
        row = self._row(task.case, contender.name, MEASURED, is_peer=is_peer, reason=contender.note)
        try:
            contender.reset()
            contender.run()
            results = contender.results()
            if not results:  # matrix products alone compute nothing that could be right
                return row
            expected = task.expected if contender.expected is None else contender.expected
            return _judged(row, error(list(zip(results, expected, strict=True))), most)
        except Exception as broken:  # noqa: BLE001 - a row, not the end of the run
            return evolve(row, state=FAILED, reason=_line(broken))

    def _timed(self, task: Task, row: BenchRow, spread: Spread | Exception, again: BenchRow) -> BenchRow:
        """The row with its times. It has the larger error of the checks before and after timing."""
        if isinstance(spread, Exception):
            return evolve(row, state=FAILED, reason=f"while it was timed: {_line(spread)}")
        if again.state != MEASURED:
            return evolve(again, reason=f"after {self.rounds} calls: {again.reason}")
        least = self.roofline.seconds(task.flops, task.bytes, fp8=task.fp8)
        worse = again if (again.error or 0.0) > (row.error or 0.0) else row
        sized = evolve(worse, flops=task.flops, bytes=task.bytes, least=least, fp8=task.fp8)
        return evolve(sized, median=spread.median, p10=spread.p10, p90=spread.p90, exposed=spread.exposed)

    def _row(self, case: _Case, by: str, state: str, *, is_peer: bool = False, reason: str = "") -> BenchRow:
        row = BenchRow(case.kernel, case.name, by, state, is_peer, reason)
        return evolve(row, series=case.series, x=case.x, records=case.records)


def _makers(
    task: Task, able: Mapping[str, Backend], peers: Sequence[Peer]
) -> Iterator[tuple[str, bool, Products, Callable[[], Contender | None]]]:
    """(name, whether it is a peer, type of its products, what makes it) of all contenders of a case."""
    for name, backend in able.items():
        yield name, False, backend.capabilities.products, partial(task.contender, name, backend, torch.bfloat16)
    for name, make in task.beside.items():
        yield name, True, Products.BF16, make
    for peer in peers:
        if task.case.kernel in peer.kernels:
            yield peer.name, True, peer.products, partial(peer.contender, task, [*able.values()])


def _judged(row: BenchRow, distance: Error, most: float) -> BenchRow:
    judged = evolve(row, error=distance.total, worst_row=distance.worst)
    if distance.within(most):
        return judged
    total = f"error {distance.total:.1e}, limit {most:.0e}"
    return evolve(judged, state=WRONG, reason=f"worst row {distance.worst:.1e}" if distance.total <= most else total)


def _compared(rows: list[BenchRow]) -> list[BenchRow]:
    peers = {row.by.removesuffix(" + gather"): row.median for row in rows if row.is_peer and row.median}
    return [
        row if row.is_peer or not row.median else evolve(row, vs={p: t / row.median for p, t in peers.items()})
        for row in rows
    ]


def _relative_to_584(rows: list[BenchRow]) -> list[BenchRow]:
    """Rows with the speed relative to the same backend's on 584-byte records. Peers have none."""
    ours = {row.by: row.median for row in rows if row.records == PAIRS[0] and not row.is_peer}

    def compared(row: BenchRow) -> BenchRow:
        on_584 = None if row.is_peer or row.records in ("", PAIRS[0]) else ours.get(row.by)
        return evolve(row, vs_584=on_584 / row.median) if on_584 and row.median else row

    return [compared(row) for row in rows]


def geomeans(rows: Sequence[BenchRow]) -> dict[tuple[str, str, str], float]:
    """Geometric mean of the speed relative to a peer over all cases of a kernel: (kernel, by, peer) -> ratio.

    Of several peers there is also BEST, the fastest of each case.
    """
    ratios, peers = defaultdict[tuple[str, str, str], list[float]](list), defaultdict[str, set[str]](set)
    for row in rows:
        peers[row.series or row.kernel].update(row.vs)
    for row in rows:
        kernel = row.series or row.kernel
        best = {BEST: row.vs_best} if row.vs_best and len(peers[kernel]) > 1 else {}
        for peer, ratio in filter(all, {**row.vs, **best}.items()):
            ratios[kernel, row.by, peer].append(ratio)
    return {key: geometric_mean(values) for key, values in ratios.items()}


def pair_means(rows: Sequence[BenchRow]) -> dict[tuple[str, str, str], float]:
    """Geometric mean of the speed relative to 584-byte records: (kernel, by, records) -> ratio."""
    ratios = defaultdict[tuple[str, str, str], list[float]](list)
    for row in rows:
        if row.vs_584:
            ratios[row.kernel, row.by, row.records].append(row.vs_584)
    return {key: geometric_mean(values) for key, values in ratios.items()}


def _line(error: BaseException) -> str:
    """The first line of an exception, with its type unless it is a Dsv4AttnError."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    ours = isinstance(error, Dsv4AttnError)
    return (first if ours else f"{type(error).__name__}: {first}")[:300]
