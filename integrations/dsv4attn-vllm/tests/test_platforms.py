"""The layers of the other platforms, on a CPU: against vLLM's own kernels where those run in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from dsv4attn_vllm.attention import insert_context_kv
from dsv4attn_vllm.compressor import V41Compressor
from dsv4attn_vllm.cpu import CPUAttention
from dsv4attn_vllm.guard import LOG, RefusedError
from dsv4attn_vllm.index_metadata import IndexBackend, V41IndexBackend
from dsv4attn_vllm.indexer import V41Indexer
from dsv4attn_vllm.metadata import Backend, SWABackend, V41Backend, V41SWABackend
from dsv4attn_vllm.replacements import PLATFORMS, V41_PLATFORMS, platform_name, replace
from dsv4attn_vllm.xpu import XPUAttention
from engine import BEFORE_0_33, Engine, config_of, world
from models import V41, Model
from processes import run_on_rocm
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v4.xpu.xpu_sparse import DeepseekV4XPUAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts


@pytest.fixture
def xpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Faked: an event of an Intel GPU is that of a CPU, and there is no cache of an accelerator to empty."""
    monkeypatch.setattr(torch.xpu, "Event", torch.cuda.Event)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    config = config_of()
    with world(config):
        yield Engine(config, XPUAttention)


def test_vllms_own_kernels_for_intel_gpus_say_the_same(xpu: Engine) -> None:
    """Insert, decode and prefill by vLLM's Triton kernels, on the same caches. They drop the sink, so there is none."""
    requests = [(150, 1), (40, 1), (0, 20)]
    work = [(xpu.request(tokens), count) for tokens, count in requests]
    metadata, rows = xpu.describe(work), 22
    xpu.select(work)
    for layer in xpu.layers:
        layer.attn_sink.data.fill_(-float("inf"))
        with set_forward_context(metadata, xpu.config, num_tokens=rows):
            of_dsv4attn = xpu.run(layer, metadata, work, rows)
            q, cache = xpu.queries[layer.prefix].clone(), layer.swa_cache_layer.kv_cache
            written = cache.clone()
            theirs_q, kv, _ = xpu.inputs(layer, work, rows)
            DeepseekV4XPUAttention._fused_qnorm_rope_kv_insert(layer, theirs_q, kv, xpu.positions[:rows], metadata)
            assert torch.equal(written, cache), layer.prefix
            assert torch.allclose(q.float(), theirs_q.float(), rtol=0.01, atol=1e-3), layer.prefix
            of_vllm = torch.empty_like(of_dsv4attn)
            DeepseekV4XPUAttention.forward_mqa(layer, q, kv, xpu.positions[:rows], of_vllm)
        assert torch.allclose(
            of_dsv4attn.float(), of_vllm.float(), rtol=0, atol=0.015 * of_dsv4attn.abs().max().item()
        ), layer.prefix


def test_a_cpu_is_served_by_vllms_layer_for_cpus() -> None:
    """Faked: the compressor writes nothing, for vLLM's is compiled; the step is window-only."""
    config = config_of()
    with world(config):
        Engine(config, CPUAttention, layers=1).check_step([(150, 1), (0, 30)], [0, 30])


def test_stages_of_a_pipeline_agree_on_the_layouts_of_caches() -> None:
    """VLLM refuses stages that name different layouts. A stage may have no layer with an indexer."""
    for window, compressed, index in (
        (SWABackend, Backend, IndexBackend),
        (V41SWABackend, V41Backend, V41IndexBackend),
    ):
        without_indexer = get_supported_kv_cache_layouts([window, compressed])
        assert without_indexer == get_supported_kv_cache_layouts([window, compressed, index])
        assert len(without_indexer) == 2


def test_a_backend_that_vllm_has_no_choice_of_is_said_to_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ROCm, Intel GPUs and CPUs vLLM's model takes one class of layers, whatever --attention-backend says."""
    said: list[str] = []
    monkeypatch.setattr(LOG, "warning", lambda text, *values: said.append(text % values))
    config = config_of()
    with world(config):
        for requested in (None, AttentionBackendEnum.CUSTOM, AttentionBackendEnum.ROCM_FLASHMLA_SPARSE_DSV4):
            assert said == []
            config.attention_config.backend = requested
            config.compilation_config.static_forward_context.clear()
            CPUAttention(config, prefix="model.layers.0.attn")

    [line] = said
    assert line == (
        "--attention-backend ROCM_FLASHMLA_SPARSE_DSV4 is not looked at on this platform, where vLLM's "
        "DeepSeek-V4 has one backend; DSV4ATTN_VLLM=0 runs that one"
    )


def test_the_platform_of_this_machine_is_a_cpu_and_every_platform_has_its_class() -> None:
    assert platform_name() == "cpu"
    v4, v41 = (
        {
            name: " ".join(map(str, replaced)).replace(f"vllm.models.{model}.", "")
            for name, replaced in platforms.items()
        }
        for model, platforms in (("deepseek_v4", PLATFORMS), ("deepseek_v41", V41_PLATFORMS))
    )
    assert v4 == {
        "cuda": "nvidia.model._select_dsv4_attn_cls nvidia.dspark._insert_context_kv",
        "rocm": "amd.model.DeepseekV4ROCMAiterMLAAttention amd.dspark._insert_context_kv",
        "xpu": "xpu.model.DeepseekV4XPUAttention xpu.dspark._insert_context_kv",
        "cpu": "cpu.model.DeepseekV4CPUAttention",
    }
    assert v41 == {"cuda": v4["cuda"], "rocm": "amd.model._select_dsv4_attn_cls amd.dspark._insert_context_kv"}


def check_rocm(model: Model, requests: list[tuple[int, int]]) -> None:
    """Run a step on a model's layers for ROCm, in a process that takes itself for one with an MI355."""
    torch.manual_seed(0)
    module, dspark = (import_module(f"vllm.models.{model.name}.amd.{name}") for name in ("model", "dspark"))
    replace(model.platforms["rocm"])
    config = model.config()
    chosen = module._select_dsv4_attn_cls(config) if model is V41 else module.DeepseekV4ROCMAiterMLAAttention
    assert chosen.__module__ == "dsv4attn_vllm.rocm"
    assert dspark._insert_context_kv is insert_context_kv
    with world(config):
        engine, rows = model.engine(config, chosen, layers=model.layers), sum(count for _, count in requests)
        outs = engine.step([(engine.request(tokens), count) for tokens, count in requests])
        for layer, out in zip(engine.layers, outs, strict=True):
            assert torch.equal(engine.of_own_builder(layer, requests, rows), out), layer.prefix
            assert engine.error(layer, out, 0, requests[0][0], 0) < 0.012
        assert engine.layers[1]._o_proj(outs[1], torch.arange(rows)).shape == (rows, 256)
        if model is V41:
            check_v41_on_rocm(engine, outs)
        if hasattr(config.kernel_config, "monokernel"):
            name = "--monokernel"
            config.kernel_config.monokernel = True
        else:
            name = "environment variable VLLM_ROCM_MONO_DECODE"
            os.environ["VLLM_ROCM_MONO_DECODE"] = "1"
        cure = f"leave {name.split()[-1]} out"
        expected = f"{name}: expected off: it runs whole layers itself, got on -> {cure}"
        with pytest.raises(RefusedError, match=expected):
            chosen(config, prefix="model.layers.9.attn")
    if model is V41:
        name = "ROCM_FLASHMLA_SPARSE_DSV4" if BEFORE_0_33 else "ROCM_FLASHMLA_SPARSE_DSV41"
        config.attention_config.backend = AttentionBackendEnum[name]
        rocm = import_module("vllm.models.deepseek_v41.amd.rocm")
        assert module._select_dsv4_attn_cls(config) is rocm.DeepseekV41ROCMAiterMLAAttention


def check_v41_on_rocm(engine: Engine, outs: list[torch.Tensor]) -> None:
    """Outputs are bf16 tensors, and compressor and indexer are dsv4attn's, which the variable asks for."""
    for layer, out in zip(engine.layers, outs, strict=True):
        assert type(layer._alloc_attn_out(3, out.flatten(1))) is torch.Tensor
    assert type(engine.layers[3].indexer) is V41Indexer
    assert type(engine.layers[3].compressor) is V41Compressor


@pytest.mark.parametrize(
    ("model", "parts", "requests"),
    [("V4", "auto", [(150, 1), (40, 1), (0, 20)]), ("V41", "all", [(40, 1), (20, 9)])],
)
def test_rocms_layer_in_a_process_that_takes_itself_for_an_mi355(
    tmp_path: Path, model: str, parts: str, requests: list[tuple[int, int]]
) -> None:
    """Faked: what `run_on_rocm` says."""
    code = f"""
import os
os.environ["DSV4ATTN_VLLM_PARTS"] = {parts!r}
import models, test_platforms
test_platforms.check_rocm(models.{model}, {requests})
"""
    run_on_rocm(tmp_path, code)
