"""Checks of deterministic backends: however the tokens of a step are cut and mixed, the bits of a row are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.contract.backend import complete
from dsv4attn.testing.case import Bench, Measure, SkipCase, Wrong
from dsv4attn.testing.check_attention import bits, judged
from dsv4attn.testing.step_fixture import StepFixture

__all__ = ["any_cut_same_bits"]

RowBits = dict[tuple[int, int], Tensor]
"""Bits of out and lse of a row, by request and position."""


def any_cut_same_bits(*cuts: Sequence[int]) -> Callable[[Bench, StepFixture], Measure]:
    """All tokens in one step, and in steps of so many tokens, of all requests together and of each one alone.

    Limits have one phase. The one step equals the oracle too.
    """

    def check(bench: Bench, inputs: StepFixture) -> Measure:
        if not complete(bench.backend).deterministic:
            raise SkipCase("does not apply: the backend was not built with deterministic=true")
        steps = _Steps(bench, inputs)
        wanted, measure = steps.run([max(n for _, n in inputs.requests)], None)
        for cut in cuts:
            for only in (None, *range(len(inputs.requests))):
                found, _ = steps.run(cut, only, judge=False)
                wrong = [key for key, row in found.items() if not torch.equal(row, wanted[key])]
                if wrong:
                    how = "together" if only is None else "alone"
                    place = "first request {}, position {}".format(*wrong[0])
                    what = f"{len(wrong)} rows have other bits, {place}"
                    raise Wrong(f"steps of {list(cut)} tokens, requests {how}: {what}")
        return measure

    return check


@frozen
class _Steps:
    """The tokens of a case input, in steps with limits of one phase."""

    bench: Bench
    inputs: StepFixture

    def run(self, cut: Sequence[int], only: int | None, *, judge: bool = True) -> tuple[RowBits, Measure]:
        """Rows of all requests, or of one, in steps of so many tokens; and the verdict, if asked for."""
        bench, inputs, found, measure = self.bench, self.inputs, RowBits(), Measure()
        caches = inputs.history(bench.backend, inputs.allocate())
        limits = evolve(inputs.limits, single_phase=True)
        done = [0] * len(inputs.requests)
        for size in cut:
            takes = [only in (None, i) for i in range(len(done))]
            counts = [min(size, n - d) if t else 0 for d, (_, n), t in zip(done, inputs.requests, takes, strict=True)]
            step = inputs.at(*((b + d, n) for d, (b, _), n in zip(done, inputs.requests, counts, strict=True)))
            done = [d + n for d, n in zip(done, counts, strict=True)]
            if not any(counts):
                continue
            out, lse = step.problem(bench.backend, caches, limits).run(bench.backend, with_lse=bench.lse)
            if judge:
                measure = judged(step, (out, lse if bench.lse else None))
            for row, token in enumerate(step.tokens):
                parts = [bits(out[row]).flatten(), *([bits(lse[row])] if bench.lse else [])]
                found[token.request, token.position] = torch.cat(parts)
        return found, measure
