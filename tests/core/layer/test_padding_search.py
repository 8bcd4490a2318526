"""Random steps with padding in any place that it may have, host lengths above the true ones, and requests that wait.

Outputs are those of the same tokens in the same steps without any of these. `SEARCH=100` runs 100 times as many steps,
and other ones in every run.
"""

from __future__ import annotations

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.contract.limits import Limits
from dsv4attn.serving.cache_manager import CachedSequence
from tests.core.attention.strategies import search
from tests.harness import FORM_NAMES, REFERENCE_FORMS, LayerStack, padded_batch, stale_positions
from tests.harness_v41 import STACKS

LIMITS = Limits(6, 64, 64, num_speculative_tokens=1)


@frozen
class Step:
    """One step.

    counts: tokens of each sequence. tails: tokens of padding after these in the same request. pads: tokens of each
    request of padding alone. rows_after: rows after the tokens. fill: of `padded_batch`. excess: what lengths
    of the host have in addition to the true ones. validate: whether the builder checks values.
    """

    counts: tuple[int, ...]
    tails: tuple[int, ...]
    pads: tuple[int, ...]
    rows_after: int
    fill: int | None
    excess: int
    validate: bool


SMALL = st.sampled_from([0, 0, 1, 1, 1, 2, 3, 7])
STEPS = st.lists(
    st.builds(
        Step,
        counts=st.tuples(SMALL, SMALL),
        tails=st.tuples(st.sampled_from([0, 0, 1, 2]), st.sampled_from([0, 0, 1])),
        pads=st.lists(st.sampled_from([1, 1, 2, 4]), max_size=2).map(tuple),
        rows_after=st.integers(0, 3),
        fill=st.sampled_from([-1, 0, 10**6, None]),
        excess=st.sampled_from([0, 1, 9]),
        validate=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def part(whole: LayerStack, n: int, sequence: CachedSequence, count: int) -> Tensor:
    """Hidden states of the next tokens of a sequence."""
    return whole.hidden(n, 64)[sequence.length :][:count]


def alone(whole: LayerStack, sequences: list[CachedSequence], step: Step) -> list[dict[int, Tensor]]:
    """Outputs of every layer by sequence for a step without padding."""
    order = sorted((n for n, count in enumerate(step.counts) if count), key=lambda n: step.counts[n])
    requests = [(sequences[n], step.counts[n]) for n in order]
    hidden = torch.cat([torch.zeros(0, 48), *(part(whole, n, sequences[n], step.counts[n]) for n in order)])
    outs = whole.run(requests, hidden) if order else []
    return [dict(zip(order, out.split([step.counts[n] for n in order]), strict=True)) for out in outs]


def padded(whole: LayerStack, sequences: list[CachedSequence], step: Step) -> list[dict[int, Tensor]]:
    """The same with everything that a step may have besides its tokens. Raises AssertionError unless it is zero."""
    manager, totals = whole.manager, [sum(both) for both in zip(step.counts, step.tails, strict=True)]
    manager.builder.validate = step.validate
    order = sorted(range(len(totals)), key=lambda n: totals[n])
    requests = [(sequences[n], totals[n]) for n in order]
    # decodes come first, those of padding too
    longest, most = max(totals), LIMITS.decode_threshold
    pads = [count if longest <= most else max(count, most + 1) for count in sorted(step.pads)]
    batch = padded_batch(manager.batch(requests), step.fill, pads, rows_after=step.rows_after)
    batch.seq_lens_cpu = (batch.seq_lens_cpu + step.excess).clamp(max=LIMITS.max_model_len)
    positions, values, real, row = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, 48)], dict[int, slice](), 0
    for n in order:
        count, tail, sequence = step.counts[n], step.tails[n], sequences[n]
        batch.slot_mapping[row + count : row + count + tail] = -1
        positions += [torch.arange(sequence.length, sequence.length + count), stale_positions(tail)]
        values += [part(whole, n, sequence, count), torch.full((tail, 48), torch.nan)]
        real[n], row = slice(row, row + count), row + count + tail
    rest = sum(pads) + step.rows_after
    hidden = torch.cat([*values, torch.full((rest, 48), torch.nan)])
    outs = whole.forward(batch, hidden, torch.cat([*positions, stale_positions(rest)]))
    live = torch.zeros(len(hidden), dtype=torch.bool)
    for rows in real.values():
        live[rows] = True
    for out in outs:
        assert not out[~live].any(), "what is no token has an output"
    return [{n: out[real[n]] for n in order if step.counts[n]} for out in outs]


@pytest.mark.parametrize("model", STACKS)
@given(steps=STEPS, form=st.sampled_from(FORM_NAMES))
@search(7)  # whole layers with padding are the subject of the kit's cases of clause D2 too
def test_steps_with_padding_are_those_without(model: str, steps: list[Step], form: str) -> None:
    wholes = [STACKS[model](loaded=REFERENCE_FORMS[form], limits=LIMITS) for _ in range(2)]
    all_sequences = [[whole.manager.new() for _ in range(2)] for whole in wholes]
    for step in steps:
        actual = padded(wholes[0], all_sequences[0], step)
        for left, right in zip(actual, alone(wholes[1], all_sequences[1], step), strict=False):
            assert left.keys() == right.keys()
            for n in left:
                torch.testing.assert_close(left[n], right[n], rtol=1e-5, atol=1e-5)
        for whole, sequences in zip(wholes, all_sequences, strict=True):
            whole.manager.advance([(sequences[n], count) for n, count in enumerate(step.counts)])
