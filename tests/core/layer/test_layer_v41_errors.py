"""Layers of DeepSeek-V4.1 refuse caches and metadata that do not fit. `test_refusals.py` has the other refusals."""

from __future__ import annotations

import pytest
import torch

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.metadata.metadata import AttentionMetadata, CompressorMetadata, LayerKey
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, Dsv4AttnError
from tests.core.test_refusals import layer_v41
from tests.harness import caches_unchanged
from tests.harness_v41 import v41_stack


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
    alone = layer_v41(2, [layer_v41(1)])
    with pytest.raises(Dsv4AttnError, match=r"layer layers.1 has no caches -> bind layers in order"):
        alone.bind_kv_cache(caches[2])


def test_a_step_that_does_not_fit_is_refused_before_anything_is_written() -> None:
    whole = v41_stack()
    requests = [(whole.manager.new(), 4)]
    metadata = whole.manager.metadata(whole.manager.batch(requests))
    full_ratio, half_ratio = metadata[LayerKind.CSA, 2], metadata[LayerKind.CSA, 1]
    cut = CompressorMetadata(block_size=4, block_table=torch.zeros(1, 0, dtype=torch.int32))
    wrong: list[tuple[int, AttentionMetadata, str]] = [
        (3, half_ratio, r"^metadata.compressed.compress_ratio: expected 2"),
        (6, full_ratio, r"^metadata.compressed.compress_ratio: expected 1"),
        (
            1,
            AttentionMetadata(full_ratio.swa, full_ratio.compressed),
            r"has no compressor states -> give Batch.c4a_state_block_table",
        ),
        (
            1,
            AttentionMetadata(full_ratio.swa, full_ratio.compressed, cut),
            r"^metadata.state.block_table: expected blocks for at",
        ),
        (2, AttentionMetadata(full_ratio.swa), r"^metadata.compressed: expected metadata of c4a layers"),
    ]
    for index, part, said in wrong:
        named: dict[LayerKey, AttentionMetadata] = {(LayerKind.CSA, ratio): part for ratio in (1, 2)}
        with caches_unchanged(whole), pytest.raises(Dsv4AttnError, match=said), set_forward_context(named):
            whole.layers[index](whole.hidden(1, 4), whole.manager.positions(requests))
