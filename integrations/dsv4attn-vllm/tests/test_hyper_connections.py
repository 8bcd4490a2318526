"""Hyper-connections on dsv4attn: vLLM's functions for CUDA, and its ops elsewhere, against its own torch code."""

# ruff: noqa: ARG005 - a fake has the arguments of what it replaces

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from dsv4attn_vllm import hyper_connections, replacements, serving
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from dsv4attn_vllm.parts import INDEXER, MHC, without_warmup
from engine import config_of, world
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.kernels import mhc as theirs
from vllm.model_executor.layers import mhc

from dsv4attn import load_backend

EPS = 1e-6
MIXES = EPS, EPS, EPS, 2.0, 20


@pytest.fixture
def ops(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """VLLM's registry of ops with dsv4attn's in it."""
    monkeypatch.setattr(hyper_connections, "_serving", [])
    monkeypatch.setattr(custom_op, "op_registry_oot", dict(custom_op.op_registry_oot))
    monkeypatch.setattr(hyper_connections, "op_registry_oot", custom_op.op_registry_oot)
    assert hyper_connections.install("cpu") == hyper_connections.install("xpu") == tuple(hyper_connections.OPS)
    hyper_connections.serve(load_backend(backend))
    with world(config_of()):
        yield


class StreamInputs:
    """Streams [5, 4, 256] and weights of a sublayer."""

    def __init__(self) -> None:
        self.streams = torch.randn(5, 4, 256, dtype=torch.float32).bfloat16()
        self.x = torch.randn(5, 256, dtype=torch.float32).bfloat16()
        self.fn = torch.randn(24, 1024, dtype=torch.float32) / 32
        self.scale, self.base = torch.rand(3, dtype=torch.float32), torch.randn(24, dtype=torch.float32) / 4

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.fn, self.scale, self.base


def check(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """fp32 within a few roundings of sums of 1024, bf16 within its own rounding."""
    for ours, vllms in zip(results, expected, strict=True):
        assert ours.shape == vllms.shape
        assert ours.dtype == vllms.dtype
        tolerance = 0.008 if vllms.dtype == torch.bfloat16 else 3e-5
        assert torch.allclose(ours.float(), vllms.float(), rtol=tolerance, atol=tolerance)


def test_ops_are_vllms_torch_code(ops: None) -> None:
    inputs = StreamInputs()
    pre, post, fused, head = (getattr(mhc, name)() for name in hyper_connections.OPS)
    assert [type(op) for op in (pre, post, fused, head)] == [*hyper_connections.OPS.values()]

    expected = theirs.mhc_pre_torch(inputs.streams, *inputs.weights, *MIXES)
    results = pre(inputs.streams, *inputs.weights, *MIXES)
    check(results, expected)
    check(
        (post(inputs.x, inputs.streams, *expected[:2]),),
        (theirs.mhc_post_torch(inputs.x, inputs.streams, *expected[:2]),),
    )
    both = fused(inputs.x, inputs.streams, *expected[:2], *inputs.weights, *MIXES)
    new = theirs.mhc_post_torch(inputs.x, inputs.streams, *expected[:2])
    check(both, (new, *theirs.mhc_pre_torch(new, *inputs.weights, *MIXES)))
    gate = inputs.fn[:4], inputs.scale[:1], inputs.base[:4]
    flat = inputs.streams.flatten(1).float()
    mixes = flat @ gate[0].T * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)
    weights = torch.sigmoid(mixes * gate[1] + gate[2]) + EPS
    check((head(inputs.streams, *gate, EPS, EPS),), ((weights[:, :, None] * inputs.streams.float()).sum(1).bfloat16(),))


def test_a_norm_is_not_forgotten(ops: None) -> None:
    """VLLM's own ops on CPUs and Intel GPUs take the weight of a norm and leave it out."""
    inputs, norm = StreamInputs(), torch.rand(256, dtype=torch.float32).bfloat16()

    *_, plain = mhc.MHCPreOp()(inputs.streams, *inputs.weights, *MIXES)
    *_, results = mhc.MHCPreOp()(inputs.streams, *inputs.weights, *MIXES, norm_weight=norm, norm_eps=EPS)

    x = plain.float()
    check((results,), ((x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * norm.float()).bfloat16(),))


def test_functions_of_the_cuda_model_are_replaced_by_those_of_the_same_name(
    ops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "_originals", {})
    for replacement in hyper_connections.FUNCTIONS:
        module = import_module(replacement.module)
        monkeypatch.setattr(module, replacement.name, getattr(module, replacement.name))

    for replacement in hyper_connections.CONSTRUCTORS:
        owner = getattr(import_module(replacement.module), replacement.name.partition(".")[0])
        monkeypatch.setattr(owner, "__init__", owner.__init__)

    names = hyper_connections.install("cuda")
    assert hyper_connections.install("cuda") == names

    model = import_module("vllm.models.deepseek_v4.nvidia.model")
    left = [
        name for name in vars(model) if name.endswith("_tilelang") and getattr(model, name).__module__[:4] == "vllm"
    ]
    assert left == []
    assert replacements.original("vllm.models.deepseek_v4.nvidia.mtp.mhc_post_tilelang").__module__[:4] == "vllm"
    inputs, norm = StreamInputs(), torch.rand(256, dtype=torch.float32).bfloat16()
    options: dict[str, Any] = {"norm_weight": norm, "norm_eps": EPS}
    streams = inputs.x[:, None].repeat(1, 4, 1)
    expected = streams, *model.mhc_pre_tilelang(streams, *inputs.weights, *MIXES, **options)
    results = model.mhc_pre_broadcast_tilelang(
        inputs.x, *inputs.weights, *MIXES, **options, fn_broadcast=inputs.fn[:, :256]
    )
    assert all(map(torch.equal, results, expected))

    # the streams are a view of the embedding, which later steps of the sublayer read and do not write
    assert results[0].data_ptr() == inputs.x.data_ptr()
    embedding, out = inputs.x.clone(), torch.randn(5, 256, dtype=torch.float32).bfloat16()
    for name, arguments in (("mhc_post", ()), ("mhc_fused_post_pre", (*inputs.weights, *MIXES))):
        of_view, of_copy = (
            getattr(model, f"{name}_tilelang")(out, *mixed[:3], *arguments) for mixed in (results, expected)
        )
        assert all(map(torch.equal, of_view, of_copy)), name
        assert all(result.is_contiguous() for result in of_view), name
    assert torch.equal(inputs.x, embedding)


KERNELS = [f"_{name}_TILELANG_KERNEL" for name in ("HC_PRENORM_GEMM", "MHC_PRE_BIG_FUSE", "MHC_POST", "MHC_FUSED")]


@pytest.mark.parametrize("ours", [True, False], ids=["dsv4attn", "vllm"])
def test_vllms_kernels_are_compiled_ahead_only_where_they_run(
    ops: None, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Faked: TileLang's kernels, which note that they are registered; attention, experts, and CUDA's streams."""
    registered, warmup_flags = [], []
    tilelang = types.ModuleType("tilelang_kernels")
    for name in (*KERNELS, "_HC_HEAD_FUSED_TILELANG_KERNEL"):
        note = partial(lambda name, *args, **options: registered.append(name), name)
        setattr(tilelang, name, SimpleNamespace(register_warmup=note))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.kernels.mhc.tilelang_kernels", tilelang)
    model = import_module("vllm.models.deepseek_v4.nvidia.model")

    def attention(config: Any, *args: Any, **options: Any) -> torch.nn.Module:
        with without_warmup(config, frozenset({MHC})):
            warmup_flags.append(config.kernel_config.enable_jit_warmup)
        with without_warmup(config, frozenset({MHC, INDEXER})):
            warmup_flags.append(config.kernel_config.enable_jit_warmup)
        return torch.nn.Module()

    monkeypatch.setattr(model, "_select_dsv4_attn_cls", lambda config: attention)
    monkeypatch.setattr(model, "DeepseekV4MoE", lambda *args, **options: torch.nn.Module())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(replacements, "_originals", {})
    for replacement in (*hyper_connections.FUNCTIONS, *hyper_connections.CONSTRUCTORS):
        owner = import_module(replacement.module)
        for name in replacement.name.split(".")[:-1]:
            owner = getattr(owner, name)
        monkeypatch.setattr(owner, replacement.attribute, getattr(owner, replacement.attribute))
    if ours:
        hyper_connections.install("cuda")
    config = config_of()
    config.kernel_config.enable_jit_warmup = True
    with set_current_vllm_config(config):
        model.DeepseekV4DecoderLayer(config, "model.layers.7")
        built_model = model.DeepseekV4Model(vllm_config=config, prefix="model")

    assert len(built_model.layers) == 3
    assert set(registered) - {"_HC_PRENORM_GEMM_TILELANG_KERNEL"} == (
        set() if ours else {*KERNELS[1:], "_HC_HEAD_FUSED_TILELANG_KERNEL"}
    )
    # kernels of attention are compiled ahead as before, unless dsv4attn has those parts too
    assert warmup_flags == [True, False] * 4
    assert config.kernel_config.enable_jit_warmup


def test_other_leading_dims_are_kept(ops: None) -> None:
    inputs = StreamInputs()
    streams = inputs.streams[:4].view(2, 2, 4, 256)

    post, comb, x = mhc.MHCPreOp()(streams, *inputs.weights, *MIXES)
    back = mhc.MHCPostOp()(x, streams, post, comb)

    assert [*post.shape, *comb.shape, *x.shape] == [2, 2, 4, 1, 2, 2, 4, 4, 2, 2, 256]
    assert back.shape == streams.shape


def test_an_op_that_another_plugin_has_is_refused(ops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(custom_op.op_registry_oot, "HCHeadOp", mhc.MHCPostOp)

    with pytest.raises(
        RefusedError, match=r"HCHeadOp: expected vLLM's own, got <class .* of another plugin -> leave mhc"
    ):
        hyper_connections.install("cpu")


def test_a_planted_bug_is_found(ops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix of the streams, transposed: sums over its second index."""
    inputs, ops_of_backend = StreamInputs(), hyper_connections._layer_ops()
    expected = theirs.mhc_pre_torch(inputs.streams, *inputs.weights, *MIXES)[:2]
    expected_streams = theirs.mhc_post_torch(inputs.x, inputs.streams, *expected)
    right_post = ops_of_backend.mhc_post

    def transposed(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return right_post(x, residual, post, comb.mT.contiguous())

    monkeypatch.setattr(hyper_connections, "_layer_ops", lambda: evolve(ops_of_backend, mhc_post=transposed))

    with pytest.raises(AssertionError):
        check((mhc.MHCPostOp()(inputs.x, inputs.streams, *expected),), (expected_streams,))


def test_layers_that_are_built_say_which_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_connections, "_serving", [])
    with pytest.raises(RefusedError, match="mhc: expected a backend, got none -> build the layers of the model first"):
        hyper_connections.mhc_post(*[torch.zeros(1, 4, 4)] * 4)
    for parts, count in (("indexer,compressor", 0), ("indexer,compressor,mhc", 1)):
        monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", parts)
        serving._serving.cache_clear()
        config = config_of()
        with world(config):
            CUDAAttention(config, prefix="model.layers.0.attn")
        assert len(hyper_connections._serving) == count


def test_a_second_model_on_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's functions do not say which model calls them."""
    monkeypatch.setattr(hyper_connections, "_serving", [])
    monkeypatch.setenv("DSV4ATTN_VLLM_PARTS", "mhc")

    def build(backend: str, max_model_len: int) -> serving.Serving:
        monkeypatch.setenv("DSV4ATTN_BACKEND", backend)
        with world(config := config_of(max_model_len=max_model_len)):
            return serving.serving_of(config)

    first = build("reference", 1024)
    assert build("reference", 512).backend is not first.backend
    with pytest.raises(
        RefusedError, match=r"mhc: expected reference, the backend of the model that was built first, got triton -> "
    ):
        build("triton", 256)
    assert hyper_connections._layer_ops() is first.backend.layer_ops
