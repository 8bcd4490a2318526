"""Compares two runs: rows that became slower or faster by more than noise, and rows that only one run has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import hypot
from statistics import geometric_mean
from typing import Any

from attrs import asdict, frozen

from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import MEASURED, BenchRow

__all__ = ["Change", "Comparison", "compare"]

LEAST = 0.05
"""A difference below this share of the old time is not reported."""
SPREADS = 3
"""Noise threshold, in combined standard spreads of the two runs."""
HOST = "host"
"""Kernel of the host's rows. Less than a factor of 2 is noise, as seen between processes (H200, 2026-11-29)."""


@frozen
class Change:
    """One row in both runs.

    case: name of the case.
    by: name of the backend.
    old: seconds in the old run.
    new: seconds in the new run, or None if it has no time.
    noise: seconds; smaller differences are noise.
    reason: why the new run has no time, or "".
    """

    case: str
    by: str
    old: float
    new: float | None
    noise: float
    reason: str = ""

    @property
    def state(self) -> str:
        """slower, faster, same, or lost."""
        if self.new is None:
            return "lost"
        if abs(self.new - self.old) <= self.noise:
            return "same"
        return "slower" if self.new > self.old else "faster"

    def __str__(self) -> str:
        """One line."""
        if self.new is None:
            return f"{self.case}, {self.by}: {1e6 * self.old:.1f} us before, no time now: {self.reason}"
        return (
            f"{self.case}, {self.by}: {1e6 * self.old:.1f} us -> {1e6 * self.new:.1f} us "
            f"({100 * (self.new / self.old - 1):+.1f} %, noise {100 * self.noise / self.old:.1f} %)"
        )


@frozen
class Comparison:
    """Rows that two runs have in common, and rows that only one of them has.

    old_run: machine, versions and date of the old run, in one line.
    old_machine: machine of the old run; on a CPU with its number of threads.
    new_machine: the same of the new run. Runs of different machines are not comparable.
    changes: rows of both runs.
    only_old: names of rows of the old run only.
    only_new: names of rows of the new run only.
    """

    old_run: str
    old_machine: str
    new_machine: str
    changes: Sequence[Change]
    only_old: Sequence[str]
    only_new: Sequence[str]

    @property
    def comparable(self) -> bool:
        """Whether both runs are of the same machine, on a CPU with the same number of threads."""
        return self.old_machine == self.new_machine

    def of(self, *states: str) -> list[Change]:
        """Changes of some kinds."""
        return [change for change in self.changes if change.state in states]

    @property
    def speed(self) -> float | None:
        """Geometric mean of old time by new time, without the host's; above 1 is faster."""
        on_device = [change for change in self.changes if not change.case.startswith(HOST)]
        speeds = [change.old / change.new for change in on_device if change.new]
        return geometric_mean(speeds) if speeds else None

    @property
    def ok(self) -> bool:
        """Whether the runs have times in common, and no backend's row became slower or lost its time.

        On different machines rows are not judged. An old run without any time has nothing to compare.
        """
        return bool(self.changes or not self.only_old) and not (self.comparable and self.of("slower", "lost"))

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        changes = [{**asdict(change), "state": change.state} for change in self.changes]
        return {**asdict(self), "changes": changes, "comparable": self.comparable, "speed": self.speed, "ok": self.ok}


def compare(old: Run, new: Run) -> Comparison:
    """Compare the times of backends. Rows of peers, and rows without a time in the old run, are left out."""
    old_rows, new_rows = _keyed(old), _keyed(new)
    timed = {key: row for key, row in old_rows.items() if row.median}
    changes = [_change(row, new_rows[key]) for key, row in timed.items() if key in new_rows]
    only_old = [", ".join(key) for key in timed if key not in new_rows]
    only_new = [", ".join(key) for key, row in new_rows.items() if row.median and key not in timed]
    return Comparison(old.title, _place(old), _place(new), changes, only_old, only_new)


def _place(run: Run) -> str:
    """Name of the machine; on a CPU with its number of threads, on which times depend."""
    machine = run.machine
    return f"{machine.name}, threads {machine.threads}" if machine.arch == "cpu" else machine.name


def _keyed(run: Run) -> dict[tuple[str, str], BenchRow]:
    rows = [*(row for row in run.rows if not row.is_peer), *_other_rows([*run.host, *run.layers])]
    return {(row.case, row.by): row for row in rows}


def _other_rows(times: Sequence[Mapping[str, Any]]) -> Iterator[BenchRow]:
    """Times of the host and of whole layers, which have no rows: `plain_us`, `deterministic_s` and so on."""
    for values in times:
        case = values.get("case", f"{HOST} {values['layer']}")
        for name, value in values.items():
            what, _, unit = name.rpartition("_")
            if unit in ("s", "us"):
                seconds = None if value is None else value if unit == "s" else 1e-6 * value
                yield BenchRow(case.partition(" ")[0], f"{case}, {what}", values["by"], MEASURED, median=seconds)


def _change(old: BenchRow, new: BenchRow) -> Change:
    assert old.median
    least = min(old.median, new.median or old.median) if new.kernel == HOST else LEAST * old.median
    noise = max(least, SPREADS * hypot(_spread(old), _spread(new)))
    return Change(new.case, new.by, old.median, new.median, noise, f"{new.state}: {new.reason}" if new.reason else "")


def _spread(row: BenchRow) -> float:
    """Half of what eight of ten rounds span."""
    return ((row.p90 or 0.0) - (row.p10 or 0.0)) / 2
