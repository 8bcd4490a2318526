"""FlashMLA's Python interface: the same names, arguments and results for the sparse attention of DeepSeek-V4.

Positional arguments are those of `sgl-flash-mla` 1.0.0, which begin with those of DeepSeek's releases.

Served: `flash_mla_with_kvcache` with `indices` over caches of V4's records, 584 bytes, and of V4.1's, 528 and 288;
`flash_mla_sparse_fwd` over bf16 rows of 512 dims. Beyond FlashMLA: V4.1 and `enable_batch_invariant` on every device,
any number of heads, q in fp32, empty batches, `out=` (as in vLLM's fork) and `backend=`, both by name.

Not served, and refused with UnsupportedError: dense attention (`indices=None`, `flash_attn_varlen_*`, `descale_q`,
`descale_k`) and keys of 576 dims (V3.2, 656-byte records).

The backend of a kind of call is chosen in its first call - `backend=`, then `DSV4ATTN_BACKEND`, configuration file,
automatic - as decode or as prefill, and then cached: run every kind once before capturing a graph. Arguments are
checked by shape, dtype and device; only lengths in host memory are checked by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Any, NoReturn

import torch
from attrs import asdict, define, frozen
from torch import Tensor

from dsv4attn.compat.direct import HEAD_DIM, PAGE_SIZE, CallKind, attend, largest_logits, plan
from dsv4attn.compat.flash_mla_arguments import (
    check_flags,
    check_format,
    check_kv,
    check_out,
    check_q,
    check_sink,
    check_switch,
    index_rows,
    paged_segment,
    record_layouts,
    refuse,
)
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices
from dsv4attn.core.contract.backend import KeyForm, Phase
from dsv4attn.core.reprs import fields_repr
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]

_ROWS = KVCacheLayout.rows()
_LOG2E = 1 / log(2)


@define
class FlashMLASchedMeta:
    """Result of `get_mla_metadata`. Backends plan by themselves: it only stores the shapes of its first call.

    have_initialized: whether a call has used it.
    config: shapes of that call, or None.
    tile_scheduler_metadata: not read; FlashMLA's field.
    num_splits: not read; FlashMLA's field.
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
        enable_batch_invariant: flag of the call.
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
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None

    __repr__ = fields_repr


def get_mla_metadata(*args: object, **kwargs: object) -> tuple[FlashMLASchedMeta, None]:
    """Return a new FlashMLASchedMeta, and None where `num_splits` used to be. Arguments of old versions are ignored."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[None, None]:
    """The two fields of FlashMLASchedMeta that FlashMLA can plan ahead: None and None, backends plan by themselves.

    topk: indices of a query. is_fp8_kvcache: must be True.
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q, use_legacy: not read.

    Raises UnsupportedError for dense attention (topk None) and for caches of bf16.
    """
    if topk is None:
        refuse("topk", "None: dense attention", "pass the number of indices, or keep FlashMLA for this layer")
    check_flags(None, causal=False, is_fp8_kvcache=is_fp8_kvcache)
    return None, None


def has_legacy() -> bool:
    """Whether caches of DeepSeek-V4 are served, which FlashMLA calls legacy. True on every device."""
    return True


@without_modes
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,  # noqa: ANN401 - ours or FlashMLA's
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of few queries per sequence over selected records of one or two paged caches, in one softmax.

    q: [b, s_q, h_q, 512] bf16 or fp32, unit stride on the last dim, like `indices`.
    k_cache, extra_k_cache: [num_blocks, page_block_size, 1, record] of one-byte type, any stride between pages. Each
       has its own page size. Bytes of a record say which it is: 584 in both caches (V4: a page holds the data of all
       its tokens, then the scales of all), or V4.1's, 528 in both, or 528 and in the extra cache 288. Scales of V4.1's
       follow their codes, and pages begin at whole records. With use_legacy=True and kv_format="V41" such a page holds
       the codes of all its tokens, then the scales of all.
    indices, extra_indices_in_kvcache: [b, s_q, topk] int32 - block * page_block_size + offset in the cache they belong
       to; -1 or anything outside the cache is no key.
    topk_length, extra_topk_length: [b] int32 in 0 .. topk - leading columns that count, for all queries of a sequence.
    attn_sink: [h_q] fp32, one more logit with value zero; -inf is none, +inf makes the output zero.
    softmax_scale: 512 ** -0.5 if None. out: where to write, like q. backend: name of the one to use.
    tile_scheduler_metadata: of `get_mla_metadata`, ours or FlashMLA's, whose first call had the same shapes. Of a
       foreign one only `have_initialized` and `config` are used.
    enable_batch_invariant: bits of a query do not depend on the rest of the batch: option `deterministic` of backends.
    use_legacy: how pages of V4.1's records are arranged, nothing else.
    kv_format: None, or the name of the records in k_cache, "V4" or "V41".
    block_table, cache_seqlens: not read, because indices name all keys.
    head_dim_v: must be 512.
    num_splits, descale_q, descale_k: must be None.
    causal: must be False.
    is_fp8_kvcache: must be None or True.

    Returns (out [b, s_q, h_q, 512] like q, lse [b, h_q, s_q] fp32: natural log, without the sink). A query without keys
    gets zeros and lse +inf. Records without an index have no effect, even with NaN.
    Raises ArgumentError, UnsupportedError, or NoBackendError, before anything is written.
    """
    if indices is None:
        refuse("indices", "dense attention (no indices)", "pass `indices`, or keep FlashMLA for this layer")
    letters = check_q(q, "b s_q h_q 512", "head_dim_v", head_dim_v)
    check_flags(num_splits, causal=causal, is_fp8_kvcache=is_fp8_kvcache)
    check_switch("enable_batch_invariant", enable_batch_invariant)
    check_switch("use_legacy", use_legacy)
    check_format(kv_format, descale_q, descale_k)
    layouts = record_layouts(k_cache, extra_k_cache, kv_format, legacy=use_legacy)
    segments = [paged_segment("", q, k_cache, layouts[0], indices, topk_length, letters)]
    if extra_k_cache is not None:
        extra = layouts[1], extra_indices_in_kvcache, extra_topk_length
        segments.append(paged_segment("extra_", q, extra_k_cache, *extra, letters))
    elif extra_indices_in_kvcache is not None or extra_topk_length is not None:
        raise ArgumentError("extra_k_cache", expected="a cache for the extra indices", actual=None)
    lengths = {"topk_length": topk_length, "extra_topk_length": extra_topk_length}
    read = {**lengths, "indices": indices, "extra_indices_in_kvcache": extra_indices_in_kvcache}
    read |= {"k_cache": k_cache, "extra_k_cache": extra_k_cache}
    sink, out = check_sink(attn_sink, q, letters), check_out(out, q, attn_sink=attn_sink, **read)
    sizes = [(rows.indices.shape[1], cache.block_size) for cache, rows in segments]
    _check_shapes(tile_scheduler_metadata, q, sizes, invariant=enable_batch_invariant)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not lse.numel():
        return out, lse.transpose(1, 2)
    used = [(columns, page) for columns, page in sizes if columns]
    caches, rows = zip(*segments[: len(used)], strict=True)
    scale = HEAD_DIM**-0.5 if softmax_scale is None else float(softmax_scale)
    kind = CallKind(
        Phase.DECODE,
        q.shape[2],
        q.dtype,
        scale,
        sink is not None,
        q.shape[1],
        tuple(used),
        layouts=tuple(cache.layout for cache in caches),
        deterministic=enable_batch_invariant,
    )
    chosen, layer = plan(kind, q.device, backend)
    flat = out.flatten(0, 1)
    attend(Phase.DECODE, chosen, layer, q.flatten(0, 1), caches, rows, sink, flat, lse.flatten(0, 1))
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat.view(out.shape))
    return out, lse.transpose(1, 2)


@without_modes
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
    need_max_logits: bool = True,
) -> tuple[Tensor, Any, Any]:
    """Attention of many queries over selected rows of one matrix of keys.

    q: [s_q, h_q, 512] bf16 or fp32. kv: [s_kv, 1, 512] bf16. indices: [s_q, 1, topk] int32 - rows of kv; anything that
       is not a row is no key. All three with unit stride on the last dim.
    topk_length: [s_q] int32 in 0 .. topk - leading columns that count.
    sm_scale: factor of the logits.
    attn_sink: [h_q] fp32, as in `flash_mla_with_kvcache`.
    out: where to write, like q. backend: name of the one to use.

    return_log2_lse: None for natural logarithms in max_logits and lse, True for base 2, False for neither.
    need_max_logits: a backend that does not return largest logits leaves them to plain torch, which reads the selected
       keys once more and multiplies them with q in fp32. Engines that only use `out` say False.
    d_v: must be 512.
    use_legacy: not read, because there is one set of kernels.

    Returns (out [s_q, h_q, 512] like q, max_logits [s_q, h_q] fp32, lse [s_q, h_q] fp32), the last two with the scale
    and without the sink; both are None if return_log2_lse is False. A query without keys gets zeros, -inf and +inf.
    max_logits is empty, [0, h_q], if not needed.
    Raises ArgumentError, UnsupportedError, or NoBackendError, before anything is written.
    """
    letters = check_q(q, "s_q h_q 512", "d_v", d_v)
    check_switch("use_legacy", use_legacy)
    check_switch("return_log2_lse", return_log2_lse, None)
    keys = check_kv(kv, q, letters)
    rows = index_rows(("indices", "topk_length"), q, indices, topk_length, "s_q 1 topk", letters)
    read = {"kv": kv, "indices": indices, "topk_length": topk_length, "attn_sink": attn_sink}
    sink, out = check_sink(attn_sink, q, letters), check_out(out, q, **read)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    needs_top = need_max_logits and return_log2_lse is not False
    if not lse.numel():
        return (out, None, None) if return_log2_lse is False else (out, torch.empty_like(lse), lse)
    width, scale = rows.indices.shape[1], float(sm_scale)
    kind = CallKind(Phase.PREFILL, q.shape[1], q.dtype, scale, sink is not None, 1, ((width, PAGE_SIZE),))
    chosen, layer = plan(kind, q.device, backend)
    capabilities = chosen.capabilities
    top = torch.empty_like(lse) if needs_top and capabilities.max_logits else None
    if capabilities.prefill_keys is KeyForm.PAGED:
        attend(Phase.PREFILL, chosen, layer, q, [PagedKVCache(kv, _ROWS)], [rows], sink, out, lse, top)
    else:
        short = -width % capabilities.index_alignment
        padded = DenseIndices(torch.nn.functional.pad(rows.indices, (0, short), value=-1), rows.lens) if short else rows
        attend(Phase.PREFILL, chosen, layer, q, keys, [padded], sink, out, lse, top)
    if return_log2_lse is False:
        return out, None, None
    if top is None:
        top = largest_logits(q, keys, rows, scale) if needs_top else lse.new_empty((0, q.shape[1]))
    return (out, top.mul_(_LOG2E), lse.mul_(_LOG2E)) if return_log2_lse else (out, top, lse)


def _check_shapes(meta: Any, q: Tensor, sizes: Sequence[tuple[int, int]], *, invariant: bool) -> None:  # noqa: ANN401
    """Store the shapes of a first call; raise ArgumentError if a later one has others. sizes: (columns, page).

    meta: FlashMLA's object is known by its fields. Its own class reads the shapes stored here like those it stores.
    """
    name = "tile_scheduler_metadata"
    if not all(hasattr(meta, field) for field in ("have_initialized", "config", name, "num_splits")):
        hint = "pass the first result of get_mla_metadata()"
        raise ArgumentError(name, expected="a FlashMLASchedMeta", actual=type(meta).__name__, hint=hint)
    (topk, page), (extra_topk, extra_page) = sizes[0], sizes[1] if len(sizes) > 1 else (None, None)
    b, s_q, h_q = q.shape[:3]
    config = FlashMLASchedMeta.Config(b, s_q, h_q, page, 1, False, True, topk, extra_page, extra_topk, invariant)
    if meta.config is None:
        meta.have_initialized, meta.config = True, config
    if meta.config == config:
        return
    fields = asdict(config)
    # older releases of FlashMLA have fewer fields
    known = {key: getattr(meta.config, key, value) for key, value in fields.items()}
    differing = [key for key in fields if known[key] != fields[key]]
    if differing:
        raise ArgumentError(
            name,
            expected="the shapes of its first call, " + ", ".join(f"{key}={known[key]}" for key in differing),
            actual=", ".join(f"{key}={fields[key]}" for key in differing),
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
