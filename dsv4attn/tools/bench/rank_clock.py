"""`RankClock`: times calls that the ranks of a process group run together, and calls that one rank runs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.tools.bench.clock import Clock, Spread

_WARM_UP = 3


class RankClock(Clock):
    """A clock that makes as many rounds, and as many flushes in a round, on every rank.

    The ranks meet in an exchange directly in front of a call that they run together, on accelerators in the stream and
    after the flushes, so that no rank's time has the wait for a rank that began later. While one rank runs a call
    alone, the others wait. Every round with a flush too few on any rank is repeated with more on all.
    """

    def __init__(self, device: torch.device, context: ContextParallel) -> None:
        super().__init__(device)
        self._context = context
        self._token = torch.zeros(1, device=device, dtype=torch.float32)

    def times_over_ranks(
        self, alone: Sequence[Callable[[], None]], together: Sequence[Callable[[], None]], rounds: int
    ) -> tuple[list[Spread], list[Spread]]:
        """Time each call once a round. Every rank must call it, with as many calls in `together`.

        alone: calls of rank 0, which other ranks need not give. together: calls that all ranks run. Returns the same on
        all ranks: for calls that ranks run together, the times of the rank with the largest median.
        """
        count = max(self._context.gather_objects(len(alone), "the number of calls"))
        # a rank that is not the first waits while the first runs its calls
        calls_alone = [*alone] if self._context.ownership.rank == 0 else [None] * count
        calls = [*((call, False) for call in calls_alone), *((call, True) for call in together)]
        own_flushes = (0 if call is None else self._warmed(call) for call, _ in calls)
        flushes = [max(self._context.gather_objects(count, "the number of flushes")) for count in own_flushes]
        spreads = self._in_turn([partial(self._round, call, meets=meets) for call, meets in calls], flushes, rounds)
        of_ranks = zip(*self._context.gather_objects(spreads, "times"), strict=True)
        slowest = [max(of_call, key=lambda spread: spread.median) for of_call in of_ranks]
        return slowest[:count], slowest[count:]

    def _round(self, call: Callable[[], None] | None, flushes: int, *, meets: bool) -> tuple[float, bool]:
        """Seconds of one call on this rank, 0 where it only waits, and whether the host's time is hidden on all."""
        took, hidden = 0.0, True
        if call is not None and meets:
            took, hidden = self._span(call, flushes, lambda: self._context.gather(self._token, "a round's start"))
        elif call is not None:
            took, hidden = self._span(call, flushes)
        # the next call begins on no rank before this one has ended on all
        return took, all(self._context.gather_objects(hidden, "a round's end"))


def captured(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture a call in a graph, after calls that compile and allocate. Returns what replays it."""
    module: Any = torch.get_device_module(device)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for _ in range(_WARM_UP):
            call()
    module.current_stream().wait_stream(side)
    module.synchronize(device)
    graph = module.CUDAGraph()
    # other threads may ask for events meanwhile: the watchdog of a process group does
    with module.graph(graph, capture_error_mode="thread_local"):
        call()
    replay: Callable[[], None] = graph.replay
    return replay
