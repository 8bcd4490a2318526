"""Layers of one step on one workspace: what they share is worked out once, and what differs must not be shared."""

from __future__ import annotations

from itertools import chain, repeat

import attrs

from dsv4attn.testing.case import Bench, Measure, Wrong
from dsv4attn.testing.check_attention import judged, worst
from dsv4attn.testing.step_fixture import ForwardArgs, StepFixture

__all__ = ["layers_share"]

LAYERS = 3


def layers_share(bench: Bench, inputs: StepFixture) -> Measure:
    """Layers of a kind run in turn on one metadata object and one workspace, each twice; each equals the oracle.

    q, sink, out, lse and caches of a layer are tensors of their own; its top-k values stand in a buffer that all share,
    and the second time in one of its own. The workspace is not in debug mode, so prepared calls and index steps are
    used again.
    """
    scenes = [attrs.evolve(inputs, seed=inputs.seed + n, pages_of=inputs if n else None) for n in range(LAYERS)]
    problems = [each.problem(bench.backend) for each in scenes]
    first = problems[0]
    # the caller's buffer: each layer's indexer writes into it
    buffer = None if first.topk_indices is None else first.topk_indices.clone()
    workspace = first.workspace(bench.backend, debug=False)
    measures, results = [], list[tuple[ForwardArgs, object]]()
    for n, (one, problem) in enumerate(chain.from_iterable(repeat([*zip(scenes, problems, strict=True)], 2))):
        if buffer is not None and problem.topk_indices is not None:
            buffer = buffer.copy_(problem.topk_indices) if n < LAYERS else problem.topk_indices.clone()
        layer = attrs.evolve(
            problem, layer=first.layer, limits=first.limits, metadata=first.metadata, topk_indices=buffer
        )
        out, lse = layer.run(bench.backend, workspace, with_lse=bench.lse)
        results.append((layer, (out, lse)))  # alive, so that no two layers have one address
        try:
            measures.append(judged(one, (out, lse if bench.lse else None)))
        except Wrong as wrong:
            raise Wrong(f"layer {n % LAYERS}, time {n // LAYERS + 1}: {wrong}", wrong.measure) from wrong
    return worst(measures)
