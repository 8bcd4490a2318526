"""When dsv4attn is used, and what is refused when vLLM has resolved its arguments: before a model is built."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from dsv4attn_vllm import arguments, model, replacements, serving
from dsv4attn_vllm.arguments import NAME
from dsv4attn_vllm.cuda import CUDAAttention, select_attention
from dsv4attn_vllm.guard import GUARD, LOG, RefusedError
from engine import config_of, world
from transformers import LlamaConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from dsv4attn.errors import NoBackendError, UnknownNameError

SWITCH = "DSV4ATTN_VLLM"
DEEP_GEMM = [(9, 0), (10, 0), (10, 3), (12, 0)]
NO_DEEP_GEMM = [(8, 0), (8, 6), (8, 9)]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The switch is as it was after each test, also where `resolve` has set it."""
    serving._serving.cache_clear()
    monkeypatch.delenv(SWITCH, raising=False)
    yield
    while arguments._set_here:
        os.environ.pop(arguments._set_here.pop(), None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of the log."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(LOG, level, lambda text, *values: lines.append(text % values))
    return lines


def on_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Take this machine for one with a GPU of NVIDIA. Faked: what vLLM says of the device, and that it is compiled."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("compiled"))
    from vllm.platforms.cuda import CudaPlatformBase

    platform = type(current_platform)
    monkeypatch.setattr(replacements, "platform_name", lambda: "cuda")
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_, **__: DeviceCapability(*capability)))
    monkeypatch.setattr(
        platform, "support_deep_gemm", classmethod(lambda _: CudaPlatformBase.support_deep_gemm.__func__(platform))
    )


def on_platform(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take this machine for one of another platform."""
    monkeypatch.setattr(replacements, "platform_name", lambda: name)


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize("capability", NO_DEEP_GEMM)
def test_a_gpu_without_an_attention_of_vllm_uses_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    on_cuda(monkeypatch, capability)

    assert not arguments.has_attention_of_vllm()
    assert arguments.is_used()
    assert not arguments.is_requested()


@pytest.mark.parametrize("capability", DEEP_GEMM)
def test_a_gpu_with_an_attention_of_vllm_must_be_asked(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    on_cuda(monkeypatch, capability)
    config = config_of()

    assert arguments.has_attention_of_vllm()
    assert not arguments.is_used(config)
    for name in ("CUSTOM", NAME):
        config.attention_config.backend = AttentionBackendEnum[name]
        assert arguments.is_used(config)
    config.attention_config.backend = AttentionBackendEnum.FLASHMLA_SPARSE_DSV4
    assert not arguments.is_used(config)
    monkeypatch.setenv(SWITCH, "1")
    assert arguments.is_used()


@pytest.mark.parametrize(("platform", "used"), [("rocm", False), ("xpu", False), ("cpu", True)])
def test_other_platforms(monkeypatch: pytest.MonkeyPatch, platform: str, used: bool) -> None:
    on_platform(monkeypatch, platform)
    assert arguments.is_used() is used
    monkeypatch.setenv(SWITCH, "1")
    assert arguments.is_used()


def test_layers_on_a_hopper_are_vllms_until_asked(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    from vllm.models.deepseek_v4.nvidia import model as module

    monkeypatch.setattr(replacements, "_originals", {})
    monkeypatch.setattr(module, "_select_dsv4_attn_cls", module._select_dsv4_attn_cls)
    replacements.replace(replacements.PLATFORMS["cuda"][:1])
    with world(config := config_of()):
        on_cuda(monkeypatch, (9, 0))
        assert select_attention(config) is DeepseekV4FlashMLAAttention
        [line] = said
        assert line == (
            "installed, but not asked for: vLLM's own attention runs DeepSeek-V4 on this device; --attention-backend "
            "DSV4ATTN or DSV4ATTN_VLLM=1 asks for dsv4attn"
        )
        monkeypatch.setenv("DSV4ATTN_BACKEND", "sm90")
        assert select_attention(config) is DeepseekV4FlashMLAAttention
        assert said[1] == f"{line}; until then DSV4ATTN_BACKEND has no effect"
        config.attention_config.backend = AttentionBackendEnum.CUSTOM
        assert select_attention(config) is CUDAAttention


def test_nothing_is_replaced_or_refused_where_it_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """Not even a version of vLLM that was never tested."""
    monkeypatch.setattr(type(GUARD), "installed", lambda _: "0.99.0")
    on_cuda(monkeypatch, (9, 0))
    monkeypatch.setattr(model, "platform_name", lambda: "cuda")
    monkeypatch.setattr(model, "_active", set())
    monkeypatch.setattr(model, "replace", lambda _: pytest.fail("replaced"))

    arguments.resolve(config_of())
    model.activate("v4")

    assert len(said) >= 2
    assert all(line.startswith("installed, but not asked for") for line in said)


def test_vllm_gets_its_names_back_for_a_model_that_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in one process, which ask and do not ask in turn. vLLM looks up their class once."""
    from vllm.models.deepseek_v4.cpu import cpu_sparse
    from vllm.models.deepseek_v4.cpu import model as layers

    monkeypatch.setattr(arguments, "has_attention_of_vllm", lambda: True)
    for name, value in (("_active", set()), ("_looked_up", set())):
        monkeypatch.setattr(model, name, value)
    monkeypatch.setattr(replacements, "_originals", {})
    monkeypatch.setattr(layers, "DeepseekV4CPUAttention", cpu_sparse.DeepseekV4CPUAttention)

    config_of(attention_backend=NAME)
    assert layers.DeepseekV4CPUAttention is cpu_sparse.DeepseekV4CPUAttention
    assert model.DeepseekV4ForCausalLM.__module__.startswith("vllm.")
    for asks in (True, False, True, True):
        config_of(**({"attention_backend": NAME} if asks else {}))
        assert (layers.DeepseekV4CPUAttention.__module__ == "dsv4attn_vllm.cpu") is asks


# ---------------------------------------------------------------- arguments


def test_the_name_is_an_attention_backend_of_the_command_line() -> None:
    """It reaches other processes as CUSTOM, which every process knows before it has loaded a plugin."""
    from engine import model_folder

    options = ["--skip-tokenizer-init", "--load-format", "dummy", "--max-model-len", "1024"]
    line = ["--model", model_folder(), *options, "--attention-backend", NAME]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())

    config = AsyncEngineArgs.from_cli_args(parser.parse_args(line)).create_engine_config()

    assert config.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert os.environ[SWITCH] == "1"
    assert b"DSV4ATTN" not in pickle.dumps(config.attention_config)


def test_a_request_by_argument_is_that_of_one_model() -> None:
    config_of(attention_backend=NAME)
    assert os.environ[SWITCH] == "1"
    config_of()
    assert SWITCH not in os.environ


def test_a_worker_without_the_variable_gives_it_to_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that starts processes on another host copies no variable."""
    monkeypatch.setattr(model, "_active", {"v4"})
    config = config_of()
    config.attention_config.backend = AttentionBackendEnum.CUSTOM

    model.activate("v4", config)

    assert os.environ[SWITCH] == "1"


def test_a_switch_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    for options in ({"attention_backend": NAME}, {}):
        config_of(**options)
        assert os.environ[SWITCH] == "1"


def test_another_model_is_left_alone_but_for_the_name(tmp_path: Any) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaConfig(**sizes, vocab_size=128, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    options = {"block_size": 32, "max_model_len": 128, "max_num_batched_tokens": 128}

    assert config_of(str(tmp_path), **options).attention_config.backend is None
    with pytest.raises(RefusedError, match="--attention-backend DSV4ATTN: expected DeepSeek-V4, got another model -> "):
        config_of(str(tmp_path), attention_backend=NAME, **options)


REFUSED: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype: expected auto or fp8 or .*, got fp8_e5m2"),
    ({}, {"dtype": "float16"}, "--dtype: expected bfloat16, got torch.float16"),
    ({"DSV4ATTN_VLLM_PARTS": "indexr"}, {}, "DSV4ATTN_VLLM_PARTS: expected .*, got 'indexr' -> write indexer"),
    ({"DSV4ATTN_VLLM": "yes"}, {}, "environment variable DSV4ATTN_VLLM: expected 0 or 1, got 'yes'"),
    ({"DSV4ATTN_VLLM_ANY_VERSION": "x"}, {}, "DSV4ATTN_VLLM_ANY_VERSION: expected 0 or 1"),
    ({"DSV4ATTN_BACKEND": "tritn"}, {}, "did you mean 'triton'"),
    ({"DSV4ATTN_BACKEND": "sm90"}, {}, "sm90"),
]


@pytest.mark.parametrize(("variables", "options", "message"), REFUSED, ids=str)
def test_what_arguments_and_variables_decide_is_refused_before_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: dict[str, Any], message: str
) -> None:
    if variables.get("DSV4ATTN_VLLM_ANY_VERSION"):
        monkeypatch.setattr(type(GUARD), "installed", lambda _: "0.99.0")
    if variables.get("DSV4ATTN_BACKEND") == "sm90":
        monkeypatch.delenv("TRITON_INTERPRET")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises((RefusedError, NoBackendError, UnknownNameError), match=message):
        config_of(**options)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size: expected 1"),
        ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size: expected 1"),
        ("parallel_config.tensor_parallel_size", 3, "tensor parallel size"),
        ("attention_config.hisparse_config", object(), "HiSparse: expected off, got on"),
    ],
)
def test_what_vllm_refuses_on_a_cpu_itself(path: str, value: object, message: str) -> None:
    """Options that vLLM takes on GPUs: the configuration has them when it is resolved."""
    config, (owner, name) = config_of(), path.split(".")
    object.__setattr__(getattr(config, owner), name, value)

    with pytest.raises(RefusedError, match=message):
        arguments.resolve(config)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0"])
def test_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(type(GUARD), "installed", lambda _: version)

    with pytest.raises(RefusedError, match=f"version of vLLM: expected 0.32.0 or 0.33.0, got {version}"):
        config_of()


def test_a_backend_on_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what vLLM knows of the device: its runtime, which would not survive a fork, does not start."""
    monkeypatch.setenv("DSV4ATTN_BACKEND", "sm90")
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("the runtime of CUDA was started"))
    config = config_of_unchecked(monkeypatch)
    object.__setattr__(config.device_config, "device_type", "cuda")

    on_cuda(monkeypatch, (9, 0))
    arguments.resolve(config)
    on_cuda(monkeypatch, (8, 0))
    with pytest.raises(NoBackendError, match="sm_80"):
        arguments.resolve(config)


def config_of_unchecked(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """A configuration that was made without `resolve`."""
    with monkeypatch.context() as patch:
        patch.setattr(arguments, "resolve", lambda _: None)
        return config_of()


def test_monokernel_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    monkeypatch.setenv(SWITCH, "1")
    on_platform(monkeypatch, "rocm")
    if hasattr(config.kernel_config, "monokernel"):
        config.kernel_config.monokernel = True
    else:
        monkeypatch.setenv("VLLM_ROCM_MONO_DECODE", "1")

    with pytest.raises(RefusedError, match="expected off: it runs whole layers itself"):
        arguments.resolve(config)


def test_vllms_backend_by_name_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "tritn")
    config = config_of_unchecked(monkeypatch)
    on_cuda(monkeypatch, (9, 0))
    monkeypatch.setenv(SWITCH, "1")
    config.attention_config.backend = AttentionBackendEnum.FLASHMLA_SPARSE_DSV4

    arguments.resolve(config)


def test_arguments_are_resolved_once_however_often_the_plugin_is_loaded() -> None:
    create = EngineArgs.create_engine_config
    arguments.prepare()
    arguments.prepare()

    assert EngineArgs.create_engine_config is create
    assert hasattr(create, "of_dsv4attn")
    assert not hasattr(create.__wrapped__, "of_dsv4attn")
