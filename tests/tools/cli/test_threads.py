"""How many threads: of the cores that are free, within what a container allows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dsv4attn.tools.cli import threads
from dsv4attn.tools.cli.threads import Load, Threads, core_limit, wait_passively

INF = float("inf")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders instead of /proc and the control groups; four cores, and as many threads of torch."""
    monkeypatch.setattr(threads, "_PROC", tmp_path)
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(threads, "LEAST_S", 0.0)
    monkeypatch.setattr(threads, "_allowed", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


def stat(proc: Path, *idle: float) -> None:
    """Seconds that each core has idled."""
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [f"cpu{i} 5 0 5 {int(seconds * ticks)} 0 0 0 0 0 0" for i, seconds in enumerate(idle)]
    (proc / "stat").write_text("\n".join(["cpu  1 2 3 4 5 6 7 0 0 0", *lines, "intr 1"]), encoding="ascii")


@pytest.mark.parametrize(
    ("idle", "own", "count"),
    [
        ((10, 10, 10, 10), 0, 4),
        ((10, 10, 10, 0), 0, 3),  # one is busy
        ((10, 10, 0, 0), 10, 3),  # one of the others is this process
        ((10, 10, 9, 9.5), 0, 4),  # noise
        ((10, 10, 5, 5), 0, 3),  # half of two
        ((1, 1, 1, 1), 0, 1),
        ((0, 0, 0, 0), 1, 1),
    ],
)
def test_there_is_a_thread_for_each_free_core(
    proc: Path, monkeypatch: pytest.MonkeyPatch, idle: tuple[float, ...], own: float, count: int
) -> None:
    stat(proc, 100, 100, 100, 100)
    before = Load(clock=time.perf_counter() - 10, own=time.process_time() - own)
    stat(proc, *(100 + seconds for seconds in idle))

    assert before.threads().count == count
    assert str(before.threads()).startswith(f"threads {count} of 4 cores (")
    assert before.threads(7) == Threads(7, 4, "--threads")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert before.threads() == Threads(4, 4, "OMP_NUM_THREADS")


def test_only_cores_of_this_process_count(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat(proc, 100, 100, 100, 100)
    monkeypatch.setattr(threads, "_allowed", lambda: {1})
    before = Load(clock=time.perf_counter() - 10)
    stat(proc, 100, 110, 100, 100)

    assert str(before.threads()).startswith("threads 1 of 1 core (1.0 free")


@pytest.mark.parametrize(("load", "count"), [(0.0, 4), (1.1, 3), (9.0, 1)])
@pytest.mark.parametrize(
    "content", [None, "nonsense", "cpu0 0 0 0 0 0\ncpu1 0 0 0 0 0\ncpu2 0 0 0 0 0\ncpu3 0 0 0 0 0"]
)
def test_without_proc_the_load_average_says_it(
    proc: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, load: float, count: int
) -> None:
    if content is not None:
        (proc / "stat").write_text(content, encoding="ascii")
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))

    assert Load(clock=time.perf_counter() - 10).threads().count == count


GROUPS = {
    "version 2": ("0::/pod/me", {"pod/cpu.max": "150000 100000"}, 1.5),
    "version 2, at the root": ("0::/", {"cpu.max": "200000 100000"}, 2.0),
    "version 2, the nearest is not the tightest": (
        "0::/a/b",
        {"a/b/cpu.max": "400000 100000", "a/cpu.max": "300000 100000"},
        3.0,
    ),
    "version 2, none": ("0::/a", {"a/cpu.max": "max 100000"}, INF),
    "version 1": ("4:cpu,cpuacct:/d", {"cpu/d/cpu.cfs_quota_us": "250000", "cpu/d/cpu.cfs_period_us": "100000"}, 2.5),
    "version 1, none": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, INF),
    "nothing to see": ("4:memory:/x", {}, INF),
    "nonsense": ("0::/", {"cpu.max": "many"}, INF),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_limit_of_a_container_is_found(proc: Path, kind: str) -> None:
    groups, files, limit = GROUPS[kind]
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text(groups + "\n", encoding="utf-8")
    for name, text in files.items():
        path = proc / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")

    assert core_limit() == limit
    stat(proc, 0, 0, 0, 0)
    before = Load(clock=time.perf_counter() - 10)
    stat(proc, 10, 10, 10, 10)
    assert before.threads().count == before.threads().cores == min(4, int(min(limit, 4)))


def test_on_this_machine_it_is_a_number_of_its_cores() -> None:
    started = time.perf_counter()
    chosen = Load().threads()

    assert 1 <= chosen.count <= chosen.cores <= len(os.sched_getaffinity(0))
    assert time.perf_counter() - started < 5


def test_threads_wait_passively_unless_the_environment_or_torch_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, dsv4attn.tools.cli.threads as t; t.wait_passively(); print(os.environ['OMP_WAIT_POLICY'])"
    for given, expected in ((None, "passive"), ("active", "active")):
        environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        environ |= {"OMP_WAIT_POLICY": given} if given else {}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
        assert done.stdout.strip() == expected
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    wait_passively()
    assert "OMP_WAIT_POLICY" not in os.environ
