"""Layers of DeepSeek-V4.1 in all roles: shared caches and selections, ratios 1 and 2 in one network, any chunks."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import attrs
import pytest
import torch

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError, NoForwardContextError
from dsv4attn.serving.cache_manager import CacheManager
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms
from tests.harness_v41 import (
    ATTENTION_LIMITS,
    ATTENTION_V41,
    INDEX_OF,
    KV_OF,
    RECORDS,
    AttentionNetwork,
    Steps,
    worst_attention_error,
)

SCHEDULES: list[Steps] = [
    [[(0, 30), (1, 11), (2, 1)]],
    [[(0, 1), (1, 1)], [(0, 1), (2, 3)], [(0, 9), (1, 14)], [(2, 1), (1, 1), (0, 19)]],
    [[(0, 1)]] * 13,
    [[(1, 8)], [(1, 7), (0, 20)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 40)]],
]


@pytest.mark.in_turn
@all_forms
@pytest.mark.parametrize("steps", SCHEDULES)
def test_every_role_attends_to_its_window_and_its_source_s_entries(steps: Steps, form: str) -> None:
    error, where = worst_attention_error(AttentionNetwork(REFERENCE_FORMS[form]).run(steps))

    assert error <= 1, where


@pytest.mark.parametrize("seed", range(4))
def test_random_chunks_are_as_right(seed: int) -> None:
    rng = random.Random(seed)
    lengths, steps = [0, 0, 0], list[list[tuple[int, int]]]()
    for _ in range(8):
        step = [(n, rng.choice([1, 1, 2, 5, 9])) for n in rng.sample(range(3), rng.randint(1, 3))]
        step = sorted((n, count) for n, count in step if lengths[n] + count <= ATTENTION_LIMITS.max_model_len)
        for n, count in step:
            lengths[n] += count
        steps.append(sorted(step, key=lambda chunk: chunk[1]))
    error, where = worst_attention_error(
        AttentionNetwork(REFERENCE_FORMS[rng.choice(FORM_NAMES)]).run([step for step in steps if step])
    )

    assert error <= 1, where


def shared(**changes: Any) -> ModelGeometry:
    """Return the model with other sources."""
    assert ATTENTION_V41.sharing is not None
    return attrs.evolve(ATTENTION_V41, sharing=attrs.evolve(ATTENTION_V41.sharing, **changes))


BUGS = {
    "queries are normalised": attrs.evolve(ATTENTION_V41, q_norm=True),
    "a reuse layer has an indexer": shared(index_source_layer_ids=(1, 2, 3, 4, 6)),
    "a reindex layer has none": shared(index_source_layer_ids=(1, 3, 4)),
    "a reindex layer owns a cache": shared(kv_source_layer_ids=(1, 3, 4, 6)),
    "a full layer owns no cache": shared(kv_source_layer_ids=(1, 4)),
    "entries and queries without YaRN": attrs.evolve(ATTENTION_V41, compress_yarn=None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_mutant_is_found(bug: str) -> None:
    error, _ = worst_attention_error(AttentionNetwork(REFERENCE_FORMS["gathered-dense"], BUGS[bug]).run(SCHEDULES[0]))

    assert error > 1


def test_the_owner_s_cache_and_index_keys_are_those_of_its_readers() -> None:
    caches = CacheManager(ATTENTION_V41, ATTENTION_LIMITS, RECORDS).caches

    for i, source in enumerate(KV_OF):
        assert caches[i].attention.compressed is (None if source is None else caches[source].attention.compressed)
        assert caches[i].index is (None if source is None else caches[source].index)
        assert (caches[i].state is not None) is (i in (1, 3))  # ratio 1 completes an entry with each token
        assert caches[i].index_state is None
    assert len({id(caches_of_layer.attention.swa) for caches_of_layer in caches}) == len(KV_OF)
    assert [ATTENTION_V41.sources(i).index for i in range(8)] == INDEX_OF


def test_kv_bytes_of_flash_are_two_and_a_half_records_and_index_keys_a_token() -> None:
    flash = ModelGeometry.preset("v4.1-flash")
    manager = CacheManager(flash, Limits(1, 512, 512), KVCacheLayout.fp8_ds_mla(448, 64), num_blocks={"window": 9})
    manager.reserve([(manager.new(), 512)])

    pages, rows = 512 // 256, [(1, 256), (3, 128)]
    layout, index = KVCacheLayout.fp8_ds_mla(448, 64), KVCacheLayout.index_fp8(128)
    of_pages = sum(layers * (layout.page_stride(n) + index.page_stride(n)) for layers, n in rows)
    assert manager.kv_bytes["compressed"] == pages * of_pages
    assert flash.entries_per_token * 512 == pages * sum(layers * n for layers, n in rows)
    assert flash.entries_per_token * 512 * (584 + 132) == pytest.approx(manager.kv_bytes["compressed"], rel=0.01)
    assert set(manager.kv_bytes) == {"window", "compressed", "c4a_state"}


def test_a_fork_copies_shared_pages_once_and_goes_on_like_the_original() -> None:
    network = AttentionNetwork(REFERENCE_FORMS["paged-dense"])
    manager = network.manager
    sequence = manager.new()
    manager.batch([(sequence, 9)])
    for cache in manager._of_group("compressed"):
        cache.tensor.random_(0, 255)
    manager.advance([(sequence, 9)])
    fork = manager.fork(sequence)

    assert len([*manager._of_group("compressed")]) == len({id(c) for c in manager._of_group("compressed")}) == 6
    for cache in manager._of_group("compressed"):
        old, new = (held.tables["compressed"].blocks for held in (sequence, fork))
        assert torch.equal(cache.tensor[torch.tensor(old)], cache.tensor[torch.tensor(new)])


def test_metadata_of_two_ratios_of_a_kind_are_named_by_both() -> None:
    network = AttentionNetwork(REFERENCE_FORMS["paged-dense"])
    batch = network.manager.batch([(network.manager.new(), 7)])
    metadata = network.manager.metadata(batch)

    assert set(metadata) == {LayerKind.SWA, (LayerKind.SWA, 1), (LayerKind.CSA, 2), (LayerKind.CSA, 1)}
    left, right = metadata[LayerKind.CSA, 1], metadata[LayerKind.CSA, 2]
    assert left.compressed is not None
    assert right.compressed is not None
    assert left.compressed.compressed_lens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert right.compressed.compressed_lens.tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert (left.compressed.records_per_block, right.compressed.records_per_block) == (8, 4)
    assert (left.compressed.slot_mapping >= 0).all()
    assert (right.compressed.slot_mapping >= 0).tolist() == [False, True] * 3 + [False]
    assert left.state is None
    assert right.state is not None
    assert left.compressed.slot_mapping.data_ptr() != right.compressed.slot_mapping.data_ptr()
    with pytest.raises(ArgumentError, match=r"^compress_ratio: expected one of \[1, 2\]"):
        network.manager.builder.build_for(batch, [LayerKind.CSA])


def test_metadata_of_the_other_ratio_are_refused_before_anything_is_written() -> None:
    network = AttentionNetwork(REFERENCE_FORMS["paged-dense"])
    metadata = network.manager.metadata(network.manager.batch([(network.manager.new(), 7)]))
    wrong = {**metadata, (LayerKind.CSA, 1): metadata[LayerKind.CSA, 2]}
    with (
        mock.patch.object(CacheManager, "metadata", return_value=wrong),
        pytest.raises(ArgumentError, match=r"compressed\.compress_ratio"),
    ):
        network.run([[(0, 7)]])


def test_a_step_without_metadata_of_a_layer_names_those_that_there_are() -> None:
    network = AttentionNetwork(REFERENCE_FORMS["paged-dense"])
    metadata = network.manager.metadata(network.manager.batch([(network.manager.new(), 7)]))
    del metadata[LayerKind.CSA, 1]
    q = torch.zeros(7, 2, 512, dtype=torch.bfloat16)
    said = r"expected metadata of c4a layers, got metadata of: c4a of ratio 2, swa, .* or call build_all"

    with set_forward_context(metadata), pytest.raises(NoForwardContextError, match=said):
        network.layers[4].forward_mqa(q, q[:, 0], torch.arange(7), torch.empty_like(q))
