"""Replayed tokens of a prefix hit: pages that another request reads keep their bytes, and new tokens are right.

Whole layers of V4 and V4.1 run on pages that two requests share; what is right is what a request computes alone, in one
step from its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.metadata.metadata import Batch
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from dsv4attn.serving.cache_manager import CachedSequence
from tests.core.attention.strategies import search
from tests.harness import SMALL, LayerStack, caches_unchanged
from tests.harness_v41 import SMALL_V41, STACKS

LENGTH, WINDOWS = 46, {"v4": SMALL.window, "v41": SMALL_V41.window}


def stack(model: str, backend: str) -> LayerStack:
    """Layers whose pages are in random order; windows of all tokens stay."""
    shuffle = {"shuffle_seed": 5} if model == "v4" else {}
    return STACKS[model](backend=backend, keep_windows=True, **shuffle)


@cache
def alone(model: str) -> list[Tensor]:
    """Outputs of every layer for a request that runs alone, in one step, on the reference."""
    whole = stack(model, "reference")
    return whole.run([(whole.manager.new(), LENGTH)], whole.hidden(1, LENGTH))


class Hit:
    """A live request, and a second one that shares the pages of its first `end` tokens and begins at `start`.

    states: whether the pages of states are part of the hit; else the second request has its own, which hold NaN.
    """

    def __init__(self, model: str, backend: str, end: int, start: int, *, states: bool = True) -> None:
        self.whole, self.end, self.start, self.states = stack(model, backend), end, start, states
        self.hidden, manager = self.whole.hidden(1, LENGTH), self.whole.manager
        self.live = manager.new()
        self.whole.step([(self.live, end + 1)], self.hidden[: end + 1])
        self.second = self._second()
        self.before = self.whole.bytes_of(self.live)

    def _second(self) -> CachedSequence:
        sequence, manager = self.whole.manager.new(), self.whole.manager
        copied = []
        for name, table in sequence.tables.items():
            n, theirs = table.tokens_per_block, self.live.tables[name].blocks
            if name == "window" or (name != "compressed" and not self.states):
                table.skip_before(self.start)
            else:
                table.blocks = theirs[: self.end // n]
                copied += [(name, self.end // n)] if self.end % n else []
        sequence.length = self.start
        manager.reserve([(sequence, LENGTH - self.start)])
        for name, pool in self.live.tables.items():
            live_blocks = torch.tensor([block for block in pool.blocks if block >= 0])
            for paged_cache in manager._of_group(name):
                kept = paged_cache.tensor[live_blocks].clone()
                paged_cache.tensor.fill_(torch.nan)
                paged_cache.tensor[live_blocks] = kept
        # a page on both sides of the end is copied before it is written, as engines do
        for name, column in copied:
            for paged_cache in manager._of_group(name):
                paged_cache.tensor[sequence.tables[name].blocks[column]] = paged_cache.tensor[
                    self.live.tables[name].blocks[column]
                ]
        return sequence

    def batch(self, requests: Sequence[tuple[CachedSequence, int]], padding: int = 0, **changes: Any) -> Batch:
        """The batch of a step, with what is known of the hit of the second request."""
        mine = [sequence is self.second for sequence, _ in requests]

        def of_second(value: int) -> Tensor:
            # more elements than requests are fine
            return torch.tensor([value if is_mine else 0 for is_mine in mine] + [99], dtype=torch.int32)

        known = {"replay_start": of_second(self.start), "num_cached_tokens": of_second(self.end)}
        if not self.states:
            known["num_cached_states"] = of_second(0)
        return attrs.evolve(self.whole.manager.batch(requests, padding=padding), **{**known, **changes})

    def step(self, requests: Sequence[tuple[CachedSequence, int]], padding: int = 0) -> list[Tensor]:
        """Outputs of every layer for a step that is done."""
        manager = self.whole.manager
        rows = [self.hidden[sequence.length : sequence.length + count] for sequence, count in requests]
        hidden = torch.cat([*rows, torch.full((padding, self.hidden.shape[1]), torch.nan)])
        positions = manager.positions(requests, padding=padding)
        outs = self.whole.forward(self.batch(requests, padding), hidden, positions)
        manager.advance(requests)
        return outs

    def run_changed(self, chunks: Sequence[int], padding: int = 0) -> None:
        """Run the second request in chunks, with other hidden states than the live one had, and compare shared pages.

        Replayed tokens have others in a network whose windows are lost.
        """
        right, length = self.hidden, self.second.length
        self.hidden = torch.cat([right[: self.start], self.whole.hidden(2, LENGTH)[self.start :]])
        self._run(chunks, padding)
        self.second.length, self.hidden = length, right

    def check(self, model: str, chunks: Sequence[int], padding: int = 0) -> None:
        """Run the second request in chunks, then both together; compare pages and outputs."""
        outs = self._run(chunks, padding)
        rest = self.second.length
        both = self.step([(self.live, 1), (self.second, LENGTH - rest)], padding)
        for i, (actual, last, expected) in enumerate(zip(outs, both, alone(model), strict=True)):
            near(last[:1], expected[self.end + 1 :][:1], f"layer {i}, the live request")
            outputs = torch.cat([*actual, last[1 : 1 + LENGTH - rest]])
            # tokens whose window is there: replayed ones at its beginning have less
            whole = max(self.start + WINDOWS[model] - 1, self.start)
            near(outputs[whole - self.start :], expected[whole:], f"layer {i}, the second request")

    def _run(self, chunks: Sequence[int], padding: int) -> list[list[Tensor]]:
        """Outputs of every layer for chunks of the second request."""
        outs: list[list[Tensor]] = [[] for _ in self.whole.layers]
        for count in chunks:
            for outputs_of_layer, out in zip(outs, self.step([(self.second, count)], padding), strict=True):
                outputs_of_layer.append(out[:count])
            # the live request's pages are those of its own tokens, of which none has run since
            for was, now in zip(self.before, self.whole.bytes_of(self.live), strict=True):
                assert torch.equal(was.view(torch.uint8), now.view(torch.uint8)), "a shared page was written"
        return outs


def near(actual: Tensor, right: Tensor, what: str) -> None:
    assert actual.shape == right.shape
    error = float((actual - right).norm() / right.norm())
    assert error <= 2.0**-9, f"{what} is off by {error}"


CASES = {
    # end of the hit, first token that is replayed, chunks of the second request before both run together
    "one step": (32, 24, [12]),
    "the end between two steps": (32, 25, [7, 3]),
    "token by token": (32, 24, [1] * 12),
    "a page on both sides of the end": (37, 26, [8, 6]),
    "an entry on both sides, cut at the end": (35, 26, [9, 4]),
    "nothing is replayed but the windows": (16, 9, [7, 1, 1]),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", STACKS)
def test_g27_replayed_tokens_write_no_page_that_the_hit_owns(model: str, case: str) -> None:
    end, start, chunks = CASES[case]
    hit = Hit(model, "reference", end, start)
    hit.run_changed(chunks, padding=3)
    hit.check(model, chunks, padding=3)


@pytest.mark.matrix
@pytest.mark.parametrize("model", STACKS)
def test_g27_neither_do_kernels(model: str) -> None:
    Hit(model, "triton", 35, 26).run_changed([9, 4], padding=1)


@pytest.mark.pairwise
@pytest.mark.parametrize(("end", "start"), [(32, 24), (35, 26), (37, 24)])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("model", STACKS)
def test_states_that_are_lost_are_written_again_to_pages_of_the_request(
    model: str, end: int, start: int, cut: bool
) -> None:
    Hit(model, "reference", end, start, states=False).check(model, [end - start, 2] if cut else [end - start + 2])


@st.composite
def hits(draw: st.DrawFn) -> tuple[str, int, int, list[int], bool, int]:
    """A model, the end of a hit, where its replay begins, chunks of the request, whether states are kept, padding."""
    model = draw(st.sampled_from(sorted(STACKS)))
    end, states, padding = draw(st.integers(16, 40)), draw(st.booleans()), draw(st.integers(0, 3))
    # the windows of new tokens, and where states are lost the first state that an entry after the hit reads
    latest = end - WINDOWS[model] + 1
    if not states:
        layers = (stack(model, "reference")).geometry.distinct_layers
        latest = min(latest, *(layer.first_state(end) for layer in layers if layer.has_states))
    start = draw(st.integers(max(latest - 6, 0), max(latest, 0)))
    left, chunks = draw(st.integers(1, LENGTH - 1 - start)), list[int]()
    while left:
        chunks.append(draw(st.integers(1, left)))
        left -= chunks[-1]
    return model, end, start, chunks, states, padding


@given(drawn=hits())
@search(12)
def test_any_hit_in_any_chunks(drawn: tuple[str, int, int, list[int], bool, int]) -> None:
    model, end, start, chunks, states, padding = drawn
    hit = Hit(model, "reference", end, start, states=states)
    if states:
        hit.run_changed(chunks, padding)
    hit.check(model, chunks, padding)


def test_the_metadata_have_no_slot_for_what_is_cached_and_windows_have_theirs() -> None:
    hit = Hit("v4", "reference", 32, 24)
    metadata = hit.whole.manager.metadata(hit.batch([(hit.live, 1), (hit.second, 14)]))
    c4a, c128a = metadata[LayerKind.CSA], metadata[LayerKind.HCA]
    assert c4a.compressed is not None
    assert c128a.compressed is not None
    assert c4a.state is not None
    assert c4a.state.slot_mapping is not None
    # positions 33, then 24 .. 37
    assert (c4a.compressed.slot_mapping >= 0).nonzero().flatten().tolist() == [1 + 35 - 24]
    assert not bool((c128a.compressed.slot_mapping >= 0).any())
    assert (c4a.state.slot_mapping >= 0).tolist() == [True] + [p >= 32 for p in range(24, 38)]
    assert bool((metadata[LayerKind.SWA].swa.slot_mapping >= 0).all()), "window keys of replayed tokens are lost"
    assert c4a.compressed.compressed_lens.tolist() == [34 // 4, *[(p + 1) // 4 for p in range(24, 38)]]

    lost = hit.whole.manager.metadata(hit.batch([(hit.second, 14)], num_cached_states=torch.zeros(1).int()))
    state = lost[LayerKind.CSA].state
    assert state is not None
    assert state.slot_mapping is not None
    assert bool((state.slot_mapping >= 0).all())


def test_a_later_step_without_a_hit_finds_nothing_of_the_one_before() -> None:
    """Buffers of the builder are the same in every step."""
    hit = Hit("v41", "reference", 35, 26)
    manager, requests = hit.whole.manager, [(hit.second, 9)]
    ring = manager.metadata(hit.batch(requests))[LayerKind.CSA, 2].state
    assert ring is not None
    assert ring.req_id_per_token is not None
    assert ring.req_id_per_token.tolist() == [-1] * 8 + [0], "position 34 is half of the entry after the hit"
    plain = manager.metadata(manager.batch([(hit.live, 9)]))
    state, entries = plain[LayerKind.CSA, 2].state, plain[LayerKind.CSA, 1].compressed
    assert state is not None
    assert state.req_id_per_token is None
    assert entries is not None
    assert bool((entries.slot_mapping >= 0).all())


@pytest.mark.parametrize("model", STACKS)
def test_a_captured_graph_reads_the_hits_of_the_step_that_is_replayed(model: str) -> None:
    """Captured with ends of 0 and padding; what it reads is written in place by the next build."""
    hit = Hit(model, "reference", 32, 24)
    manager, requests = hit.whole.manager, [(hit.live, 1), (hit.second, 1)]
    captured = manager.metadata(hit.batch(requests, padding=2, num_cached_tokens=ints(0, 0, 0)))
    first_metadata = manager.metadata(hit.batch(requests, padding=2))
    for key, part in captured.items():
        again = first_metadata[key]
        pairs: list[tuple[Tensor | None, Tensor | None]] = []
        if part.compressed is not None and again.compressed is not None:
            pairs.append((part.compressed.slot_mapping, again.compressed.slot_mapping))
        if part.state is not None and again.state is not None:
            pairs.append((part.state.slot_mapping, again.state.slot_mapping))
            pairs.append((part.state.req_id_per_token, again.state.req_id_per_token))
        for old, new in pairs:
            assert (old is None) is (new is None)
            if old is not None and new is not None:
                assert old.data_ptr() == new.data_ptr()
                assert old.shape == new.shape
                assert old.tolist()[1:] == [-1] * (len(old) - 1), "the second request's token is replayed"


# refused


def refused(hit: Hit, said: str, **changes: Any) -> None:
    batch = hit.batch([(hit.second, 14)], **changes)
    with caches_unchanged(hit.whole), pytest.raises(ArgumentError, match=said):
        hit.whole.manager.metadata(batch)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("model", STACKS)
def test_a_replay_without_the_end_of_the_hit_is_refused(model: str) -> None:
    said = r"^Batch.num_cached_tokens: expected a tensor where replay_start is given, got None -> .* 0 for none"
    refused(Hit(model, "reference", 32, 24), said, num_cached_tokens=None)


def test_states_past_the_hit_and_a_replay_that_begins_too_late_are_refused() -> None:
    hit = Hit("v4", "reference", 36, 26)
    said = r"^Batch.num_cached_states\[0\]: expected at most 36, the end of the prefix hit .*, got 37 -> "
    refused(hit, said, num_cached_states=ints(37))
    said = r"^Batch.replay_start\[0\]: expected at most 32, the first state that entries .* of c4a read, got 33"
    refused(hit, said, num_cached_states=ints(0), replay_start=ints(33))


def test_states_of_the_hit_must_have_blocks_where_an_entry_after_it_reads_them() -> None:
    hit = Hit("v4", "reference", 32, 24, states=False)
    hit.second.tables["c4a_state"].blocks[28 // 4] = -1
    said = r"^c4a_state_block_table\[0, 7\]: expected .* positions 28 .*, got -1 -> .* see Batch.num_cached_states"
    refused(hit, said, num_cached_states=None)
    hit.second.tables["c4a_state"].blocks[28 // 4], hit.second.tables["c4a_state"].blocks[24 // 4] = 0, -1
    hit.whole.manager.metadata(hit.batch([(hit.second, 14)], num_cached_states=None))  # none reads that block
    hit.whole.manager.metadata(hit.batch([(hit.second, 8)], num_cached_states=None))  # nor any: it is all replayed


@pytest.mark.parametrize("name", ["num_cached_tokens", "num_cached_states"])
def test_wrong_ends_are_refused(name: str) -> None:
    hit = Hit("v41", "reference", 32, 24)
    wrong: list[tuple[Any, str]] = [
        (torch.zeros(0).int(), "expected an element for each of the 1 requests, got 0 elements"),
        (torch.zeros(1), r"expected a?.*int32.*, got \[1\] float32"),
        (torch.zeros(1, 1).int(), r"expected \[_\] int32, got \[1, 1\]"),
        ([0], "expected a tensor"),
    ]
    for value, said in wrong:
        with pytest.raises(ArgumentError, match=rf"^Batch.{name}: {said}"):
            hit.batch([(hit.second, 14)], 0, **{name: value})
    batch = hit.batch([(hit.second, 14)])
    setattr(batch, name, torch.zeros(0).int())
    with pytest.raises(ArgumentError, match=rf"^Batch.{name}: expected an element for each of the 1 requests"):
        hit.whole.manager.metadata(batch)
