"""Hyper-connections on dsv4attn: vLLM's functions for CUDA, and its ops elsewhere, against its own torch code."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from dsv4attn_vllm import hyper_connections, replacements, serving
from dsv4attn_vllm.cuda import CUDAAttention
from dsv4attn_vllm.guard import RefusedError
from engine import config_of, world
from torch import Tensor
from vllm.model_executor import custom_op
from vllm.model_executor.kernels import mhc as theirs
from vllm.model_executor.layers import mhc

from dsv4attn import load_backend
from dsv4attn.core.contract import complete

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


class Given:
    """Streams [5, 4, 256] and weights of a sublayer."""

    def __init__(self) -> None:
        self.streams = torch.randn(5, 4, 256, dtype=torch.float32).bfloat16()
        self.x = torch.randn(5, 256, dtype=torch.float32).bfloat16()
        self.fn = torch.randn(24, 1024, dtype=torch.float32) / 32
        self.scale, self.base = torch.rand(3, dtype=torch.float32), torch.randn(24, dtype=torch.float32) / 4

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.fn, self.scale, self.base


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """fp32 within a few roundings of sums of 1024, bf16 within its own rounding."""
    for ours, own in zip(found, wanted, strict=True):
        assert ours.shape == own.shape
        assert ours.dtype == own.dtype
        tolerance = 0.008 if own.dtype == torch.bfloat16 else 3e-5
        assert torch.allclose(ours.float(), own.float(), rtol=tolerance, atol=tolerance)


def test_ops_are_vllms_torch_code(ops: None) -> None:
    given = Given()
    pre, post, fused, head = (getattr(mhc, name)() for name in hyper_connections.OPS)
    assert [type(op) for op in (pre, post, fused, head)] == [*hyper_connections.OPS.values()]

    wanted = theirs.mhc_pre_torch(given.streams, *given.weights, *MIXES)
    found = pre(given.streams, *given.weights, *MIXES)
    check(found, wanted)
    check((post(given.x, given.streams, *wanted[:2]),), (theirs.mhc_post_torch(given.x, given.streams, *wanted[:2]),))
    both = fused(given.x, given.streams, *wanted[:2], *given.weights, *MIXES)
    new = theirs.mhc_post_torch(given.x, given.streams, *wanted[:2])
    check(both, (new, *theirs.mhc_pre_torch(new, *given.weights, *MIXES)))
    gate = given.fn[:4], given.scale[:1], given.base[:4]
    flat = given.streams.flatten(1).float()
    mixes = flat @ gate[0].T * torch.rsqrt(flat.square().mean(1, keepdim=True) + EPS)
    weights = torch.sigmoid(mixes * gate[1] + gate[2]) + EPS
    check((head(given.streams, *gate, EPS, EPS),), ((weights[:, :, None] * given.streams.float()).sum(1).bfloat16(),))


def test_a_norm_is_not_forgotten(ops: None) -> None:
    """VLLM's own ops on CPUs and Intel GPUs take the weight of a norm and leave it out."""
    given, norm = Given(), torch.rand(256, dtype=torch.float32).bfloat16()

    *_, plain = mhc.MHCPreOp()(given.streams, *given.weights, *MIXES)
    *_, found = mhc.MHCPreOp()(given.streams, *given.weights, *MIXES, norm_weight=norm, norm_eps=EPS)

    x = plain.float()
    check((found,), ((x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * norm.float()).bfloat16(),))


def test_functions_of_the_cuda_model_are_replaced_by_those_of_the_same_name(
    ops: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "_originals", {})
    for one in hyper_connections.FUNCTIONS:
        module = import_module(one.module)
        monkeypatch.setattr(module, one.name, getattr(module, one.name))

    names = hyper_connections.install("cuda")
    assert hyper_connections.install("cuda") == names

    model = import_module("vllm.models.deepseek_v4.nvidia.model")
    left = [
        name for name in vars(model) if name.endswith("_tilelang") and getattr(model, name).__module__[:4] == "vllm"
    ]
    assert left == []
    assert replacements.original("vllm.models.deepseek_v4.nvidia.mtp.mhc_post_tilelang").__module__[:4] == "vllm"
    given, norm = Given(), torch.rand(256, dtype=torch.float32).bfloat16()
    options: dict[str, Any] = {"norm_weight": norm, "norm_eps": EPS}
    streams = given.x[:, None].repeat(1, 4, 1)
    wanted = streams, *model.mhc_pre_tilelang(streams, *given.weights, *MIXES, **options)
    found = model.mhc_pre_broadcast_tilelang(given.x, *given.weights, *MIXES, **options, fn_broadcast=given.fn[:, :256])
    assert all(map(torch.equal, found, wanted))


def test_other_leading_dims_are_kept(ops: None) -> None:
    given = Given()
    streams = given.streams[:4].view(2, 2, 4, 256)

    post, comb, x = mhc.MHCPreOp()(streams, *given.weights, *MIXES)
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
    given, steps = Given(), hyper_connections._steps()
    wanted = theirs.mhc_pre_torch(given.streams, *given.weights, *MIXES)[:2]
    right = theirs.mhc_post_torch(given.x, given.streams, *wanted)
    own = steps.mhc_post
    monkeypatch.setattr(steps, "mhc_post", lambda x, residual, post, comb: own(x, residual, post, comb.mT.contiguous()))

    with pytest.raises(AssertionError):
        check((mhc.MHCPostOp()(given.x, given.streams, *wanted),), (right,))


def test_layers_that_are_built_say_which_backend(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_connections, "_serving", [])
    with pytest.raises(RefusedError, match="mhc: expected a backend, got none -> build the layers of the model first"):
        hyper_connections.mhc_post(*[torch.zeros(1, 4, 4)] * 4)
    for steps, count in (("indexer,compressor", 0), ("indexer,compressor,mhc", 1)):
        monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", steps)
        serving._serving.cache_clear()
        config = config_of()
        with world(config):
            CUDAAttention(config, prefix="model.layers.0.attn")
        assert len(hyper_connections._serving) == count


def test_a_second_model_on_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's functions do not say which model calls them."""
    monkeypatch.setattr(hyper_connections, "_serving", [])
    monkeypatch.setenv("DSV4ATTN_VLLM_STEPS", "mhc")

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
    assert hyper_connections._steps() is complete(first.backend).layer_steps
