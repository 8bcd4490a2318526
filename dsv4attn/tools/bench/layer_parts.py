"""Where the time of a layer goes: seconds and launches of each of its parts.

Parts follow each other without a gap. On an accelerator the time of a part is that of the kernels which the host
launched in it, as torch's profiler saw them; gaps between kernels belong to no part. On a CPU it is the host's time.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from attrs import evolve, frozen
from torch.profiler import profile, record_function, supported_activities

from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.wrapped import WrappedBackend
from dsv4attn.tools.bench.clock import Clock

_T = TypeVar("_T")
_PREFIX = "dsv4attn layer: "
_WARM_UP = 2
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what runs on a device, in a trace."""
_ROUNDS = 3
"""Most steps that are measured: one of plain torch has ten thousand launches in a trace."""
_STEPS = {
    "save_partial_states": "save states",
    "compress_norm_rope_store": "compress + store",
    "indexer_q_rope_quant": "index q",
    "select_topk": "score + select",
}


@frozen
class LayerPart:
    """A part of a step of a layer.

    name: name of the part.
    seconds: time of a step.
    launches: kernels, copies and fills of a step; None on a CPU.
    """

    name: str
    seconds: float
    launches: float | None = None


class Marks:
    """Says which part of a step is being run.

    seconds: time of the host in each part since the last `start`, in the order in which they began.
    """

    def __init__(self, device: torch.device) -> None:
        """Outside of a step."""
        self.seconds: dict[str, float] = {}
        self._traced = device.type != "cpu"
        self._name, self._since = "", 0.0
        self._range: Any = None

    def start(self, name: str) -> None:
        """Begin a step with this part."""
        self.seconds = {}
        self.to(name)

    def to(self, name: str = "") -> None:
        """End the part, and begin another; without a name, end the step."""
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.perf_counter() - self._since
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._name, self._range = name, None
        if name and self._traced:
            self._range = record_function(_PREFIX + name)
            self._range.__enter__()
        self._since = time.perf_counter()

    def around(self, name: str, call: Callable[..., _T], then: str = "") -> Callable[..., _T]:
        """The call as a part of its own. After it `then` goes on, or else the part before."""

        def run(*arguments: Any, **options: Any) -> _T:  # noqa: ANN401 - those of the call
            outer = self._name
            self.to(name)
            try:
                return call(*arguments, **options)
            finally:
                self.to(then or outer)

        return run


class MarkedBackend(WrappedBackend):
    """A backend around another one, whose ops around attention are parts."""

    def __init__(self, backend: Backend, marks: Marks) -> None:
        """Wrap a backend."""
        super().__init__(backend)
        ops = backend.layer_ops
        marked: dict[str, Any] = {op: marks.around(part, getattr(ops, op)) for op, part in _STEPS.items()}
        self.layer_ops = evolve(ops, **marked)


def measured(run: Callable[[], None], marks: Marks, clock: Clock, rounds: int) -> list[LayerPart]:
    """Parts of a step that marks them; none where the profiler sees no kernels."""
    for _ in range(_WARM_UP):
        run()
    rounds = min(rounds, _ROUNDS)
    if clock.device.type != "cpu":
        return of_trace(_trace(run, clock, rounds), rounds)
    steps = []
    for _ in range(rounds):
        run()
        steps.append(marks.seconds)
    return [LayerPart(name, statistics.median(step[name] for step in steps)) for name in steps[0]]


def _trace(run: Callable[[], None], clock: Clock, rounds: int) -> Sequence[Mapping[str, Any]]:
    """Events of some steps, before each of which caches are flushed."""
    clock.wait()
    with profile(activities=supported_activities()) as profiler:
        for _ in range(rounds):
            clock.flush()
            run()
        clock.wait()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def of_trace(events: Iterable[Mapping[str, Any]], rounds: int) -> list[LayerPart]:
    """Parts of the steps in a trace: what runs on the device belongs to the part in which the host launched it."""
    timed = [event for event in events if "ts" in event and "cat" in event]
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(_PREFIX))
        for event in timed
        if event["cat"] == "user_annotation" and event["name"].startswith(_PREFIX)
    )
    starts = [start for start, _, _ in ranges]
    launched = {
        _id(event, "correlation"): event["ts"] for event in timed if event["cat"].endswith(("_runtime", "_driver"))
    }
    # where a launch itself is not in the trace, the operator around it is
    around = {
        _id(event, "External id"): event["ts"] for event in timed if event["cat"] in ("cpu_op", "user_annotation")
    }
    totals: dict[str, tuple[float, int]] = {}
    for event in timed:
        if event["cat"] not in _DEVICE:
            continue
        at = launched.get(_id(event, "correlation"), around.get(_id(event, "External id"), -1.0))
        place = bisect_right(starts, at) - 1
        if place >= 0 and at <= ranges[place][1]:
            name = ranges[place][2]
            seconds, launches = totals.get(name, (0.0, 0))
            totals[name] = seconds + 1e-6 * event["dur"], launches + 1
    names = dict.fromkeys(name for _, _, name in ranges) if totals else {}
    parts = {name: totals.get(name, (0.0, 0)) for name in names}
    return [LayerPart(name, seconds / rounds, launches / rounds) for name, (seconds, launches) in parts.items()]


def _id(event: Mapping[str, Any], name: str) -> object:
    """An id among an event's arguments; of an event without it, itself, which no other has."""
    return event.get("args", {}).get(name, id(event))
