"""Checks FlashMLA's arguments, with its names in errors, and converts them to the arguments of backends."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from dsv4attn.compat.direct import HEAD_DIM
from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.errors import ArgumentError, UnsupportedError

_SPLIT = Arrangement.SPLIT
_LAYOUTS = {584: KVCacheLayout.fp8_ds_mla(), 528: KVCacheLayout.v41_fp8(), 288: KVCacheLayout.v41_fp4()}
"""By bytes of a record. Records of V4.1 have their scales after their codes."""
_LEGACY = {528: KVCacheLayout.v41_fp8(arrangement=_SPLIT), 288: KVCacheLayout.v41_fp4(arrangement=_SPLIT)}
"""The same in FlashMLA's legacy kernels, where scales are after all codes of a page."""
_PAIRS = ((584, 584), (528, 528), (528, 288))
"""Bytes of records of the cache and of the extra one."""
_Q_DTYPES = (torch.bfloat16, torch.float32)
_BYTE_DTYPES = (torch.float8_e4m3fn, torch.uint8, torch.int8)
_FORMATS = {"V4": 584, "V41": 528}
"""Names of the records of `k_cache`, with their bytes."""
_OTHER_FORMATS = ("V32", "V32_NO_ROPE", "V41_FP4")


def refuse(argument: str, actual: object, hint: str) -> NoReturn:
    """Raise UnsupportedError for a feature of FlashMLA that this package lacks."""
    raise UnsupportedError(argument, expected="sparse attention of DeepSeek-V4", actual=actual, hint=hint)


def check_q(q: Tensor, shape: str, dim_name: str, dim: int) -> dict[str, int]:
    """Check the query, and return its sizes by letter."""
    letters: dict[str, int] = {}
    if getattr(q, "shape", ())[-1:] == (576,):
        refuse("q", "head_dim 576, of DeepSeek-V3", "keep FlashMLA for these layers")
    check_tensor("q", q, shape, _Q_DTYPES, letters)
    if not letters["h_q"]:
        raise ArgumentError("q", expected="at least one head", actual=list(q.shape))
    if dim != HEAD_DIM:
        raise ArgumentError(dim_name, expected="512, values being whole keys", actual=dim)
    return letters


def check_switch(argument: str, value: object, *others: object) -> None:
    """Raise ArgumentError unless a switch is a bool, or one of `others`."""
    if isinstance(value, bool) or any(value is other for other in others):
        return
    if isinstance(value, Tensor):
        hint = "pass the tensor to write to by its name, out=..."
        raise ArgumentError(argument, expected="True or False", actual="a Tensor", hint=hint)
    expected = " or ".join(["True", "False", *map(str, others)])
    raise ArgumentError(argument, expected=expected, actual=repr(value))


def check_flags(num_splits: object, *, causal: bool, is_fp8_kvcache: bool | None) -> None:
    """Check the switches between FlashMLA's kernels, with indices given. is_fp8_kvcache: None means yes."""
    if is_fp8_kvcache is not None and not is_fp8_kvcache:
        hint = "for bf16 rows call flash_mla_sparse_fwd with k_cache.view(-1, 1, 512)"
        refuse("is_fp8_kvcache", "False together with indices", hint)
    if causal:
        raise ArgumentError("causal", expected="False: indices say which keys a query sees", actual=causal)
    if num_splits is not None:
        actual = type(num_splits).__name__
        raise ArgumentError("num_splits", expected="None, as get_mla_metadata returns", actual=actual)


def check_format(kv_format: object, descale_q: object, descale_k: object) -> None:
    """Check the name of the record format, and that no scales of dense fp8 attention are given."""
    if kv_format == "V41_FP4":
        refuse(
            "kv_format", "'V41_FP4' for `k_cache`", "say 'V41': fp4 records of an extra cache are known by their size"
        )
    if kv_format in _OTHER_FORMATS:
        refuse("kv_format", f"{kv_format!r}", "keep FlashMLA for these layers, or store records of V4")
    if kv_format not in (None, *_FORMATS):
        known = ", ".join(repr(name) for name in (*_FORMATS, *_OTHER_FORMATS))
        raise ArgumentError("kv_format", expected=f"None or one of {known}", actual=repr(kv_format))
    for name, scale in (("descale_q", descale_q), ("descale_k", descale_k)):
        if scale is not None:
            refuse(name, "a scale of dense fp8 attention", "leave it out: records contain their scales")


def check_kv(kv: Tensor, q: Tensor, letters: dict[str, int]) -> Tensor:
    """Check the rows [s_kv, 1, 512] of a prefill, and return them [s_kv, 512]."""
    check_tensor("kv", kv, "s_kv 1 512", torch.bfloat16, letters)
    check_same_device(q, kv=kv)
    return kv[:, 0]


def check_sink(attn_sink: Tensor | None, q: Tensor, letters: dict[str, int]) -> Tensor | None:
    """Check the sinks, and return them contiguous."""
    if attn_sink is None:
        return None
    check_tensor("attn_sink", attn_sink, "h_q", torch.float32, letters, any_strides=True)
    check_same_device(q, attn_sink=attn_sink)
    return attn_sink.contiguous()


def check_out(out: Tensor | None, q: Tensor, **read: Tensor | None) -> Tensor:
    """The given output tensor, checked, or a new one like q. read: what else the call reads."""
    if out is None:
        return q.new_empty(q.shape)
    check_tensor("out", out, " ".join(map(str, q.shape)), q.dtype, {}, written=True)
    check_same_device(q, out=out)
    check_results_apart({"out": out}, q=q, **read)
    return out


def record_layouts(
    k_cache: Tensor, extra_k_cache: Tensor | None, kv_format: str | None, *, legacy: bool
) -> tuple[KVCacheLayout, KVCacheLayout]:
    """Layouts of the cache and of the extra one, by the bytes of their records, as FlashMLA knows them."""
    window = _record(k_cache, "k_cache")
    if window == 288:
        expected = "records of 584 or 528 bytes: those of 288 are for an extra cache"
        raise ArgumentError("k_cache", expected=expected, actual="288")
    if kv_format is not None and window in _LAYOUTS and window != _FORMATS[kv_format]:
        expected = f"records of {_FORMATS[kv_format]} bytes with kv_format={kv_format!r}"
        raise ArgumentError("k_cache", expected=expected, actual=window)
    if legacy and window == 528 and kv_format is None:
        hint = "V32_NO_ROPE records have as many bytes, and others in them"
        expected = "'V41' with use_legacy=True and records of 528 bytes"
        raise ArgumentError("kv_format", expected=expected, actual=None, hint=hint)
    extra = window if extra_k_cache is None else _record(extra_k_cache, "extra_k_cache")
    if extra in _LAYOUTS and window in _LAYOUTS and (window, extra) not in _PAIRS:
        allowed = " or ".join(str(of_extra) for of_cache, of_extra in _PAIRS if of_cache == window)
        expected = f"records of {allowed} bytes next to those of {window}"
        raise ArgumentError("extra_k_cache", expected=expected, actual=extra)
    known = {**_LAYOUTS, **_LEGACY} if legacy else _LAYOUTS
    return known.get(window, _LAYOUTS[584]), known.get(extra, _LAYOUTS[584])


def _record(cache: Tensor, name: str) -> int:
    """Last dim of a cache; 0 of what is no tensor."""
    size = next(iter(getattr(cache, "shape", ())[-1:]), 0)
    if size == 656:
        hint = "keep FlashMLA for these layers, or store records of V4 or V4.1"
        refuse(name, "656-byte records, of DeepSeek-V3.2", hint)
    return int(size)


def paged_segment(
    prefix: str,
    q: Tensor,
    cache: Tensor,
    layout: KVCacheLayout,
    indices: Tensor | None,
    length: Tensor | None,
    letters: dict[str, int],
) -> tuple[PagedKVCache, DenseIndices]:
    """One cache and its index rows, checked, with FlashMLA's names in errors."""
    name, record = f"{prefix}k_cache", layout.record_bytes
    check_tensor(name, cache, f"_ {prefix}page_block_size 1 {record}", _BYTE_DTYPES, letters)
    check_same_device(q, **{name: cache})
    if layout.arrangement is Arrangement.INTERLEAVED and cache.shape[0] > 1 and cache.stride(0) % record:
        expected = f"pages that begin at whole records, multiples of {record} bytes"
        raise ArgumentError(name, expected=expected, actual=f"every {cache.stride(0)} bytes")
    try:
        paged = PagedKVCache(cache[:, :, 0].view(torch.uint8), layout)
    except ArgumentError as error:
        raise ArgumentError(name, expected=error.expected, actual=error.actual, hint=error.hint) from error
    if not paged.block_size:
        raise ArgumentError(name, expected="pages of at least one record", actual=list(cache.shape))
    names = (f"{prefix}indices_in_kvcache" if prefix else "indices", f"{prefix}topk_length")
    return paged, index_rows(names, q, indices, length, f"b s_q {prefix}topk", letters)


def index_rows(
    names: tuple[str, str],
    q: Tensor,
    indices: Tensor | None,
    length: Tensor | None,
    shape: str,
    letters: dict[str, int],
) -> DenseIndices:
    """Index rows of all queries, one after another. Lengths have the size of the first letter of `shape`."""
    check_tensor(names[0], indices, shape, torch.int32, letters)
    assert indices is not None
    if length is not None:
        check_tensor(names[1], length, shape.split(maxsplit=1)[0], torch.int32, letters)
    check_same_device(q, **{names[0]: indices, names[1]: length})
    width = indices.shape[2]
    if not width and names[0] == "indices":
        raise ArgumentError(names[0], expected="at least one column", actual=list(indices.shape))
    flat = indices.flatten(0, 1)
    if length is None:
        return DenseIndices(flat, torch.full(flat.shape[:1], width, dtype=torch.int32, device=q.device))
    # only lengths in host memory are read; reading others would synchronise
    if length.device.type == "cpu" and length.numel():
        least, most = int(length.min()), int(length.max())
        if least < 0 or most > width:
            raise ArgumentError(names[1], expected=f"lengths in 0 .. {width}, the columns", actual=f"{least} .. {most}")
    return DenseIndices(flat, length if indices.shape[1] == 1 else length.repeat_interleave(indices.shape[1]))
