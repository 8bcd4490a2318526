"""Layers of DeepSeek-V4.1 of vLLM with dsv4attn in them, against its own builder and the oracle; see v41.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import engine as engines
import pytest
import torch
from dsv4attn_vllm.cuda import V41CUDAAttention
from engine import world
from torch import Tensor
from v41 import RATIOS, V41Engine, v41_config, whole_v41_engine
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v41.nvidia.model_state import ReplayAttnMetadata
from whole import both


@pytest.fixture
def engine(backend: str) -> Iterator[V41Engine]:
    config = v41_config()
    with world(config):
        yield V41Engine(config, V41CUDAAttention, layers=len(RATIOS))


@pytest.mark.parametrize(
    ("backend", "before", "behind"),
    [
        ("reference", [(150, 1), (40, 1)], 2),  # decodes, and rows that a captured piece has after them
        ("reference", [(0, 70)], 0),  # a fresh prompt
        ("reference", [(150, 1), (40, 1), (129, 30)], 3),  # two decodes and the next chunk of a prompt
        ("triton", [(131, 1), (40, 1), (13, 7)], 1),
    ],
    ids=["decode", "prefill", "mixed", "triton"],
    indirect=["backend"],
)
def test_a_step_is_what_own_builder_and_oracle_say(
    engine: V41Engine, before: list[tuple[int, int]], behind: int
) -> None:
    work = [(engine.request(tokens), count) for tokens, count in before]
    rows = sum(count for _, count in before)

    outs = engine.step(work, behind=behind)

    for layer, out in zip(engine.layers, outs, strict=True):
        assert torch.equal(engine.of_own_builder(layer, before, rows + behind), out), layer.prefix
        assert not out[rows:].any()
    engine.check_rows(outs, before, [0, rows // 2, rows - 1])


def test_tokens_computed_again_for_their_windows_see_entries_and_no_older_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM's bounded replay: after a hit of 256 tokens in the prefix cache, windows of the last 128 are built again.

    These tokens have no slots in compressed caches, which hold their entries already.
    """
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    config, start, hit, count = v41_config(), 128, 256, 140
    with world(config):
        engine = V41Engine(config, V41CUDAAttention, layers=4)
        request, other = engine.request(hit), engine.request(50)
        for layer in engine.layers:  # what the hit does not have
            swa = layer.swa_cache_layer
            swa.kv_cache[request.blocks[engine.group_of(swa.prefix)]] = 0xFF
        written = [layer.kv_cache.clone() for layer in engine.layers if layer.is_kv_source]
        request.tokens, build = start, engines.build_attn_metadata

        def replayed(*given: Any, **options: Any) -> dict[str, Any]:
            for layer in engine.layers:
                if layer.is_kv_source:
                    options["slot_mappings"][engine.group_of(layer.prefix), 1 : 1 + hit - start] = -1
            starts = torch.tensor([0, start], dtype=torch.int32)
            return build(*given, **options, model_specific_attn_metadata=ReplayAttnMetadata(starts))

        monkeypatch.setattr(engines, "build_attn_metadata", replayed)
        outs = engine.step([(other, 1), (request, count)])

        for layer, out in zip(engine.layers, outs, strict=True):
            assert not out.isnan().any(), layer.prefix
            assert engine.error(layer, out, 0, 50, 0) < 0.012
            for position in (start, start + 1, hit - 1, hit, start + count - 1):
                error = engine.error(layer, out, 1, position, 1 + position - start, earliest=start)
                assert error < 0.012, (layer.prefix, position, error)
        for layer, before in zip((engine.layers[1], engine.layers[3]), written, strict=True):
            own = engine.tables[engine.group_of(layer.prefix)][1]
            pages = own[: hit // 128].long()
            assert torch.equal(layer.kv_cache[pages], before[pages])


PADDING = {"tokens": {"pad": 2}, "requests too": {"pad": 2, "pad_requests": 2}}
"""Padding after the tokens of a step: of vLLM's piecewise graphs, and of graphs of whole decode steps."""


def check_padding(engine: V41Engine, padding: dict[str, int]) -> None:
    """Two decodes have the same outputs and caches, rings too, with padding as without; padding sees nothing."""
    work = [(engine.request(130), 1), (engine.request(33), 1)]
    before = {name: bytes_of(cache) for name, cache in engine.bound().items()}
    alone = engine.step(work)
    caches = {name: bytes_of(cache) for name, cache in engine.bound().items()}
    for name, cache in engine.bound().items():
        cache.copy_(before[name].view(cache.dtype))
    for request, _ in work:
        request.tokens -= 1

    padded = engine.step(work, **padding)

    for one, other in zip(alone, padded, strict=True):
        assert torch.equal(one, other[:2])
        assert not other[2:].any()
    assert [name for name, cache in engine.bound().items() if not torch.equal(bytes_of(cache), caches[name])] == []
    for request, _ in work:
        request.tokens -= 1
    metadata = engine.describe(work, **padding)
    assert metadata["model.layers.1.attn"].dsv4attn.compressed_lens.tolist() == [131 // 2, 34 // 2, 0, 0]
    assert metadata["model.layers.3.attn"].dsv4attn.compressed_lens.tolist() == [131, 34, 0, 0]


@pytest.fixture
def with_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[V41Engine]:
    """An engine whose compressor and indexer are dsv4attn's; its layers are called without the indexer."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", "indexer,compressor")
    config = v41_config()
    with world(config):
        yield V41Engine(config, V41CUDAAttention, layers=len(RATIOS))


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_padding_of_a_captured_batch_is_zero_and_inserts_nothing(engine: V41Engine, padding: dict[str, int]) -> None:
    check_padding(engine, padding)


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
def test_padding_stores_nothing_in_rings_of_dsv4attns_compressor(
    with_steps: V41Engine, padding: dict[str, int]
) -> None:
    check_padding(with_steps, padding)
    # request 0 has 131 tokens with the new one, and the index keys are described for each token
    keys = with_steps.describe([(with_steps.request(), 1)], **padding)["model.layers.3.attn.indexer.k_cache"]
    assert keys.visible_lens.tolist() == [1, 0, 0]


@pytest.mark.parametrize("mask", ["visible entries", "requests of tokens"])
def test_a_removed_mask_of_padding_is_found(with_steps: V41Engine, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    from dsv4attn_vllm import index_metadata, metadata

    build = metadata.V41StateMetadataBuilder.build

    def visible_entries(common: Any, ratio: int, buffer: Tensor, numbers: Tensor) -> Tensor:
        return buffer[: common.num_actual_tokens].copy_((common.positions + 1) // ratio)

    def without_mask(*given: Any, **options: Any) -> Any:
        made = build(*given, **options)
        made.requests = made.token_to_req_indices[: len(made.requests)]
        return made

    if mask == "visible entries":
        for module in (metadata, index_metadata):
            monkeypatch.setattr(module, "visible_entries_of_replayed", visible_entries)
    else:
        monkeypatch.setattr(metadata.V41StateMetadataBuilder, "build", without_mask)

    for padding in PADDING.values():
        with pytest.raises(AssertionError):
            check_padding(with_steps, padding)


def test_a_step_of_requests_without_memory_writes_nothing(with_steps: V41Engine) -> None:
    """What vLLM runs to warm up: tokens with slots of -1, of requests whose pages and rings are all block 0."""
    request, names = with_steps.request(), with_steps.bound()
    with_steps.describe([(request, 3)])
    for number in range(len(with_steps.block_sizes)):
        request.blocks[number] = [0] * len(request.blocks[number])
    before = {name: bytes_of(cache) for name, cache in names.items()}
    build = engines.build_attn_metadata

    def without_slots(*given: Any, **options: Any) -> dict[str, Any]:
        options["slot_mappings"].fill_(-1)
        return build(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "build_attn_metadata", without_slots)
        with_steps.step([(request, 3)])

    assert [name for name, cache in names.items() if not torch.equal(bytes_of(cache), before[name])] == []


@pytest.mark.parametrize("steps", ["none", "indexer,compressor"])
def test_compressed_caches_alone_that_are_bound_again_are_read_and_written(
    monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    """By the layers that own them and by those that share them. The bytes that were bound before are NaN."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", steps)
    config = v41_config()
    with world(config):
        engine = V41Engine(config, V41CUDAAttention, layers=len(RATIOS))
        request = engine.request(147)  # the next token completes an entry of two
        work = [(request, 1)]
        metadata = engine.describe(work)

        def outputs() -> list[Tensor]:
            with set_forward_context(metadata, engine.config, num_tokens=1):
                engine.select(work)
                return [engine.run(layer, metadata, work, 1) for layer in engine.layers]

        others = {}
        for layer in filter(lambda layer: layer.is_kv_source, engine.layers):
            shape, stride = layer.kv_cache.shape, layer.kv_cache.stride()
            others[layer] = torch.empty_strided(shape, stride, dtype=torch.uint8).copy_(layer.kv_cache)
        wanted = outputs()
        for layer, new in others.items():
            # caches of several groups lie in one memory: no others but the request's own pages
            layer.kv_cache[request.blocks[engine.group_of(layer.prefix)]] = 0xFF
            layer.kv_cache = new

        outs = outputs()

    assert all(map(torch.equal, wanted, outs))
    assert not any(out.isnan().any() for out in outs)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_metadata_none_reserves_memory_and_zeroes_the_output(engine: V41Engine) -> None:
    from vllm.v1.worker.workspace import lock_workspace

    q = torch.randn(5, 4, 512).bfloat16()
    for layer in engine.layers:
        out = torch.ones_like(q)
        with set_forward_context(None, engine.config, num_tokens=5):
            assert layer._fused_qnorm_rope_kv_insert(q, q[:, 0], engine.positions[:5], None) is q
            layer.forward_mqa(q, q[:, 0], engine.positions[:5], out)
        assert not out.any()
    lock_workspace()
    engine.step([(engine.request(40), 1), (engine.request(), 30)])  # all of it fits


def bytes_of(cache: Tensor) -> Tensor:
    """A copy of the bytes of a cache."""
    return cache.contiguous().view(torch.uint8).clone()


WHOLE_STEPS = ([(0, 20)], [(0, 1), (1, 5)], [(0, 1), (1, 1)])
"""A prompt, then a decode next to a prompt, then two decodes: (request, tokens)."""


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_whole_layers_are_bit_for_bit_dsv4attns_own(backend: str) -> None:
    """Hidden states in, hidden states out, with vLLM's compressor, index keys and short contexts."""
    with whole_v41_engine(V41CUDAAttention) as engine:
        for layer, theirs, ours in both(engine, WHOLE_STEPS):
            assert torch.equal(theirs, ours), layer.prefix
            assert theirs.float().std() > 1e-3


def test_keys_alone_are_the_bytes_that_whole_layers_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward_kv`, by which vLLM writes the keys of all tokens where layers then run on the last ones alone."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_v41_engine(V41CUDAAttention) as engine:
        request, caches = engine.request(), engine.bound()
        blank = {name: bytes_of(cache) for name, cache in caches.items()}
        engine.step([(request, 30)])
        wanted = {name: bytes_of(cache) for name, cache in caches.items()}
        for name, cache in caches.items():
            assert not torch.equal(wanted[name], blank[name]), name
            cache.copy_(blank[name].view(cache.dtype))
        request.tokens = 0

        engine.step([(request, 30)], attend=False)

        assert all(torch.equal(bytes_of(cache), wanted[name]) for name, cache in caches.items())
        assert len(caches) == len(RATIOS) + 2 + 2 + 1  # windows, entries, index keys, states of ratio 2


def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in each of three layers: queries are normalised, another layer's cache is read, and an old selection."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_v41_engine(V41CUDAAttention) as engine:
        layers = engine.layers
        layers[2]._geometry = copy.copy(layers[2]._geometry)
        object.__setattr__(layers[2]._geometry, "q_norm", True)
        right = layers[3].kv_cache
        layers[4]._compressed_kv_cache = lambda: layers[1].kv_cache.as_strided(right.shape, right.stride())
        layers[5].topk_indices_buffer = torch.zeros_like(engine.topk)

        found = {
            layer.layer_id
            for layer, theirs, ours in both(engine, ([(0, 6)], *WHOLE_STEPS[1:]))
            if not torch.equal(theirs, ours)
        }

    assert found == {2, 4, 5}
