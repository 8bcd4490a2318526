"""A step over ranks that share the compressed entries, one rank after the other in this process, without a group."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.attention import merge_parts
from dsv4attn.core.contract.backend import complete
from dsv4attn.core.memory.rank_buffers import merge_specs
from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_attention import judged, merged_by, worst
from dsv4attn.testing.step_fixture import StepFixture

__all__ = ["over_ranks"]


def over_ranks(*divided: tuple[int, int]) -> Callable[[Bench, StepFixture], Measure]:
    """Each rank attends to its own entries, rank 0 to windows too; the parts are merged as ranks merge them.

    divided: numbers of ranks, each with an interleave. The part of each rank equals the oracle's answer for its keys,
    without the sink. The whole equals the oracle's for all keys, with the sink. Both have the budget of a single call:
    weights of parts add up to 1, and what another rounding of out costs is within it.
    """

    def check(bench: Bench, inputs: StepFixture) -> Measure:
        measures = []
        for size, interleave in divided:
            ranks = [Ownership(rank, size, interleave) for rank in range(size)]
            parts = [_part(bench, attrs.evolve(inputs, sinks=None, ownership=rank)) for rank in ranks]
            outs, lses = (torch.stack([part[i] for _, *part in parts]) for i in (0, 1))
            try:
                whole = judged(inputs, _merged(bench, outs, lses, inputs))
            except Wrong as wrong:
                raise Wrong(f"{size} ranks, interleave {interleave}, merged: {wrong}", wrong.measure) from None
            measures += [whole, *(measure for measure, *_ in parts)]
        return worst(measures)

    return check


def _part(bench: Bench, part: StepFixture) -> tuple[Measure, Tensor, Tensor]:
    """The verdict on what a rank computes, and its out and lse."""
    out, lse = part.problem(bench.backend).run(bench.backend)
    try:
        measure = judged(part, (out, lse))
    except Wrong as wrong:
        rank = part.ownership
        where = f"rank {rank.rank} of {rank.size}, interleave {rank.interleave}: {wrong}"
        raise Wrong(where, wrong.measure) from None
    return measure, out, lse


def _merged(bench: Bench, outs: Tensor, lses: Tensor, inputs: StepFixture) -> tuple[Tensor, Tensor]:
    """Out and lse of all ranks, with the sink of the case input, by the backend's own steps or by core's."""
    sink = None if inputs.sink_values is None else torch.from_numpy(inputs.sink_values).to(outs.device, torch.float32)
    steps = complete(bench.backend).rank_steps
    if steps is not None:
        return merged_by(steps, [*outs], [*lses], sink)
    size, tokens, heads, dim = outs.shape
    specs = merge_specs(size, tokens, heads, dim, outs.dtype)[3:]
    working = [torch.empty(shape, dtype=dtype, device=outs.device)[:tokens] for shape, dtype in specs]
    lse = torch.empty_like(lses[0])
    return merge_parts(outs, lses, lse, sink, working).to(outs.dtype), lse
