"""What is served of DeepSeek-V4.1 and what is refused: records, images, geometry; see v41.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from attrs import evolve
from dsv4attn_vllm import parts, serving
from dsv4attn_vllm.cuda import V41CUDAAttention
from dsv4attn_vllm.guard import GUARD, RefusedError
from engine import config_of, with_images, world
from v41 import V41Engine, fake_family, since_0_33, v41_config
from vllm.config import VllmConfig

import dsv4attn as ds


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    vllm_config = v41_config()
    with world(vllm_config):
        yield vllm_config


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked: that this is a GPU of sm_100."""
    fake_family(monkeypatch, 100)


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
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", named)

    assert said in refusal(config)


def test_scores_of_candidates_by_a_kernel_of_vllms(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", "all")
    config.attention_config.indexer_sparse_logits = True

    assert "indexer_sparse_logits: expected off, for an indexer on dsv4attn, got on -> leave" in refusal(config)


def test_parts_run_where_vllm_has_no_indexer_and_elsewhere_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere, hopper = (parts.Device("cuda", deep_gemm=deep_gemm) for deep_gemm in (False, True))
    amd, both = parts.Device("rocm", deep_gemm=False), {"indexer", "compressor"}

    assert (parts.v41_parts(ampere), parts.v41_parts(hopper), parts.v41_parts(amd)) == (both, set(), set())
    for named in ("all", "indexer,compressor"):
        monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", named)
        assert all(parts.v41_parts(device) == both for device in (ampere, hopper, amd))
        with pytest.raises(RefusedError, match="indexer_kv_dtype: expected fp8, for parts of dsv4attn on ROCm"):
            parts.v41_parts(evolve(amd, mxfp4=True))
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", "none")
    assert parts.v41_parts(hopper) == parts.v41_parts(amd) == set()
    with pytest.raises(RefusedError, match="expected indexer and compressor, as vLLM's need DeepGEMM, got none"):
        parts.v41_parts(ampere)


def test_records_that_vllm_has_and_dsv4attn_does_not_expect(config: VllmConfig, monkeypatch: Any) -> None:
    from vllm.models.deepseek_v41 import attention

    monkeypatch.setattr(attention, "_use_v41_mxfp8_kv_record", lambda: True)

    assert "model.layers.0.attn: window cache: expected records of 584 bytes, got 528 -> install" in refusal(config)


# ---------------------------------------------------------------- records, images, geometry


@pytest.mark.parametrize(("dtype", "records"), [("auto", (528, 528)), ("nvfp4_ds_mla", (528, 288))])
@since_0_33
@pytest.mark.usefixtures("blackwell")
def test_records_of_sm_100(config: VllmConfig, dtype: str, records: tuple[int, int]) -> None:
    config.cache_config.cache_dtype = dtype

    served = layer_of(config)._serving

    assert (served.swa_layout.record_bytes, served.compressed_layout.record_bytes) == records
    facts = {
        (problem.layer.compress_ratio, problem.swa.page_size, problem.compressed.page_size)
        for problem in served.problems[1:3]
    }
    assert facts == {(2, 32, 64), (1, 32, 128)}
    assert {problem.swa.layout for problem in served.problems} == {"v41_fp8"}


@since_0_33
@pytest.mark.usefixtures("blackwell")
def test_a_step_on_records_of_sm_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    with world(config := v41_config()):
        engine = V41Engine(config, V41CUDAAttention, layers=4)
        engine.check_step([(40, 1), (20, 9)], [0, 1, 9])

        assert {layer.swa_cache_layer.kv_cache.shape[-1] for layer in engine.layers} == {528}


@pytest.mark.usefixtures("blackwell")
def test_records_of_vllm_0_32_on_sm_100_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages are not whole records apart."""
    monkeypatch.setattr(type(GUARD), "installed", lambda _: "0.32.0")

    with pytest.raises(RefusedError, match=r"V4.1 on sm_100: expected vLLM 0.33 or newer, .* got 0.32.0 -> in"):
        serving.serving_of(config, v41=True)


def test_one_problem_for_each_ratio_and_no_wider_rows_for_images(config: VllmConfig) -> None:
    with_images(config, 64)

    served = serving.serving_of(config, v41=True)

    assert [
        (problem.phase, problem.layer.key[0].value, problem.layer.compress_ratio) for problem in served.problems
    ] == [(phase, *layer) for phase in ("decode", "prefill") for layer in (("swa", 1), ("c4a", 2), ("c4a", 1))]
    assert served.limits.prefill_window_columns == 0
    assert not any(problem.layer.q_norm or problem.window_columns for problem in served.problems)
    assert (served.layer(0).kind, served.layer(1).key, served.layer(2).key) == (
        ds.LayerKind.SWA,
        (ds.LayerKind.CSA, 1),
        (ds.LayerKind.CSA, 2),
    )


def test_a_model_of_v4_keeps_its_geometry() -> None:
    vllm_config = config_of()
    with world(vllm_config):
        facts = serving.serving_of(vllm_config)

        assert [problem.layer.compress_ratio for problem in facts.problems[:3]] == [1, 4, 128]
        assert [problem.compressed and problem.compressed.page_size for problem in facts.problems[:3]] == [None, 64, 2]
        assert facts.layer(1).kind is ds.LayerKind.SWA
