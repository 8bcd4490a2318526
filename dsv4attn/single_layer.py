"""`SingleLayer`: one DeepSeek-V4 attention layer with all that it needs, for a first try and for experiments.

Engines bind layers themselves, with their own caches, workspace and batches: see docs/engine-guide.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.argument_checks import check_count, check_type, shown
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry, is_path
from dsv4attn.core.model.weights import AttentionWeights, weight_shapes
from dsv4attn.core.reprs import layer_text, one_line
from dsv4attn.core.tensorspec import check_tensor, usable_device
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import select_backend
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager

__all__ = ["SingleLayer"]


class SingleLayer:
    """One attention layer of a model, from hidden states to hidden states, with weights, caches and workspace.

    model: a preset ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-v4.1-flash"), a path to a `config.json`, or a
       `ModelGeometry`.
    kind: "swa", "c4a" or "c128a": which of the model's layers. The layer reads from no other layer, also in V4.1.
    compress_ratio: which layers of the kind, in models that have several ratios: 1 or 2 for c4a layers of V4.1.
    device: "cpu", "cuda", "cuda:1", "xpu", ...; None: the accelerator of this machine, or the CPU without one.
    backend: a name, or what `load_backend` returns; None: the automatic choice for the device.
    weights: tensors by the names of `weight_shapes(layer.geometry, 0)`, or `AttentionWeights`; None: random ones, the
       same in every process.
    dtype: of hidden states and of random matrices.
    max_requests, max_tokens, max_model_len: most requests at a time, most tokens of a step, most tokens of a request.

    Raises ArgumentError for what does not fit, GeometryError for a configuration, and NoBackendError.
    """

    def __init__(
        self,
        model: str | Path | ModelGeometry,
        kind: LayerKind | str = LayerKind.CSA,
        *,
        compress_ratio: int | None = None,
        device: torch.device | str | None = None,
        backend: Backend | str | None = None,
        weights: AttentionWeights | Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        max_requests: int = 4,
        max_tokens: int = 1024,
        max_model_len: int = 8192,
    ) -> None:
        released = _geometry(model)
        chosen = released.layer_of_kind(kind, compress_ratio)
        self.geometry = geometry = released.with_own_layers([(chosen.kind, chosen.compress_ratio)])
        self.device = _device(device)
        self.limits = Limits(max_requests, max_tokens, max_model_len)
        record = KVCacheLayout.v41_fp8 if geometry.shared_latent else KVCacheLayout.fp8_ds_mla
        layout = record(geometry.head_dim - geometry.rope_dim, geometry.rope_dim)
        self.backend = _backend(backend, geometry, layout, self.device)
        if not isinstance(weights, AttentionWeights):
            tensors = _random_weights(geometry, dtype, self.device) if weights is None else weights
            weights = AttentionWeights.from_dict(tensors, geometry, 0)
        self.caches = CacheManager(geometry, self.limits, layout, device=self.device, backend=self.backend)
        workspace = WorkspaceManager(self.device)
        self.layer = DeepseekV4Attention("layer", geometry, 0, self.limits, self.backend, weights, workspace=workspace)
        self.layer.bind_kv_cache(self.caches.caches[0])
        self.dtype = dtype

    @property
    def hidden_size(self) -> int:
        """Elements of a hidden state."""
        return self.geometry.hidden_size

    def new_request(self) -> CachedSequence:
        """A request without tokens. `caches` can free, fork and truncate it."""
        return self.caches.new()

    def random_hidden(self, num_tokens: int) -> Tensor:
        """Random hidden states [num_tokens, hidden_size].

        num_tokens: number of rows. Raises ArgumentError if it is no count.
        """
        check_count("num_tokens", num_tokens, 0)
        return torch.randn(num_tokens, self.hidden_size, device=self.device, dtype=torch.float32).to(self.dtype)

    def step(self, *requests: tuple[CachedSequence, Tensor]) -> list[Tensor]:
        """Run the next tokens of some requests, prompts and single tokens, in one step.

        requests: (request, hidden states [n, hidden_size] of its next n tokens), each request once, in any order.
        Returns [n, hidden_size] for each; for no requests an empty list. Raises, with nothing changed, ArgumentError
        for what does not fit and OutOfPagesError.
        """
        for given in requests:
            pair: object = given
            if not isinstance(pair, tuple | list) or len(pair) != 2:  # `step(request, hidden)` is easily written
                hint = "pass step((request, hidden), ...), a pair for each request"
                expected, actual = "pairs (request, hidden)", shown(pair)
                raise ArgumentError("requests", expected=expected, actual=actual, hint=hint)
            request, hidden = pair
            check_type("request", request, CachedSequence, cure="pass what new_request() returns")
            check_tensor("hidden", hidden, "n d", self.dtype, {"d": self.hidden_size})
        if not requests:
            return []
        # requests of one token are decoded where they come before all others
        order = sorted(range(len(requests)), key=lambda i: requests[i][1].shape[0] > 1)
        counts = [(requests[i][0], requests[i][1].shape[0]) for i in order]
        with torch.no_grad(), set_forward_context(self.caches.metadata(self.caches.batch(counts))):
            out = self.layer(torch.cat([requests[i][1] for i in order]), self.caches.positions(counts))
        self.caches.advance(counts)
        by_request = dict(zip(order, out.split([count for _, count in counts]), strict=True))
        return [by_request[i] for i in range(len(requests))]

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Model, kind, heads, backend and device."""
        layer = self.geometry.layer(0)
        yield self.geometry.name
        yield layer_text(layer)
        yield f"{layer.num_heads} heads"
        yield f"backend {self.backend.name}"
        yield f"on {self.device}"


def _geometry(model: object) -> ModelGeometry:
    if isinstance(model, ModelGeometry):
        return model
    if isinstance(model, Path) or (isinstance(model, str) and is_path(model)):
        return ModelGeometry.from_config(model)
    check_type("model", model, str, cure="pass the name of a preset, a path to config.json, or a ModelGeometry")
    return ModelGeometry.preset(str(model))


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return usable_device(device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _backend(
    backend: Backend | str | None, geometry: ModelGeometry, layout: KVCacheLayout, device: torch.device
) -> Backend:
    if backend is not None and not isinstance(backend, str):
        return backend
    kind = geometry.layers[0][0]
    problems = [Problem.of(geometry, kind, phase) for phase in ("decode", "prefill")]
    problems = [
        evolve(
            problem,
            swa=CacheFacts.of(layout, problem.swa.page_size),
            compressed=problem.compressed and CacheFacts.of(layout, problem.compressed.page_size),
        )
        for problem in problems
    ]
    return select_backend(*problems, backend=backend, device=device)


def _random_weights(geometry: ModelGeometry, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Matrices of normal values that keep the size of what they multiply, norms of 1, and small vectors."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in weight_shapes(geometry, 0).items():
        values = torch.randn(shape, device=device, dtype=torch.float32, generator=generator)
        if name.endswith("norm"):
            weights[name] = torch.ones_like(values)
        else:
            weights[name] = values.mul_(shape[-1] ** -0.5).to(dtype if len(shape) == 2 else torch.float32)
    return weights
