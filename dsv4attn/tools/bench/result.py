"""A benchmark run as a value: machine, date, rows; written to and read from JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen

from dsv4attn import __version__
from dsv4attn.core.contract.device import DeviceFacts, version_of
from dsv4attn.core.reprs import counted
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.bench.roofline import Roofline
from dsv4attn.tools.bench.runner import FAILED, WRONG, BenchRow, geomeans, pair_means
from dsv4attn.tools.bench.saved import structured
from dsv4attn.tools.bench.scaling import Cliff
from dsv4attn.tools.bench.whole_layer import LayerTime

SCHEMA = "dsv4attn-bench/1"
"""Version of the JSON. It changes when a field changes its meaning or is removed."""


@frozen
class Machine:
    """The machine and the versions of a run.

    name: of the accelerator, or of the CPU.
    arch: architecture, such as sm_90, or "cpu".
    torch: version of torch.
    triton: version of Triton, or None.
    python: version of Python.
    dsv4attn: version of this package.
    threads: threads of the CPU.
    cores: cores of the CPU that the process may use; 0 if not counted.
    threads_from: where the number of threads comes from, in words.
    """

    name: str
    arch: str
    torch: str
    triton: str | None
    python: str
    dsv4attn: str
    threads: int
    cores: int = 0
    threads_from: str = ""

    def __str__(self) -> str:
        """One line, for titles."""
        threads = f", {self.threads_text}" if self.arch == "cpu" else ""
        triton = f", Triton {self.triton}" if self.triton else ""
        return f"{self.name}{threads}, torch {self.torch}{triton}, dsv4attn {self.dsv4attn}"

    @property
    def threads_text(self) -> str:
        """Threads of the CPU, and the number of cores if it was counted."""
        return counted(self.threads, "thread") + (f" of {counted(self.cores, 'core')}" if self.cores else "")


@frozen
class Run:
    """Everything that one command measured.

    machine: machine and versions.
    date: date and minute, UTC.
    rounds: rounds of each median.
    roofline: roofline of the machine, measured in the same run.
    rows: one for each case and each backend or peer.
    command: the command line.
    cliffs: points at which time outgrows work.
    unavailable: peers that are not available, with reasons.
    versions: versions of the peers.
    host: core's time on the host, by backend and kind of layer.
    asked: number of cases of the command.
    ran: cases that were measured before the run was interrupted, or None for all of them.
    layers: times of whole layers, by backend.
    reference_ops: ops that the reference computed instead of the backends, by DSV4ATTN_REFERENCE_OPS.
    """

    machine: Machine
    date: str
    rounds: int
    roofline: Roofline
    rows: tuple[BenchRow, ...]
    command: str = ""
    cliffs: tuple[Cliff, ...] = ()
    unavailable: Mapping[str, str] = field(factory=dict)
    versions: Mapping[str, str] = field(factory=dict)
    host: tuple[Mapping[str, object], ...] = ()
    asked: int = 0
    ran: int | None = None
    layers: tuple[Mapping[str, object], ...] = ()
    reference_ops: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Machine, versions and date, in one line."""
        return f"{self.machine}, {self.date} UTC"

    @property
    def failures(self) -> list[BenchRow]:
        """Rows of backends that supported the case and still have no time."""
        return [row for row in self.rows if not row.is_peer and row.state in (WRONG, FAILED)]

    @property
    def ok(self) -> bool:
        """Whether something was measured, no backend failed, and no case was left out."""
        return (
            self.ran is None
            and not self.failures
            and any([*self.host, *self.layers, *(row.median for row in self.rows if not row.is_peer)])
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        means = [
            {"kernel": kernel, "by": by, "peer": peer, "speed": ratio}
            for (kernel, by, peer), ratio in geomeans(self.rows).items()
        ]
        beside_584 = [
            {"kernel": kernel, "by": by, "records": records, "speed": ratio}
            for (kernel, by, records), ratio in pair_means(self.rows).items()
        ]
        return {
            "ok": self.ok,
            "schema": SCHEMA,
            **asdict(self),
            "rows": [row.as_json() for row in self.rows],
            "geometric_means": means,
            "beside_584": beside_584,
            "complete": self.ran is None,
            "ran": self.asked if self.ran is None else self.ran,
        }


@frozen
class _Times:
    """What times of the host and of layers have in a file."""

    by: str
    layer: str
    text: str


@frozen
class _HostTimes(_Times):
    direct_us: float
    plain_us: float
    bound_us: float
    idle_us: float


def load(path: Path, option: str) -> Run:
    """A run that was saved. Raises ArgumentError, which names the option, for anything else."""
    expected = "a file that `dsv4attn bench --save FILE` wrote"
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(option, expected=expected, actual=f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(option, expected=expected, actual=f"{path}, which is no JSON: {error}") from error
    schema = saved.get("schema") if isinstance(saved, dict) else None
    if schema != SCHEMA:
        hint = "measure again with the version at hand" if schema else ""
        raise ArgumentError(option, expected=f"{expected} ({SCHEMA})", actual=f"{path}: schema {schema}", hint=hint)
    try:
        run: Run = structured(Run, saved)
        for name, kind in ("host", _HostTimes), ("layers", _Times), ("layers", LayerTime):
            for i, times in enumerate(getattr(run, name)):
                structured(kind, times, f"{name}[{i}]")
    except ValueError as error:
        raise ArgumentError(option, expected=expected, actual=f"{path}, in which {error}") from error
    return evolve(run, ran=None) if saved.get("complete", True) else run


def this_machine(device: torch.device, cores: int = 0, threads_from: str = "") -> Machine:
    """The machine of this process. cores, threads_from: as in `Machine`."""
    facts = DeviceFacts.here(device)
    name = _cpu_name() if facts.kind == "cpu" else facts.name
    versions = torch.__version__, facts.triton_version, platform.python_version(), __version__
    return Machine(name, facts.arch, *versions, torch.get_num_threads(), cores, threads_from)


def now() -> str:
    """The date and minute, UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")


def peer_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the peers' distributions, as far as they are installed."""
    distributions = {"flash_mla": "flash-mla", "flashinfer": "flashinfer-python", "deep_gemm": "deep-gemm"}
    distributions |= {"flashinfer_topk": distributions["flashinfer"], "vllm_topk": "vllm", "vllm_auto_topk": "vllm"}
    distributions["sglang_topk"] = "sglang"
    versions = {name: version_of(distributions.get(name, name)) for name in names}
    return {name: version for name, version in versions.items() if version}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
