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
from dsv4attn_vllm.records import FP4_CACHE
from engine import config_of, with_images, world
from models import V4, V41, Model
from released_sizes import KINDS
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


CONTEXT = "expected 1, as vLLM's layers of DeepSeek-V4 exchange nothing among ranks that share a context, got 2"
OPTIONS: list[tuple[str, object, str]] = [
    *(
        ("cache_config.cache_dtype", dtype, f"--kv-cache-dtype: expected {{dtypes}}, got {dtype} -> leave")
        for dtype in ("bfloat16", "fp8_e5m2")
    ),
    *(
        (
            f"parallel_config.{phase}_context_parallel_size",
            2,
            f"--{phase}-context-parallel-size: {CONTEXT} -> use tensor or data parallelism",
        )
        for phase in ("decode", "prefill")
    ),
    ("parallel_config.tensor_parallel_size", 3, "tensor parallel size"),  # which heads cannot be shared by
    ("model_config.dtype", torch.float16, "--dtype: expected bfloat16, got torch.float16"),
]


@pytest.mark.parametrize(("path", "value", "said"), OPTIONS, ids=[f"{path} {value}" for path, value, _ in OPTIONS])
def test_an_option_that_is_not_served(model: Model, path: str, value: object, said: str) -> None:
    owner, name = path.split(".")
    with world(config := model.config()):
        setattr(getattr(config, owner), name, value)

        assert said.format(dtypes=" or ".join(model.dtypes)) in refusal(config, model.layer)


def test_records_of_v41_are_refused_for_v4(config: VllmConfig) -> None:
    config.cache_config.cache_dtype = FP4_CACHE

    assert "--kv-cache-dtype: expected auto or fp8 or fp8_e4m3 or fp8_ds_mla, got nvfp4" in refusal(config)


@pytest.mark.parametrize("dtype", serving.CACHE_DTYPES)
def test_cache_dtypes_that_are_served(config: VllmConfig, dtype: str) -> None:
    config.cache_config.cache_dtype = dtype

    assert CUDAAttention(config, prefix="model.layers.0.attn").kv_cache_dtype == "fp8_ds_mla"


UNDER_V4 = "model: expected a DeepSeek-V4 configuration, got one of DeepSeek-V4.1 -> serve it by its own"
OF_V41 = "expected a DeepSeek-V4.1 configuration, got the model: "


@pytest.mark.parametrize(
    ("model", "changed", "said"),
    [
        (V4, None, "model: expected a DeepSeek-V4 configuration, got"),
        # a ratio of 1 would read as layers without a compressed cache
        (V4, {"model_type": "deepseek_v41"}, UNDER_V4),
        (V4, {"model_type": "deepseek_mtp", "kv_source_layer_ids": [0, 1]}, UNDER_V4),
        (V41, {"kv_source_layer_ids": None}, f"{OF_V41}field 'kv_source"),
        (V41, {"compress_ratios": [0, 4, 128, 4, 4, 4]}, f"{OF_V41}compress_"),
        (V41, {"head_dim": 256}, "got 192 + 64 dims, without a norm -> serve a DeepSeek-V4.1 model"),
        (V41, {"q_head_norm": True}, "got 448 + 64 dims, with a norm -> serve a DeepSeek-V4.1 model"),
    ],
    ids=str,
)
def test_another_model(model: Model, changed: dict[str, object] | None, said: str) -> None:
    """changed: fields of the configuration; None: a model of another kind."""
    with world(config := model.config()):
        llama = {"model_type": "llama", "hidden_size": 4}
        fields = llama if changed is None else {**config.model_config.hf_config.to_dict(), **changed}
        config.model_config.hf_config = SimpleNamespace(to_dict=lambda: fields)

        assert said in refusal(config, model.layer)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"head_dim": 256, "partial_rotary_factor": 0.25}, "got 192 + 64 dims, ratios [1, 4, 128]"),
        ({"compress_rates": {"heavily_compressed_attention": 64}}, "ratios [1, 4, 64]"),
    ],
)
def test_a_deepseek_v4_of_other_dims(config: VllmConfig, changed: dict[str, object], said: str) -> None:
    hf_config = config.model_config.hf_config
    hf_config.update(changed)
    # the rotated part of a head stands in the tables' parameters too
    for parameters in (hf_config.rope_parameters, *hf_config.rope_parameters.values()):
        if isinstance(parameters, dict) and "partial_rotary_factor" in parameters:
            parameters["partial_rotary_factor"] = 64 / hf_config.head_dim
    # rates belong to types, which vLLM 0.32 does not read
    hf_config.update({"layer_types": [*KINDS.values()]})

    assert said in refusal(config)


@pytest.mark.parametrize("backend", ["reference", ""], ids=["asked for", "automatic"])
def test_a_backend_that_cannot_run_here(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Torch's reference cannot be captured; on a CPU there is no other that is native."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", backend)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    serving._serving.cache_clear()

    with pytest.raises(NoBackendError) as caught:
        CUDAAttention(config, prefix="model.layers.0.attn")

    assert "CAPTURE" in str(caught.value)
    assert ("environment variable DSV4ATTN_BACKEND" in str(caught.value)) is bool(backend)


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
    of_vllm = import_module(f"vllm.models.{model.name}.nvidia.flashmla").DeepseekV4FlashMLAAttention
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
        for backend, chosen in ((None, model.layer), (model.flash_mla, of_vllm), ("CUSTOM", model.layer)):
            config.attention_config.backend = backend and AttentionBackendEnum[backend]
            assert model.select(config) is chosen


def test_nothing_is_replaced_if_one_name_cannot_be(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that lacks the second name, or a module of this package that cannot be imported, keeps all of its own."""
    module, dspark = modules_for_cuda(model)
    functions = module._select_dsv4_attn_cls, dspark._insert_context_kv
    first, second = model.platforms["cuda"]
    monkeypatch.setattr(replacements, "_originals", {})
    for broken in (evolve(second, name="_insert"), evolve(second, by="dsv4attn_vllm.attention:insert")):
        with pytest.raises(RefusedError, match=rf"vllm.models.{model.name}.nvidia.dspark._insert.*: expected .* -> in"):
            replacements.replace((first, broken))

        assert (module._select_dsv4_attn_cls, dspark._insert_context_kv) == functions
        assert replacements._originals == {}


def test_limits_hold_the_padding_of_captured_graphs(config: VllmConfig) -> None:
    """VLLM pads a step to the next size it captured, past its own most requests."""
    config.compilation_config.max_cudagraph_capture_size = 16

    limits = serving.serving_of(config).limits

    assert limits.max_decode_tokens == 16 > config.scheduler_config.max_num_seqs


def test_a_backend_is_asked_about_the_rows_of_images_and_of_draft_blocks() -> None:
    speculative = {"method": "dspark", "num_speculative_tokens": 5}
    config = with_images(config_of(speculative_config=speculative), 64)
    with world(config):
        served = serving.serving_of(config)

    assert served.limits.prefill_window_columns == 128 + 64
    assert served.limits.decode_window_columns == 192
    # a draft block is attended by drafts alone, which are window-only
    assert {(problem.phase, problem.layer.kind.value): problem.window_columns for problem in served.problems} == {
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
