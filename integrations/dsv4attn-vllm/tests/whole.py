"""Steps of whole layers: hidden states in, hidden states out, through vLLM's own `forward` of a layer.

Faked, next to what conftest.py says, so that outputs can be compared bit for bit on every CPU:
- torch's matrix products are computed in fp64 and rounded once. vLLM multiplies fused weights, and dsv4attn's own
  layers one after the other: the bits of a product in bf16 depend on its shape. `torch.mm(..., out_dtype=)`, which CPUs
  lack, is such a product too.
- q's and kv's norms are computed in fp64 and rounded to fp32, after a check that vLLM's and dsv4attn's results are that
  but for a few roundings of fp32. One such rounding decides the bits of bf16 where a value is half-way between two.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from engine import Engine, Request, config_of, model_folder, world
from torch import Tensor

import dsv4attn as ds
from dsv4attn.core.torch_ops.tiles import gives_fp32

SMALL = {"index_topk": 8, "index_n_heads": 16}
"""Few entries to select, so that short contexts have more; few heads, for Triton's interpreter."""


def use_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ask for a backend of dsv4attn by the variable that a user sets."""
    from dsv4attn_vllm import serving

    monkeypatch.setenv("DSV4ATTN_BACKEND", name)
    serving._serving.cache_clear()


def with_op(monkeypatch: pytest.MonkeyPatch, engine: Engine, **changed: Any) -> None:
    """Change layer ops of the engine's backend."""
    backend = engine.layers[0]._serving.backend
    monkeypatch.setitem(vars(backend), "layer_ops", evolve(backend.layer_ops, **changed))


class HiddenStates(Engine):
    """What engines of V4 and V4.1 whose layers run as a whole share."""

    def hidden_states(self, layer: Any, work: Sequence[tuple[Request, int]], rows: int) -> Tensor:
        """[rows, hidden] bf16, which depend on request, position and layer only; rows of padding are 3."""
        return self.random_rows(work, rows, layer.hidden_size, self.seed_of(layer)).bfloat16()


class WholeEngine(HiddenStates):
    """An engine whose layers run as a whole, and each get hidden states of their own.

    hidden: [rows, hidden] bf16 of each layer in the last step, by prefix.
    """

    def select(self, work: Sequence[tuple[Request, int]]) -> None:
        """Leave the selection to the indexer; what it does not write is visible as a slot far outside."""
        self.topk.fill_(10**6)

    def run(self, layer: Any, metadata: Any, work: Any, rows: int, *, attend: bool = True) -> Tensor:
        """The output [rows, hidden] of a layer. attend: else nothing is selected and attended, which is quicker."""
        hidden = self.hidden_states(layer, work, rows)
        self.queries[layer.prefix] = hidden
        with pytest.MonkeyPatch.context() as patch:
            if not attend:
                patch.setattr(layer, "forward_mqa", lambda *_: None, raising=False)
                patch.setattr(layer, "_o_proj", lambda *_: hidden, raising=False)
                if layer.indexer is not None:
                    patch.setattr(layer.indexer.indexer_op, "forward", lambda *_: None)
            return layer(self.positions[:rows], hidden)


@contextmanager
def whole_engine(
    layer_class: type, *, kinds: tuple[str, ...] = ("swa", "c4a", "c128a"), **arguments: Any
) -> Iterator[WholeEngine]:
    """A `WholeEngine` with a layer of each of these kinds."""
    config = config_of(model_folder(kinds, **SMALL), **arguments)
    with world(config), products_in_fp64():
        engine = WholeEngine(config, layer_class, layers=len(kinds))
        with norms_in_fp64(engine):
            yield engine


@contextmanager
def products_in_fp64() -> Iterator[None]:
    """Compute `torch.mm` and `torch.bmm`, and with them `linear`, in fp64; round the result once, to its dtype."""

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        # by numpy: torch's product in fp64 would call this function again
        wide = np.matmul(*(operand.detach().double().numpy() for operand in (a, b)))
        return torch.from_numpy(wide).to(out_dtype or a.dtype)

    library = torch.library.Library("aten", "IMPL")
    # whether torch multiplies into fp32 is tried once, and here it does
    gives_fp32.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in ("mm", "mm.dtype", "bmm"):
                library.impl(name, product, "CPU")
        yield
    finally:
        library._destroy()
        gives_fp32.cache_clear()


ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""The largest part of a value that rounding it once adds or takes."""


def exact_norm(x: Tensor, weight: Tensor, eps: float, result: Tensor) -> Tensor:
    """RMSNorm of x [..., d] times weight [d], in fp64 and rounded to fp32.

    result: the norm that the layer computed, which is compared with this one.
    """
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
    # 8 roundings of fp32: those of the mean of squares count half, as its root is taken; and of two products
    allowed = ROUNDING[result.dtype] + 8 * ROUNDING[torch.float32]
    assert ((result.double() - wide).abs() <= allowed * wide.abs()).all()
    return wide.float()


@contextmanager
def norms_in_fp64(engine: Engine) -> Iterator[None]:
    """Replace the norms of q and kv, of an engine's layers and of dsv4attn's own, by `exact_norm`."""

    def replaced(layer: Any) -> Callable[[Tensor], tuple[Tensor, Any, Tensor]]:
        original, sizes = layer._split_qkv_and_norm, [layer.q_lora_rank, layer.head_dim]

        def split_and_norm(qr_kv: Tensor) -> tuple[Tensor, Any, Tensor]:
            qr, scale, kv = original(qr_kv)
            projections, weights = qr_kv.split(sizes, -1), (layer.q_norm.weight, layer.kv_norm.weight)
            norms = map(exact_norm, projections, weights, [layer.eps] * 2, (qr, kv))
            qr, kv = (norm.to(qr_kv.dtype) for norm in norms)
            return qr, scale, kv

        return split_and_norm

    backend = engine.layers[0]._serving.backend
    norm_of_backend = backend.layer_ops.norm_q_kv

    def norm_q_kv(
        q: Tensor, kv: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        results = norm_of_backend(q, kv, q_weight, kv_weight, eps, dtype)
        norms = map(exact_norm, (q, kv), (q_weight, kv_weight), [eps] * 2, results)
        return tuple(norm.to(dtype) for norm in norms)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "layer_ops", evolve(backend.layer_ops, norm_q_kv=norm_q_kv))
        for layer in engine.layers:
            patch.setattr(layer, "_split_qkv_and_norm", replaced(layer))
        yield


class OwnLayers:
    """dsv4attn's own layers with the weights of an engine's, over caches, builder and pages of dsv4attn."""

    def __init__(self, engine: Engine) -> None:
        serving = engine.layers[0]._serving
        self.model, options = serving.model, {"index_layout": serving.index_layout, "backend": serving.backend}
        layouts = serving.swa_layout, serving.compressed_layout
        self.manager = ds.CacheManager(self.model, serving.limits, layouts[0], compressed_layout=layouts[1], **options)
        self.layers, self.sequences = [], {}
        for i, of_vllm in enumerate(engine.layers):
            weights = ds.AttentionWeights.from_dict(weights_of(of_vllm), self.model, i)
            space = {"workspace": ds.WorkspaceManager(), "cos_sin_cache": of_vllm.rotary_emb.cos_sin_cache}
            if self.model.shared_latent:
                space["sources"] = self.layers
            layer = ds.DeepseekV4Attention(
                of_vllm.prefix, self.model, i, serving.limits, serving.backend, weights, **space
            )
            layer.bind_kv_cache(self.manager.caches[i])
            self.layers.append(layer)

    def step(
        self, work: Sequence[tuple[Request, int]], hidden: Sequence[Tensor], *, attend: bool = True
    ) -> list[Tensor]:
        """The output of each layer of a step, of requests that are new here or ran in earlier steps.

        attend: else caches are written and outputs mean nothing, which is quicker.
        """
        for request, _ in work:
            self.sequences.setdefault(request.name, self.manager.new())
        requests = [(self.sequences[request.name], count) for request, count in work]
        context = ds.set_forward_context(self.manager.metadata(self.manager.batch(requests)))
        with torch.no_grad(), context, pytest.MonkeyPatch.context() as patch:
            for layer in [] if attend else self.layers:
                patch.setattr(layer.attention, "attend_from", lambda *_: None)
            positions = self.manager.positions(requests)
            outs = [layer(layer_hidden, positions) for layer, layer_hidden in zip(self.layers, hidden, strict=True)]
        self.manager.advance(requests)
        return outs


def check_rejected_drafts(engine: WholeEngine, steps: Sequence[tuple[int, int]]) -> None:
    """Run one request, and compare each layer's outputs with those of dsv4attn's own layer, bit for bit.

    steps: (tokens that the request has, tokens to run). Tokens of the step before that are run again were rejected.
    """
    own_layers, request = OwnLayers(engine), engine.request()
    for tokens, count in steps:
        request.tokens, work = tokens, [(Request(request.name, tokens), count)]
        hidden = [engine.hidden_states(layer, work, count) for layer in engine.layers]
        of_vllm = engine.step([(request, count)])
        if request.name in own_layers.sequences:
            own_layers.manager.truncate(own_layers.sequences[request.name], tokens)
        for layer, a, b in zip(engine.layers, of_vllm, own_layers.step(work, hidden), strict=True):
            assert torch.equal(a, b), (layer.prefix, tokens)


def projected(layer: Any, o: Tensor, positions: Tensor, wo_a: Tensor) -> Tensor:
    """The output projection of outputs [5, 4, 512] of attention, in fp64. wo_a: the weight that its codes stand for."""
    turned = layer.rotary_emb.forward_native(positions, o.clone(), None, inverse=True)[0].double()
    z = torch.einsum("tgd,grd->tgr", turned.view(5, 2, 1024), wo_a.view(2, 64, 1024)).flatten(1)
    return (z @ layer.wo_b.weight.double().T).detach()


def weights_of(layer: Any) -> dict[str, Tensor]:
    """The weights of a layer of vLLM, of V4 or V4.1, by the names of DeepSeek's checkpoints."""
    lora, fused, indexer = layer.q_lora_rank, layer.fused_wqa_wkv.weight, layer.indexer
    weights = {name: getattr(layer, name).weight for name in ("q_norm", "wq_b", "kv_norm", "wo_a", "wo_b")}
    weights |= {"wq_a": fused[:lora], "wkv": fused[lora:], "attn_sink": layer.attn_sink}
    compressors = {"compressor": layer.compressor}
    if indexer is not None:
        compressors["indexer.compressor"] = getattr(indexer, "compressor", None)
        names = ("wq_b", "weights_proj", *(("wk", "k_norm") if getattr(indexer, "owns_k", False) else ()))
        weights |= {f"indexer.{name}": getattr(indexer, name).weight for name in names}
    for name, compressor in compressors.items():
        if compressor is None:
            continue
        # in V4.1 a compressor of ratio 1 has no gate
        columns = getattr(compressor, "coff", 1) * compressor.head_dim
        parts = compressor.fused_wkv_wgate.weight.split(columns)
        weights |= dict(zip((f"{name}.wkv", f"{name}.wgate"), parts, strict=False))
        weights[f"{name}.norm"] = compressor.norm.weight
        if hasattr(compressor, "ape"):
            weights[f"{name}.ape"] = compressor.ape
    return {name: weight.detach() for name, weight in weights.items()}


def unequal_layers(
    engine: Any, steps: Sequence[Sequence[tuple[int, int]]], *, last_alone: bool = False, **options: Any
) -> set[int]:
    """Numbers of the layers whose outputs of some step are not bit for bit those of dsv4attn's own layer.

    steps: (request, tokens) of each step in the order of the batch; requests have numbers. last_alone: earlier steps
    write caches and nothing more, which is quicker.
    """
    own_layers, requests, unequal = OwnLayers(engine), {}, set()
    for number, step in enumerate(steps, 1):
        work = [(requests.setdefault(name, engine.request()), count) for name, count in step]
        described = [(copy.copy(request), count) for request, count in work]
        rows, attend = sum(count for _, count in work), number == len(steps) or not last_alone
        hidden = [engine.hidden_states(layer, described, rows) for layer in engine.layers]
        of_vllm = engine.step(work, attend=attend, **options)
        of_dsv4attn = own_layers.step(described, hidden, attend=attend)
        for i, (out, own_out) in enumerate(zip(of_vllm, of_dsv4attn, strict=True)) if attend else ():
            assert own_out.float().std() > 1e-3
            unequal |= set() if torch.equal(out[:rows], own_out) else {i}
    return unequal
