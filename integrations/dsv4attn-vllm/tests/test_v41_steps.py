"""Compressor and indexer of DeepSeek-V4.1 on dsv4attn in vLLM's layers: against its own layers, and vLLM's kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from dsv4attn_vllm import serving
from dsv4attn_vllm.compressor import V41Compressor
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.indexer import V41Indexer
from engine import bytes_of, world
from torch import Tensor
from v41 import CANDIDATES, fake_family, short_run, since_0_33, v41_config, whole_v41_engine
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v41.compressor import DeepseekCompressor
from whole import check_rejected_drafts, unequal_layers

from dsv4attn.core.contract.device import DeviceFacts

STEPS = ([(0, 50)], [(0, 17)], [(0, 1), (1, 5)], [(0, 2), (1, 1)])
"""Chunks of a prompt of more tokens than entries are selected, or than candidate blocks hold; then decodes."""
SHORT = ([(0, 42)], [(0, 1), (1, 3)])


pytestmark = pytest.mark.usefixtures("reference")
whole_engine = partial(whole_v41_engine, "all")


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [("reference", {}), ("reference", CANDIDATES), ("triton", CANDIDATES)],
    ids=["reference", "candidates", "triton"],
    indirect=["backend"],
)
def test_whole_layers_are_bit_for_bit_dsv4attns_own(backend: str, sizes: dict[str, Any]) -> None:
    with whole_engine(sizes) as engine:
        assert [type(layer.indexer) for layer in engine.layers[1:4:2]] == [V41Indexer] * 2
        assert type(engine.layers[1].compressor) is V41Compressor
        assert not unequal_layers(engine, STEPS if backend == "reference" else SHORT)


@since_0_33
def test_records_and_index_keys_of_sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed records of 288 bytes next to windows of 528, and index keys of 4 bits. Faked: that GPU."""
    from vllm.models.deepseek_v41 import attention
    from vllm.v1.attention.backends.mla import indexer

    fake_family(monkeypatch, 100)
    for module in (attention, indexer):
        monkeypatch.setattr(module, "dsa_indexer_uses_fp4", lambda _: True)
    with whole_engine(CANDIDATES, kv_cache_dtype="nvfp4_ds_mla") as engine:
        assert not unequal_layers(engine, SHORT)
        caches = engine.bound()
    widths = [caches[f"model.layers.1.attn{name}"].shape[-1] for name in (".swa_cache", "", ".indexer.k_cache")]
    assert widths == [528, 288, 68]


def test_drafts_that_are_rejected_leave_nothing_behind() -> None:
    """Rings hold the states of a step's drafts, and that before them."""
    with whole_engine(CANDIDATES, drafts=5) as engine:
        check_rejected_drafts(engine, [(0, 37), (37, 6), (38, 6), (43, 6), (44, 1), (45, 2)])


def test_a_planted_bug_is_found() -> None:
    """An indexer that is not restricted to the candidates of another layer."""
    with whole_engine(CANDIDATES) as engine:
        engine.layers[5].indexer.indexer_op._candidates = None

        assert unequal_layers(engine, STEPS[:1]) == {5}


def written(cache: Tensor, old_bytes: Tensor) -> Tensor:
    """Which pages of a cache were written, or which rows of a ring. before: bytes."""
    changed = bytes_of(cache) != old_bytes
    return changed.any(-1) if cache.dtype == torch.float32 else changed.flatten(1).any(-1)


@pytest.mark.parametrize("rows", [{"extra_rows": 2}, {"pad": 2}], ids=["extra rows", "padding"])
def test_rows_of_padding_change_nothing(rows: dict[str, int]) -> None:
    """But for a matrix product of bf16 on a CPU, whose bits depend on how many rows it has."""
    with whole_engine() as engine:
        first, second = engine.request(), engine.request()
        engine.step([(first, 43), (second, 3)])
        old_bytes = {name: bytes_of(cache) for name, cache in engine.bound().items()}
        states = {}
        for options in ({}, rows):
            for name, cache in engine.bound().items():
                cache.copy_(old_bytes[name].view(cache.dtype))
            first.tokens, second.tokens = 43, 3
            outs = engine.step([(first, 1), (second, 1)], **options)
            changed = {name: written(cache, old_bytes[name]) for name, cache in engine.bound().items()}
            states[bool(options)] = [out[:2] for out in outs], changed

    (alone, rings), (padded, same) = states[False], states[True]
    assert all(torch.equal(rings[name], same[name]) for name in rings)
    ring = "model.layers.1.attn.compressor.state_cache"
    ring_blocks = [request.blocks[engine.group_of(ring)][0] for request in (first, second)]
    assert rings[ring][ring_blocks].sum(dim=1).tolist() == [1, 1]
    for out, padded_out in zip(alone, padded, strict=True):
        assert torch.allclose(out.float(), padded_out.float(), rtol=0, atol=1e-3 * out.abs().max().item())


def test_caches_are_byte_for_byte_those_of_vllms_own_kernels() -> None:
    """Entries and index keys, and outputs."""
    of_dsv4attn, caches, own_class = short_run("all")
    of_vllm, expected, class_of_vllm = short_run("none")

    assert (own_class, class_of_vllm) == (V41Compressor, DeepseekCompressor)
    assert caches.keys() == expected.keys()
    assert [name for name in caches if not torch.equal(caches[name], expected[name])] == []
    assert all(map(torch.equal, of_dsv4attn, of_vllm))


@pytest.mark.parametrize("measuring", [False, True], ids=["step", "without metadata"])
def test_scores_of_another_dtype_or_width_are_refused(measuring: bool) -> None:
    """In a step, and before it, while vLLM measures memory and passes no metadata; right ones are then ignored."""
    with whole_engine() as engine:
        metadata = None if measuring else engine.describe([(engine.request(), 4)])
        compressors = [layer.compressor for layer in engine.layers if layer.compressor is not None]
        assert {compressor.compress_ratio for compressor in compressors} == {1, 2}
        with set_forward_context(metadata, engine.config, num_tokens=4):
            for compressor in compressors:
                width = compressor.compress_ratio * compressor.head_dim
                for wrong in (torch.zeros(4, width).bfloat16(), torch.zeros(4, width - 1, dtype=torch.float32)):
                    expected = rf"{compressor.prefix}: kv_score: expected \[T, {width}\] torch.float32, got"
                    with pytest.raises(RefusedError, match=expected):
                        compressor(wrong, engine.positions[:4])
                if measuring:
                    assert compressor(torch.zeros(4, width, dtype=torch.float32), engine.positions[:4]) is None


def test_kernels_of_steps_are_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants that a warm-up on an A100 compiles; nothing is compiled here."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    config, results = v41_config(CANDIDATES), {}
    with world(config):
        for steps_text in ("all", "none"):
            monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", steps_text)
            serving_backend = serving.serving_of(config, v41=True)
            variants = serving_backend.backend.kernel_variants(serving_backend.bounds(), DeviceFacts.named("a100"))
            results[steps_text] = {variant.name for variant in variants}

    around = {"index_query_kernel", "score_kernel", "choose_kernel", "order_kernel", "score_blocks_kernel"}
    assert results["all"] - results["none"] == {*around, "latent_kernel", "ring_kernel", "store_kernel"}
    assert "attention" in results["none"]
