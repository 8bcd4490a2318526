"""Which parts run on dsv4attn: the variable, the devices of `auto`, and what is refused when layers are built."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from dsv4attn_vllm import hyper_connections, parts, serving
from dsv4attn_vllm.compressor import Compressor
from dsv4attn_vllm.cpu import CPUAttention
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import LOG, RefusedError
from dsv4attn_vllm.index_metadata import IndexBackend
from dsv4attn_vllm.indexer import IndexCache, IndexerParts, Selector
from dsv4attn_vllm.parts import COMPRESSOR, INDEXER, MHC, PROJECTION, Device
from processes import execute, run
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.custom_op import op_registry_oot
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import DeepseekCompressor
from vllm.platforms import current_platform

from dsv4attn.core.contract.device import DeviceFacts

AMPERE = Device("cuda", deep_gemm=False)
HOPPER = Device("cuda", deep_gemm=True)
BLACKWELL = Device("cuda", deep_gemm=True, packed_scales=True)
MI300, INTEL, CPU = (Device(name, deep_gemm=False) for name in ("rocm", "xpu", "cpu"))
C4A = "model.layers.1.attn"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4ATTN_BACKEND", "reference")
    monkeypatch.setattr(hyper_connections, "_serving", [])
    serving._serving.cache_clear()


def layer_of(config: VllmConfig, layer_class: type = CUDAAttention) -> CUDAAttention:
    topk = torch.zeros(config.scheduler_config.max_num_batched_tokens, 32, dtype=torch.int32)
    return layer_class(config, prefix=C4A, topk_indices_buffer=topk)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        *[(device, parts.AUTO) for device in (AMPERE, CPU)],
        *[(device, {PROJECTION}) for device in (HOPPER, BLACKWELL)],
        *[(device, set()) for device in (MI300, INTEL)],
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set | frozenset) else str(value),
)
@pytest.mark.parametrize("text", ["", " ", "auto", "AUTO", "auto,"])
def test_auto_takes_what_vllm_has_no_kernels_for_and_its_rounding(
    monkeypatch: pytest.MonkeyPatch, device: Device, expected: set[str], text: str
) -> None:
    monkeypatch.setenv(parts.VARIABLE, text)

    assert parts.chosen(device) == expected
    assert MHC not in parts.chosen(device)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", {INDEXER, COMPRESSOR, PROJECTION, MHC}),
        ("none", set()),
        ("mhc", {MHC}),
        (" indexer , Compressor,", {INDEXER, COMPRESSOR}),
    ],
)
@pytest.mark.parametrize("device", [AMPERE, HOPPER, MI300, CPU], ids=str)
def test_named_steps_are_taken_on_every_device(
    monkeypatch: pytest.MonkeyPatch, device: Device, text: str, expected: set[str]
) -> None:
    monkeypatch.setenv(parts.VARIABLE, text)

    assert parts.chosen(device) == expected


@pytest.mark.parametrize("text", [INDEXER, COMPRESSOR])
def test_half_of_the_index_keys_is_refused_where_vllm_has_another_format(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(parts.VARIABLE, text)

    assert parts.chosen(HOPPER) == {text}
    assert parts.chosen(evolve(BLACKWELL, mxfp4=True)) == {text}  # one format
    with pytest.raises(RefusedError, match=f"another format on this GPU, got {text} -> name both of them"):
        parts.chosen(BLACKWELL)


def test_pages_that_only_vllm_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parts.VARIABLE, "all")

    with pytest.raises(RefusedError, match="indexer_kv_dtype: expected fp8, for parts of dsv4attn on ROCm, got mxfp4"):
        parts.chosen(evolve(MI300, mxfp4=True))


def test_hyper_connections_in_compiled_code_are_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parts.VARIABLE, "mhc")
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE

    with pytest.raises(
        RefusedError, match=r"mhc: expected a model that is not compiled, got torch.compile -> pass --enf"
    ):
        layer_of(config)


def test_a_backend_without_an_fp8_projection(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused by name, and left out of `auto` and `all`."""
    for text in ("auto", "all"):
        monkeypatch.setenv(parts.VARIABLE, text)
        serving._serving.cache_clear()
        assert PROJECTION not in serving.serving_of(config).parts
    monkeypatch.setenv(parts.VARIABLE, "projection")
    serving._serving.cache_clear()
    with pytest.raises(
        RefusedError, match=r"backend reference: expected projection=fp8, which .* asks for, got bf16 -> le"
    ):
        layer_of(config)
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    serving._serving.cache_clear()
    served = serving.serving_of(config)
    assert (served.parts, served.backend.projects_fp8) == ({PROJECTION}, True)


def test_an_option_in_the_configuration_file_stays(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "dsv4attn.toml").write_text('[options.triton]\nprojection = "bf16"\n')
    monkeypatch.setenv("DSV4ATTN_CONFIG", str(tmp_path / "dsv4attn.toml"))
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")

    served = serving.serving_of(config)

    assert (served.parts, served.backend.projects_fp8) == ({INDEXER, COMPRESSOR}, False)


@pytest.mark.parametrize("layer_class", [CUDAAttention, CPUAttention])
def test_classes_of_a_layer_by_its_parts(config: VllmConfig, layer_class: type) -> None:
    layer = layer_of(config, layer_class)
    assert isinstance(layer.indexer, IndexerParts)
    assert isinstance(layer.indexer, DeepseekV4Indexer)
    assert type(layer.indexer.indexer_op) is Selector
    assert type(layer.indexer.k_cache) is IndexCache
    assert layer.indexer.k_cache.get_attn_backend() is IndexBackend
    assert type(layer.compressor) is type(layer.indexer.compressor) is Compressor
    assert not op_registry_oot  # other models of the process have their own ops


def test_none_leaves_vllms_own(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parts.VARIABLE, "none")

    layer = layer_of(config)

    assert serving.serving_of(config).parts == set()
    assert type(layer.indexer) is DeepseekV4Indexer
    assert type(layer.indexer.k_cache) is DeepseekV4IndexerCache
    assert type(layer.compressor) is type(layer.indexer.compressor) is DeepseekCompressor
    assert not op_registry_oot


def test_an_indexer_is_built_where_vllms_needs_deep_gemm(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does on an A100. Faked: that the platform is CUDA."""
    from vllm.model_executor.layers import sparse_attn_indexer

    monkeypatch.setattr(sparse_attn_indexer, "has_deep_gemm", lambda: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setenv(parts.VARIABLE, "none")
    with pytest.raises(RuntimeError, match="requires DeepGEMM"):
        layer_of(config)
    config.compilation_config.static_forward_context.clear()
    monkeypatch.setenv(parts.VARIABLE, "indexer,compressor")

    assert type(layer_of(config).indexer.indexer_op) is Selector


@pytest.mark.parametrize(("text", "registers"), [("indexer", False), ("none", True)])
def test_kernels_that_will_not_run_are_not_compiled_ahead(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, text: str, registers: bool
) -> None:
    from vllm.models.deepseek_v4 import compressor

    registered: list[object] = []
    kernel = compressor._SAVE_PARTIAL_STATES_KERNEL
    monkeypatch.setattr(type(kernel), "register_warmup", lambda *_, **options: registered.append(options))
    monkeypatch.setenv(parts.VARIABLE, text)
    config.kernel_config.enable_jit_warmup = True
    with parts.without_warmup(config, parts.chosen(HOPPER)):
        compressor.DeepseekCompressor(config, 4, 256, 128, prefix="one")

    assert bool(registered) is registers
    assert config.kernel_config.enable_jit_warmup


@pytest.mark.parametrize("asked", [True, False])
def test_kernels_of_vllm_that_still_run_are_compiled_ahead(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    """Otherwise vLLM would compile them in a request, and its monitor of compilations would stop the engine."""
    from vllm.models.common.ops import _FUSED_Q_KV_RMSNORM_KERNEL
    from vllm.v1.attention.backends.mla import compressor_utils, sparse_swa

    kernels = {
        "prefill": sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL,
        "windows": sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL,
        "norms": _FUSED_Q_KV_RMSNORM_KERNEL,
        "slots": compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL,
    }
    registered: dict[str, object] = {}
    for name, kernel in kernels.items():
        monkeypatch.setattr(
            type(kernel), "register_warmup", lambda *_, name=name, **options: registered.update({name: options})
        )
    monkeypatch.setenv(parts.VARIABLE, "indexer,compressor")
    config.kernel_config.enable_jit_warmup = asked

    layer = layer_of(config)

    assert registered.keys() == (kernels.keys() if asked else set())
    if asked:
        sizes = {"window_size": 128, "block_size": layer.swa_cache_layer.block_size, "max_image_tokens": 0}
        assert registered["windows"] == sizes


def test_the_log_says_once_which_steps_run(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    class Records(logging.Handler):
        emit = staticmethod(lambda record: said.append(record.getMessage()))

    said: list[str] = []
    monkeypatch.setattr(LOG, "_lines", set())
    monkeypatch.setattr(LOG.logger, "handlers", [Records()])
    for _ in range(2):
        serving._serving.cache_clear()
        layer_of(config)
        config.compilation_config.static_forward_context.clear()

    expected = "dsv4attn-vllm: compressor, indexer on dsv4attn (DSV4ATTN_VLLM_PARTS)"
    assert [text for text in said if parts.VARIABLE in text] == [expected]


MODEL = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
os.environ["DSV4ATTN_VLLM_PARTS"] = "mhd"
try:
    ModelRegistry.models["DeepseekV4ForCausalLM"].load_model_cls()
except RuntimeError as error:
    refused = str(error)
os.environ["DSV4ATTN_VLLM_PARTS"] = "mhc"
ModelRegistry.models["DeepseekV4ForCausalLM"].load_model_cls()
from vllm.model_executor.custom_op import op_registry_oot
print()
print(json.dumps([refused, sorted(op_registry_oot)]))
"""


def test_a_model_is_refused_or_gets_its_hyper_connections_when_it_is_imported(tmp_path: Path) -> None:
    """In a process of its own, as vLLM imports models."""
    printed = run(tmp_path, execute, {"code": MODEL})

    refused, ops = json.loads(printed.strip().splitlines()[-1])
    assert "DSV4ATTN_VLLM_PARTS: expected auto, all, none, or some of" in refused
    assert refused.endswith("got 'mhd' -> write mhc, or set DSV4ATTN_VLLM=0 to run vLLM's own attention")
    assert ops == ["HCHeadOp", "MHCFusedPostPreOp", "MHCPostOp", "MHCPreOp"]
    assert "replaced vllm.models.deepseek_v4.cpu.model.DeepseekV4CPUAttention, MHCPreOp, MHCPostOp" in printed


PART_KERNELS = {
    PROJECTION: {"quantize_output_kernel", "project_codes_kernel"},
    INDEXER: {"index_query_kernel", "score_kernel", "choose_kernel"},
    COMPRESSOR: {"save_kernel", "compress_kernel"},
    MHC: {"products_kernel", "post_kernel", "mix_kernel"},
}


@pytest.mark.parametrize("text", ["none", "projection", "indexer", "compressor", "mhc", "auto", "all"])
def test_kernels_of_steps_are_compiled_before_the_first_request(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """The variants that a warm-up on an A100 compiles; nothing is compiled here."""
    monkeypatch.setenv(parts.VARIABLE, text)
    monkeypatch.setenv("DSV4ATTN_BACKEND", "triton")
    serving_backend = serving.serving_of(config)

    kernels = {
        variant.name
        for variant in serving_backend.backend.kernel_variants(serving_backend.bounds(), DeviceFacts.named("a100"))
    }

    around = {name for several in PART_KERNELS.values() for name in several}
    assert kernels & around == {name for part in serving_backend.parts for name in PART_KERNELS[part]}
    assert "attention" in kernels


class SlowBackend:
    """A backend whose kernels take a while to compile, or do not compile."""

    name = "slow"

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.may_end, self.devices = error, threading.Event(), []

    def warmup(self, bounds: object, device: torch.device) -> int:
        """Wait until the test lets it end."""
        assert self.may_end.wait(timeout=60)
        self.devices.append(device)
        if self.error is not None:
            raise self.error
        return 7


@pytest.fixture
def compiles(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., serving.Serving]:
    """The serving of this model on a GPU that is faked, with a slow backend."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(serving, "plan_workspace", lambda *_: None)
    monkeypatch.setattr(serving.Serving, "_workspaces", lambda _: [])
    return lambda backend: evolve(serving.serving_of(config), device="cuda", backend=backend, warm=False)


def test_kernels_are_compiled_while_weights_are_loaded(compiles: Callable[..., serving.Serving]) -> None:
    backend = SlowBackend()
    served = compiles(backend)

    for _ in range(3):  # layers
        served.start_compiling()
    backend.may_end.set()
    for _ in range(3):
        served.warm_up(served.layer(4), torch.device("cuda"))
    served.start_compiling()

    assert backend.devices == [torch.device("cuda", 1)]
    assert served.warm


def test_a_kernel_that_does_not_compile_is_raised_where_start_up_waits(
    compiles: Callable[..., serving.Serving],
) -> None:
    backend = SlowBackend(RuntimeError("no such instruction"))
    served = compiles(backend)
    served.start_compiling()
    backend.may_end.set()

    with pytest.raises(RuntimeError, match="no such instruction"):
        served.warm_up(served.layer(4), torch.device("cuda"))
    assert not served.warm


def test_nothing_is_compiled_on_a_cpu(compiles: Callable[..., serving.Serving]) -> None:
    backend = SlowBackend()
    served = evolve(compiles(backend), device="cpu")

    served.start_compiling()

    assert served.compiling is None


def test_the_device_of_this_machine(config: VllmConfig) -> None:
    assert Device.here(config) == CPU
