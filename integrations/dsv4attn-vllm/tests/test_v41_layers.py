"""Layers of DeepSeek-V4.1 of vLLM with dsv4attn in them, against its own builder and the oracle; see v41.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import engine as engines
import pytest
import torch
from dsv4attn_vllm.cuda_v41 import CUDAAttention
from engine import Request, world
from torch import Tensor
from v41 import RATIOS, OwnV41Layers, V41Engine, WholeV41Engine, v41_config, whole_v41_engine
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v41.nvidia.model_state import ReplayAttnMetadata


@pytest.fixture
def engine(backend: str) -> Iterator[V41Engine]:
    config = v41_config()
    with world(config):
        yield V41Engine(config, CUDAAttention, layers=len(RATIOS))


def check_rows(engine: V41Engine, outs: list[Tensor], before: list[tuple[int, int]], rows: list[int]) -> None:
    """Hold rows of the last step against the oracle. before: tokens in the caches before the step, and new tokens."""
    tokens = [(i, tokens + j) for i, (tokens, count) in enumerate(before) for j in range(count)]
    for layer, out in zip(engine.layers, outs, strict=True):
        for row in rows:
            error = engine.error(layer, out, *tokens[row], row)
            assert error < 0.012, (layer.prefix, row, error)


@pytest.mark.parametrize(
    ("backend", "before", "behind"),
    [
        ("reference", [(150, 1), (40, 1)], 2),  # decodes, and rows that a captured piece has behind them
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
    check_rows(engine, outs, before, [0, rows // 2, rows - 1])


def test_tokens_computed_again_for_their_windows_see_entries_and_no_older_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """VLLM's bounded replay: after a hit of 256 tokens in the prefix cache, windows of the last 128 are built again.

    These tokens have no slots in compressed caches, which hold their entries already.
    """
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    config, start, hit, count = v41_config(), 128, 256, 140
    with world(config):
        engine = V41Engine(config, CUDAAttention, layers=4)
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


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_padding_of_a_captured_batch_is_zero_and_inserts_nothing(engine: V41Engine) -> None:
    work = [(engine.request(130), 1), (engine.request(33), 1)]
    alone = engine.step(work)
    for request, _ in work:
        request.tokens -= 1
    caches = {name: bytes_of(cache) for name, cache in engine.bound().items() if cache.dtype == torch.uint8}

    padded = engine.step(work, pad=2)

    for one, other in zip(alone, padded, strict=True):
        assert torch.equal(one, other[:2])
        assert not other[2:].any()
    assert all(torch.equal(bytes_of(engine.bound()[name]), caches[name]) for name in caches)
    metadata = engine.describe(work, pad=2)
    assert metadata["model.layers.1.attn"].dsv4attn.compressed_lens.tolist() == [66, 17, 0, 0]
    assert metadata["model.layers.3.attn"].dsv4attn.compressed_lens.tolist() == [132, 35, 0, 0]


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


def whole_steps(engine: WholeV41Engine, prompt: int = 20) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """(layer, vLLM's output, that of dsv4attn's own layer) of a prompt, then a decode beside a prompt, then two."""
    own, (first, second) = OwnV41Layers(engine), (engine.request(), engine.request())
    for work in ([(first, prompt)], [(first, 1), (second, 5)], [(first, 1), (second, 1)]):
        described = [(Request(request.name, request.tokens), count) for request, count in work]
        rows = sum(count for _, count in work)
        hidden = [engine.hidden_states(layer, described, rows) for layer in engine.layers]
        yield from zip(engine.layers, engine.step(work), own.step(described, hidden), strict=True)


@pytest.mark.parametrize("backend", ["reference"], indirect=True)
def test_whole_layers_are_bit_for_bit_dsv4attns_own(backend: str) -> None:
    """Hidden states in, hidden states out, with vLLM's compressor, index keys and short contexts."""
    with whole_v41_engine(CUDAAttention) as engine:
        for layer, theirs, ours in whole_steps(engine):
            assert torch.equal(theirs, ours), layer.prefix
            assert theirs.float().std() > 1e-3


def test_keys_alone_are_the_bytes_that_whole_layers_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forward_kv`, by which vLLM writes the keys of all tokens where layers then run on the last ones alone."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with whole_v41_engine(CUDAAttention) as engine:
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
    with whole_v41_engine(CUDAAttention) as engine:
        layers = engine.layers
        layers[2]._geometry = copy.copy(layers[2]._geometry)
        object.__setattr__(layers[2]._geometry, "q_norm", True)
        right = layers[3].kv_cache
        layers[4]._compressed_kv_cache = lambda: layers[1].kv_cache.as_strided(right.shape, right.stride())
        layers[5].topk_indices_buffer = torch.zeros_like(engine.topk)

        found = {layer.layer_id for layer, theirs, ours in whole_steps(engine, 6) if not torch.equal(theirs, ours)}

    assert found == {2, 4, 5}
