"""TokenSpeed's ops of attention by FlashMLA's interface on dsv4attn. Slots and lengths may be int64."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor

from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from dsv4attn_tokenspeed.kernels import ints, kernel, trait

_RECORD = 584
_INTS = trait(torch.int32, torch.int64)


def decode(
    q: Tensor,
    swa_kv_cache: Tensor,
    swa_slots: Tensor,
    swa_lens: Tensor,
    swa_page_size: int,
    attn_sink: Tensor | None,
    softmax_scale: float,
    extra_kv_cache: Tensor | None = None,
    extra_slots: Tensor | None = None,
    extra_lens: Tensor | None = None,
    extra_page_size: int | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,  # noqa: FBT001, FBT002 - TokenSpeed's
) -> Tensor | tuple[Tensor, Tensor]:
    """`dsv4_decode`: see TokenSpeed. A token without keys gets zeros, and -inf as its lse."""
    extra = None
    if extra_kv_cache is not None:
        extra = _pages(extra_kv_cache, extra_page_size), extra_slots, extra_lens
    window = _pages(swa_kv_cache, swa_page_size), swa_slots, swa_lens
    result, lse = _attend(q, window, extra, attn_sink, softmax_scale, out)
    # FlashMLA has +inf for a token without keys, with which partial results cannot be merged
    return (result, lse.masked_fill(lse == inf, -inf)) if return_lse else result


def prefill(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lens: Tensor | None,
    attn_sink: Tensor,
    softmax_scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """`dsv4_prefill`: see TokenSpeed. lens: None for all columns."""
    tokens, heads = q.shape[:2]
    length = None if lens is None else ints(lens, tokens)
    rows, sink = ints(indices, tokens, 1, -1), _sink(attn_sink, heads)
    result, *_ = flash_mla_sparse_fwd(
        q, kv.reshape(-1, 1, q.shape[-1]), rows, float(softmax_scale), 512, sink, length, out=out, need_max_logits=False
    )
    return result


def selected_attention(
    q: Tensor,
    swa_cache: Tensor,
    swa_slots: Tensor | None,
    swa_lens: Tensor | None,
    global_cache: Tensor | None,
    global_slots: Tensor | None,
    global_lens: Tensor | None,
    attn_sink: Tensor,
    softmax_scale: float,
    out: Tensor | None,
    _query_chunk_size: int,
    _schedule: object,
    prefill_kv: Tensor | None,
    prefill_indices: Tensor | None,
) -> Tensor:
    """`dsv41_selected_attention`: see TokenSpeed. Neither chunks of queries nor a schedule of FlashMLA's are needed."""
    if (prefill_kv is None) != (prefill_indices is None):
        raise ValueError("prefill_kv and prefill_indices must be given together")
    if prefill_kv is not None and prefill_indices is not None:
        return prefill(q, prefill_kv, prefill_indices, None, attn_sink, softmax_scale, out)
    extra = None
    if global_cache is not None:
        extra = global_cache.unsqueeze(2), global_slots, global_lens
    window = swa_cache.unsqueeze(2), swa_slots, swa_lens
    return _attend(q, window, extra, attn_sink, softmax_scale, out)[0]


def _attend(
    q: Tensor,
    window: tuple[Tensor, Any, Any],
    extra: tuple[Tensor, Any, Any] | None,
    attn_sink: Tensor | None,
    softmax_scale: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention over one or two caches, each with its slots and lengths. Returns out [T, H, 512], lse [T, H, 1]."""
    tokens, heads = q.shape[:2]
    arguments: dict[str, Any] = {}
    for name, slots_name, segment in (("", "indices", window), ("extra_", "extra_indices_in_kvcache", extra)):
        if segment is not None:
            cache, slots, lens = segment
            arguments[f"{name}k_cache"], arguments[slots_name] = cache, ints(slots, tokens, 1, -1)
            arguments[f"{name}topk_length"] = ints(lens, tokens)
    # TokenSpeed's pages of V4.1's records have all codes first, as FlashMLA's older kernels read them
    if window[0].shape[-1] != _RECORD:
        arguments |= {"use_legacy": True, "kv_format": "V41"}
    result, lse = flash_mla_with_kvcache(
        q.unsqueeze(1),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=q.shape[-1],
        tile_scheduler_metadata=get_mla_metadata()[0],
        softmax_scale=float(softmax_scale),
        is_fp8_kvcache=True,
        attn_sink=None if attn_sink is None else _sink(attn_sink, heads),
        out=None if out is None else out.unsqueeze(1),
        **arguments,
    )
    return (result.squeeze(1) if out is None else out), lse


def _pages(cache: Tensor, page_size: int | None) -> Tensor:
    """[pages, page_size, 1, 584] of a cache [pages, bytes], whose rows may be longer than a page."""
    size = int(page_size or 0)
    if cache.shape[1] < size * _RECORD:
        raise ValueError(f"cache: expected pages of at least {size * _RECORD} bytes, got {cache.shape[1]}")
    return cache.as_strided((cache.shape[0], size, 1, _RECORD), (cache.stride(0), _RECORD, _RECORD, 1))


def _sink(attn_sink: Tensor, heads: int) -> Tensor:
    """Of the heads of q: TokenSpeed may give more."""
    return attn_sink.flatten()[:heads].float()


def register() -> None:
    """Register the three kernels."""
    common = {"head_dim": trait(512), "metadata_dtypes": _INTS}
    paged = {"cache_layout": trait("fp8_swa_page_planar"), "topk_layout": trait("global_slots")}
    flags = dict.fromkeys(("has_extra_segment", "return_lse", "sinks"), trait(False, True))
    bf16 = torch.bfloat16
    kernel("dsv4_decode", decode, [{"q": bf16, "swa_kv_cache": torch.uint8}], {**common, **paged, **flags})
    dense = {"cache_layout": trait("dense_workspace"), "sinks": trait(True)}
    kernel("dsv4_prefill", prefill, [{"q": bf16, "kv": bf16}], {**common, **dense})
    kernel("dsv41_selected_attention", selected_attention, [{"x": bf16}], {})
