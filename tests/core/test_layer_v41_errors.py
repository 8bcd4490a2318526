"""What layers of DeepSeek-V4.1 refuse: sources, buffers, weights and caches that do not fit, and metadata of others."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, CompressorMetadata, LayerKey
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.model.weights import AttentionWeights
from dsv4attn.errors import ArgumentError, Dsv4AttnError
from dsv4attn.selection import load_backend
from tests.harness import random_weights, same_bits
from tests.harness_v41 import LIMITS_V41, SMALL_V41, v41_stack


def build(index: int, sources: Any = (), geometry: Any = SMALL_V41, **options: Any) -> DeepseekV4Attention:
    weights = AttentionWeights.from_dict(random_weights(geometry, index), geometry, index)
    backend = load_backend("reference")
    return DeepseekV4Attention(
        f"layers.{index}", geometry, index, LIMITS_V41, backend, weights, sources=sources, **options
    )


def test_a_source_that_is_missing_or_does_not_fit_is_refused() -> None:
    layers = v41_stack().layers
    with pytest.raises(ArgumentError, match=r"^sources: expected layer 1, whose compressed entries layer 2 reads, got"):
        build(2)
    with pytest.raises(ArgumentError, match=r"^sources: expected layer 6, whose selected entries layer 7 reads, got"):
        build(7, layers[:6])
    other = attrs.evolve(SMALL_V41, index_topk=6)
    with pytest.raises(ArgumentError, match=r"^sources: layer 1: expected one of the same geometry"):
        build(2, layers[:2], other)
    elsewhere = build(1)
    elsewhere.device = torch.device("meta")
    with pytest.raises(ArgumentError, match=r"^sources: layer 1: expected one on cpu, as the weights of layer 2"):
        build(2, [elsewhere])
    short = build(1)
    short.limits = Limits(1, 8, 64)
    with pytest.raises(ArgumentError, match=r"^sources: layer 1: expected limits of at least 48 tokens in a step"):
        build(2, [short])


def test_a_buffer_of_another_width_or_owner_is_refused() -> None:
    layers, wide = v41_stack().layers, torch.zeros(48, 6, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^topk_indices_buffer: expected 5 columns, and at least 48 rows"):
        build(1, topk_indices_buffer=wide)
    with pytest.raises(
        ArgumentError, match=r"^topk_indices_buffer: expected None, or the tensor of the layer's source"
    ):
        build(2, layers[:2], topk_indices_buffer=wide[:, :5].clone())
    with pytest.raises(ArgumentError, match=r"^topk_indices_buffer: expected int32 on cpu, got int64 on cpu"):
        build(1, topk_indices_buffer=wide[:, :5].long())
    with pytest.raises(ArgumentError, match=r"^candidates_buffer: expected 4 columns, and at least 48 rows"):
        build(4, candidates_buffer=wide)
    with pytest.raises(ArgumentError, match=r"^candidates_buffer: expected None on layer 3, which has no candidates"):
        build(3, candidates_buffer=wide)


def test_entries_of_v41_are_not_spread_over_ranks() -> None:
    with pytest.raises(ArgumentError, match=r"^context_parallel: expected None with .*, got ranks -> entries of V4.1"):
        build(1, context_parallel=object())


def test_weights_of_another_role_are_refused() -> None:
    given = random_weights(SMALL_V41, 4)
    for index, said in ((6, "a reindex c4a layer: .*'compressor.wkv'"), (7, "a reuse c4a layer"), (3, "wgate'")):
        with pytest.raises(ArgumentError, match=said):
            AttentionWeights.from_dict(given, SMALL_V41, index)
    with pytest.raises(ArgumentError, match=r"^layer: expected the number of the layer"):
        AttentionWeights.from_dict(given, SMALL_V41, SMALL_V41.layer(4))


def test_caches_of_a_source_are_taken_and_those_of_others_refused() -> None:
    whole = v41_stack()
    layers, caches = whole.layers, whole.manager.caches
    window = LayerCaches(caches[2].attention.swa)
    layers[2].bind_kv_cache(DeepseekV4Caches(window))
    assert layers[2].caches is not None
    assert layers[2].caches.attention.compressed is caches[1].attention.compressed
    with pytest.raises(
        ArgumentError, match=r"^caches.compressed: expected the cache of layer 1, the source of layer 2"
    ):
        layers[2].bind_kv_cache(DeepseekV4Caches(LayerCaches(window.swa, caches[3].attention.compressed)))
    with pytest.raises(ArgumentError, match=r"^caches.index: expected the cache of layer 4, the source of layer 6"):
        layers[6].bind_kv_cache(DeepseekV4Caches(caches[6].attention, index=caches[3].index))
    alone = build(2, [build(1)])
    with pytest.raises(Dsv4AttnError, match=r"layer layers.1 has no caches -> bind layers in order"):
        alone.bind_kv_cache(caches[2])


def test_a_step_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    whole = v41_stack()
    requests = [(whole.manager.new(), 4)]
    metadata = whole.manager.metadata(whole.manager.batch(requests))
    before = [cache.tensor.clone() for caches in whole.manager.caches for cache in caches.present.values()]
    two, one = metadata[LayerKind.C4A, 2], metadata[LayerKind.C4A, 1]
    cut = CompressorMetadata(block_size=4, block_table=torch.zeros(1, 0, dtype=torch.int32))
    wrong: list[tuple[int, AttentionMetadata, str]] = [
        (3, one, r"^metadata.compressed.compress_ratio: expected 2"),
        (6, two, r"^metadata.compressed.compress_ratio: expected 1"),
        (
            1,
            AttentionMetadata(two.swa, two.compressed),
            r"has no compressor states -> give Batch.c4a_state_block_table",
        ),
        (1, AttentionMetadata(two.swa, two.compressed, cut), r"^metadata.state.block_table: expected blocks for at"),
        (2, AttentionMetadata(two.swa), r"^metadata.compressed: expected metadata of c4a layers"),
    ]
    for index, given, said in wrong:
        found: dict[LayerKey, AttentionMetadata] = {(LayerKind.C4A, ratio): given for ratio in (1, 2)}
        with pytest.raises(Dsv4AttnError, match=said), set_forward_context(found):
            whole.layers[index](whole.hidden(1, 4), whole.manager.positions(requests))

    after = [cache.tensor for caches in whole.manager.caches for cache in caches.present.values()]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))
