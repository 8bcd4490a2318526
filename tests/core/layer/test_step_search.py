"""Random programs of steps, padding, empty steps and copies on whole layers, against recomputation.

Every real token must give what a new sequence gives that runs all the tokens in one step, whatever padding lies around
it: rows and requests that are not real, with any positions, any hidden states and any blocks in their tables. Lengths
on the host may be above the true ones.
`SEARCH=100` runs 100 times as many programs, and other ones in every run.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.metadata import Batch
from tests.core.attention.strategies import search
from tests.harness import FORM_NAMES, REFERENCE_FORMS, padded_batch
from tests.harness_v41 import STACKS

MAX_LEN, MAX_TOKENS, MAX_REQS = 64, 48, 6
STALE = torch.tensor([0, 1, 7, 63, 64, 10**6, 2**31, -1, -(10**9)])
"""Positions of padding."""
BLOCKS = [-1, 0, 3, 10**6, 2**31 - 1, -(2**31), None]
"""Blocks in the tables of requests of padding; None: those of the first request."""


@attrs.frozen
class Padding:
    """Rows of a step that are not real.

    rows: after the last request. requests: query tokens of each request of padding. block: in its tables. tails: tokens
    of padding at the end of each sequence's request. excess: what lengths on the host have in addition to the true
    ones. validate: whether the builder checks values. seed: of positions and lengths.
    """

    rows: int = 0
    requests: tuple[int, ...] = ()
    block: int | None = -1
    tails: tuple[int, ...] = (0, 0, 0)
    excess: int = 0
    validate: bool = True
    seed: int = 0


PADDING = st.builds(
    Padding,
    rows=st.integers(0, 4),
    requests=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    block=st.sampled_from(BLOCKS),
    tails=st.tuples(*[st.sampled_from([0, 0, 1, 2])] * 3),
    excess=st.sampled_from([0, 1, 9]),
    validate=st.booleans(),
    seed=st.integers(0, 2**16),
)


class Program:
    """A network under test, one that recomputes, and the tokens of each sequence."""

    def __init__(self, model: str, form: str) -> None:
        limits = Limits(MAX_REQS, MAX_TOKENS, MAX_LEN, num_speculative_tokens=1)
        self.whole = STACKS[model](loaded=REFERENCE_FORMS[form], limits=limits)
        self.scratch = STACKS[model](limits=Limits(MAX_REQS, MAX_REQS * MAX_LEN, MAX_LEN))
        self.embedding = self.whole.hidden(11, 512)
        self.sequences = [self.whole.manager.new() for _ in range(3)]
        self.tokens: list[list[int]] = [[] for _ in self.sequences]
        self.next_token = 0
        self.ran: list[tuple[str, list[tuple[int, int, int]], list[Tensor]]] = []
        """For each step: what it was, (sequence, first token, tokens) of its requests, and their outputs by layer."""

    def step(self, counts: list[int], padding: Padding) -> None:
        """Run a step of some sequences, and keep what it gives for its real tokens."""
        chosen = [
            (i, count, tail)
            for i, (count, tail) in enumerate(zip(counts, padding.tails, strict=True))
            if count >= 0 and len(self.tokens[i]) + count + tail <= MAX_LEN
        ]
        chosen.sort(key=lambda request: request[1] + request[2])
        ids, is_real = list[int](), list[bool]()
        for i, count, tail in chosen:
            mine = [(self.next_token + n) % 512 for n in range(count)]
            self.next_token += count
            self.tokens[i] += mine
            ids += mine
            is_real += [True] * count + [False] * tail
        manager, rows = self.whole.manager, sum(padding.requests) + padding.rows
        requests = [(self.sequences[i], count + tail) for i, count, tail in chosen]
        batch, positions = manager.batch(requests), torch.nn.functional.pad(manager.positions(requests), (0, rows))
        real = torch.tensor(is_real + [False] * rows, dtype=torch.bool)
        batch.slot_mapping[~real[: len(is_real)]] = -1
        positions[~real] = stale(int((~real).sum()), padding)
        hidden = torch.full((len(real), self.whole.geometry.hidden_size), torch.nan)
        hidden[real] = self.embedding[ids]
        manager.builder.validate = padding.validate
        outs = self.whole.forward(padded(batch, padding), hidden, positions)
        manager.advance([(self.sequences[i], count) for i, count, _ in chosen])
        for layer, out in enumerate(outs):
            assert out.shape[0] == positions.shape[0]
            assert not bool(out[~real].any()), f"layer {layer}: padding is not zero: {padding}"
        spans = [(i, len(self.tokens[i]) - count, count) for i, count, _ in chosen]
        self.ran.append((f"{chosen}, {padding}", spans, [out[real] for out in outs]))

    def compare(self) -> None:
        """Compare all steps with one step of new sequences that have all tokens."""
        new = [(self.scratch.manager.new(), len(tokens)) for tokens in self.tokens]
        outs = self.scratch.step(new, self.embedding[[token for tokens in self.tokens for token in tokens]])
        right = [out.split([count for _, count in new]) for out in outs]
        for said, spans, mine in self.ran:
            for layer, (out, rows) in enumerate(zip(mine, right, strict=True)):
                expected = torch.cat([out[:0], *(rows[i][first : first + count] for i, first, count in spans)])
                torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4, msg=f"layer {layer}: {said}")

    def copy(self, *, pickled: bool) -> None:
        """Go on with a copy of layers, caches and sequences; the original must not matter any more."""
        state = self.whole, self.sequences
        kept = pickle.loads(pickle.dumps(state)) if pickled else copy.deepcopy(state)  # noqa: S301 - its own bytes
        self.whole.poison_caches()
        self.whole, self.sequences = kept


def stale(count: int, padding: Padding) -> Tensor:
    """Positions of rows that are not real."""
    random = torch.Generator().manual_seed(padding.seed)
    return STALE[torch.randint(0, len(STALE), (count,), generator=random)]


def padded(batch: Batch, padding: Padding) -> Batch:
    """The same step with requests and rows of padding after its own, and with other lengths on the host."""
    random = torch.Generator().manual_seed(padding.seed)
    batch = padded_batch(batch, padding.block, padding.requests, rows_after=padding.rows)
    lens, many = batch.seq_lens_cpu.clone(), len(padding.requests)
    lens[len(lens) - many :] += torch.randint(0, 20, (many,), generator=random, dtype=torch.int32)
    return attrs.evolve(batch, seq_lens=lens, seq_lens_cpu=(lens + padding.excess).clamp(max=MAX_LEN))


COUNTS = st.one_of(st.just(-1), st.integers(0, 3), st.integers(1, 14))
STEPS = st.tuples(st.just("step"), st.lists(COUNTS, min_size=3, max_size=3), PADDING)
EMPTY = st.tuples(st.just("step"), st.just([-1, -1, -1]), PADDING)
COPIES = st.tuples(st.just("copy"), st.booleans())


OPERATIONS = st.lists(st.one_of(STEPS, STEPS, STEPS, EMPTY, COPIES), min_size=2, max_size=8)


@pytest.mark.parametrize("model", STACKS)
@search(10)
@given(operations=OPERATIONS, form=st.sampled_from(FORM_NAMES))
def test_g27_tokens_that_are_not_real_and_copies_change_nothing(
    model: str, operations: list[tuple[Any, ...]], form: str
) -> None:
    program = Program(model, form)
    program.step([5, 11, 0], Padding())
    for name, *arguments in operations:
        if name == "copy":
            program.copy(pickled=arguments[0])
        else:
            program.step(*arguments)
    program.step([1, 1, 1], Padding())
    program.compare()
