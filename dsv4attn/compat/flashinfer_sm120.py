"""FlashInfer's per-layer wrapper for SM120, with the same name and arguments, on the sm120 backend's own kernel.

Its constructor and `run` are those of `flashinfer.mla.SparseMLASm120Wrapper`, so that it can replace that class for
calls that FlashInfer does not serve: any head count up to 128 without padding, any top-k, any page size, exact products
of bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4attn.compat.arguments import check_optional, check_rows, layer_of
from dsv4attn.compat.direct import device_backend
from dsv4attn.compat.flashinfer_sm120_memory import WrapperMemory, device_of
from dsv4attn.core.attention.checks import check_same_device
from dsv4attn.core.attention.overlap import check_results_apart
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.selected_keys import DenseIndices, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.reprs import fields_repr
from dsv4attn.core.tensorspec import BufferSpec, check_tensor
from dsv4attn.errors import ArgumentError, UnsupportedError

__all__ = ["SparseMLASm120Wrapper", "get_padded_num_q_heads"]

_D, _ROPE, _RECORD = 512, 64, 584
_MOST_HEADS, _MOST_TOKENS, _MOST_SPLIT_TOKENS = 128, 2**31 - 1, 64
_LOG2E = 1 / log(2)
_backend = partial(device_backend, "sm120", kernel="own")
_layout = cache(KVCacheLayout.fp8_ds_mla)


def get_padded_num_q_heads(num_heads: int) -> int:
    """Heads of q in FlashInfer's kernels. This backend pads by itself, and its own kernel takes any number of heads.

    num_heads: heads of the model on this rank.
    """
    sizes = (8, 16, 32, 64, _MOST_HEADS)
    if not 1 <= num_heads <= sizes[-1]:
        raise ArgumentError("num_heads", expected=f"1 to {_MOST_HEADS}", actual=num_heads)
    return next(size for size in sizes if size >= num_heads)


class _Rows(NamedTuple):
    """One segment: its cache, its index rows, and their lengths; lens is None if all columns count."""

    cache: PagedKVCache
    indices: Tensor
    lens: Tensor | None

    def __repr__(self) -> str:
        """With dtypes and shapes of tensors."""
        return fields_repr(self)


class SparseMLASm120Wrapper:
    """Attention on fp8 pages for one layer and stream.

    max_num_tokens, max_num_heads: both or neither, the largest call. With them all memory of the wrapper is allocated
    here, on `device` or the current accelerator, and is never moved: any call within them can be captured, and a
    captured graph stays valid after any later call. Without them it is allocated on `device`, or in the first call on
    the device of its q; memory for lengths then grows outside captures, and memory of a captured graph is not freed.
    d_v: must be 512.
    kv_scale_format: must be "auto".
    kv_cache_format: must be "fp8".
    extra_kv_fp4: must be False.
    compute_precision: "default" or "bf16", which are the same here.
    device: where the memory is allocated; None: the current accelerator.
    backend: name of the backend that runs the calls.

    Raises ArgumentError or UnsupportedError.
    """

    def __init__(
        self,
        max_num_tokens: int | None = None,
        max_num_heads: int | None = None,
        *,
        d_v: int = _D,
        kv_scale_format: str = "auto",
        kv_cache_format: str = "fp8",
        extra_kv_fp4: bool = False,
        compute_precision: str = "default",
        device: torch.device | str | None = None,
        backend: str = "auto",
    ) -> None:
        """Check the arguments, and allocate the memory of all calls if the maxima are given."""
        if (max_num_tokens is None) != (max_num_heads is None):
            missing = "max_num_tokens" if max_num_tokens is None else "max_num_heads"
            raise ArgumentError(missing, expected="both maxima or neither", actual=None)
        for name, most, limit in (
            ("max_num_tokens", max_num_tokens, _MOST_TOKENS),
            ("max_num_heads", max_num_heads, _MOST_HEADS),
        ):
            if most is not None and not 1 <= most <= limit:
                raise ArgumentError(name, expected=f"1 to {limit}", actual=most)
        for name, value, allowed in (
            ("d_v", d_v, (_D,)),
            ("kv_scale_format", kv_scale_format, ("auto",)),
            ("kv_cache_format", kv_cache_format, ("fp8",)),
            ("extra_kv_fp4", extra_kv_fp4, (False,)),
            ("compute_precision", compute_precision, ("default", "bf16")),
            ("backend", backend, ("auto", "sparse")),
        ):
            if value not in allowed:
                raise UnsupportedError(name, expected=" or ".join(map(repr, allowed)), actual=repr(value))
        self._most = max_num_tokens, max_num_heads
        self._memory: WrapperMemory | None = None
        if device is not None or max_num_tokens is not None:
            self._memory = self._allocated(device_of(device))

    def run(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        output: Tensor,
        sm_scale: float,
        *,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_kv_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
        out_lse: Tensor | None = None,
        mid_out: Tensor | None = None,
        mid_lse: Tensor | None = None,
        prefill_impl: str | None = None,
        return_lse: bool = False,
        lse_scale: float = 1.0,
    ) -> Tensor | None:
        """Attend, and write `output`; returns the lse if asked for.

        q: [T, H, 512] or [T, 1, H, 512] bf16, H up to 128. output: the same, of either rank. kv_cache, extra_kv_cache:
        uint8 [B, P, 584] or [B, P, 1, 584], each with its own page size and page stride. indices, extra_indices:
        [T, K] or [T, 1, K] int32 slots; -1 and slots that do not exist are absent. topk_length, extra_topk_length: [T]
        int32, leading columns that count, or None for all. attn_sink: [H] fp32.
        out_lse: [>= T, H] fp32. Its logarithm has base 2 and includes the sink; lse_scale multiplies it, so that ln 2
        makes it natural. A row without keys gives zeros, and the sink's lse or -inf.
        mid_out, mid_lse: memory for splits of rows, contiguous; num_splits is limited to what fits. Without it the
        wrapper's own. prefill_impl: None, "auto" or "mg"; there is one implementation. Up to 64 tokens several programs
        share a row, above 64 they do not; results are the same. Nothing is launched for no tokens.
        sm_scale: factor of the logits.
        return_lse: whether to return the lse.
        lse_scale: factor of the lse.
        Raises ArgumentError or UnsupportedError before any launch: for a call past the maxima or on another device than
        the wrapper's memory; and, in a wrapper without maxima, for a captured call that needs memory first.
        """
        q, out = _flat("q", q, _D), _flat("output", output, _D)
        letters = {"D": _D}
        check_tensor("q", q, "T H D", torch.bfloat16, letters)
        check_tensor("output", out, "T H D", torch.bfloat16, letters, written=True)
        check_optional("attn_sink", attn_sink, "H", torch.float32, letters)
        tokens, heads = letters["T"], letters["H"]
        self._check_size(tokens, heads)
        if prefill_impl not in (None, "auto", "mg"):
            expected = "None, 'auto' or 'mg': there is one implementation"
            raise UnsupportedError("prefill_impl", expected=expected, actual=repr(prefill_impl))
        segments = [_segment(q, "", kv_cache, indices, topk_length)]
        if extra_kv_cache is not None or extra_indices is not None:
            segments.append(_segment(q, "extra_", extra_kv_cache, extra_indices, extra_topk_length))
        elif extra_topk_length is not None:
            raise ArgumentError("extra_topk_length", expected="None without extra_kv_cache", actual="a tensor")
        lse = self._lse_of(q, out_lse, return_lse=return_lse)
        check_same_device(q, output=out, attn_sink=attn_sink, out_lse=lse)
        results = {"output": out, "out_lse": lse, "mid_out": mid_out, "mid_lse": mid_lse}
        read = {"topk_length": topk_length, "kv_cache": kv_cache, "indices": indices, "attn_sink": attn_sink}
        more = {"extra_topk_length": extra_topk_length, "extra_kv_cache": extra_kv_cache}
        check_results_apart(results, q=q, extra_indices=extra_indices, **read, **more)
        if not tokens:
            return lse if return_lse else None
        if not segments[0].indices.shape[1]:
            raise ArgumentError("indices", expected="at least one column", actual=0)
        layer = layer_of(heads, _D, _ROPE, float(sm_scale))
        width, backend = sum(rows.indices.shape[1] for rows in segments), _backend()
        specs = backend.scratch(Phase.DECODE, layer, tokens, width) if tokens <= _MOST_SPLIT_TOKENS else ()
        lens = None if all(rows.lens is not None for rows in segments) else self._own(q).lens(tokens)
        parts = self._parts(q, specs, mid_out, mid_lse)
        keys = [PagedKeys(rows.cache, DenseIndices(rows.indices, _lens_of(rows, lens))) for rows in segments]
        backend.decode(AttentionCall(layer, q, keys, attn_sink, out, lse, parts))
        if lse is not None:
            _to_base_two(lse, attn_sink, lse_scale)
        return lse if return_lse else None

    def _check_size(self, tokens: int, heads: int) -> None:
        if not 1 <= heads <= _MOST_HEADS:
            raise ArgumentError("q", expected=f"1 to {_MOST_HEADS} heads", actual=heads)
        for name, value, most in zip(("tokens", "heads"), (tokens, heads), self._most, strict=True):
            if most is not None and value > most:
                raise ArgumentError("q", expected=f"at most max_num_{name}={most} {name}", actual=value)

    def _lse_of(self, q: Tensor, out_lse: Tensor | None, *, return_lse: bool) -> Tensor | None:
        tokens, heads, _ = q.shape
        if out_lse is not None:
            check_tensor("out_lse", out_lse, f"_ {heads}", torch.float32, {}, written=True)
            if out_lse.shape[0] < tokens:
                raise ArgumentError("out_lse", expected=f"at least {tokens} rows", actual=out_lse.shape[0])
            return out_lse[:tokens]
        return q.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None

    def _allocated(self, device: torch.device) -> WrapperMemory:
        tokens, heads = self._most
        return WrapperMemory(device, _backend(), tokens=tokens or 0, heads=heads or _MOST_HEADS)

    def _own(self, q: Tensor) -> WrapperMemory:
        """The wrapper's memory, on the device of q. A wrapper with neither maxima nor device allocates it now."""
        if self._memory is None:
            self._memory = self._allocated(q.device)
        if q.device != self._memory.device:
            expected = f"a tensor on {self._memory.device}, where the wrapper's memory is"
            raise ArgumentError("q", expected=expected, actual=f"one on {q.device}", hint=f"device={str(q.device)!r}")
        return self._memory

    def _parts(
        self, q: Tensor, specs: Sequence[BufferSpec], mid_out: Tensor | None, mid_lse: Tensor | None
    ) -> Sequence[Tensor]:
        """Memory of the splits of each row: the caller's, as far as it suffices, or the wrapper's own.

        specs: of the scratch that the backend asks for; none if rows are not split.
        """
        if mid_out is not None and mid_lse is not None:
            values, lse = (_bytes_of(name, memory, q) for name, memory in (("mid_out", mid_out), ("mid_lse", mid_lse)))
            tokens, heads, dim = q.shape
            rows = tokens * heads
            requested = specs[1][0][1] if specs else 1
            splits = min(requested, values.numel() // (rows * dim), lse.numel() // rows)
            if splits < 2:
                return ()
            shape = tokens, splits, heads
            return values[: rows * splits * dim].view(*shape, dim), lse[: rows * splits].view(shape)
        if (mid_out is None) != (mid_lse is None):
            missing = "mid_out" if mid_out is None else "mid_lse"
            raise ArgumentError(missing, expected="both mid_out and mid_lse, or neither", actual=None)
        return self._own(q).parts(specs) if specs else ()


def _lens_of(rows: _Rows, lens: Tensor | None) -> Tensor:
    """The lengths of a segment's rows, which are `lens` if the caller gave none."""
    of_rows = lens if rows.lens is None else rows.lens
    assert of_rows is not None
    return of_rows


def _flat(name: str, tensor: Tensor, last: int) -> Tensor:
    """[T, 1, H, last] as [T, H, last]; later checks refuse other shapes."""
    if tensor.ndim == 4:
        if tensor.shape[1] != 1:
            raise ArgumentError(name, expected=f"[T, H, {last}] or [T, 1, H, {last}]", actual=list(tensor.shape))
        return tensor.squeeze(1)
    return tensor


def _segment(q: Tensor, name: str, cache: Tensor | None, indices: Tensor | None, lens: Tensor | None) -> _Rows:
    """One cache and the index rows into it, checked."""
    rows = check_rows(q, (f"{name}indices", f"{name}topk_length"), indices, lens, optional=True)
    owner = f"{name}kv_cache"
    if isinstance(cache, Tensor) and cache.ndim == 4 and cache.shape[2] == 1:
        cache = cache.squeeze(2)
    check_tensor(owner, cache, f"_ _ {_RECORD}", torch.uint8, {})
    check_same_device(q, **{owner: cache})
    assert cache is not None
    return _Rows(PagedKVCache(cache, _layout()), rows, lens)


def _bytes_of(name: str, tensor: Tensor, q: Tensor) -> Tensor:
    """A caller's memory as a flat fp32 vector."""
    check_same_device(q, **{name: tensor})
    if not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ArgumentError(name, expected="contiguous memory that begins at a multiple of 16 bytes", actual="other")
    flat = tensor.view(-1).view(torch.uint8)
    return flat[: flat.numel() // 4 * 4].view(torch.float32)


def _to_base_two(lse: Tensor, sink: Tensor | None, scale: float) -> None:
    """Convert an lse in place: from natural without the sink, as kernels write it, to base 2 with the sink."""
    lse.mul_(_LOG2E)
    if sink is not None:
        torch.logaddexp2(lse, (sink * _LOG2E).expand_as(lse), out=lse)
    if scale != 1.0:
        lse.mul_(scale)
