"""A call of `forward_mqa` that works, for tests that spoil it."""

from __future__ import annotations

from typing import Any

import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry

I32, F32, F16, BF16 = torch.int32, torch.float32, torch.float16, torch.bfloat16
SWA, C4A, C128A = LayerKind.SWA, LayerKind.C4A, LayerKind.C128A
KINDS = [SWA, C4A, C128A]
MODEL = ModelGeometry(
    num_heads=4,
    head_dim=32,
    rope_dim=8,
    window=8,
    index_topk=3,
    layers=((SWA, 1), (C4A, 4), (C128A, 16)),
    max_position=4096,
    hidden_size=64,
    o_groups=2,
    o_lora_rank=16,
)
LIMITS = Limits(max_num_reqs=4, max_num_batched_tokens=64, max_model_len=256)
LAYOUT = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
OTHER_DIMS = KVCacheLayout.fp8_ds_mla(32, 4, group_size=8)
QUERY, SEQ = [1, 1, 9, 20], [40, 5, 29, 20]
TOKENS, PADDED = sum(QUERY), sum(QUERY) + 3


def random_cache(layout: KVCacheLayout, block_size: int, blocks: int) -> PagedKVCache:
    """Return a cache of random but finite keys."""
    cache = PagedKVCache.allocate(layout, blocks, block_size)
    keys = torch.randn(cache.capacity, layout.head_dim, generator=torch.Generator().manual_seed(0))
    ReferenceBackend().quantize_and_insert_k_cache(keys, cache, torch.arange(cache.capacity))
    return cache


def caches_of(kind: LayerKind, layout: KVCacheLayout = LAYOUT, **changes: Any) -> LayerCaches:
    """Return the caches of a layer: window blocks of 4, compressed blocks of 32 tokens."""
    compressed = {SWA: None, C4A: random_cache(layout, 8, 32), C128A: random_cache(layout, 2, 32)}[kind]
    return LayerCaches(**{"swa": random_cache(layout, 4, 256), "compressed": compressed, **changes})


def metadata_of(
    kind: LayerKind,
    query: list[int] = QUERY,
    seq: list[int] = SEQ,
    tables: dict[str, Any] | None = None,
    **options: Any,
) -> AttentionMetadata:
    """Return the metadata of a batch whose requests have rows of their own in both tables, unless given others."""
    starts, lens = torch.tensor([0, *query], dtype=I32).cumsum(0).to(I32), torch.tensor(seq, dtype=I32)
    rows: dict[str, Any] = {
        "block_table": torch.arange(len(query) * 64, dtype=I32).view(-1, 64),
        "compressed_block_table": torch.arange(len(query) * 8, dtype=I32).view(-1, 8),
    }
    batch = Batch(
        num_reqs=len(query),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        slot_mapping=torch.arange(sum(query)),
        **{**rows, **(tables or {})},
    )
    fixed: dict[str, Any] = {"limits": LIMITS, "swa_block_size": 4, "compressed_block_tokens": 32, "geometry": MODEL}
    return MetadataBuilder(**{**fixed, **options}).build_for(batch, [kind])[kind]


def good(kind: LayerKind) -> dict[str, Any]:
    """Return arguments of a call that works, with three padding rows; every output holds a sentinel."""
    return {
        "q": torch.randn(PADDED, 4, 32, generator=torch.Generator().manual_seed(1)),
        "caches": caches_of(kind),
        "metadata": metadata_of(kind),
        "backend": ReferenceBackend(),
        "workspace": WorkspaceManager(),
        "out": torch.full((PADDED, 4, 32), 7.0),
        "layer": MODEL.layer_of_kind(kind),
        "limits": LIMITS,
        "attn_sink": torch.zeros(4),
        "topk_indices": torch.arange(3, dtype=I32).expand(PADDED, 3),
        "lse": torch.full((PADDED, 4), 7.0),
    }
