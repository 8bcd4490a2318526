"""Random programs of steps, padding, empty steps and copies on whole layers, against recomputation.

Every real token must give what a new sequence gives that runs all the tokens in one step, whatever padding lies around
it: rows and requests that are not real, with any positions, any hidden states and any blocks in their tables.
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
from tests.harness import BLOCK_TABLES, padded_batch
from tests.harness_v41 import STACKS

MAX_LEN, MAX_TOKENS, MAX_REQS = 64, 48, 6
STALE = torch.tensor([0, 1, 7, 63, 64, 10**6, 2**31, -1, -(10**9)])
"""Positions of padding."""
BLOCKS = [-1, 0, 3, 10**6, 2**31 - 1, -(2**31)]
"""Blocks in the tables of requests of padding."""


@attrs.frozen
class Padding:
    """Rows of a step that are not real.

    rows: after the last request. requests: query tokens of each request of padding. block: in its tables. validate:
    whether the builder checks values. seed: of positions and lengths.
    """

    rows: int = 0
    requests: tuple[int, ...] = ()
    block: int = -1
    validate: bool = True
    seed: int = 0


PADDING = st.builds(
    Padding,
    rows=st.integers(0, 4),
    requests=st.lists(st.integers(0, 3), max_size=2).map(tuple),
    block=st.sampled_from(BLOCKS),
    validate=st.booleans(),
    seed=st.integers(0, 2**16),
)


class Program:
    """A network under test, one that recomputes, and the tokens of each sequence."""

    def __init__(self, model: str) -> None:
        self.whole = STACKS[model](limits=Limits(MAX_REQS, MAX_TOKENS, MAX_LEN, num_speculative_tokens=1))
        self.scratch = STACKS[model](limits=Limits(MAX_REQS, MAX_REQS * MAX_LEN, MAX_LEN))
        self.embedding = self.whole.hidden(11, 512)
        self.sequences = [self.whole.manager.new() for _ in range(3)]
        self.tokens: list[list[int]] = [[] for _ in self.sequences]
        self.next_token = 0

    def step(self, counts: list[int], padding: Padding) -> None:
        """Run a step of some sequences, and compare its real tokens."""
        chosen = [
            (i, count)
            for i, count in enumerate(counts[: len(self.sequences)])
            if count >= 0 and len(self.tokens[i]) + count <= MAX_LEN
        ]
        chosen.sort(key=lambda pair: pair[1])
        requests = [(self.sequences[i], count) for i, count in chosen]
        ids = []
        for i, count in chosen:
            mine = [(self.next_token + n) % 512 for n in range(count)]
            self.next_token += count
            self.tokens[i] += mine
            ids += mine
        real = torch.arange(len(ids))
        batch, positions = self.whole.manager.batch(requests), self.whole.manager.positions(requests)
        batch, positions = padded(batch, positions, padding)
        hidden = torch.full((positions.shape[0], self.whole.geometry.hidden_size), 50.0)
        hidden[: len(ids)] = self.embedding[ids]
        self.whole.manager.builder.validate = padding.validate
        outs = self.whole.forward(batch, hidden, positions)
        self.whole.manager.advance(requests)
        for layer, (out, right) in enumerate(zip(outs, self.recomputed([i for i, _ in chosen]), strict=True)):
            last = [rows[len(rows) - count :] for rows, (_, count) in zip(right, chosen, strict=True)]
            expected = torch.cat([out[:0], *last])
            said = f"layer {layer}: {chosen}, {padding}"
            torch.testing.assert_close(out[real], expected, rtol=1e-3, atol=1e-4, msg=said)
            assert out.shape[0] == positions.shape[0]
            assert not bool(out[len(ids) :].any()), f"layer {layer}: padding is not zero: {padding}"

    def recomputed(self, which: list[int]) -> list[list[Tensor]]:
        """By layer and sequence: the outputs of all tokens, in one step of new sequences."""
        new = [(self.scratch.manager.new(), len(self.tokens[i])) for i in which]
        outs = self.scratch.step(new, self.embedding[[t for i in which for t in self.tokens[i]]])
        for sequence, _ in new:
            self.scratch.manager.free(sequence)
        return [list(out.split([count for _, count in new])) for out in outs]

    def copy(self, *, pickled: bool) -> None:
        """Go on with a copy of layers, caches and sequences; the original must not matter any more."""
        state = self.whole, self.sequences
        kept = pickle.loads(pickle.dumps(state)) if pickled else copy.deepcopy(state)  # noqa: S301 - its own bytes
        self.whole.poison_caches()
        self.whole, self.sequences = kept


def padded(batch: Batch, positions: Tensor, padding: Padding) -> tuple[Batch, Tensor]:
    """The same step with requests and rows of padding after its own."""
    random = torch.Generator().manual_seed(padding.seed)
    real, many, rows = batch.num_reqs, len(padding.requests), sum(padding.requests) + padding.rows
    tables = {name: table for name in BLOCK_TABLES if (table := getattr(batch, name)) is not None}
    # the manager's tables have no columns where no sequence has tokens; those of an engine always have some
    wide: dict[str, Any] = {
        name: torch.nn.functional.pad(t, (0, 0 if t.shape[1] else 4), value=-1) for name, t in tables.items()
    }
    batch = padded_batch(attrs.evolve(batch, **wide), padding.block, padding.requests, rows_after=padding.rows)
    lens = batch.seq_lens_cpu.clone()
    lens[real:] += torch.randint(0, 20, (many,), generator=random, dtype=torch.int32)
    batch = attrs.evolve(batch, seq_lens=lens, seq_lens_cpu=lens)
    return batch, torch.cat([positions, STALE[torch.randint(0, len(STALE), (rows,), generator=random)]])


COUNTS = st.one_of(st.just(-1), st.integers(0, 3), st.integers(1, 14))
STEPS = st.tuples(st.just("step"), st.lists(COUNTS, min_size=3, max_size=3), PADDING)
EMPTY = st.tuples(st.just("step"), st.just([-1, -1, -1]), PADDING)
COPIES = st.tuples(st.just("copy"), st.booleans())


@pytest.mark.parametrize("model", STACKS)
@search(6)
@given(st.lists(st.one_of(STEPS, STEPS, STEPS, EMPTY, COPIES), min_size=2, max_size=8))
def test_g27_tokens_that_are_not_real_and_copies_change_nothing(model: str, operations: list[tuple[Any, ...]]) -> None:
    program = Program(model)
    program.step([5, 11, 0], Padding())
    for name, *arguments in operations:
        if name == "copy":
            program.copy(pickled=arguments[0])
        else:
            program.step(*arguments)
    program.step([1, 1, 1], Padding())
