"""What cannot be served is refused when vLLM builds the layers: by name, with the reasons and the cure."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from dsv4attn_vllm import replacements, serving
from dsv4attn_vllm.attention import insert_context_kv
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from engine import config_of, world
from models import V4, V41, Model
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dsv4attn.errors import NoBackendError, UnknownNameError


@pytest.fixture(params=[V4, V41], ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    return request.param


def refusal(config: VllmConfig, layer_class: type = CUDAAttention) -> str:
    """The message of the refusal, by the constructor of a layer."""
    with pytest.raises(RefusedError) as caught:
        layer_class(config, prefix="model.layers.0.attn")
    assert "DSV4ATTN_VLLM=0" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e5m2", "nvfp4_ds_mla"])
def test_a_cache_dtype_that_is_not_served(model: Model, dtype: str) -> None:
    with world(config := model.config()):
        config.cache_config.cache_dtype = dtype
        said = refusal(config, model.layer)

    assert f"--kv-cache-dtype: expected {' or '.join(model.dtypes)}, got {dtype} -> leave" in said


@pytest.mark.parametrize("dtype", serving.CACHE_DTYPES)
def test_cache_dtypes_that_are_served(config: VllmConfig, dtype: str) -> None:
    config.cache_config.cache_dtype = dtype

    assert CUDAAttention(config, prefix="model.layers.0.attn").kv_cache_dtype == "fp8_ds_mla"


def test_a_model_that_is_not_deepseek_v4(config: VllmConfig) -> None:
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: {"model_type": "llama", "hidden_size": 4})

    assert "model: expected a DeepSeek-V4 configuration, got" in refusal(config)


@pytest.mark.parametrize(
    "changed", [{"model_type": "deepseek_v41"}, {"model_type": "deepseek_mtp", "kv_source_layer_ids": [0, 1]}]
)
def test_a_deepseek_v41_under_a_name_of_v4(config: VllmConfig, changed: dict[str, object]) -> None:
    """Its ratio 1 would read as layers without a compressed cache."""
    fields = {**config.model_config.hf_config.to_dict(), **changed}
    config.model_config.hf_config = SimpleNamespace(to_dict=lambda: fields)

    assert "model: expected a DeepSeek-V4 configuration, got one of DeepSeek-V4.1 -> serve it by its own" in refusal(
        config
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim": 256, "partial_rotary_factor": 0.25}, "got 192 + 64 dims, ratios [1, 4, 128]"),
        ({"compress_rates": {"heavily_compressed_attention": 64}}, "ratios [1, 4, 64]"),
    ],
)
def test_a_deepseek_v4_of_other_dims(config: VllmConfig, changed: dict[str, object], said: str) -> None:
    found = config.model_config.hf_config
    found.update(changed)
    # the rotated part of a head stands in the tables' parameters too
    for parameters in found.rope_parameters.values():
        parameters["partial_rotary_factor"] = 64 / found.head_dim

    assert said in refusal(config)


def test_heads_that_ranks_cannot_share(config: VllmConfig) -> None:
    config.parallel_config.tensor_parallel_size = 3

    assert "tensor parallel size" in refusal(config)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_context_parallelism(model: Model, phase: str) -> None:
    reason = "vLLM's layers of DeepSeek-V4 exchange nothing among ranks that share a context"
    wanted = f"--{phase}-context-parallel-size: expected 1, as {reason}, got 2 -> use tensor or data parallelism"
    with world(config := model.config()):
        setattr(config.parallel_config, f"{phase}_context_parallel_size", 2)
        assert wanted in refusal(config, model.layer)


def test_another_dtype_of_the_model(config: VllmConfig) -> None:
    config.model_config.dtype = torch.float16

    assert "--dtype: expected bfloat16, got torch.float16" in refusal(config)


@pytest.mark.parametrize("asked", ["reference", ""], ids=["asked for", "automatic"])
def test_a_backend_that_cannot_run_here(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    """Torch's reference cannot be captured; on a CPU there is no other that is native."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", asked)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    serving._serving.cache_clear()

    with pytest.raises(NoBackendError) as caught:
        CUDAAttention(config, prefix="model.layers.0.attn")

    assert "CAPTURE" in str(caught.value)
    assert ("environment variable DSV4ATTN_BACKEND" in str(caught.value)) is bool(asked)


def test_an_unknown_backend(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "tritn")
    serving._serving.cache_clear()

    with pytest.raises((NoBackendError, UnknownNameError), match="did you mean 'triton'"):
        CUDAAttention(config, prefix="model.layers.0.attn")


def test_weights_that_the_projection_does_not_take(config: VllmConfig) -> None:
    layer = CUDAAttention(config, prefix="model.layers.0.attn")
    layer.wo_a.weight = torch.nn.Parameter(layer.wo_a.weight.to(torch.float8_e4m3fn), requires_grad=False)

    with pytest.raises(RefusedError, match=r"model.layers.0.attn.wo_a: expected bf16, or fp8 with a scale"):
        layer.process_weights_after_loading(torch.bfloat16)


def modules_for_cuda(model: Model) -> tuple[Any, Any]:
    """VLLM's modules of the model and of its drafts."""
    return tuple(import_module(f"vllm.models.{model.name}.nvidia.{name}") for name in ("model", "dspark"))


def test_an_attention_backend_of_vllms_that_is_asked_for_is_used(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    module, dspark = modules_for_cuda(model)
    theirs = import_module(f"vllm.models.{model.name}.nvidia.flashmla").DeepseekV4FlashMLAAttention
    insert = dspark._insert_context_kv
    monkeypatch.setattr(replacements, "_originals", {})
    monkeypatch.setattr(module, "_select_dsv4_attn_cls", module._select_dsv4_attn_cls)
    monkeypatch.setattr(dspark, "_insert_context_kv", insert)
    replacements.replace(model.platforms["cuda"])
    replacements.replace(model.platforms["cuda"])  # what vLLM had is still known

    assert module._select_dsv4_attn_cls is model.select
    assert dspark._insert_context_kv is insert_context_kv
    assert replacements.original(f"{dspark.__name__}._insert_context_kv") is insert
    with world(config := model.config()):
        for backend, chosen in ((None, model.layer), (model.flash_mla, theirs), ("CUSTOM", model.layer)):
            config.attention_config.backend = backend and AttentionBackendEnum[backend]
            assert model.select(config) is chosen


def test_nothing_is_replaced_if_one_name_cannot_be(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that lacks the second name, or a module of this package that cannot be imported, keeps all of its own."""
    module, dspark = modules_for_cuda(model)
    before = module._select_dsv4_attn_cls, dspark._insert_context_kv
    first, second = model.platforms["cuda"]
    monkeypatch.setattr(replacements, "_originals", {})
    for broken in (evolve(second, name="_insert"), evolve(second, by="dsv4attn_vllm.attention:insert")):
        with pytest.raises(RefusedError, match=rf"vllm.models.{model.name}.nvidia.dspark._insert.*: expected .* -> in"):
            replacements.replace((first, broken))

        assert (module._select_dsv4_attn_cls, dspark._insert_context_kv) == before
        assert replacements._originals == {}


def test_limits_hold_the_padding_of_captured_graphs(config: VllmConfig) -> None:
    """VLLM pads a step to the next size it captured, past its own most requests."""
    config.compilation_config.max_cudagraph_capture_size = 16

    limits = serving.serving_of(config).limits

    assert limits.max_decode_tokens == 16 > config.scheduler_config.max_num_seqs


def test_a_backend_is_asked_about_the_rows_of_images_and_of_draft_blocks() -> None:
    speculative = {"method": "dspark", "num_speculative_tokens": 5}
    config = config_of(speculative_config=speculative)
    config.model_config.hf_config.update({"vision_n_layers": 2, "vision_max_n_token": 64})
    with world(config):
        made = serving.serving_of(config)

    assert made.limits.prefill_window_columns == 128 + 64
    assert made.limits.decode_window_columns == 192
    # a draft block is attended by drafts alone, which are window-only
    assert {(one.phase, one.layer.kind.value): one.window_columns for one in made.problems} == {
        ("decode", "swa"): 192,
        ("decode", "c4a"): 0,
        ("decode", "c128a"): 0,
        ("prefill", "swa"): 192,
        ("prefill", "c4a"): 192,
        ("prefill", "c128a"): 192,
    }


def test_metadata_without_positions_are_refused_before_the_first_step(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention import backend

    monkeypatch.setattr(backend, "CommonAttentionMetadata", SimpleNamespace(__dataclass_fields__={}))

    assert "CommonAttentionMetadata.positions: expected a field of vLLM's metadata, got none" in refusal(config)
