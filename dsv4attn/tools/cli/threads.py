"""Number of CPU threads of a command: one for each core that the process may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from dsv4attn.core.reprs import counted
from dsv4attn.errors import ArgumentError

VARIABLE = "OMP_NUM_THREADS"
_LEAST_BOUND, _PER_CORE = 64, 4
"""Threads that any machine may have, and threads for each core of a larger one."""
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


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

    @classmethod
    def chosen(cls, requested: int | None = None) -> Threads:
        """The requested number, or OMP_NUM_THREADS, or one for each usable core and at most torch's own number.

        Raises ArgumentError for far more threads than cores, see `check_number`.
        """
        import torch

        cores = usable_cores()
        if requested is not None:
            return cls(check_number("--threads", requested), cores, "--threads")
        if os.environ.get(VARIABLE, "").strip():
            return cls(check_number(VARIABLE, torch.get_num_threads()), cores, VARIABLE)
        return cls(min(cores, torch.get_num_threads()), cores, "cores of this process; --threads N sets it")

    def __str__(self) -> str:
        """The text of reports."""
        return f"threads {self.count} of {counted(self.cores, 'core')} ({self.source})"

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let torch use this number of threads inside a `with` block."""
        import torch

        count_outside = torch.get_num_threads()
        torch.set_num_threads(self.count)
        try:
            yield
        finally:
            torch.set_num_threads(count_outside)


def check_number(argument: str, number: int) -> int:
    """A number of threads or processes. Raises ArgumentError for so many that the system may end this process.

    argument: the option or the variable that says the number.
    """
    cores = usable_cores()
    most = max(_LEAST_BOUND, _PER_CORE * cores)
    if number > most:
        expected, actual = f"at most {most}", f"{number} on {counted(cores, 'core')}"
        raise ArgumentError(argument, expected=expected, actual=actual, hint="one for each core is fastest")
    return number


def wait_passively() -> None:
    """Let idle threads sleep, not spin, unless the environment sets it. It has no effect after torch was loaded."""
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def usable_cores() -> int:
    """Cores of the process's CPU affinity, or fewer if the quota of its control group, a container's, allows fewer."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([affinity, *_quotas()])))


def _quotas() -> Iterator[float]:
    """Quota over period of the process's control groups, of version 1 and 2, and of each group above them."""
    try:
        groups = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, files = (_CGROUPS / "cpu", ("cfs_quota_us", "cfs_period_us")) if controllers else (_CGROUPS, ("max",))
        for folder in (Path(path), *Path(path).parents):
            try:
                texts = [(root / str(folder).lstrip("/") / f"cpu.{file}").read_text(encoding="ascii") for file in files]
                quota, period = map(float, " ".join(texts).split())
            except (OSError, ValueError):  # there is no such file, or the quota is "max"
                continue
            if quota > 0 and period > 0:
                yield quota / period
