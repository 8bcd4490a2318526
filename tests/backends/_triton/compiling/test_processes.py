"""Worker processes that fill Triton's cache: which forms they get, what happens when they fail, and the lock of ranks.

Most tests start `worker_stub.py` in the place of workers, which needs neither torch nor Triton.
"""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl

from dsv4attn.backends._triton.compiling import processes
from dsv4attn.backends._triton.compiling.processes import LOCK_NAME, Form, compile_in_processes
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import PRESETS
from tests.backends._triton.launching.fake_drivers import rows_of
from tests.backends._triton.launching.kernels_small import rows
from tests.backends.built_in import forms as backends
from tests.programs import told_by

fcntl = pytest.importorskip("fcntl")

GPU = TARGETS["sm_90"].gpu
FORMS: list[Form] = [(Variant(rows, rows_of().types, {"DT": tl.bfloat16, "BLOCK": 2**i}), False) for i in range(16)]
STUB = f"import runpy; runpy.run_path({str(Path(__file__).with_name('worker_stub.py'))!r}, run_name='__main__')"

POPEN = subprocess.Popen


class Started:
    """Processes that were started, and forms that the cache has."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.cached: set[Variant] = set()

    def popen(self, *args: Any, **options: Any) -> subprocess.Popen[bytes]:
        """`subprocess.Popen` that remembers the process."""
        self.processes.append(POPEN(*args, **options))
        return self.processes[-1]

    @property
    def running(self) -> int:
        """Processes that have not ended."""
        return sum(process.poll() is None for process in self.processes)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Started]:
    """Stubs are workers, two cores are usable, and the cache is an empty folder of this test."""
    started = Started()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DSV4ATTN_STUB", "{}")
    monkeypatch.setattr(processes, "_START", STUB)
    monkeypatch.setattr(processes, "INTERPRETED", False)
    monkeypatch.setattr(processes, "threads", lambda: 2)
    # interpreted kernels have no such method
    monkeypatch.setattr(type(rows), "is_gluon", lambda _: False, raising=False)
    monkeypatch.setattr(processes, "is_cached", lambda variant, _gpu, *, far: variant in started.cached and not far)
    monkeypatch.setattr(subprocess, "Popen", started.popen)
    yield started
    assert started.running == 0


@pytest.fixture
def obey(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Tell stubs how to behave."""

    def order(*, only_first: bool = False, **orders: Any) -> None:
        monkeypatch.setenv("DSV4ATTN_STUB", json.dumps(orders))
        if only_first:
            monkeypatch.setenv("DSV4ATTN_STUB_TURN", str(tmp_path / "turn"))

    return order


def test_workers_compile_all_that_is_missing(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    assert compile_in_processes(FORMS, GPU) == (16, 2)
    assert len(started.processes) == 2
    assert not caplog.records


@pytest.mark.parametrize(
    ("cores", "missing", "workers"), [(2, 15, 0), (1, 200, 0), (2, 16, 2), (16, 16, 4), (16, 63, 15), (16, 500, 16)]
)
def test_workers_are_few_where_few_forms_are_missing(
    monkeypatch: pytest.MonkeyPatch, cores: int, missing: int, workers: int
) -> None:
    monkeypatch.setattr(processes, "threads", lambda: cores)
    assert processes._workers_for(FORMS[:1] * missing) == workers


def test_nothing_starts_where_the_cache_has_the_forms(started: Started) -> None:
    started.cached = {variant for variant, _ in FORMS[:1]}
    assert compile_in_processes(FORMS, GPU) == (0, 0)
    assert not started.processes


def test_nothing_starts_where_kernels_are_interpreted(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "INTERPRETED", True)
    assert compile_in_processes(FORMS, GPU) == (0, 0)
    assert not started.processes


def test_nothing_starts_where_a_worker_would_compile_something_else(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compile_in_processes(FORMS, triton.backends.compiler.GPUTarget("xpu", "pvc", 32)) == (0, 0)
    with monkeypatch.context() as changed:
        changed.setattr(triton.knobs.runtime, "add_stages_inspection_hook", print)
        assert compile_in_processes(FORMS, GPU) == (0, 0)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    assert compile_in_processes(FORMS, GPU) == (0, 0)
    assert not started.processes


def test_workers_see_no_device_and_import_from_the_same_paths(
    started: Started, obey: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(tmp_path / "made by this process"))
    obey(environment=str(tmp_path / "seen.json"), only_first=True)
    compile_in_processes(FORMS, GPU)

    seen = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert seen == {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None, "paths": sys.path}


def test_a_form_that_does_not_compile_is_left_to_this_process(
    started: Started, obey: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    obey(answer='"CompilationError"', only_first=True)
    compiled, workers = compile_in_processes(FORMS, GPU)

    assert compiled < 16
    assert workers == 2
    # this process raises the error when it compiles
    assert not caplog.records


@pytest.mark.parametrize("dies_at", [1, 3])
def test_a_worker_that_dies_leaves_its_form_and_the_reason(
    started: Started, obey: Callable[..., None], caplog: pytest.LogCaptureFixture, dies_at: int
) -> None:
    obey(dies_at=dies_at, says="ImportError: no such module")
    compiled, _ = compile_in_processes(FORMS, GPU)

    assert compiled == 2 * (dies_at - 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("did not: a worker ended with code 3: ImportError: no such module")


def test_the_other_workers_go_on_when_one_dies(
    started: Started, obey: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    obey(dies_at=1, only_first=True)
    compiled, _ = compile_in_processes(FORMS, GPU)

    assert compiled == 15
    assert len(caplog.records) == 1


def test_a_worker_that_cannot_be_started_is_a_reason(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such file"))
    assert compile_in_processes(FORMS, GPU) == (0, 2)

    (record,) = caplog.records
    assert "a worker cannot be started: " in record.getMessage()


def test_workers_that_never_answer_are_ended(
    started: Started, obey: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_LONGEST_SILENCE", 0.2)
    obey(silent=True)
    assert compile_in_processes(FORMS, GPU) == (0, 2)

    assert "no worker answered for" in caplog.records[0].getMessage()
    assert started.running == 0


def test_an_interrupt_ends_the_workers(
    started: Started, obey: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        assert started.running == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "_collected", interrupted)
    obey(silent=True)
    with pytest.raises(KeyboardInterrupt):
        compile_in_processes(FORMS, GPU)

    assert len(started.processes) == 2
    assert started.running == 0


def test_a_kernel_that_cannot_be_imported_by_name_is_left_to_this_process(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    plain = rows_of()
    namesake = Variant(stable_kernel(rows.fn), plain.types, plain.constants)
    with pytest.raises(pickle.PicklingError, match=r"kernel rows of module .*kernels_small cannot be imported"):
        pickle.dumps(namesake)
    assert compile_in_processes([(namesake, False), *FORMS], GPU) == (16, 2)

    (record,) = caplog.records
    assert "kernel rows of module" in record.getMessage()


class Holder:
    """Another process that holds the lock, as an open file of this process: locks belong to open files."""

    def __init__(self, folder: Path, flags: int = 0) -> None:
        self.file = (folder / LOCK_NAME).open("w", encoding="utf-8")
        fcntl.flock(self.file, fcntl.LOCK_EX | flags)

    def end(self) -> None:
        """Close the file, as the system does when a process ends in whatever way."""
        self.file.close()


def test_a_rank_waits_and_finds_all_in_the_cache(
    started: Started, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    holder = Holder(tmp_path)

    def fill_and_end() -> None:
        time.sleep(0.3)
        started.cached = {variant for variant, _ in FORMS}
        holder.end()

    with caplog.at_level(logging.INFO):
        other = threading.Thread(target=fill_and_end)
        other.start()
        assert compile_in_processes(FORMS, GPU) == (0, 0)
        other.join()

    assert not started.processes
    (record,) = caplog.records
    assert "another process compiles kernels into" in record.getMessage()


def test_a_rank_compiles_after_a_holder_that_ended_early(started: Started, tmp_path: Path) -> None:
    holder = Holder(tmp_path)
    ending = threading.Timer(0.3, holder.end)
    ending.start()
    assert compile_in_processes(FORMS, GPU) == (16, 2)
    ending.join()


def test_a_rank_does_not_wait_for_ever(
    started: Started, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_LONGEST_WAIT", 0.2)
    holder = Holder(tmp_path)
    assert compile_in_processes(FORMS, GPU) == (16, 2)
    holder.end()

    assert "another process compiles kernels for over" in caplog.records[-1].getMessage()


def test_workers_do_not_keep_the_lock(started: Started, tmp_path: Path) -> None:
    with processes._sole_compiler(tmp_path):
        child = started.popen([sys.executable, "-c", "import os; os.read(0, 1)"], stdin=subprocess.PIPE)
    Holder(tmp_path, fcntl.LOCK_NB).end()
    child.communicate()


@pytest.mark.parametrize("obstacle", ["not a folder", "no locks"])
def test_where_no_lock_is_possible_a_rank_compiles_without(
    started: Started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, obstacle: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    if obstacle == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert compile_in_processes(FORMS, GPU) == (16, 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (i % 2)) for i, name in enumerate(backends())]
)
def test_every_variant_of_every_backend_survives_a_pickle(name: str) -> None:
    backend = backends()[name]()
    variants = set[Variant]()
    for model in PRESETS.values():
        bounds = WarmupSpec.of(model, Limits(256, 8192, 65536), layer_parts=True)
        for arch in ("sm_90", "sm_120", "gfx942"):
            variants |= {*backend.kernel_variants(bounds, DeviceFacts.named(arch))}

    restored = {pickle.loads(pickle.dumps(variant)) for variant in variants}  # noqa: S301 - of this test
    assert restored == variants
    assert {id(variant.kernel) for variant in restored} == {id(variant.kernel) for variant in variants}
    assert variants


@pytest.mark.slow
def test_what_workers_compile_is_what_a_warm_up_looks_up(tmp_path: Path) -> None:
    facts = told_by(str(Path(__file__).with_name("warms_in_workers.py")), cache=tmp_path)

    assert facts["warm"] == {"count": 16, "missing": 16, "looked up": 16, "compiled here": 0, "cached": 16}
    (line,) = facts["log"]
    assert "acme is warm: 16 kernels on xpu, of which 16 were compiled now in 2 processes, in " in line
    assert facts["cross-compiled"] == {"looked up": 16, "compiled here": 0}
    # forms that do not compile raise the compiler's error, as without workers
    assert "arange's range must be a power of 2" in facts["error"]
    # the process that started the worker has died
    assert facts["without input"] == 0
