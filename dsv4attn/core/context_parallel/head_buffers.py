"""Memory of attention over ranks that divide heads: queries, out and lse of all heads beside what ranks exchange."""

from __future__ import annotations

from functools import lru_cache

import torch
from attrs import evolve

from dsv4attn.core.context_parallel.buffers import merge_specs
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.layer_geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec

__all__ = ["ALL_HEADS_VIEWS", "all_heads", "divided_bytes", "divided_specs"]

ALL_HEADS_VIEWS = 3
"""The last views of `divided_specs`: q, out and lse of all heads."""


@lru_cache(maxsize=256)
def all_heads(layer: LayerGeometry, ranks: int) -> LayerGeometry:
    """A layer with the heads of all ranks; the same object for equal layers, as prepared steps are keyed by it.

    layer: with the heads of one rank. Every rank has as many.
    """
    return evolve(layer, num_heads=layer.num_heads * ranks)


def divided_specs(
    ranks: int, tokens: int, heads: int, dim: int, dtype: torch.dtype, *, sums: bool = True
) -> tuple[BufferSpec, ...]:
    """Views of attention over ranks with `heads` heads each: those of `merge_specs`, then q, out and lse of all heads.

    What is sent has a part for each rank, and queries are gathered where parts are received later. dtype: of q.
    """
    lse, ((places, sent), kind), *others = merge_specs(ranks, tokens, heads, dim, dtype, sums=sums)
    every = tokens, ranks * heads
    return (
        lse,
        ((places, ranks * sent), kind),
        *others,
        ((*every, dim), dtype),
        ((*every, dim), dtype),
        (every, torch.float32),
    )


def divided_bytes(
    ranks: int, layer: LayerGeometry, limits: Limits, q_dtype: torch.dtype | None = None, *, sums: bool = True
) -> int:
    """`rank_buffers.merge_bytes` of ranks that divide heads. layer: with the heads of one rank."""
    tokens, sizes = limits.max_num_batched_tokens, (layer.num_heads, layer.head_dim)
    dtypes = (torch.bfloat16, torch.float32) if q_dtype is None else (q_dtype,)
    return max(simultaneous_bytes(divided_specs(ranks, tokens, *sizes, dtype, sums=sums)) for dtype in dtypes)
