"""Decode under context parallelism, compared with one rank that has all entries: equal results, times in turn.

Every rank makes the same inputs on its device, runs them once on its own, and keeps of the compressed cache and of the
index keys the entries that it holds. Rank 0 keeps the whole caches too, and is the one rank of the times. Letters: R
ranks, T tokens, one of each request, E entries of a request, K entries that a token selects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from attrs import asdict, frozen
from torch import Tensor

from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.context import ContextParallel
from dsv4attn.core.contract.backend import Backend, Products
from dsv4attn.core.memory.rank_buffers import attention_bytes, candidate_bytes
from dsv4attn.core.torch_ops.selection import ascending
from dsv4attn.tools.bench.accuracy import Error, error, largest
from dsv4attn.tools.bench.clock import Spread
from dsv4attn.tools.bench.context_cases import ContextCase
from dsv4attn.tools.bench.context_step import ContextStep, one_rank, over_ranks
from dsv4attn.tools.bench.rank_clock import RankClock, captured
from dsv4attn.tools.bench.result import Machine
from dsv4attn.tools.bench.saved import finite

BUDGET = {Products.BF16: 5e-3, Products.FP8: 5e-2}
"""Largest distance from one rank's output, as a share of its norm: parts are rounded to bf16 before they are merged."""


@frozen
class PartTime:
    """Seconds of one part of a step.

    part: name: scores and selection, attention and merge, or both.
    one: on rank 0, which has all entries.
    ranks: over all ranks, of the rank with the largest median.
    """

    part: str
    one: Spread
    ranks: Spread

    @property
    def speed(self) -> float:
        """Speed relative to one rank; 2 is twice as fast."""
        return self.one.median / self.ranks.median


@frozen
class ContextResult:
    """One case, the same on all ranks.

    case: the case.
    error: distance from one rank's output as a share of its norm, the largest of all ranks.
    worst_row: the same of the worst row.
    selected: entries that all tokens selected; 0 on layers that select nothing.
    wrong: what disagrees with one rank, a line for each rank and result; empty if all is right.
    times: times of the parts; none where something is wrong.
    one_bytes: bytes of the pages of one rank with all entries, `entries` and `index keys`.
    rank_bytes: the same of a rank that holds a part.
    formula: bytes that a rank sends for a token, `attention` and `candidates`.
    sent: the same as counted in one step, the most of all ranks.
    """

    case: ContextCase
    error: float
    worst_row: float
    selected: int
    wrong: tuple[str, ...]
    times: tuple[PartTime, ...]
    one_bytes: Mapping[str, int]
    rank_bytes: Mapping[str, int]
    formula: Mapping[str, int]
    sent: Mapping[str, float]

    @property
    def share(self) -> float:
        """Bytes on a rank as a share of one rank's."""
        return sum(self.rank_bytes.values()) / sum(self.one_bytes.values())

    def as_json(self) -> dict[str, object]:
        """Plain values. Numbers that are not finite are null."""
        case = {"case": self.case.name, "requests": self.case.requests, "context": self.case.context}
        times = [{**asdict(time), "speed": time.speed} for time in self.times]
        return finite({**asdict(self), **case, "share": self.share, "times": times})


CONTEXT_SCHEMA = "dsv4attn-bench-context/1"
"""Version of the JSON. It changes when a field changes its meaning or is removed."""


@frozen
class ContextRun:
    """Everything that one command measured, the same on all ranks but for the machine.

    machine: machine and versions of the rank.
    date: date and minute, UTC.
    command: the command line, without torchrun.
    backend: name of the backend.
    process_group: backend of the process group, gloo or nccl.
    ranks: ranks of the group.
    interleave: consecutive entries of one rank.
    rounds: rounds of each median.
    graph: whether replays of captured graphs were timed.
    results: one for each case.
    reference_ops: ops that the reference computed instead of the backend, by DSV4ATTN_REFERENCE_OPS.
    """

    machine: Machine
    date: str
    command: str
    backend: str
    process_group: str
    ranks: int
    interleave: int
    rounds: int
    graph: bool
    results: tuple[ContextResult, ...]
    reference_ops: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all ranks agree with one rank in all cases."""
        return not any(result.wrong for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        facts = {"ok": self.ok, "schema": CONTEXT_SCHEMA, **asdict(self)}
        return {**facts, "results": [result.as_json() for result in self.results]}


def measure(
    case: ContextCase,
    backend: Backend,
    context: ContextParallel,
    sent: Counter[str],
    clock: RankClock,
    rounds: int,
    *,
    graph: bool = False,
) -> ContextResult:
    """Measure a case. Every rank must call it with the same arguments, and gets the same result.

    sent: bytes that `context` has sent, by name of what they are; the context counts them. graph: time replays of
    captured graphs. A result that differs from one rank's, on any rank, gives no times.
    """
    first = context.ownership.rank == 0
    with torch.inference_mode():
        with context.together(f"inputs of {case.name}"):
            inputs, single = one_rank(case, backend, clock.device)
        context.check_same(f"inputs of {case.name}", {"digest": _digest(inputs.q, *single.tensors())})
        with context.together(f"one rank of {case.name}"):
            single.spoil()
            single.run()
            expected = _written(single)
            many = over_ranks(inputs, single, context)
        sizes, parts = (single.bytes, many.bytes), [*single.calls]
        # whole caches stay on rank 0 alone
        alone, whole = ([*single.calls.values()], single) if first else ([], None)
        del inputs, single
        calls, sent_by_step = [*many.calls.values()], dict[str, float]()

        def check() -> tuple[Error, Sequence[str]]:
            for step, runs in ((whole, alone), (many, calls)):
                if step is not None:
                    sent_before = sent.copy()
                    step.spoil()
                    runs[-1]()
            for name in ("attention", "candidates"):
                sent_by_step.setdefault(name, (sent[name] - sent_before[name]) / case.requests)
            return _compared(context, many, expected, whole)

        checks, times = [check()], tuple[PartTime, ...]()
        if not checks[0][1]:
            if graph:
                with context.together(f"graphs of one rank of {case.name}"):
                    alone[:] = [captured(call, clock.device) for call in alone]
                calls[:] = [captured(call, clock.device) for call in calls]
            spreads = clock.times_over_ranks(alone, calls, rounds)
            times = tuple(PartTime(*part) for part in zip(parts, *spreads, strict=True))
            # later calls may give other results
            checks.append(check())
    heads, dim = many.step.q.shape[1:]
    formula = {"attention": attention_bytes(heads, dim, many.step.q.element_size())}
    formula |= {"candidates": candidate_bytes(case.preset.topk)} if case.selects else {}
    sent_by_rank = context.gather_objects(sent_by_step, "what was sent")
    wrong = tuple(line for _, lines in checks for line in lines)
    return ContextResult(
        case,
        largest([away.total for away, _ in checks]),
        largest([away.worst for away, _ in checks]),
        0 if expected[1] is None else int((expected[1] >= 0).sum()),
        wrong,
        () if wrong else times,
        *sizes,
        formula,
        {name: max(rank[name] for rank in sent_by_rank) for name in formula},
    )


_Written: TypeAlias = "tuple[Tensor, Tensor | None]"
"""Out [T, H, D] of a step, and topk_indices [T, K] int32 on layers that select."""


def _written(side: ContextStep) -> _Written:
    """Copies of what a step has written."""
    chosen = side.step.topk_indices
    return side.step.out.clone(), None if chosen is None else chosen.clone()


def _compared(
    context: ContextParallel, many: ContextStep, expected: _Written, whole: ContextStep | None = None
) -> tuple[Error, Sequence[str]]:
    """Compare the results of each rank with one rank's, and with each other. The same on all ranks.

    Returns the largest distance of all ranks, and what is wrong. whole: one rank's step, which has run again; None on
    ranks without it.
    """
    ownership, limit = context.ownership, BUDGET[many.step.backend.capabilities.products]
    away, lines = _differences(many, expected, ownership, limit)
    if whole is not None:
        _, others = _differences(whole, expected, Ownership(0, 1), limit)
        lines += [f"{line}, on one rank itself after it was timed" for line in others]
    of_rank = (away.total, away.worst, lines, _digest(many.step.out))
    totals, worsts, said, digests = zip(*context.gather_objects(of_rank, "results"), strict=True)
    wrong = [f"rank {rank} of {ownership.size}: {line}" for rank, its in enumerate(said) for line in its]
    if len({*digests}) > 1:
        wrong.append("attention does not have the same bits on all ranks")
    return Error(largest(totals), largest(worsts)), wrong


def _differences(side: ContextStep, expected: _Written, ownership: Ownership, limit: float) -> tuple[Error, list[str]]:
    """Distance of the attention from what is expected, and a line for each result that is wrong.

    ownership: whose numbers `topk_indices` has.
    """
    expected_out, expected_indices = expected
    lines, away, chosen = [], error([(side.step.out, expected_out)]), side.step.topk_indices
    if not away.within(limit):
        lines.append(f"attention is {away.total:.1e} of the norm from one rank's, worst row {away.worst:.1e}")
    if chosen is not None and expected_indices is not None:
        expected_numbers = ascending(ownership.local_numbers(expected_indices))
        rows = int((chosen != expected_numbers).any(-1).sum())
        if rows:
            lines.append(
                f"topk_indices of {rows} of {len(expected_numbers)} tokens are not those that one rank selects"
            )
    return away, lines


def _digest(*tensors: Tensor) -> str:
    """Of the bits of tensors: sums of their elements as integers, and of the elements times their number."""
    sums, integers = [], {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    for tensor in tensors:
        bits = tensor.view(integers[tensor.element_size()])
        rows = bits.sum(tuple(range(1, bits.dim())), dtype=torch.int64)
        sums.append((int(rows.sum()), int((rows * torch.arange(len(rows), device=rows.device)).sum())))
    return repr(sums)
