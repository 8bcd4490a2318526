"""Pools of pages: enough for what is promised, and never more than allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.serving.request import Request
from dsv4attn.serving.scheduler import Scheduler
from dsv4attn.tools.replay.pools import PageGroup, RequestPages, plan_pools
from tests.tools.replay.small import GEOMETRY, requests_of

PLENTY = 1 << 40
WINDOW, COMPRESSED = PageGroup(4, 8, 10), PageGroup(256, None, 100)
STATES = {"c4a_state": PageGroup(4, 8, 30), "c128a_state": PageGroup(8, 16, 50)}


def plan(requests: list[Request], *, states: bool = False, compressed: bool = True, **changes: int) -> dict[str, int]:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_bytes": PLENTY} | changes
    groups = {"window": WINDOW, **({"compressed": COMPRESSED} if compressed else {}), **(STATES if states else {})}
    return plan_pools(requests, groups, **limits)


def serve(
    requests: list[Request], pages: dict[str, int], *, budget: int, seqs: int
) -> tuple[Scheduler, RequestPages, CacheManager]:
    """Serve the requests, and hold that each step has every page that it reads."""
    limits = Limits(seqs, budget, max(request.attention_tokens for request in requests))
    layout, states = KVCacheLayout.rows(24, 8), "c4a_state" in pages
    manager = CacheManager(
        GEOMETRY, limits, layout, num_blocks=pages, swa_block_size=4, shuffle_seed=0, attention_only=not states
    )
    held = RequestPages(manager)
    scheduler = Scheduler(requests, max_num_batched_tokens=budget, max_num_seqs=seqs, blocks=held)
    while (step := scheduler.next_step()) is not None:
        for (sequence, _), entry in zip(held.of_step(step), step.scheduled, strict=True):
            assert sequence.length == entry.prefix_len
            # an entry of c4a needs the states of its own window and of the one before
            first = {"window": max(entry.prefix_len - 7, 0), "compressed": 0}
            first |= {"c4a_state": max((entry.prefix_len // 4 - 1) * 4, 0), "c128a_state": entry.prefix_len // 16 * 16}
            for name, table in sequence.tables.items():
                tokens = table.tokens_per_block
                assert all(table.blocks[n] >= 0 for n in range(first[name] // tokens, -(-entry.seq_len // tokens)))
        scheduler.step_done(step)
        manager.advance(held.of_step(step))
    assert set(manager.pages_in_use.values()) == {0}
    assert all(held.peaks[name] <= n for name, n in pages.items())
    return scheduler, held, manager


def test_groups_are_those_of_the_caches_of_all_layers() -> None:
    manager = CacheManager(GEOMETRY, Limits(2, 2, 1), KVCacheLayout.rows(24, 8), swa_block_size=4)
    groups = PageGroup.of(manager)

    assert {name: (group.tokens, group.span) for name, group in groups.items()} == {
        "window": (4, 8),
        "compressed": (256, None),
        "c4a_state": (4, 8),
        "c128a_state": (8, 16),
    }
    sequence = manager.new()
    manager.reserve([(sequence, 1)])
    assert {name: group.page_bytes for name, group in groups.items()} == manager.kv_bytes


def test_attention_alone_has_neither_index_keys_nor_states() -> None:
    manager = CacheManager(GEOMETRY, Limits(2, 2, 1), KVCacheLayout.rows(24, 8), attention_only=True)

    assert set(manager.tokens_per_block) == {"window", "compressed"}
    present = [set(caches.present) for caches in manager.caches]
    assert present == [{"swa"} if kind is LayerKind.SWA else {"swa", "compressed"} for kind, _ in GEOMETRY.layers]


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
    options: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": budget}
    pages = plan(requests, **options)
    if scarce:
        longest = max(-(-r.attention_tokens // 256) for r in requests)
        allowed = 10 * pages["window"] + 100 * (longest + scarce - 1)
        pages = plan(requests, **options, max_bytes=allowed)
        assert 10 * pages["window"] + 100 * pages["compressed"] <= allowed
    scheduler, _, _ = serve(requests, pages, budget=budget, seqs=seqs)

    assert scheduler.counters.finished == len(requests)
    assert scarce or scheduler.counters.preemptions == 0


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.integers(0, 200),
)
def test_states_that_an_entry_needs_are_held_and_their_pools_never_run_out(
    lengths: list[tuple[int, int]], seqs: int, spare: int
) -> None:
    requests, budget = requests_of(*lengths), seqs + spare
    pages = plan(requests, states=True, max_num_seqs=seqs, max_num_batched_tokens=budget)
    scheduler, _, _ = serve(requests, pages, budget=budget, seqs=seqs)

    assert scheduler.counters.preemptions == 0


def test_pools_hold_the_longest_requests_at_once_and_no_more() -> None:
    requests = requests_of((300, 1), (600, 1), (100, 1))

    assert [plan(requests, max_num_seqs=n)["compressed"] for n in (1, 2, 9)] == [3, 5, 6]
    # windows and one chunk, however long the requests are
    assert plan(requests, max_num_seqs=1)["window"] == (7 // 4 + 3) + 16 // 4 + 1
    assert plan(requests_of((5, 1)), max_num_seqs=1)["window"] == 2


def test_window_only_layers_have_no_compressed_pool() -> None:
    assert set(plan(requests_of((300, 1)), compressed=False)) == {"window"}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("states", [False, True])
def test_the_bound_named_in_the_error_is_enough_and_one_byte_less_is_not(*, compressed: bool, states: bool) -> None:
    requests = requests_of((300, 1), (600, 1))
    pages = plan(requests, states=states, compressed=compressed)
    needed = 10 * pages["window"] + 300 * compressed
    needed += 30 * pages.get("c4a_state", 0) + 50 * pages.get("c128a_state", 0)

    assert plan(requests, states=states, compressed=compressed, max_bytes=needed).get("compressed", 3) == 3
    refused = rf"max_kv_bytes: expected at least {needed}, so that request 1 \(600 tokens\)"
    for too_few in (needed - 1, 1):
        with pytest.raises(ArgumentError, match=refused):
            plan(requests, states=states, compressed=compressed, max_bytes=too_few)
