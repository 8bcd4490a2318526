"""`DeepseekV4Attention` on a network of DeepSeek-V4.1 in all roles, against float64, in any chunks."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.layer.compressor import LatentCompressor
from dsv4attn.core.layer.projections import Projections
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerRole
from dsv4attn.core.model.weight_copies import WeightCopies
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.core.torch_ops.tiles import linear
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from tests.backends.built_in import EVERYWHERE
from tests.harness import LayerStack, random_weights
from tests.harness_v41 import (
    BLOCKS,
    CONSUMER,
    INDEX_OF,
    KV_OF,
    LIMITS_V41,
    PUBLISHER,
    ROUNDED,
    SIZE,
    SMALL_V41,
    OracleNetwork,
    Steps,
    v41_stack,
    worst_layer_error,
)

SCHEDULES: dict[str, Steps] = {
    "whole": [[(0, 30), (1, 11), (2, 1)]],
    "chunks": [[(0, 3), (1, 1)], [(0, 9), (2, 5)], [(0, 14), (1, 22)]],
    "one by one": [[(0, 1)]] * 17,
    "mixed": [[(1, 8)], [(1, 7), (0, 20)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 40)]],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_role_is_right_in_any_chunks(schedule: str) -> None:
    assert worst_layer_error(v41_stack(), SCHEDULES[schedule]) <= ROUNDED


FORMATS: dict[str, dict[str, Any]] = {
    "584": {"layout": KVCacheLayout.fp8_ds_mla(48, 16, group_size=16)},
    "528": {"layout": KVCacheLayout.v41_fp8(48, 16), "index_layout": KVCacheLayout.index_mxfp4(32)},
    "288": {"layout": KVCacheLayout.v41_fp8(48, 16), "compressed_layout": KVCacheLayout.v41_fp4(48, 16)},
}


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMATS)
def test_every_role_is_right_on_records_of_codes(form: str) -> None:
    # a value that fp32 rounds to another code than float64 is off by up to an eighth, by half of it in fp4
    steps = [[(1, 8)], [(1, 7), (0, 20)], [(0, 1), (1, 1)]]
    assert worst_layer_error(v41_stack(**FORMATS[form]), steps, slack=0.2) <= 2.0**-5


@pytest.mark.matrix
def test_every_role_is_right_on_a_backend_of_kernels() -> None:
    sizes: dict[str, Any] = {"head_dim": 512, "rope_dim": 64, "index_head_dim": 128, "num_heads": 2, "index_n_heads": 4}
    layout = KVCacheLayout.rows(dtype=torch.float32)
    whole = v41_stack(layout, "triton", geometry=attrs.evolve(SMALL_V41, **sizes))

    assert worst_layer_error(whole, [[(1, 5)], [(0, 12), (1, 4)], [(0, 1), (1, 1)]]) <= ROUNDED


@pytest.mark.matrix
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_every_role_is_right_if_all_dims_of_index_keys_have_rope(backend: str) -> None:
    whole = v41_stack(backend=backend, geometry=attrs.evolve(SMALL_V41, index_head_dim=SMALL_V41.rope_dim))

    assert worst_layer_error(whole, [[(1, 8), (0, 9)], [(0, 1), (1, 1)]]) <= ROUNDED


def test_layers_say_their_roles_and_their_sources() -> None:
    layers = v41_stack().layers

    roles = [layer.role.name for layer in layers]
    assert roles == ["WINDOW_ONLY", "FULL", "REUSE", "FULL", "FULL", "REUSE", "REINDEX", "REUSE"]
    assert [layer.sources.kv for layer in layers] == KV_OF
    assert [layer.sources.candidates for layer in layers] == [None] * CONSUMER + [PUBLISHER, None]
    assert layers[7].topk_indices is layers[6].topk_indices is not layers[4].topk_indices
    assert {i for i, layer in enumerate(layers) if layer.compressor} == {1, 3, 4}
    assert {i for i, layer in enumerate(layers) if layer.indexer} == {1, 3, 4, 6}


def test_one_buffer_of_selected_entries_serves_all_layers() -> None:
    shared = torch.full((48, 5), 9, dtype=torch.int32)
    shared_stack, own_stack = v41_stack(layer_options={"topk_indices_buffer": shared}), v41_stack()
    hidden = own_stack.hidden(1, 40)

    for left, right in zip(
        shared_stack.cut(hidden, [25, 1, 14])[1], own_stack.cut(hidden, [25, 1, 14])[1], strict=True
    ):
        assert torch.equal(left, right)


@pytest.mark.matrix  # bytes of caches too; `any-cut-layer-v41` of the kit compares outputs
def test_a_deterministic_network_has_the_same_bits_in_any_chunks() -> None:
    backend = load_backend("reference", deterministic=True)
    outputs = []
    for cuts in ([48], [7, 1, 40], [23, 25]):
        whole = v41_stack(limits=LIMITS_V41, loaded=backend, keep_windows=True)
        sequence, outs = whole.cut(whole.hidden(1, 48), cuts)
        outputs.append([*outs, *whole.bytes_of(sequence)])

    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


# candidates


def candidates_matter(length: int) -> bool:
    """Whether outputs differ without candidates."""
    with_them, without = v41_stack(), v41_stack()
    indexer = without.layers[CONSUMER].indexer
    assert indexer is not None
    indexer._restricts = None
    hidden = with_them.hidden(1, length)
    outs = [whole.cut(hidden, [length])[1][CONSUMER] for whole in (with_them, without)]
    return not torch.equal(*outs)


def test_candidates_are_void_up_to_their_limit_and_effective_above() -> None:
    assert not candidates_matter(BLOCKS * SIZE)
    assert candidates_matter(6 * BLOCKS * SIZE)


# mutants


def consumer_inserts(whole: LayerStack) -> None:
    """Let a reuse layer write entries of its own to its source's cache."""
    reuse, drawn = whole.layers[2], random_weights(SMALL_V41, 3)
    weights = AttentionWeights.from_dict(drawn, SMALL_V41, 3).compressor
    assert weights is not None
    table, steps = reuse.attention.cos_sin_cache, reuse.backend.layer_ops
    reuse.compressor = LatentCompressor(
        attrs.evolve(reuse.layer, compress_ratio=2), weights, table, steps, reuse._copies
    )
    products, more = reuse._of_hidden_states, {"compressor.wkv": weights.wkv, "compressor.wgate": weights.wgate}
    all_products = Projections("hidden_states", WeightCopies(), linear)
    all_products.load(more)
    reuse._of_hidden_states = lambda x: products(x) | all_products(x)  # type: ignore[assignment]
    assert reuse.caches is not None
    reuse.caches = attrs.evolve(reuse.caches, state=whole.manager.caches[3].state)


def other_choice(whole: LayerStack) -> None:
    """Let a reuse layer read the choice of the layer before its source."""
    whole.layers[7].attention.topk_indices_buffer = whole.layers[4].topk_indices


def no_candidates(whole: LayerStack) -> None:
    """Let a consumer select from all entries."""
    indexer = whole.layers[CONSUMER].indexer
    assert indexer is not None
    indexer._restricts = None


def own_cache(whole: LayerStack) -> None:
    """Let a reuse layer read the entries of the next owner."""
    swa, entries = (whole.manager.caches[i].attention for i in (2, 3))
    whole.layers[2].attention.bind_kv_cache(swa.swa, entries.compressed)


def queries_are_normalised(whole: LayerStack) -> None:
    """Normalise heads of q, as V4 does."""
    layer = whole.layers[5].attention
    layer.geometry = attrs.evolve(layer.geometry, q_norm=True)


BUGS = [consumer_inserts, other_choice, no_candidates, own_cache, queries_are_normalised]


@pytest.mark.parametrize("mutant", BUGS)
def test_a_mutant_is_found(mutant: Any) -> None:
    whole = v41_stack()
    mutant(whole)
    try:
        error = worst_layer_error(whole, [[(0, 40)], [(0, 3)]])
    except AssertionError:
        return

    assert error > 4 * ROUNDED


# bounded replay


def replayed(first: int, start: int | None) -> tuple[LayerStack, list[torch.Tensor]]:
    """Tokens `first` .. 39 of a request that has the entries of 28 tokens: neither windows nor states are there."""
    whole, hit, end = v41_stack(keep_windows=True), 28, 40
    hidden, sequence = whole.hidden(1, 64), whole.manager.new()
    whole.step([(sequence, hit)], hidden[:hit])
    whole.manager.truncate(sequence, first)
    owned, requests = [whole.manager.caches[i] for i in (1, 3, 4)], [(sequence, end - first)]
    old_entries = first_entries(sequence, owned, hit)
    for caches in whole.manager.caches:
        for cache in (caches.attention.swa, caches.state):
            if cache is not None:
                cache.tensor.fill_(torch.nan)
    batch = whole.manager.batch(requests)
    if start is not None:
        first_run, end_of_hit = (torch.tensor([n], dtype=torch.int32) for n in (start, hit))
        batch = attrs.evolve(batch, replay_start=first_run, num_cached_tokens=end_of_hit)
    outs = whole.forward(batch, hidden[first:end], whole.manager.positions(requests))
    after = first_entries(sequence, owned, hit)
    assert start is None or all(torch.allclose(a, b, atol=1e-2) for a, b in zip(old_entries, after, strict=True))
    return whole, outs


def first_entries(sequence: Any, owned: list[DeepseekV4Caches], tokens: int) -> list[torch.Tensor]:
    """Copies of the pages that are full of entries of the first tokens."""
    pages = sequence.tables["compressed"].blocks[: tokens // 8]
    caches = [caches_of_layer.attention.compressed for caches_of_layer in owned]
    return [cache.tensor[page].clone() for cache in caches if cache is not None for page in pages]


@pytest.mark.parametrize("start", [20, 21])
def test_windows_begin_with_the_tokens_that_are_replayed(start: int) -> None:
    whole, outs = replayed(start, start)
    index = whole.manager.caches[1].index
    assert index is not None
    exact = OracleNetwork(whole, index.layout, [1], 64)
    for i, out in enumerate(outs):
        topk = whole.layers[INDEX_OF[i] or 0].topk_indices
        for p in (start, start + 3, 28, 39):
            chosen = [] if topk is None or INDEX_OF[i] is None else [e for e in topk[p - start].tolist() if e != -1]
            expected = exact.out(i, 0, p, chosen, earliest=start)
            assert np.linalg.norm(out[p - start].double().numpy() - expected) <= ROUNDED * np.linalg.norm(expected)

    unbounded = replayed(start, None)[1]
    assert all(out[0].isnan().all() for out in unbounded)


# drafts of DSpark: window layers whose tokens of a block see each other


@pytest.mark.parametrize("context", [3, 30])
def test_tokens_of_a_draft_block_see_the_whole_block_and_the_window_before_it(context: int) -> None:
    limits = attrs.evolve(LIMITS_V41, num_speculative_tokens=4, decode_window_columns=SMALL_V41.window + 5)
    whole = v41_stack(limits=limits, keep_windows=True)
    draft, index = whole.layers[0], whole.manager.caches[1].index
    assert draft.role is LayerRole.WINDOW_ONLY
    assert index is not None
    sequence, hidden = whole.manager.new(), whole.hidden(1, 64)
    whole.step([(sequence, context)], hidden[:context])
    requests = [(sequence, 5)]
    batch, positions = whole.manager.batch(requests), whole.manager.positions(requests)
    with set_forward_context(whole.manager.metadata(attrs.evolve(batch, causal=False))):
        out = draft(hidden[context : context + 5], positions)

    exact = OracleNetwork(whole, index.layout, [1], 64)
    seen = range(max(context - SMALL_V41.window, 0), context + 5)
    keys = np.stack([exact.key(0, 0, p) for p in seen])
    for i, p in enumerate(range(context, context + 5)):
        expected = exact.out_of(0, 0, p, keys)
        assert np.linalg.norm(out[i].double().numpy() - expected) <= ROUNDED * np.linalg.norm(expected)
        alone = exact.out(0, 0, p, [])
        assert np.linalg.norm(alone - expected) > ROUNDED * np.linalg.norm(expected)


# an engine's own rings of states


def test_rings_of_one_block_are_states_too() -> None:
    whole, pages = v41_stack(), v41_stack()
    ring = torch.tensor([[2]], dtype=torch.int32)  # one block of 4 tokens: the ratio, and a draft
    hidden, sequence, outputs = whole.hidden(1, 40), whole.manager.new(), []
    for part in hidden.split([5, 1, 1, 2, 31]):
        requests = [(sequence, part.shape[0])]
        batch = attrs.evolve(whole.manager.batch(requests), c4a_state_block_table=ring)
        outputs.append(whole.forward(batch, part, whole.manager.positions(requests)))
        whole.manager.advance(requests)

    expected = pages.cut(hidden, [5, 1, 1, 2, 31])[1]
    for i, outs in enumerate(zip(*outputs, strict=True)):
        assert torch.equal(torch.cat(outs), expected[i])
    batch = attrs.evolve(whole.manager.batch([(sequence, 1)]), c4a_state_block_table=ring - 3)
    with pytest.raises(ArgumentError, match=r"^c4a_state_block_table\[0, 0\]: expected a block in \[0, "):
        whole.manager.metadata(batch)
    none = attrs.evolve(batch, c4a_state_block_table=torch.zeros(1, 0, dtype=torch.int32))
    with pytest.raises(ArgumentError, match=r"^Batch.c4a_state_block_table: expected at least 1 columns"):
        whole.manager.metadata(none)


@pytest.mark.matrix
@pytest.mark.parametrize("context", [6, 7])
def test_on_a_ring_a_step_may_be_repeated_unless_it_is_long_and_begins_within_an_entry(context: int) -> None:
    """A ring of 4 rows: up to 3 tokens leave the state of the token before the step."""
    ring = torch.tensor([[2]], dtype=torch.int32)
    outs: dict[tuple[int, int], list[torch.Tensor]] = {}
    for count in (1, 3, 4, 20):
        for runs in (1, 2):
            whole = v41_stack()
            hidden, sequence = whole.hidden(1, 40), whole.manager.new()
            for start, n, times in ((0, context, 1), (context, count, runs)):
                requests = [(sequence, n)]
                for _ in range(times):
                    batch = attrs.evolve(whole.manager.batch(requests), c4a_state_block_table=ring)
                    step_outs = whole.forward(batch, hidden[start : start + n], whole.manager.positions(requests))
                whole.manager.advance(requests)
            outs[count, runs] = step_outs
    same = {count: all(map(torch.equal, outs[count, 1], outs[count, 2])) for count in (1, 3, 4, 20)}

    assert same == {1: True, 3: True, 4: context == 6, 20: context == 6}
