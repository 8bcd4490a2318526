"""Two runs, side by side: what became slower by more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, hypot, log

from attrs import asdict, frozen

from dsv4attn.tools.bench.result import Run
from dsv4attn.tools.bench.runner import Row

__all__ = ["Change", "Comparison", "compare"]

LEAST = 0.05
"""A difference below this share of the old time says nothing."""
SPREADS = 3
"""A difference below so many spreads of both runs together is noise."""


@frozen
class Change:
    """One row in both runs. Seconds; new is None if there is no time any more, and reason says why."""

    case: str
    by: str
    old: float
    new: float | None
    noise: float
    """Difference in seconds that has to be exceeded."""
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
    """What two runs have in common, and what only one of them has.

    comparable: both are of the same machine, on a CPU with the same number of threads.
    """

    old_machine: str
    new_machine: str
    changes: Sequence[Change]
    only_old: Sequence[str]
    only_new: Sequence[str]

    @property
    def comparable(self) -> bool:
        """Whether a ratio of times says something about the code."""
        return self.old_machine == self.new_machine

    def of(self, *states: str) -> list[Change]:
        """Changes of some kinds."""
        return [change for change in self.changes if change.state in states]

    @property
    def speed(self) -> float | None:
        """Geometric mean of old time by new time; above 1 is faster."""
        logs = [log(change.old / change.new) for change in self.changes if change.new]
        return exp(sum(logs) / len(logs)) if logs else None

    @property
    def ok(self) -> bool:
        """Whether nothing of ours got slower or lost; across machines there is nothing to say."""
        return not (self.comparable and self.of("slower", "lost"))

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        changes = [{**asdict(change), "state": change.state} for change in self.changes]
        return {**asdict(self), "changes": changes, "comparable": self.comparable, "speed": self.speed, "ok": self.ok}


def compare(old: Run, new: Run) -> Comparison:
    """Our rows of both runs. A peer's times are no concern of ours, and a row that never had a time is none."""
    before, after = _keyed(old), _keyed(new)
    timed = {key: row for key, row in before.items() if row.median}
    changes = [_change(row, after[key]) for key, row in timed.items() if key in after]
    only_old = [", ".join(key) for key in timed if key not in after]
    only_new = [", ".join(key) for key, row in after.items() if row.median and key not in timed]
    return Comparison(_place(old), _place(new), changes, only_old, only_new)


def _place(run: Run) -> str:
    """The machine; on a CPU also how many threads, without which its times say nothing."""
    machine = run.machine
    return f"{machine.name}, threads {machine.threads}" if machine.arch == "cpu" else machine.name


def _keyed(run: Run) -> dict[tuple[str, str], Row]:
    return {(row.case, row.by): row for row in run.rows if not row.is_peer}


def _change(old: Row, new: Row) -> Change:
    assert old.median
    noise = max(LEAST * old.median, SPREADS * hypot(_spread(old), _spread(new)))
    return Change(new.case, new.by, old.median, new.median, noise, f"{new.state}: {new.reason}" if new.reason else "")


def _spread(row: Row) -> float:
    """Half of what eight of ten rounds span."""
    return ((row.p90 or 0.0) - (row.p10 or 0.0)) / 2
