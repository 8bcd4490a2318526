"""Continuous batching with chunked prefill: which tokens of which requests go into the next step.

The replay is offline: it runs as fast as it can, and arrival times only order the requests. A request of N prompt and
M output tokens is prefilled in chunks; the step that finishes the prompt yields output token 1, and M - 1 steps of one
token each (prefix N, N + 1, ...) yield the rest. So N + M - 1 tokens pass through attention.

A step is filled in this order, first come first served within each:

1. one token for every running request that needs just one;
2. chunks for the running prefills;
3. new requests, while there is a free sequence, token budget and memory for their first chunk.

When a running request cannot grow, the newest running request is preempted: its blocks are freed and it goes back to
the head of the queue, to be computed again from its first token, the outputs it had produced included. The oldest
request is never preempted and advances in every step, so every replay ends; if even alone it has no memory for one
more token, `OutOfPagesError` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from attrs import define, frozen

from dsv4attn.core.argument_checks import check_count
from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.serving.request import Request

__all__ = ["Counters", "KVBlocks", "Scheduled", "Scheduler", "Step"]


class KVBlocks(Protocol):
    """The cache memory of the scheduler. Tokens are counted from the start of the request."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make the request's caches hold its first `num_tokens` tokens, or return False and take nothing."""

    def free(self, request: Request) -> None:
        """Take back everything the request holds: it has finished or was preempted."""


@frozen
class Scheduled:
    """One request in one step: tokens `prefix_len` to `prefix_len + query_len` - 1 go through attention.

    request: the request.
    prefix_len: tokens computed before.
    query_len: tokens of this step.
    """

    request: Request
    prefix_len: int
    query_len: int

    @property
    def seq_len(self) -> int:
        """Tokens of the request that are in the caches after this step."""
        return self.prefix_len + self.query_len


@frozen
class Step:
    """One batch.

    scheduled: first the entries of at most `decode_threshold` tokens (the decode part), then the rest (prefill).
    num_decodes: entries of the decode part.
    num_decode_tokens: tokens of the decode part.
    num_tokens: tokens of the step.
    """

    scheduled: tuple[Scheduled, ...]
    num_decodes: int
    num_decode_tokens: int
    num_tokens: int


@define
class Counters:
    """Totals over the steps that are done.

    steps: number of steps.
    decode_tokens: tokens served by the decode parts, short prefill chunks included.
    prefill_tokens: tokens served by the prefill parts.
    recomputed_tokens: tokens that were served and then lost to a preemption; they are served again.
    preemptions: number of preemptions.
    finished: finished requests.
    """

    steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finished: int = 0


@define(eq=False)
class _Running:
    """A request in the scheduler.

    request: the request.
    available: prompt tokens plus produced outputs, the tokens that can be fed.
    computed: tokens whose keys are in the caches.
    planned: tokens of the step that is planned or run.
    """

    request: Request
    available: int
    computed: int = 0
    planned: int = 0

    @property
    def remaining(self) -> int:
        return self.available - self.computed

    @property
    def finished(self) -> bool:
        return self.available == self.request.input_length + self.request.output_length


class Scheduler:
    """Plans steps until every request has finished: call `next_step`, run it, call `step_done`, repeat until None."""

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        decode_threshold: int = 1,
        blocks: KVBlocks | None = None,
    ) -> None:
        """Queue the requests by arrival.

        `blocks` None means unlimited memory. `max_num_batched_tokens` bounds the tokens of a step and must be at least
        `max_num_seqs`, the most requests that run at once, so that each of them can get a token in every step.
        """
        check_count("max_num_batched_tokens", max_num_batched_tokens, 1)
        check_count("max_num_seqs", max_num_seqs, 1)
        check_count("decode_threshold", decode_threshold, 1)
        if max_num_batched_tokens < max_num_seqs:
            raise ArgumentError(
                "max_num_batched_tokens",
                expected=f"at least max_num_seqs ({max_num_seqs}), one token for each running request",
                actual=max_num_batched_tokens,
                hint="raise it, or lower max_num_seqs",
            )
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        seen: set[int] = set()
        for request in ordered:
            if request.index in seen:
                actual = f"two requests of index {request.index}"
                raise ArgumentError("requests", expected="a different index for each", actual=actual)
            seen.add(request.index)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.decode_threshold = decode_threshold
        self.counters = Counters()
        self._blocks: KVBlocks = _Unlimited() if blocks is None else blocks
        # all running requests arrived before all waiting ones, and both are in arrival order
        self._waiting = deque(_Running(request, available=request.input_length) for request in ordered)
        self._running: list[_Running] = []
        self._open: Step | None = None
        self._left = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no memory: not begun, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have begun and not finished."""
        return len(self._running)

    def next_step(self) -> Step | None:
        """Plan the next step, or return None when every request has finished."""
        if self._open is not None:
            raise ArgumentError("next_step", expected="step_done for the last step first", actual="a step still open")
        preempted = self.counters.preemptions
        self._left = self.max_num_batched_tokens
        ones = [state for state in self._running if state.remaining == 1]
        for state in ones + [state for state in self._running if state.remaining > 1]:
            # an earlier request may have preempted this one
            if self._left and state in self._running:
                self._grow(state)
        if self.counters.preemptions == preempted:
            self._admit()
        self._open = self._assemble() if self._running else None
        return self._open

    def step_done(self, step: Step) -> tuple[Request, ...]:
        """Account for a step that has run, free what finished with it, and return those requests."""
        if step is not self._open:
            raise ArgumentError("step", expected="the step that next_step returned last", actual="another one")
        self._open = None
        self.counters.steps += 1
        self.counters.decode_tokens += step.num_decode_tokens
        self.counters.prefill_tokens += step.num_tokens - step.num_decode_tokens
        for state in self._running:
            state.computed += state.planned
            state.planned = 0
            # once all available tokens are computed, the last of them yields the next output
            state.available += state.remaining == 0
        finished = tuple(state.request for state in self._running if state.finished)
        self._running = [state for state in self._running if not state.finished]
        for request in finished:
            self._blocks.free(request)
        self.counters.finished += len(finished)
        return finished

    def _grow(self, state: _Running) -> None:
        """Plan as many tokens of a running request as the budget allows, preempting the newest ones for memory."""
        request = state.request
        query = min(state.remaining, self._left)
        while not self._blocks.reserve(request, state.computed + query):
            if len(self._running) > 1:
                newest = self._running.pop()
                self._preempt(newest)
                if newest is state:
                    return
            elif query > 1:
                # a request that runs alone may use a smaller chunk: the window frees blocks between two chunks
                query //= 2
            else:
                raise OutOfPagesError(
                    f"request {request.index} ({request.input_length} prompt + {request.output_length} output tokens): "
                    f"no blocks for its first {state.computed + query} tokens, even running alone "
                    "-> give the cache more blocks, or shrink the request"
                )
        state.planned = query
        self._left -= query

    def _preempt(self, state: _Running) -> None:
        self._blocks.free(state.request)
        self.counters.preemptions += 1
        self.counters.recomputed_tokens += state.computed
        self._left += state.planned
        state.computed = state.planned = 0
        self._waiting.appendleft(state)

    def _admit(self) -> None:
        while self._waiting and self._left and len(self._running) < self.max_num_seqs:
            state = self._waiting[0]
            chunk = min(state.remaining, self._left)
            if self._running and not self._blocks.reserve(state.request, chunk):
                return
            self._running.append(self._waiting.popleft())
            self._grow(state)

    def _assemble(self) -> Step:
        entries = [Scheduled(state.request, state.computed, state.planned) for state in self._running if state.planned]
        decodes = [entry for entry in entries if entry.query_len <= self.decode_threshold]
        prefills = [entry for entry in entries if entry.query_len > self.decode_threshold]
        num_decode_tokens = sum(entry.query_len for entry in decodes)
        num_tokens = num_decode_tokens + sum(entry.query_len for entry in prefills)
        return Step((*decodes, *prefills), len(decodes), num_decode_tokens, num_tokens)


class _Unlimited:
    """Unlimited memory."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        return True

    def free(self, request: Request) -> None:
        pass
