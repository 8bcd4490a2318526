"""How many threads: of the cores of the process, within what a container allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4attn.errors import ArgumentError
from dsv4attn.tools.cli import threads
from dsv4attn.tools.cli.threads import Threads, usable_cores, wait_passively

INF = float("inf")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders instead of /proc and the control groups; four cores, and as many threads of torch."""
    monkeypatch.setattr(threads, "_PROC", tmp_path)
    monkeypatch.setattr(threads, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


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
def test_the_quota_of_a_container_limits_the_cores(proc: Path, kind: str) -> None:
    groups, files, limit = GROUPS[kind]
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text(groups + "\n", encoding="utf-8")
    for name, text in files.items():
        path = proc / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")

    assert usable_cores() == Threads.chosen().count == min(4, int(min(limit, 4)))


def test_an_option_comes_before_the_variable_and_that_before_the_cores(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(Threads.chosen()) == "threads 4 of 4 cores (cores of this process; --threads N sets it)"
    assert Threads.chosen(7) == Threads(7, 4, "--threads")
    with pytest.raises(ArgumentError, match=r"^--threads: expected at most 64, got 100000 on 4 cores -> one for each"):
        Threads.chosen(100_000)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Threads.chosen() == Threads(4, 4, "OMP_NUM_THREADS")


def test_only_cores_of_the_affinity_count(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})

    assert str(Threads.chosen()).startswith("threads 1 of 1 core (")


def test_on_this_machine_it_is_a_number_of_its_cores() -> None:
    chosen = Threads.chosen()

    assert chosen.count >= 1
    assert 1 <= chosen.cores <= len(os.sched_getaffinity(0))


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
