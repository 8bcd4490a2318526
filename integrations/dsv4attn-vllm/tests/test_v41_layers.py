"""Layers of DeepSeek-V4.1 of vLLM with dsv4attn in them, against its own builder and the oracle; see v41.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import engine as engines
import pytest
import torch
from dsv4attn_vllm.cuda import V41CUDAAttention
from engine import bytes_of, world
from v41 import RATIOS, V41Engine, v41_config, whole_v41_engine
from vllm.models.deepseek_v41.nvidia.model_state import ReplayAttnMetadata
from whole import unequal_layers

pytestmark = pytest.mark.usefixtures("reference")


def test_tokens_computed_again_for_their_windows_see_entries_and_no_older_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM's bounded replay: after a hit of 256 tokens in the prefix cache, windows of the last 128 are built again.

    These tokens have no slots in compressed caches, which hold their entries already.
    """
    config, start, hit, count = v41_config(), 128, 256, 140
    with world(config):
        engine = V41Engine(config, V41CUDAAttention, layers=4)
        request, other = engine.request(hit), engine.request(50)
        for layer in engine.layers:  # what the hit does not have
            swa = layer.swa_cache_layer
            swa.kv_cache[request.blocks[engine.group_of(swa.prefix)]] = 0xFF
        written = [layer.kv_cache.clone() for layer in engine.layers if layer.is_kv_source]
        request.tokens, build = start, engines.build_attn_metadata

        def replayed(*arguments: Any, **options: Any) -> dict[str, Any]:
            for layer in engine.layers:
                if layer.is_kv_source:
                    options["slot_mappings"][engine.group_of(layer.prefix), 1 : 1 + hit - start] = -1
            starts = torch.tensor([0, start], dtype=torch.int32)
            return build(*arguments, **options, model_specific_attn_metadata=ReplayAttnMetadata(starts))

        monkeypatch.setattr(engines, "build_attn_metadata", replayed)
        outs = engine.step([(other, 1), (request, count)])

        for layer, out in zip(engine.layers, outs, strict=True):
            assert not out.isnan().any(), layer.prefix
            assert engine.error(layer, out, 0, 50, 0) < 0.012
            for position in (start, start + 1, hit - 1, hit, start + count - 1):
                error = engine.error(layer, out, 1, position, 1 + position - start, earliest=start)
                assert error < 0.012, (layer.prefix, position, error)
        for layer, old_bytes in zip((engine.layers[1], engine.layers[3]), written, strict=True):
            table = engine.tables[engine.group_of(layer.prefix)][1]
            pages = table[: hit // 128].long()
            assert torch.equal(layer.kv_cache[pages], old_bytes[pages])


@pytest.fixture
def with_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[V41Engine]:
    """An engine whose compressor and indexer are dsv4attn's; its layers are called without the indexer."""
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", "indexer,compressor")
    config = v41_config()
    with world(config):
        yield V41Engine(config, V41CUDAAttention, layers=len(RATIOS))


@pytest.mark.parametrize("padding", [{"pad": 2}, {"pad": 2, "pad_requests": 2}], ids=["tokens", "requests too"])
def test_index_keys_are_described_for_each_token_and_padding_sees_none(
    with_parts: V41Engine, padding: dict[str, int]
) -> None:
    keys = with_parts.describe([(with_parts.request(), 1)], **padding)["model.layers.3.attn.indexer.k_cache"]
    assert keys.visible_lens.tolist() == [1, 0, 0]


def test_a_step_of_requests_without_memory_writes_nothing(with_parts: V41Engine) -> None:
    """What vLLM runs to warm up: tokens with slots of -1, of requests whose pages and rings are all block 0."""
    request, names = with_parts.request(), with_parts.bound()
    with_parts.describe([(request, 3)])
    for number in range(len(with_parts.block_sizes)):
        request.blocks[number] = [0] * len(request.blocks[number])
    old_bytes = {name: bytes_of(cache) for name, cache in names.items()}
    build = engines.build_attn_metadata

    def without_slots(*arguments: Any, **options: Any) -> dict[str, Any]:
        options["slot_mappings"].fill_(-1)
        return build(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "build_attn_metadata", without_slots)
        with_parts.step([(request, 3)])

    assert [name for name, cache in names.items() if not torch.equal(bytes_of(cache), old_bytes[name])] == []


WHOLE_STEPS = ([(0, 20)], [(0, 1), (1, 5)], [(0, 1), (1, 1)])
"""A prompt, then a decode next to a prompt, then two decodes: (request, tokens)."""


def test_whole_layers_are_bit_for_bit_dsv4attns_own() -> None:
    """Hidden states in, hidden states out, with vLLM's compressor, index keys and short contexts."""
    with whole_v41_engine() as engine:
        assert not unequal_layers(engine, WHOLE_STEPS)


def test_keys_alone_are_the_bytes_that_whole_layers_write() -> None:
    """`forward_kv`, by which vLLM writes the keys of all tokens where layers then run on the last ones alone."""
    with whole_v41_engine() as engine:
        request, caches = engine.request(), engine.bound()
        blank = {name: bytes_of(cache) for name, cache in caches.items()}
        engine.step([(request, 30)])
        expected = {name: bytes_of(cache) for name, cache in caches.items()}
        for name, cache in caches.items():
            assert not torch.equal(expected[name], blank[name]), name
            cache.copy_(blank[name].view(cache.dtype))
        request.tokens = 0

        engine.step([(request, 30)], attend=False)

        assert all(torch.equal(bytes_of(cache), expected[name]) for name, cache in caches.items())
        assert len(caches) == len(RATIOS) + 2 + 2 + 1  # windows, entries, index keys, states of ratio 2


def test_planted_bugs_are_found() -> None:
    """One in each of three layers: queries are normalised, another layer's cache is read, and an old selection."""
    with whole_v41_engine() as engine:
        layers = engine.layers
        of_core = layers[2]._attention
        of_core.geometry = copy.copy(of_core.geometry)
        object.__setattr__(of_core.geometry, "q_norm", True)
        right = layers[3].kv_cache
        layers[4]._compressed_kv_cache = lambda: layers[1].kv_cache.as_strided(right.shape, right.stride())
        layers[5].topk_indices_buffer = torch.zeros_like(engine.topk)

        assert unequal_layers(engine, ([(0, 6)], *WHOLE_STEPS[1:])) == {2, 4, 5}
