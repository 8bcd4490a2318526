"""Calls of the Gluon kernels on tensors without memory, for recordings of what their launches compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import meta_calls as shared
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows
from dsv4attn.backends.sm90.attention.key_format import KeyFormat
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry

NUMBERS = (1,) * 14
"""Numbers of both segments, see `sm90.launch`. No variant depends on them."""


def meta_calls(
    segments: int,
    kind: KeyFormat,
    heads: int,
    *,
    sinks: Sequence[bool],
    lses: Sequence[bool],
    tokens: int = 2,
    width: int = 1,
    raw: bool = False,
) -> Iterator[AttentionCall]:
    """Calls with the memory of `Sm90Backend.scratch`, one for each of `sinks` and `lses`.

    segments, kind: number of segments of keys, and their format, of which the tensors have only the dtype.
    tokens, width: rows of q, and index columns of each segment.
    sinks, lses, raw: as of `_triton.attention.meta_calls`.
    """
    layer = evolve(ModelGeometry.preset("flash").layer_of_kind(LayerKind.SWA), num_heads=heads)
    caches = [meta_cache(KVCacheLayout.fp8_ds_mla(layer.nope_dim, layer.rope_dim))] * segments
    keys: Any = shared.meta_pages(caches, tokens=tokens, width=width)
    if not kind.is_paged:
        keys = shared.meta_gathered(KVCacheLayout.rows(layer.nope_dim, layer.rope_dim), tokens=tokens)
    parts, numbers = meta_rows(2, layer.head_dim, dtype=torch.float32), meta_rows(2, dtype=torch.float32)
    scratch = [parts, numbers, numbers, meta_rows(tokens, 2), meta_rows(tokens + 1, 4)]
    for call in shared.meta_calls(layer, keys, torch.bfloat16, sinks=sinks, lses=lses, raw=raw):
        yield evolve(call, scratch=scratch)
