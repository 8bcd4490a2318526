"""`CacheManager`: sequences of other managers, numbers of pages, and refusals before a page is taken."""

from __future__ import annotations

import pickle
import random
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.serving.cache_manager import CacheManager
from tests.backends.built_in import EVERYWHERE
from tests.harness import FP32, SMALL, LayerStack, caches_unchanged

REAL_RATIOS = attrs.evolve(SMALL, layers=((LayerKind.SWA, 1), (LayerKind.CSA, 4), (LayerKind.HCA, 128)), window=128)


def test_a_sequence_of_another_manager_is_refused_everywhere() -> None:
    first, second = (CacheManager(SMALL, Limits(4, 64, 256), FP32) for _ in range(2))
    mine, foreign = first.new(), second.new()
    first.reserve([(mine, 5)])
    for call in (
        lambda: first.batch([(foreign, 1)]),
        lambda: first.fork(foreign),
        lambda: first.truncate(foreign, 0),
        lambda: first.free(foreign),
        lambda: first.advance([(foreign, 1)]),
        lambda: first.select([mine, foreign], [0]),
    ):
        with pytest.raises(ArgumentError, match=r"^sequence: expected a sequence of this manager, got one of another"):
            call()
    first.free(mine)
    with pytest.raises(ArgumentError, match=r"^sequence: expected a sequence of this manager, got one that was freed"):
        first.free(mine)


def test_what_a_step_cannot_have_is_refused_before_a_page_is_taken() -> None:
    manager = CacheManager(SMALL, Limits(2, 8, 32), FP32)
    a, b, c = (manager.new() for _ in range(3))
    for requests, padding, said in (
        ([(a, 1), (a, 1)], 0, r"^requests: expected each sequence once, got one twice -> give it all"),
        ([(a, 1), (b, 1), (c, 1)], 0, r"^requests: expected at most 2 sequences, the max_num_reqs of the limits"),
        ([(a, 9)], 0, r"^requests: expected at most 8 tokens in a step, with padding, the max_num_batched_tokens"),
        ([(a, 4)], 5, r"^requests: expected at most 8 tokens in a step, with padding, .* got 9"),
        ([(a, 4)], -1, r"^padding: expected an integer of at least 0, got -1"),
        ([(a, -4)], 0, r"^tokens of a sequence: expected an integer of at least 0, got -4"),
    ):
        with pytest.raises(ArgumentError, match=said):
            manager.batch(requests, padding=padding)
    with pytest.raises(ArgumentError, match=r"^requests: expected tokens that a batch gave pages, after the 0 there"):
        manager.advance([(a, 5)])
    wrong: list[tuple[list[Any], str]] = [
        ([(a, -1)], r"^tokens of a sequence: expected an integer of at least 0, got -1"),
        ([(a, 0.5)], r"^tokens of a sequence: expected an integer of at least 0, got 0\.5"),
        ([(a, 1), (a, 1)], r"^requests: expected each sequence once, got one twice -> give it all"),
    ]
    for same, said in wrong:
        for call in (manager.batch, manager.reserve, manager.positions, manager.advance):
            with pytest.raises(ArgumentError, match=said):
                call(same)
    with pytest.raises(ArgumentError, match=r"^compressed_block_tokens: expected a multiple of ratio 128, got 64"):
        CacheManager(REAL_RATIOS, Limits(2, 8, 32), FP32, compressed_block_tokens=64)

    assert not any(manager.kv_bytes.values())


def test_a_step_that_is_counted_twice_or_backwards_leaves_every_length_as_it_is() -> None:
    manager = CacheManager(SMALL, Limits(2, 16, 32), FP32)
    a, b = manager.new(), manager.new()
    manager.batch([(a, 10), (b, 2)])
    manager.advance([(a, 5)])
    for requests in ([(b, 1), (a, -5)], [(a, 2), (b, 1), (a, 2)]):
        with pytest.raises(ArgumentError):
            manager.advance(requests)

    assert (a.length, b.length) == (5, 0)


@pytest.mark.parametrize("seed", range(8))
def test_default_pools_are_enough_for_any_batches_within_the_limits(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(rng.choice([1, 4, 9]), rng.choice([16, 64, 256]), 2048, rng.choice([0, 2]))
    manager = CacheManager(REAL_RATIOS, limits, FP32)
    sequences = [manager.new() for _ in range(limits.max_num_reqs)]
    for _ in range(300):
        left, requests = limits.max_num_batched_tokens, []
        for sequence in rng.sample(sequences, len(sequences)):
            count = rng.choice([1, 1, 3, 127, 128, left])
            if sequence.length + count > 2048:
                manager.free(sequence)
                sequences[sequences.index(sequence)] = manager.new()
            elif count <= left:
                requests.append((sequence, count))
                left -= count
        manager.batch(requests)
        manager.advance(requests)


def test_tokens_whose_pages_are_gone_cannot_be_written_again() -> None:
    geometry = attrs.evolve(SMALL, layers=((LayerKind.SWA, 1),))
    whole = LayerStack(load_backend("reference"), geometry=geometry, swa_block_size=4)
    sequence, _ = whole.cut(whole.hidden(0, 40), [40])

    with pytest.raises(ArgumentError, match=r"^length: expected a length whose window pages, from token 0 on"):
        whole.manager.truncate(sequence, 0)
    assert whole.manager.fork(sequence, 0).length == 0


@pytest.mark.parametrize("length", [12, 37, 40, 64])
def test_a_fork_can_lose_its_drafts_like_the_original(length: int) -> None:
    limits = Limits(4, 64, 256, num_speculative_tokens=3)
    whole = LayerStack(load_backend("reference"), limits=limits, swa_block_size=4)
    hidden = whole.hidden(0, length)
    sequence, _ = whole.cut(hidden, [length])
    fork = whole.manager.fork(sequence)
    for branch in (sequence, fork):
        whole.manager.truncate(branch, length - 3)
    first, second = (whole.step([(branch, 3)], hidden[-3:]) for branch in (sequence, fork))

    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_states_in_pages_of_another_size_than_the_metadata_s_are_refused() -> None:
    whole = LayerStack(load_backend("reference"))
    for index, name in ((1, "state"), (1, "index_state"), (2, "state")):
        caches = whole.manager.caches[index]
        cache: PagedKVCache = getattr(caches, name)
        other = PagedKVCache.allocate(cache.layout, cache.num_blocks, 2 * cache.block_size)
        whole.layers[index].bind_kv_cache(attrs.evolve(caches, **{name: other}))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=rf"expected {other.block_size}, the records per block of"):
            whole.run([(whole.manager.new(), 5)], whole.hidden(0, 5))
        whole.layers[index].bind_kv_cache(caches)


def test_rows_that_are_missing_are_refused_before_anything_is_written() -> None:
    whole = LayerStack(load_backend("reference"))
    requests = [(whole.manager.new(), 30)]
    batch = whole.manager.batch(requests)
    with caches_unchanged(whole), set_forward_context(whole.manager.metadata(batch)):
        for layer in whole.layers:
            with pytest.raises(ArgumentError, match=r"^hidden_states: expected a row for each of the 30"):
                layer(whole.hidden(0, 20), torch.arange(20))


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_manager_that_was_pickled_goes_on_with_its_sequences(backend: str) -> None:
    whole = LayerStack(load_backend(backend))
    hidden = whole.hidden(0, 24)
    sequence, _ = whole.cut(hidden[:22], [20, 2])
    ops = whole.manager.builder.builder_ops, whole.layers[0].backend.index_ops
    whole.manager, sequence, loaded = pickle.loads(pickle.dumps((whole.manager, sequence, ops)))  # noqa: S301 - its own
    assert loaded == ops
    for layer, caches in zip(whole.layers, whole.manager.caches, strict=True):
        layer.bind_kv_cache(caches)
    outs = whole.step([(sequence, 2)], hidden[22:])
    _, expected = LayerStack(load_backend("reference")).cut(hidden, [24])
    for out, rows in zip(outs, expected, strict=True):
        torch.testing.assert_close(out, rows[22:], rtol=1e-4, atol=1e-5)
