"""What is served of DeepSeek-V4.1 and what is refused: records, drafts, platforms; see v41.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as replaced
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from dsv4attn_vllm import serving, steps
from dsv4attn_vllm.attention import insert_context_kv
from dsv4attn_vllm.cuda import V41CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from engine import config_of, world
from processes import run_on_rocm
from v41 import RATIOS, V41Engine, v41_config
from vllm.config import VllmConfig
from vllm.platforms import current_platform

import dsv4attn as ds

DRAFT = len(RATIOS)


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    made = v41_config()
    with world(made):
        yield made


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked: that this is a GPU of sm_100."""
    told = classmethod(lambda _, family, *__: family == 100)
    monkeypatch.setattr(type(current_platform), "is_device_capability_family", told)


def layer_of(config: VllmConfig, index: int = 0) -> Any:
    """A new layer; those that others need are there already."""
    return V41CUDAAttention(config, prefix=f"model.layers.{index}.attn")


def refusal(config: VllmConfig) -> str:
    """The message of the refusal, by the constructor of a layer."""
    with pytest.raises(RefusedError) as caught:
        layer_of(config)
    assert "DSV4ATTN_VLLM=0" in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kv_source_layer_ids": None}, "expected a DeepSeek-V4.1 configuration, got the model: field 'kv_source"),
        ({"compress_ratios": [0, 4, 128, 4, 4, 4]}, "expected a DeepSeek-V4.1 configuration, got the model: compress_"),
        ({"head_dim": 256}, "got 192 + 64 dims, without a norm -> serve a DeepSeek-V4.1 model"),
        ({"q_head_norm": True}, "got 448 + 64 dims, with a norm -> serve a DeepSeek-V4.1 model"),
    ],
)
def test_another_model(config: VllmConfig, changed: dict[str, object], said: str) -> None:
    fields = {**config.model_config.hf_config.to_dict(), **changed}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: fields)

    assert said in refusal(config)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("projection", "expected indexer and compressor, as the others of DeepSeek-V4.1 are vLLM's, got projection"),
        ("indexer,compressor,mhc", "got mhc -> leave mhc out"),
        ("indexer", "expected indexer and compressor, or neither, for DeepSeek-V4.1, got indexer -> name both"),
        ("compressor", "got compressor -> name both of them"),
        ("indexr", "got 'indexr' -> write indexer"),
    ],
)
def test_steps_that_are_named(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, named: str, said: str) -> None:
    monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", named)

    assert said in refusal(config)


def test_scores_of_candidates_by_a_kernel_of_vllms(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", "all")
    config.attention_config.indexer_sparse_logits = True

    assert "indexer_sparse_logits: expected off, for an indexer on dsv4attn, got on -> leave" in refusal(config)


def test_steps_run_where_vllm_has_no_indexer_and_elsewhere_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere, hopper = (steps.Device("cuda", deep_gemm=deep_gemm) for deep_gemm in (False, True))
    amd, both = steps.Device("rocm", deep_gemm=False), {"indexer", "compressor"}

    assert (steps.v41_steps(ampere), steps.v41_steps(hopper), steps.v41_steps(amd)) == (both, set(), set())
    for asked in ("all", "indexer,compressor"):
        monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", asked)
        assert all(steps.v41_steps(device) == both for device in (ampere, hopper, amd))
        with pytest.raises(RefusedError, match="indexer_kv_dtype: expected fp8, for steps of dsv4attn on ROCm"):
            steps.v41_steps(evolve(amd, mxfp4=True))
    monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", "none")
    assert steps.v41_steps(hopper) == steps.v41_steps(amd) == set()
    with pytest.raises(RefusedError, match="expected indexer and compressor, as vLLM's need DeepGEMM, got none"):
        steps.v41_steps(ampere)


def test_records_that_vllm_has_and_dsv4attn_does_not_expect(config: VllmConfig, monkeypatch: Any) -> None:
    from vllm.models.deepseek_v41 import attention

    monkeypatch.setattr(attention, "_use_v41_mxfp8_kv_record", lambda: True)

    assert "model.layers.0.attn: window cache: expected records of 584 bytes, got 528 -> install" in refusal(config)


# ---------------------------------------------------------------- records, images, geometry


@pytest.mark.parametrize(("dtype", "records"), [("auto", (528, 528)), ("nvfp4_ds_mla", (528, 288))])
@pytest.mark.usefixtures("blackwell")
def test_records_of_sm_100(config: VllmConfig, dtype: str, records: tuple[int, int]) -> None:
    config.cache_config.cache_dtype = dtype

    made = layer_of(config)._serving

    assert (made.swa_layout.record_bytes, made.compressed_layout.record_bytes) == records
    facts = {(one.layer.compress_ratio, one.swa.page_size, one.compressed.page_size) for one in made.problems[1:3]}
    assert facts == {(2, 32, 64), (1, 32, 128)}
    assert {one.swa.layout for one in made.problems} == {"v41_fp8"}


@pytest.mark.usefixtures("blackwell")
def test_a_step_on_records_of_sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    config, before = v41_config(), [(40, 1), (20, 9)]
    with world(config):
        engine = V41Engine(config, V41CUDAAttention, layers=4)
        outs = engine.step([(engine.request(tokens), count) for tokens, count in before])

        assert {layer.swa_cache_layer.kv_cache.shape[-1] for layer in engine.layers} == {528}
        for layer, out in zip(engine.layers, outs, strict=True):
            assert torch.equal(engine.of_own_builder(layer, before, 10), out), layer.prefix
            for row, index, position in [(0, 0, 40), (1, 1, 20), (9, 1, 28)]:
                assert engine.error(layer, out, index, position, row) < 0.012, (layer.prefix, row)


def test_one_problem_for_each_ratio_and_no_wider_rows_for_images(config: VllmConfig) -> None:
    config.model_config.hf_config.update({"vision_n_layers": 2, "vision_max_n_token": 64})

    made = serving.serving_of(config, v41=True)

    assert [(one.phase, one.layer.key[0].value, one.layer.compress_ratio) for one in made.problems] == [
        (phase, *layer) for phase in ("decode", "prefill") for layer in (("swa", 1), ("c4a", 2), ("c4a", 1))
    ]
    assert made.limits.prefill_window_columns == 0
    assert not any(one.layer.q_norm or one.window_columns for one in made.problems)
    assert (made.layer(0).kind, made.layer(1).key, made.layer(2).key) == (
        ds.LayerKind.SWA,
        (ds.LayerKind.CSA, 1),
        (ds.LayerKind.CSA, 2),
    )


# ---------------------------------------------------------------- drafts


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Iterator[V41Engine]:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    serving._serving.cache_clear()
    config = v41_config(speculative_config={"method": "dspark", "num_speculative_tokens": 5})
    draft = replaced(config, model_config=config.speculative_config.draft_model_config)

    def made(_: VllmConfig, prefix: str, **options: Any) -> V41CUDAAttention:
        """A layer after those of the model, built with the draft's configuration as vLLM's loader does."""
        return V41CUDAAttention(draft, prefix=prefix.replace(".0.", f".{DRAFT}."), **options)

    with world(config):
        yield V41Engine(config, made, layers=1)


def test_tokens_of_a_draft_block_see_each_other_and_the_window_before(drafting: V41Engine) -> None:
    before, [layer] = [(150, 5), (40, 5)], drafting.layers
    work = [(drafting.request(tokens), count) for tokens, count in before]

    [out] = drafting.step(work, causal=False)

    assert layer._geometry.kind is ds.LayerKind.SWA
    assert layer._serving is serving.serving_of(drafting.config, v41=True)
    assert layer._serving.limits.decode_window_columns > 128
    for i, (tokens, count) in enumerate(before):
        for j in range(count):
            block = range(tokens, tokens + count)
            assert drafting.error(layer, out, i, tokens + j, i * 5 + j, block=block) < 0.012, (i, j)


def test_context_keys_of_a_draft_are_those_that_a_step_inserts(drafting: V41Engine) -> None:
    [layer], request = drafting.layers, drafting.request(20)
    swa, numbers = layer.swa_cache_layer, range(20)
    wanted = drafting.records(swa.kv_cache, swa.prefix, 0, numbers)
    request.tokens = 0
    _, kv, _ = drafting.inputs(layer, [(request, 20)], 20)
    slots = drafting.slots[drafting.group_of(swa.prefix), :20].clone()
    swa.kv_cache.fill_(0xFF)

    insert_context_kv(layer, kv, torch.arange(20), slots)

    found = drafting.records(swa.kv_cache, swa.prefix, 0, numbers)
    assert not np.isnan(wanted).any()
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


# ---------------------------------------------------------------- platforms


def test_a_model_of_v4_keeps_its_geometry() -> None:
    made = config_of()
    with world(made):
        facts = serving.serving_of(made)

        assert [one.layer.compress_ratio for one in facts.problems[:3]] == [1, 4, 128]
        assert [one.compressed and one.compressed.page_size for one in facts.problems[:3]] == [None, 64, 2]
        assert facts.layer(1).kind is ds.LayerKind.SWA


ROCM = """
import os
os.environ["DSV4ATTN_VLLM_STEPS"] = "all"
from engine import world
from v41 import RATIOS, V41Engine, v41_config
from dsv4attn_vllm.replacements import V41_PLATFORMS, replace
from vllm.models.deepseek_v41.amd import model, dspark, rocm
replace(V41_PLATFORMS["rocm"])
from dsv4attn_vllm import attention
from dsv4attn_vllm.guard import RefusedError
from vllm.v1.attention.backends.registry import AttentionBackendEnum
config = v41_config()
assert dspark._insert_context_kv is attention.insert_context_kv
chosen = model._select_dsv4_attn_cls(config)
assert chosen.__module__ == "dsv4attn_vllm.rocm"
with world(config):
    engine = V41Engine(config, chosen, layers=len(RATIOS))
    before = [(40, 1), (20, 9)]
    outs = engine.step([(engine.request(tokens), count) for tokens, count in before])
    for layer, out in zip(engine.layers, outs):
        assert torch.equal(engine.of_own_builder(layer, before, 10), out), layer.prefix
        assert engine.error(layer, out, 0, 40, 0) < 0.012
        assert type(layer._alloc_attn_out(3, out.flatten(1))) is torch.Tensor
    assert type(engine.layers[3].indexer).__name__ == "V41Indexer"
    assert type(engine.layers[3].compressor).__name__ == "V41Compressor"
    y = engine.layers[1]._o_proj(outs[1], torch.arange(10))
    assert y.shape == (10, 256), y.shape
    config.kernel_config.monokernel = True
    try:
        chosen(config, prefix="model.layers.9.attn")
    except RefusedError as error:
        print(error)
config.attention_config.backend = AttentionBackendEnum.ROCM_FLASHMLA_SPARSE_DSV41
assert model._select_dsv4_attn_cls(config) is rocm.DeepseekV41ROCMAiterMLAAttention
"""


def test_rocms_layer_in_a_process_that_takes_itself_for_an_mi355(tmp_path: Path) -> None:
    """Faked: what `run_on_rocm` says."""
    printed = run_on_rocm(tmp_path, ROCM)

    assert "--monokernel: expected off: it runs whole layers itself, got on -> leave --monokernel out" in printed
