"""The attention layers of transformers' DeepSeek-V4, run through dsv4attn's layers on paged caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import Backend
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.integrations.transformers.weights import attention_weights
from dsv4attn.serving.cache_manager import CachedSequence, CacheManager


class Stack:
    """The attention layers of a model of transformers, on our caches; each gets the hidden states that theirs got."""

    def __init__(
        self,
        model: Any,
        backend: Backend,
        layout: KVCacheLayout,
        *,
        reqs: int = 4,
        tokens: int = 128,
        length: int = 256,
        single_phase: bool = False,
        **options: Any,
    ) -> None:
        self.geometry = ModelGeometry.from_config(model.config)
        self.limits = Limits(reqs, tokens, length, single_phase=single_phase)
        self.manager = CacheManager(self.geometry, self.limits, layout, shuffle_seed=7, backend=backend, **options)
        workspace, self.layers = WorkspaceManager(), []
        for i, layer in enumerate(model.layers):
            weights = attention_weights(layer.self_attn, self.geometry, self.geometry.layer(i), f"layers.{i}")
            attention = DeepseekV4Attention(
                f"layers.{i}", self.geometry, i, self.limits, backend, weights, workspace=workspace
            )
            attention.bind_kv_cache(self.manager.caches[i])
            self.layers.append(attention)

    def step(self, requests: Sequence[tuple[CachedSequence, int]], hidden: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of every layer [T, hidden] for the tokens of a step; `hidden` has those of each layer."""
        batch, positions = self.manager.batch(requests), self.manager.positions(requests)
        with torch.no_grad(), set_forward_context(self.manager.metadata(batch)):
            out = [layer(x, positions) for layer, x in zip(self.layers, hidden, strict=True)]
        self.manager.advance(requests)
        return out
