"""Number of CPU threads of a command: one for each free core.

A pool of threads waits for its slowest thread at every operation. Next to one busy process, two threads on two cores
take several times as long as one, because the thread that shares its core with that process delays the other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import asdict, field, frozen

__all__ = ["Load", "Threads", "core_limit", "wait_passively"]

VARIABLE = "OMP_NUM_THREADS"
LEAST_S = 0.3
"""Least seconds over which idle time is measured: /proc counts in hundredths."""
MOSTLY = 0.75
"""A core gets a thread if at least this fraction of it is free."""

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


@frozen
class Threads:
    """A number of threads and its origin.

    count: threads.
    cores: cores that this process may use.
    source: where the number comes from, in words.
    """

    count: int
    cores: int
    source: str

    def __str__(self) -> str:
        """The text of reports."""
        return f"threads {self.count} of {self.cores} core{'s' * (self.cores != 1)} ({self.source})"

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return asdict(self)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let torch use this number of threads inside a `with` block."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@frozen
class Load:
    """Processor times at one moment.

    cores: cores that this process may use.
    clock: wall clock, seconds.
    own: processor time of this process, seconds.
    idle: idle time of those cores, seconds; None if unknown.
    """

    cores: frozenset[int] = field(factory=lambda: frozenset(_allowed()))
    clock: float = field(factory=time.perf_counter)
    own: float = field(factory=time.process_time)
    idle: float | None = field()

    @idle.default
    def _idle(self) -> float | None:
        return _idle_seconds(self.cores)

    def free(self) -> float:
        """Cores that were free for this process since that moment; without /proc, computed from the load average."""
        time.sleep(max(0.0, LEAST_S - (time.perf_counter() - self.clock)))
        now = Load(self.cores)
        if self.idle is None or now.idle is None or now.idle == self.idle == 0:
            return len(self.cores) - (os.getloadavg()[0] if hasattr(os, "getloadavg") else 0)
        return (now.idle - self.idle + now.own - self.own) / (now.clock - self.clock)

    def threads(self, asked: int | None = None) -> Threads:
        """The requested number, or OMP_NUM_THREADS, or one for each free core and at most torch's own number."""
        import torch

        cores = max(1, int(min(len(self.cores), core_limit())))
        if asked is not None:
            return Threads(asked, cores, "--threads")
        if os.environ.get(VARIABLE, "").strip():
            return Threads(torch.get_num_threads(), cores, VARIABLE)
        free = min(max(self.free(), 0.0), cores)
        count = min(int(free + 1 - MOSTLY), cores, torch.get_num_threads())
        return Threads(max(count, 1), cores, f"{free:.1f} free at the start; --threads N sets it")


def wait_passively() -> None:
    """Let idle threads sleep, not spin, unless the environment sets it. It has no effect after torch was loaded."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _idle_seconds(cores: frozenset[int]) -> float | None:
    """Seconds that these cores have idled, or waited for a disk, since the machine started; None if unknown."""
    try:
        lines = (_PROC / "stat").read_text(encoding="ascii").splitlines()
        ticks = [line.split() for line in lines if line.startswith("cpu")]
        named = {name[3:]: int(idle) + int(iowait) for name, _, _, _, idle, iowait, *_ in ticks}
        return sum(named[str(core)] for core in cores) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, KeyError):
        return None


def core_limit() -> float:
    """Cores that the control groups of this process allow, as a container's limit; infinity without one."""
    try:
        groups = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return float("inf")
    limits = [float("inf")]
    for group in groups:
        _, controllers, path = group.split(":", 2)
        for folder in (Path(path), *Path(path).parents):
            at = str(folder).lstrip("/")
            if not controllers:
                limits.append(_quota(_CGROUPS / at / "cpu.max"))
            elif "cpu" in controllers.split(","):
                base = _CGROUPS / "cpu" / at
                limits.append(_quota(base / "cpu.cfs_quota_us", base / "cpu.cfs_period_us"))
    return min(limits)


def _quota(*files: Path) -> float:
    """Quota by period, from one file or two."""
    try:
        quota, period = " ".join(file.read_text(encoding="ascii") for file in files).split()
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else float("inf")
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")
