"""Random programs of new, step, fork, truncate, select and free on whole layers, against recomputation from scratch.

Every accepted step must give what a new sequence gives that runs all the tokens again. Every refused fork must be one
that could not be right, by a count of the tokens whose contents are left, which is kept here position by position.
`SEARCH=100` runs 100 times as many programs, and other ones in every run.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.config import v41_layers
from dsv4attn.core.model.geometry import LayerKind, LayerSharing, ModelGeometry
from dsv4attn.errors import ArgumentError, OutOfPagesError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CachedSequence
from tests.core.attention.strategies import search
from tests.harness import FP32, SMALL, LayerStack
from tests.harness_v41 import FP32_V41, SMALL_V41

MAX_LEN, MAX_TOKENS, MAX_REQS = 64, 48, 4
STATE_SIZES = {"c4a": 4, "c128a": 8}


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """V4 or V4.1 with any ratios, window, pages and drafts."""
    window, layout = draw(st.sampled_from([1, 3, 8, 16])), FP32
    if draw(st.booleans()):
        ratios = draw(st.sampled_from([[0, 2, 2, 1], [2, 1], [0, 2], [1, 0]]))
        owners = tuple(i for i, ratio in enumerate(ratios) if ratio and ratio not in ratios[:i])
        sharing, layout = LayerSharing(owners, owners), FP32_V41
        geometry = attrs.evolve(SMALL_V41, layers=v41_layers(ratios), sharing=sharing, window=window)
    else:
        c4a, c128a = draw(st.sampled_from([(4, 16), (2, 8), (3, 5), (4, 32)]))
        layers = (LayerKind.SWA, 1), (LayerKind.CSA, c4a), (LayerKind.HCA, c128a)
        some = draw(st.sampled_from([(0, 1, 2), (1,), (2, 0), (0,)]))
        geometry = attrs.evolve(SMALL, layers=tuple(layers[i] for i in some), window=window)
    return {
        "geometry": geometry,
        "layout": layout,
        "drafts": draw(st.sampled_from([0, 0, 1, 3])),
        "keep_windows": draw(st.sampled_from([False, False, True])),
        "swa_block_size": draw(st.sampled_from([1, 4, 16])),
    }


def first_needed(geometry: ModelGeometry, length: int) -> dict[str, int]:
    """By group, the first position that a token at `length` or later reads, by going through what later tokens read."""
    first = {"window": max(length - geometry.window + 1, 0)}
    for kind, ratio in geometry.layers:
        if kind is LayerKind.SWA or (geometry.shared_latent and ratio == 1):
            continue
        overlap = ratio if kind is LayerKind.CSA and not geometry.shared_latent else 0
        # the entry that the next token, or one of those after it, completes
        entry = next(e for e in range(length + 1) if (e + 1) * ratio > length)
        group = f"{kind.value}_state"
        first[group] = min(first.get(group, length), max(entry * ratio - overlap, 0))
    return first


@attrs.define(eq=False)
class Held:
    """A sequence, its tokens, and by group the positions whose contents it has."""

    sequence: CachedSequence
    tokens: list[int]
    held: dict[str, set[int]]


class Program:
    """A manager under test, one that recomputes, and what each sequence should have."""

    def __init__(
        self, geometry: ModelGeometry, layout: KVCacheLayout, drafts: int, swa_block_size: int, *, keep_windows: bool
    ) -> None:
        limits = Limits(MAX_REQS, MAX_TOKENS, MAX_LEN, num_speculative_tokens=drafts)
        page = math.lcm(*(ratio for _, ratio in geometry.layers)) * (4 if geometry.shared_latent else 1)
        options: dict[str, Any] = {"swa_block_size": swa_block_size, "compressed_block_tokens": page}
        backend = load_backend("reference")
        self.whole = LayerStack(
            backend, layout, geometry=geometry, limits=limits, shuffle_seed=5, keep_windows=keep_windows, **options
        )
        self.scratch = LayerStack(
            backend, layout, geometry=geometry, limits=Limits(MAX_REQS, MAX_REQS * MAX_LEN, MAX_LEN), **options
        )
        self.geometry, self.drafts, self.keep, self.next_token = geometry, drafts, keep_windows, 0
        self.sizes = {"window": swa_block_size}
        self.sizes |= {f"{kind}_state": size for kind, size in STATE_SIZES.items()}
        self.embedding = self.whole.hidden(11, 1024)
        self.live: list[Held] = []

    def new(self) -> None:
        """Begin a sequence."""
        groups = first_needed(self.geometry, 0)
        self.live.append(Held(self.whole.manager.new(), [], {name: set() for name in groups}))

    def step(self, wishes: list[tuple[int, int]]) -> None:
        """Run a step of some sequences, and compare it with a new sequence that runs all tokens again."""
        counts: dict[int, int] = {}
        left = MAX_TOKENS
        for i, count in wishes[:MAX_REQS]:
            if self.live and count <= left and len(self.live[i % len(self.live)].tokens) + count <= MAX_LEN:
                left -= count - counts.get(i % len(self.live), 0)
                counts[i % len(self.live)] = count
        chosen = [(self.live[i], count) for i, count in sorted(counts.items(), key=lambda pair: pair[1])]
        if not chosen:
            return
        ids = [[*range(self.next_token + 50 * i, self.next_token + 50 * i + n)] for i, (_, n) in enumerate(chosen)]
        self.next_token = (self.next_token + 50 * len(ids)) % 800
        requests = [(held.sequence, count) for held, count in chosen]
        try:
            outs = self.whole.step(requests, self.embedding[[t for part in ids for t in part]])
        except OutOfPagesError:
            return
        for (held, count), part in zip(chosen, ids, strict=True):
            held.tokens += part
            assert held.sequence.length == len(held.tokens)
            for positions in held.held.values():
                positions |= {*range(len(held.tokens) - count, len(held.tokens))}
            self.give_back(held)
        self.poison()
        whole = self.recomputed([held.tokens for held, _ in chosen])
        for layer, (out, wanted_rows) in enumerate(zip(outs, whole, strict=True)):
            last = [rows[len(rows) - count :] for rows, (_, count) in zip(wanted_rows, chosen, strict=True)]
            torch.testing.assert_close(out, torch.cat(last), rtol=1e-3, atol=1e-4, msg=f"layer {layer}: {chosen}")

    def recomputed(self, histories: list[list[int]]) -> list[list[torch.Tensor]]:
        """By layer and sequence: the outputs of all tokens, in one step of new sequences."""
        new = [self.scratch.manager.new() for _ in histories]
        requests = [(sequence, len(tokens)) for sequence, tokens in zip(new, histories, strict=True)]
        outs = self.scratch.step(requests, self.embedding[[t for tokens in histories for t in tokens]])
        for sequence in new:
            self.scratch.manager.free(sequence)
        return [list(out.split([len(tokens) for tokens in histories])) for out in outs]

    def give_back(self, held: Held) -> None:
        """Drop the blocks that no token reads from here on, with the drafts of the last step rejected."""
        if self.keep:
            return
        for name, first in first_needed(self.geometry, max(len(held.tokens) - self.drafts, 0)).items():
            whole_blocks = first // self.sizes[name] * self.sizes[name]
            held.held[name] -= {*range(whole_blocks)}

    def can_continue(self, held: Held, length: int) -> bool:
        """Whether a sequence has all that its tokens from `length` on read."""
        needed = first_needed(self.geometry, length)
        return all(held.held[name] >= {*range(first, length)} for name, first in needed.items())

    def fork(self, i: int, length: int) -> None:
        """Fork a sequence at any length."""
        if not self.live:
            return
        held = self.live[i % len(self.live)]
        length %= len(held.tokens) + 1
        forked: CachedSequence | None
        try:
            forked = self.whole.manager.fork(held.sequence, length)
        except OutOfPagesError:
            return
        except ArgumentError:
            forked = None
        assert (forked is not None) == self.can_continue(held, length), f"fork({length}) of {held}: {forked}"
        if forked is not None:
            self.live.append(self.copied(held, forked, length))

    def copied(self, source: Held, sequence: CachedSequence, length: int) -> Held:
        """What a fork has."""
        kept = first_needed(self.geometry, 0 if self.keep else max(length - self.drafts, 0))
        held = {name: source.held[name] & {*range(first, length)} for name, first in kept.items()}
        return Held(sequence, source.tokens[:length], held)

    def truncate(self, i: int, length: int) -> None:
        """Forget tokens."""
        if not self.live:
            return
        held = self.live[i % len(self.live)]
        length = len(held.tokens) - length % (len(held.tokens) + 1)
        try:
            self.whole.manager.truncate(held.sequence, length)
        except ArgumentError:
            return
        assert self.can_continue(held, length), f"truncate({length}) of {held} was accepted"
        del held.tokens[length:]
        for positions in held.held.values():
            positions -= {p for p in positions if p >= length}

    def select(self, rows: list[int]) -> None:
        """Go on with some of the sequences."""
        rows = [row % len(self.live) for row in rows] if self.live else []
        sequences, kv_bytes = [held_sequence.sequence for held_sequence in self.live], self.whole.manager.kv_bytes
        try:
            selected = self.whole.manager.select(sequences, rows)
        except OutOfPagesError:
            assert all(sequence.owner is self.whole.manager for sequence in sequences)
            assert kv_bytes == self.whole.manager.kv_bytes
            return
        held = []
        for i, (row, sequence) in enumerate(zip(rows, selected, strict=True)):
            chosen = self.live[row]
            held.append(chosen if row not in rows[:i] else self.copied(chosen, sequence, len(chosen.tokens)))
        self.live = held
        self.poison()

    def free(self, i: int) -> None:
        """Give a sequence back."""
        if self.live:
            self.whole.manager.free(self.live.pop(i % len(self.live)).sequence)
            self.poison()

    def poison(self) -> None:
        """Fill the pages that are free with NaN."""
        for name, pool in self.whole.manager._pools.items():
            free = torch.tensor(pool._free, dtype=torch.int64)
            for cache in self.whole.manager._of_group(name):
                cache.tensor[free] = torch.nan

    def close(self) -> None:
        """Free everything: no page may be left."""
        while self.live:
            self.free(len(self.live) // 2)
        assert not any(self.whole.manager.kv_bytes.values())


NUMBERS = st.integers(0, MAX_LEN)
ROWS = st.integers(0, 5)
COUNTS = st.one_of(st.integers(0, 4), st.integers(1, 40))
OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.lists(st.tuples(ROWS, COUNTS), min_size=1, max_size=3)),
    st.tuples(st.just("step"), st.lists(st.tuples(ROWS, COUNTS), min_size=1, max_size=3)),
    st.tuples(st.just("fork"), ROWS, NUMBERS),
    st.tuples(st.just("fork"), ROWS, NUMBERS),
    st.tuples(st.just("new")),
    st.tuples(st.just("truncate"), ROWS, st.integers(0, 4)),
    st.tuples(st.just("truncate"), ROWS, NUMBERS),
    st.tuples(st.just("select"), st.lists(ROWS, max_size=4)),
    st.tuples(st.just("free"), ROWS),
)


@search(8)
@given(models(), st.lists(OPERATIONS, min_size=3, max_size=10))
def test_every_accepted_fork_goes_on_as_if_its_tokens_had_run_alone(
    options: dict[str, Any], operations: list[tuple[Any, ...]]
) -> None:
    program = Program(**options)
    program.poison()
    program.new()
    program.step([(0, 40)])
    for name, *arguments in operations:
        getattr(program, name)(*arguments)
    # every sequence goes on once more, one token at a time, past the end of an entry
    for i in range(len(program.live)):
        for _ in range(2):
            program.step([(i, 1)])
    program.close()
