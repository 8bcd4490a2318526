"""Small valid calls of FlashMLA's interface; a test changes one argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.compat.flash_mla import get_mla_metadata
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache

B, S_Q, H, TOPK = 3, 2, 4, 8


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return normal numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache_of(page: int = 4, blocks: int = 6, seed: int = 1) -> Tensor:
    """A cache in which every record is written."""
    cache = torch.full((blocks, page, 1, 584), 0, dtype=torch.uint8)
    paged = PagedKVCache(cache[:, :, 0], KVCacheLayout.fp8_ds_mla())
    ReferenceBackend().quantize_and_insert_k_cache(
        random(blocks * page, 512, seed=seed), paged, torch.arange(blocks * page)
    )
    return cache


def decode_args(**changes: Any) -> dict[str, Any]:
    """Arguments of a good call, some of them exchanged."""
    good = {
        "q": random(B, S_Q, H, 512),
        "k_cache": cache_of(),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": get_mla_metadata()[0],
        "is_fp8_kvcache": True,
        "indices": torch.arange(B * S_Q * TOPK, dtype=torch.int32).view(B, S_Q, TOPK) % 24,
    }
    return {**good, **changes}


def prefill_args(**changes: Any) -> dict[str, Any]:
    """Arguments of a good call, some of them exchanged."""
    good = {
        "q": random(5, H, 512),
        "kv": random(12, 1, 512, seed=1),
        "indices": torch.arange(5 * TOPK, dtype=torch.int32).view(5, 1, TOPK) % 12,
        "sm_scale": 0.1,
    }
    return {**good, **changes}
