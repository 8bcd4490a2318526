"""Times calls that run in turn, with flushed caches and the host's time hidden on accelerators."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch
from attrs import frozen

_FLUSH_BYTES = 2**29
"""More than any last-level cache of an accelerator holds, AMD's 256 MiB included."""
_WARM_UP = 3
MOST_FLUSHES = 64
"""Most flushes in front of a call."""


@frozen
class Spread:
    """Seconds of the rounds of one call.

    median: median of the rounds.
    p10: a tenth of the rounds took less.
    p90: a tenth of the rounds took more.
    exposed: whether the host's own time is part of it, because in some round the device became idle meanwhile.
    """

    median: float
    p10: float
    p90: float
    exposed: bool = False

    @classmethod
    def of(cls, seconds: Sequence[float], *, exposed: bool = False) -> Spread:
        """Summarise rounds."""
        low, middle, high = np.quantile(seconds, [0.1, 0.5, 0.9]).tolist()
        return cls(middle, low, high, exposed)


class Clock:
    """Times calls on one device.

    On an accelerator each call runs between two device events, after writes that flush the caches. Those writes are
    repeated until they take twice as long as the host needs to enqueue the call. So the device is still busy with them
    when the call's kernels arrive, and the host's time is not measured. Every round checks this, and is repeated with
    more writes if it failed. The host's time of a call that itself waits for the device cannot be hidden. On a CPU the
    clock is the wall clock, and nothing is flushed.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the memory that flushes write."""
        self.device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        if self._module is not None:
            # events and kernels belong to the current device
            self._module.set_device(device)
            self._junk = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
            self._flush_s = min(self._span(self._junk.zero_, 0)[0] for _ in range(5))

    def times(self, calls: Sequence[Callable[[], object]], rounds: int) -> list[Spread]:
        """Time each call once a round, one after the other."""
        return self._in_turn([partial(self._span, call) for call in calls], [*map(self._warmed, calls)], rounds)

    def _in_turn(
        self, spans: Sequence[Callable[[int], tuple[float, bool]]], flushes: list[int], rounds: int
    ) -> list[Spread]:
        """Times of spans, each once a round. A span with too few flushes before it is repeated with twice as many.

        spans: each takes a number of flushes, and returns seconds and whether the host's time is hidden.
        """
        seconds: list[list[float]] = [[] for _ in spans]
        exposed = [False] * len(spans)
        for _ in range(rounds):
            for i, span in enumerate(spans):
                took, hidden = span(flushes[i])
                while not hidden and flushes[i] < MOST_FLUSHES:
                    flushes[i] = min(2 * flushes[i], MOST_FLUSHES)
                    took, hidden = span(flushes[i])
                seconds[i].append(took)
                exposed[i] |= not hidden
        return [Spread.of(rounds_of, exposed=bare) for rounds_of, bare in zip(seconds, exposed, strict=True)]

    def flush(self) -> None:
        """Write over all caches of an accelerator, after what is enqueued."""
        if self._module is not None:
            self._junk.zero_()

    def wait(self) -> None:
        """Wait until an accelerator is idle."""
        if self._module is not None:
            self._module.synchronize(self.device)

    def _warmed(self, call: Callable[[], object]) -> int:
        """Run a call until it is warm. Returns the number of flushes that hide its time on the host."""
        host = 0.0
        for _ in range(_WARM_UP):
            self.wait()
            start = time.perf_counter()
            call()
            host = time.perf_counter() - start
        self.wait()
        return 0 if self._module is None else min(ceil(2 * host / self._flush_s) + 1, MOST_FLUSHES)

    def _span(
        self, call: Callable[[], object], flushes: int, meet: Callable[[], object] = lambda: None
    ) -> tuple[float, bool]:
        """Seconds of a call, and whether the device was busy with flushes until the host had enqueued the call.

        meet: enqueued in front of the call, and not timed.
        """
        if self._module is None:
            meet()
            started = time.perf_counter()
            call()
            return time.perf_counter() - started, True
        start, end = (self._module.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            self._junk.zero_()
        meet()
        start.record()
        call()
        end.record()
        hidden = not start.query()
        self.wait()
        return float(start.elapsed_time(end)) / 1e3, hidden
