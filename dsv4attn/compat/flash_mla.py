"""FlashMLA's Python interface: the same names, arguments and results for the sparse attention of DeepSeek-V4.

Served: `flash_mla_with_kvcache` with `indices` over caches of 584-byte records, and `flash_mla_sparse_fwd` over bf16
rows of 512 dims. Beyond FlashMLA: any number of heads, q in fp32, empty batches, `out=` (as in vLLM's fork) and
`backend=`.

Not served, and refused with UnsupportedError: dense attention (`indices=None`, `flash_attn_varlen_*`), keys of 576 dims
(V3.2, 656-byte records) and the 528- and 288-byte records of V4.1.

The backend of a kind of call is chosen in its first call - `backend=`, then `DSV4ATTN_BACKEND`, configuration file,
automatic - as decode or as prefill, and then cached: run every kind once before capturing a graph. Arguments are
checked by shape, dtype and device; only lengths in host memory are checked by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from attrs import asdict, define, frozen
from torch import Tensor

from dsv4attn.compat.arguments import (
    check_flags,
    check_kv,
    check_out,
    check_q,
    check_sink,
    index_rows,
    paged_segment,
    refuse,
)
from dsv4attn.compat.direct import HEAD_DIM, attend, largest_logits, plan
from dsv4attn.core.contract import KeyForm, Phase
from dsv4attn.core.keys import DenseIndices
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
from dsv4attn.errors import ArgumentError

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

_ROWS = KVCacheLayout.rows()


@define
class FlashMLASchedMeta:
    """Result of `get_mla_metadata`. Backends plan by themselves: it only stores the shapes of its first call.

    have_initialized: whether a call has used it.
    config: shapes of that call, or None.
    tile_scheduler_metadata: always None; FlashMLA's field.
    num_splits: always None; FlashMLA's field.
    """

    @frozen
    class Config:
        """Shapes that all calls with one FlashMLASchedMeta share.

        b: batch size.
        s_q: queries of a sequence.
        h_q: query heads.
        page_block_size: records of a page.
        h_k: key heads.
        causal: flag of the call.
        is_fp8_kvcache: flag of the call.
        topk: columns of the indices.
        extra_page_block_size: records of a page of the extra cache, or None.
        extra_topk: columns of the extra indices, or None.
        """

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return a new FlashMLASchedMeta, and None where `num_splits` used to be. Arguments of old versions are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,  # noqa: FBT001, FBT002 - FlashMLA's signature
    is_fp8_kvcache: bool = False,  # noqa: FBT001, FBT002
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of few queries per sequence over selected records of one or two paged caches, in one softmax.

    q: [b, s_q, h_q, 512] bf16 or fp32, unit stride on the last dim, like `indices`.
    k_cache, extra_k_cache: [num_blocks, page_block_size, 1, 584] of one-byte type, any stride between pages. Each has
       its own page size. A page holds the data of all its tokens, then the scales of all its tokens.
    indices, extra_indices_in_kvcache: [b, s_q, topk] int32 - block * page_block_size + offset in the cache they belong
       to; -1 or anything outside the cache is no key.
    topk_length, extra_topk_length: [b] int32 in 0 .. topk - leading columns that count, for all queries of a sequence.
    attn_sink: [h_q] fp32, one more logit with value zero; -inf is none, +inf makes the output zero.
    softmax_scale: 512 ** -0.5 if None. out: where to write, like q. backend: name of the one to use.
    block_table, cache_seqlens are not read: indices name all keys. num_splits must be None, causal False,
    is_fp8_kvcache True, head_dim_v 512, tile_scheduler_metadata one of `get_mla_metadata` whose first call had the
    same shapes.

    Returns (out [b, s_q, h_q, 512] like q, lse [b, h_q, s_q] fp32: natural log, without the sink). A query without keys
    gets zeros and lse +inf. Records without an index have no effect, even with NaN.
    Raises ArgumentError, UnsupportedError, or NoBackendError, before anything is written.
    """
    if indices is None:
        refuse("indices", "dense attention (no indices)", "pass `indices`, or keep FlashMLA for this layer")
    letters = check_q(q, "b s_q h_q 512", "head_dim_v", head_dim_v)
    check_flags(num_splits, causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    segments = [paged_segment("", q, k_cache, indices, topk_length, letters)]
    if extra_k_cache is not None:
        segments.append(paged_segment("extra_", q, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, letters))
    elif extra_indices_in_kvcache is not None or extra_topk_length is not None:
        raise ArgumentError("extra_k_cache", expected="a cache for the extra indices", actual=None)
    sink, out = check_sink(attn_sink, q, letters), check_out(out, q)
    sizes = [(rows.indices.shape[1], cache.block_size) for cache, rows in segments]
    _check_shapes(tile_scheduler_metadata, q, sizes)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse.transpose(1, 2)
    # two numbers for each segment that has columns
    widths = [n for pair in sizes if pair[0] for n in pair]
    caches, rows = zip(*segments[: len(widths) // 2], strict=True)
    scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    facts = (q.shape[2], q.dtype, scale, sink is not None, q.shape[1])
    chosen, layer = plan(Phase.DECODE, q.device, backend, *facts, *widths)
    flat = out.flatten(0, 1)
    attend(Phase.DECODE, chosen, layer, q.flatten(0, 1), caches, rows, sink, flat, lse.flatten(0, 1))
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat.view(out.shape))
    return out, lse.transpose(1, 2)


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    backend: str | None = None,
    need_max_logits: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of many queries over selected rows of one matrix of keys.

    q: [s_q, h_q, 512] bf16 or fp32. kv: [s_kv, 1, 512] bf16. indices: [s_q, 1, topk] int32 - rows of kv; anything that
       is not a row is no key. All three with unit stride on the last dim.
    topk_length: [s_q] int32 in 0 .. topk - leading columns that count.
    attn_sink: [h_q] fp32, as in `flash_mla_with_kvcache`. d_v must be 512.
    out: where to write, like q. backend: name of the one to use.
    need_max_logits: a backend that does not return largest logits leaves them to plain torch, which reads the selected
       keys once more and multiplies them with q in fp32. Engines that only use `out` say False.

    Returns (out [s_q, h_q, 512] like q, max_logits [s_q, h_q] fp32, lse [s_q, h_q] fp32: natural log), the last two
    with the scale and without the sink. A query without keys gets zeros, -inf and +inf. max_logits is empty, [0, h_q],
    if not needed.
    Raises ArgumentError, UnsupportedError, or NoBackendError, before anything is written.
    """
    letters = check_q(q, "s_q h_q 512", "d_v", d_v)
    keys = check_kv(kv, q, letters)
    rows = index_rows(("indices", "topk_length"), q, indices, topk_length, "s_q 1 topk", letters)
    sink, out = check_sink(attn_sink, q, letters), check_out(out, q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, torch.empty_like(lse), lse
    width, scale = rows.indices.shape[1], float(sm_scale)
    chosen, layer = plan(Phase.PREFILL, q.device, backend, q.shape[1], q.dtype, scale, sink is not None, 1, width)
    forms = chosen.forms
    top = torch.empty_like(lse) if need_max_logits and forms.max_logits else None
    if forms.prefill_keys is KeyForm.PAGED:
        attend(Phase.PREFILL, chosen, layer, q, [PagedKVCache(kv, _ROWS)], [rows], sink, out, lse, top)
    else:
        short = -width % forms.index_alignment
        padded = DenseIndices(torch.nn.functional.pad(rows.indices, (0, short), value=-1), rows.lens) if short else rows
        attend(Phase.PREFILL, chosen, layer, q, keys, [padded], sink, out, lse, top)
    if top is None:
        top = largest_logits(q, keys, rows, scale) if need_max_logits else lse.new_empty((0, q.shape[1]))
    return out, top, lse


def _check_shapes(meta: object, q: Tensor, sizes: Sequence[tuple[int, int]]) -> None:
    """Store the shapes of a first call; raise ArgumentError if a later one has others. sizes: (columns, page)."""
    name = "tile_scheduler_metadata"
    if not isinstance(meta, FlashMLASchedMeta):
        hint = "pass the first result of dsv4attn.compat.flash_mla.get_mla_metadata()"
        raise ArgumentError(name, expected="a FlashMLASchedMeta of this module", actual=type(meta).__name__, hint=hint)
    (topk, page), (extra_topk, extra_page) = sizes[0], sizes[1] if len(sizes) > 1 else (None, None)
    b, s_q, h_q = q.shape[:3]
    config = FlashMLASchedMeta.Config(b, s_q, h_q, page, 1, False, True, topk, extra_page, extra_topk)
    if meta.config is None:
        meta.have_initialized, meta.config = True, config
    elif meta.config != config:
        known, given = asdict(meta.config), asdict(config)
        differing = [key for key in known if known[key] != given[key]]
        raise ArgumentError(
            name,
            expected="the shapes of its first call, " + ", ".join(f"{key}={known[key]}" for key in differing),
            actual=", ".join(f"{key}={given[key]}" for key in differing),
            hint="take a new one from get_mla_metadata() for every set of shapes",
        )


def _absent(name: str) -> Callable[..., NoReturn]:
    def absent(*args: object, **kwargs: object) -> NoReturn:
        refuse(name, "dense attention", "keep FlashMLA, or another library of dense attention, for this call")

    absent.__name__ = absent.__qualname__ = name
    absent.__doc__ = "Not served: raises UnsupportedError."
    return absent


flash_attn_varlen_func = _absent("flash_attn_varlen_func")
flash_attn_varlen_kvpacked_func = _absent("flash_attn_varlen_kvpacked_func")
flash_attn_varlen_qkvpacked_func = _absent("flash_attn_varlen_qkvpacked_func")
