"""A small model with random weights, and its layers on caches: what tests of the whole layer share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry, Yarn
from dsv4attn.core.model.weights import AttentionWeights, weight_shapes
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager

KINDS = (LayerKind.SWA, 1), (LayerKind.C4A, 4), (LayerKind.C128A, 16)
SMALL = ModelGeometry(
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    window=8,
    index_topk=3,
    layers=KINDS,
    max_position=4096,
    hidden_size=48,
    o_groups=2,
    o_lora_rank=16,
    compress_yarn=Yarn(16.0, 256),
    q_lora_rank=24,
    index_n_heads=16,
    index_head_dim=32,
)
FP32 = KVCacheLayout.rows(24, 8, dtype=torch.float32)
FP8 = KVCacheLayout.fp8_ds_mla(24, 8, group_size=16)
Requests = Sequence[tuple[CachedSequence, int]]


def random_weights(
    geometry: ModelGeometry, index: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Tensor]:
    """Weights of a layer by name: matrices with outputs of unit size, norms around 1."""
    generator, made = torch.Generator().manual_seed(1000 * seed + index), {}
    for name, shape in weight_shapes(geometry, index).items():
        value = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        if name.endswith("norm"):
            value = 1 + 0.2 * value
        elif len(shape) == 2 and not name.endswith("ape"):
            value *= shape[1] ** -0.5 * (3 if name.endswith("wgate") else 1)
        made[name] = value.to(device, dtype if len(shape) == 2 and not name.endswith("ape") else torch.float32)
    return made


class Whole:
    """All layers of a model, each on the same hidden states."""

    def __init__(
        self,
        backend: Backend,
        layout: KVCacheLayout = FP32,
        *,
        geometry: ModelGeometry = SMALL,
        limits: Limits | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        weights: Mapping[int, Mapping[str, Any]] | None = None,
        layer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.limits = limits or Limits(4, 64, 256)
        self.geometry, self.dtype, self.device = geometry, dtype, device
        self.manager = CacheManager(geometry, self.limits, layout, backend=backend, device=device, **options)
        self.workspace, self.layers = WorkspaceManager(device), list[DeepseekV4Attention]()
        self.weights: dict[int, Mapping[str, Any]] = {}
        for i in range(geometry.num_layers):
            given = (weights or {}).get(i) or random_weights(geometry, i, dtype=dtype, device=device)
            self.weights[i] = given
            made = AttentionWeights.from_dict(given, geometry, i)
            common = {"workspace": self.workspace, "sources": self.layers, **(layer_options or {})}
            layer = DeepseekV4Attention(f"layers.{i}", geometry, i, self.limits, backend, made, **common)
            layer.bind_kv_cache(self.manager.caches[i])
            self.layers.append(layer)

    def hidden(self, seed: int, count: int) -> Tensor:
        """[count, hidden] hidden states of a sequence."""
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(count, self.geometry.hidden_size, generator=generator, dtype=torch.float32, device="cpu")
        return values.to(self.device, self.dtype)

    def run(self, requests: Requests, hidden: Tensor, *, padding: int = 0) -> list[Tensor]:
        """Outputs [T, hidden] of every layer; sequences do not advance."""
        batch = self.manager.batch(requests, padding=padding)
        positions = self.manager.positions(requests, padding=padding)
        with torch.no_grad(), set_forward_context(self.manager.metadata(batch)):
            return [layer(hidden, positions) for layer in self.layers]

    def step(self, requests: Requests, hidden: Tensor) -> list[Tensor]:
        """Outputs of a step that is done."""
        out = self.run(requests, hidden)
        self.manager.advance(requests)
        return out

    def cut(self, hidden: Tensor, cuts: Sequence[int]) -> tuple[CachedSequence, list[Tensor]]:
        """A new sequence in steps of so many tokens: outputs [T, hidden] of every layer."""
        sequence = self.manager.new()
        parts = [self.step([(sequence, part.shape[0])], part) for part in hidden.split(list(cuts))]
        return sequence, [torch.cat(outs) for outs in zip(*parts, strict=True)]

    def bytes_of(self, sequence: CachedSequence) -> list[Tensor]:
        """Pages of a sequence in every cache, in order."""
        found = []
        for name, table in sequence.tables.items():
            blocks = torch.tensor([b for b in table.blocks if b >= 0], device=self.device)
            found += [cache.tensor[blocks] for cache in self.manager._of_group(name)]
        return found


def deterministic(limits: Limits) -> Limits:
    """Limits for a deterministic backend."""
    return evolve(limits, single_phase=True)
