"""The compressor on dsv4attn: caches bit for bit those of vLLM's own kernels, interpreted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from dsv4attn_vllm.compressor import Compressor
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from whole import WholeEngine, whole_engine, with_op

from dsv4attn import EntryNorm, StatePages


@pytest.fixture
def engine(backend: str) -> Iterator[WholeEngine]:
    with whole_engine(CUDAAttention) as engine:
        yield engine


def compressors(engine: WholeEngine) -> list[tuple[Any, Any]]:
    """Each compressor with its layer: of c4a, of its indexer, of c128a."""
    return [(layer, compressor) for layer in engine.layers for compressor in layer._compressors()]


def scores(compressor: Any, rows: int) -> Tensor:
    return torch.randn(rows, 2 * compressor.coff * compressor.head_dim, dtype=torch.float32)


def bytes_of(engine: WholeEngine) -> dict[str, Tensor]:
    return {name: tensor.view(torch.uint8).clone() for name, tensor in engine.tensors.items()}


def differences(engine: WholeEngine, work: Sequence[Any], *, pad: int = 0, extra_rows: int = 0) -> dict[str, int]:
    """Bytes of caches that differ after a step of dsv4attn and one of vLLM, by compressor; every step writes some."""
    metadata, rows, counts_by_layer = (
        engine.describe(work, pad=pad),
        sum(count for _, count in work) + pad + extra_rows,
        {},
    )
    with set_forward_context(metadata, engine.config, num_tokens=rows):
        for layer, compressor in compressors(engine):
            states, old_bytes, written = scores(compressor, rows), bytes_of(engine), []
            for forward in (Compressor.forward, DeepseekCompressor.forward):
                for name, tensor in engine.tensors.items():
                    tensor.view(torch.uint8).copy_(old_bytes[name])
                forward(compressor, states, engine.positions[:rows], layer.rotary_emb)
                written.append(bytes_of(engine))
            ours, theirs = written
            assert any((theirs[name] != old_bytes[name]).any() for name in old_bytes), compressor.prefix
            counts_by_layer[compressor.prefix] = sum(int((ours[name] != theirs[name]).count_nonzero()) for name in ours)
    return counts_by_layer


@pytest.mark.parametrize(
    ("requests", "pad", "extra_rows"),
    [
        ([(127, 1), (39, 1)], 0, 2),  # decodes, of which each completes entries; rows after the batch
        ([(50, 1), (41, 1)], 2, 0),  # of which none does; padding
        ([(0, 9)], 0, 0),  # a fresh prompt: entry 0 has no window before it
        ([(126, 1), (30, 3), (120, 12)], 0, 1),  # a prompt that goes on over a boundary of both ratios
    ],
    ids=["decode", "between", "prefill", "mixed"],
)
def test_states_and_entries_are_vllms_byte_for_byte(
    engine: WholeEngine, requests: list[tuple[int, int]], pad: int, extra_rows: int
) -> None:
    work = [(engine.request(tokens), count) for tokens, count in requests]

    changed = differences(engine, work, pad=pad, extra_rows=extra_rows)

    assert changed == {
        "model.layers.1.attn.compressor": 0,
        "model.layers.1.attn.indexer.compressor": 0,
        "model.layers.2.attn.compressor": 0,
    }


@pytest.mark.parametrize("bug", ["window", "position", "state"])
def test_planted_bugs_are_found(engine: WholeEngine, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """An entry of another request's window, one that is rotated at its last token, a score without its bias."""
    ops = engine.layers[0]._serving.backend.layer_ops
    store, save = ops.compress_norm_rope_store, ops.save_partial_states

    def wrong_store(
        states: StatePages, requests: Tensor, positions: Tensor, slots: Tensor, norm: EntryNorm, ratio: int, cache: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        if bug == "window":
            states = evolve(states, block_table=states.block_table.roll(1, 1))
        if bug == "position":
            norm = evolve(norm, cos_sin_cache=norm.cos_sin_cache.roll(1 - ratio, 0))
        store(states, requests, positions, slots, norm, ratio, cache, **options)

    def wrong_save(kv: Tensor, score: Tensor, ape: Tensor, *rest: Any) -> None:
        save(kv, score, torch.zeros_like(ape) if bug == "state" else ape, *rest)

    work = [(engine.request(127), 1)]
    with_op(monkeypatch, engine, compress_norm_rope_store=wrong_store)
    with_op(monkeypatch, engine, save_partial_states=wrong_save)

    assert all(differences(engine, work).values())


def test_a_step_that_completes_no_entry_of_128_stores_none(
    engine: WholeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int] = []
    with_op(monkeypatch, engine, compress_norm_rope_store=lambda *arguments, **_: stored.append(arguments[5]))

    engine.step([(engine.request(), 20)])
    assert stored == [4, 4]
    request = engine.request()
    request.tokens = 127
    engine.step([(request, 1)])
    assert stored == [4, 4, 4, 4, 128]


def test_caches_that_vllm_binds_again_are_written(engine: WholeEngine) -> None:
    layer = engine.layers[2]
    engine.step([(engine.request(), 4)])
    old = layer.compressor.state_cache.kv_cache.clone()
    layer.compressor.state_cache.kv_cache = torch.full_like(old, 7.0)

    engine.step([(engine.request(), 4)])

    assert (layer.compressor.state_cache.kv_cache != 7.0).any()
    assert layer.compressor._states.tensor is layer.compressor.state_cache.kv_cache


def test_weights_that_are_loaded_again_are_used(engine: WholeEngine) -> None:
    """Written to `.data`, as vLLM's loader does, which torch does not count."""
    engine.step([(engine.request(), 4)])
    for _, compressor in compressors(engine):
        compressor.norm.weight.data.uniform_(1.0, 3.0)

    assert not any(differences(engine, [(engine.request(127), 1)]).values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_weight_of_the_norm_is_vllms_own(
    engine: WholeEngine, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Not a copy; but ops that take no bf16 get one in fp32, of the weights as they are in that step.

    Sums of vLLM have another order, so a code may be the next one: of three entries at most two.
    """
    ops = engine.layers[0]._serving.backend.layer_ops
    norm_weights: list[Tensor] = []
    store, work = ops.compress_norm_rope_store, [(engine.request(127), 1)]

    def noted(*arguments: Any, **options: Any) -> None:
        norm_weights.append(arguments[4].weight)
        store(*arguments, **options)

    with_op(monkeypatch, engine, compress_norm_rope_store=noted)
    own_weights = [compressor.norm.weight for _, compressor in compressors(engine)]
    for weight in own_weights:
        weight.data = weight.data.to(dtype)
    assert sum(differences(engine, work).values()) <= 2
    assert [weight.data_ptr() for weight in norm_weights] == [weight.data_ptr() for weight in own_weights]


def test_no_tokens_write_nothing(engine: WholeEngine) -> None:
    """What a rank without requests gets. vLLM's builders make no such metadata for this test to take."""
    nothing = {"slot_mapping": torch.empty(0, dtype=torch.int64), "c128_boundary": None}
    old_bytes = bytes_of(engine)
    for layer, compressor in compressors(engine):
        table, requests = torch.zeros(1, 4, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
        state = SimpleNamespace(block_table=table, token_to_req_indices=requests, **nothing)
        by_prefix = {compressor.state_cache.prefix: state, compressor.k_cache_prefix: SimpleNamespace(**nothing)}
        with set_forward_context(by_prefix, engine.config, num_tokens=0):
            compressor(scores(compressor, 0), engine.positions[:0], layer.rotary_emb)

    assert all(torch.equal(old_bytes[name], new_bytes) for name, new_bytes in bytes_of(engine).items())


@pytest.mark.parametrize("measuring", [False, True], ids=["step", "without metadata"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_another_dtype_or_width_are_refused(engine: WholeEngine, dtype: torch.dtype, measuring: bool) -> None:
    """In a step, and before it, while vLLM measures memory and passes no metadata."""
    layer = engine.layers[1]
    metadata = None if measuring else engine.describe([(engine.request(), 4)])
    wrong_scores = torch.zeros(4, 2048 if dtype == torch.bfloat16 else 1024, dtype=dtype)

    with (
        set_forward_context(metadata, engine.config, num_tokens=4),
        pytest.raises(
            RefusedError, match=r"layers.1.attn.compressor: kv_score: expected \[T, 2048\] torch.float32, got"
        ),
    ):
        layer.compressor(wrong_scores, engine.positions[:4], layer.rotary_emb)


def test_without_metadata_nothing_is_written(engine: WholeEngine) -> None:
    old_bytes = bytes_of(engine)
    with set_forward_context(None, engine.config, num_tokens=4):
        for layer, compressor in compressors(engine):
            compressor(scores(compressor, 4), engine.positions[:4], layer.rotary_emb)

    assert all(torch.equal(old_bytes[name], new_bytes) for name, new_bytes in bytes_of(engine).items())
