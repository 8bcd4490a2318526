"""Reading and checking arguments of vLLM's and FlashInfer's functions, which engines call without metadata."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.core.tensorspec import check_tensor

__all__ = ["FLOATS", "as_rows", "check_optional", "layer_of"]

FLOATS = (torch.bfloat16, torch.float32)


@lru_cache(maxsize=256)
def layer_of(heads: int, head_dim: int, rope_dim: int, scale: float) -> LayerGeometry:
    """A layer of these dims. Kernels read neither its kind nor its angles and window."""
    rope = Rope(rope_dim, 10000.0)
    return LayerGeometry(LayerKind.SWA, 1, heads, head_dim, rope, window=1, topk=0, softmax_scale=scale)


def as_rows(indices: Tensor | None) -> Tensor | None:
    """[T, 1, K] as [T, K]; other values are returned as they are, for a check to refuse."""
    return indices.squeeze(1) if isinstance(indices, Tensor) and indices.ndim == 3 else indices


def check_optional(name: str, tensor: Tensor | None, shape: str, dtype: torch.dtype, letters: dict[str, int]) -> None:
    if tensor is not None:
        check_tensor(name, tensor, shape, dtype, letters)
