"""`dsv4_swa_cache_insert` on dsv4attn: the norm and rotation of q, and the window's keys, rotated and quantised."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4attn import KVCacheLayout
from dsv4attn_tokenspeed.kernels import backend_for, kernel, paged, trait

_LAYOUT = KVCacheLayout.fp8_ds_mla()


def swa_cache_insert(
    q: Tensor,
    kv: Tensor,
    swa_kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    rms_norm_eps: float,
    page_size: int,
    q_out: Tensor | None = None,
) -> None:
    """See TokenSpeed. q_out: where q is written; None: q itself. Slots outside of the cache insert nothing."""
    result = q if q_out is None else q_out.copy_(q)
    cache, backend = paged(swa_kv_cache, _LAYOUT, page_size), backend_for(q.device, q.shape[1], page_size)
    slots, places = slot_mapping.long(), positions.long()
    backend.qnorm_rope_kv_insert(result, kv, cache, slots, places, cos_sin_cache, float(rms_norm_eps))


def register() -> None:
    """Register the kernel."""
    traits = {"head_dim": trait(512), "quant_block_size": trait(64), "rope_dim": trait(64)}
    traits |= {"cache_layout": trait("fp8_swa_page_planar"), "has_q_out": trait(False, True)}
    dtypes = {"q": torch.bfloat16, "kv": torch.bfloat16, "swa_kv_cache": torch.uint8}
    kernel("dsv4_swa_cache_insert", swa_cache_insert, [dtypes], traits)
