"""Pools of pages: enough for what is promised, and never more than allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.errors import ArgumentError
from dsv4attn.serving.scheduler import Scheduler
from dsv4attn.tools.replay.pools import PagedBlocks, PoolSizes, StatePool
from dsv4attn.tools.replay.request import Request
from tests.tools.replay.small import GEOMETRY, requests_of

PLENTY = 1 << 40


def sizes_of(requests: list[Request], **changes: Any) -> PoolSizes:
    settings = {"window": 8, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_bytes": PLENTY}
    pages = {"window_page_bytes": 10, "compressed_page_bytes": 100}
    return PoolSizes.of(requests, **settings | pages | changes)


def serve(requests: list[Request], sizes: PoolSizes, *, budget: int, seqs: int) -> tuple[Scheduler, PagedBlocks]:
    blocks = PagedBlocks(sizes, 4, 8, 0)
    scheduler = Scheduler(requests, max_num_batched_tokens=budget, max_num_seqs=seqs, blocks=blocks)
    while (step := scheduler.next_step()) is not None:
        for table, entry in zip(blocks.tables(step.scheduled)["window"].tolist(), step.scheduled, strict=True):
            live = range(max(entry.prefix_len - 7, 0) // 4, -(-entry.seq_len // 4))
            assert all(table[column] >= 0 for column in live)
        scheduler.step_done(step)
        blocks.slide(step)
    return scheduler, blocks


@given(
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 200),
    st.integers(0, 3),
)
def test_every_trace_is_served_and_only_a_scarce_pool_preempts(
    lengths: list[tuple[int, int]], seqs: int, spare: int, scarce: int
) -> None:
    requests, budget = requests_of(*lengths), seqs + spare
    options = {"max_num_seqs": seqs, "max_num_batched_tokens": budget}
    sizes = sizes_of(requests, **options)
    if scarce:
        longest = max(-(-r.attention_tokens // 256) for r in requests)
        allowed = 10 * sizes.window + 100 * (longest + scarce - 1)
        sizes = sizes_of(requests, **options, max_bytes=allowed)
        assert 10 * sizes.window + 100 * sizes.compressed <= allowed
    scheduler, blocks = serve(requests, sizes, budget=budget, seqs=seqs)

    assert scheduler.counters.finished == len(requests)
    assert scarce or scheduler.counters.preemptions == 0
    assert blocks.num_used == 0
    assert blocks.peaks["window"] <= sizes.window
    assert blocks.peaks["compressed"] <= sizes.compressed


STATES = [StatePool(GEOMETRY.layer_of_kind(kind), size) for kind, size in (("c4a", 30), ("c128a", 50))]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 200),
)
def test_states_that_an_entry_needs_are_held_and_their_pools_never_run_out(
    lengths: list[tuple[int, int]], seqs: int, spare: int
) -> None:
    requests, budget = requests_of(*lengths), seqs + spare
    sizes = sizes_of(requests, max_num_seqs=seqs, max_num_batched_tokens=budget, states=STATES)
    blocks = PagedBlocks(sizes, 4, 8, 0, STATES)
    scheduler = Scheduler(requests, max_num_batched_tokens=budget, max_num_seqs=seqs, blocks=blocks)
    while (step := scheduler.next_step()) is not None:
        tables = blocks.tables(step.scheduled)
        for pool, ratio in zip(STATES, (4, 16), strict=True):
            for table, entry in zip(tables[pool.name].tolist(), step.scheduled, strict=True):
                # an entry of c4a needs the states of its own window and of the one before
                first = max((entry.prefix_len // ratio - (ratio == 4)) * ratio, 0)
                live = range(first // pool.tokens, -(-entry.seq_len // pool.tokens))
                assert all(table[column] >= 0 for column in live)
        scheduler.step_done(step)
        blocks.slide(step)

    assert (scheduler.counters.preemptions, blocks.num_used) == (0, 0)
    assert all(blocks.peaks[name] <= pages for name, pages in sizes.by_name.items())


def test_memory_for_states_is_part_of_what_must_fit() -> None:
    requests = requests_of((300, 1), (600, 1))
    sizes = sizes_of(requests, states=STATES)
    needed = 10 * sizes.window + 100 * 3 + 30 * sizes.states["c4a_state"] + 50 * sizes.states["c128a_state"]

    assert sizes_of(requests, states=STATES, max_bytes=needed).compressed == 3
    with pytest.raises(ArgumentError, match=f"at least {needed},"):
        sizes_of(requests, states=STATES, max_bytes=needed - 1)


def test_pools_hold_the_longest_requests_at_once_and_no_more() -> None:
    requests = requests_of((300, 1), (600, 1), (100, 1))

    assert sizes_of(requests, max_num_seqs=1).compressed == 3
    assert sizes_of(requests, max_num_seqs=2).compressed == 5
    assert sizes_of(requests, max_num_seqs=9).compressed == 6
    # windows and one chunk, however long the requests are
    assert sizes_of(requests, max_num_seqs=1).window == (7 // 4 + 3) + 16 // 4 + 1
    assert sizes_of(requests_of((5, 1)), max_num_seqs=1).window == 2


def test_window_only_layers_have_no_compressed_pool() -> None:
    sizes = sizes_of(requests_of((300, 1)), compressed_page_bytes=0)
    blocks = PagedBlocks(sizes, 4, 8, 0)
    blocks.allocate(requests_of((300, 1))[0], 10)

    assert sizes.compressed == 0
    assert blocks.peaks["compressed"] == 0
    assert blocks.num_used == 3


@pytest.mark.parametrize("compressed_page_bytes", [0, 100])
def test_a_request_that_can_never_fit_is_named_before_anything_runs(compressed_page_bytes: int) -> None:
    with pytest.raises(ArgumentError, match=r"max_kv_bytes: expected at least \d+, so that request 1 \(600 tokens\)"):
        sizes_of(requests_of((300, 1), (600, 1)), max_bytes=50, compressed_page_bytes=compressed_page_bytes)


def test_the_bound_named_in_the_error_is_enough_and_one_byte_less_is_not() -> None:
    requests = requests_of((300, 1), (600, 1))
    sizes = sizes_of(requests)
    needed = 10 * sizes.window + 100 * 3

    assert sizes_of(requests, max_bytes=needed).compressed == 3
    with pytest.raises(ArgumentError, match=f"at least {needed},"):
        sizes_of(requests, max_bytes=needed - 1)
