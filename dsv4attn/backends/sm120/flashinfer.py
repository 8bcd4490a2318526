"""Attention by FlashInfer on SM120: its wrapper under our contract, in both phases, on pages as they are.

What differs, and is put right here: heads are 8, 16, 32, 64 or 128; an index is absent only if it is negative; above 64
tokens rows of indices are dense and whole tiles wide; lse has base 2 and counts the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf, log, nan
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends.sm120.probe import TILE, Found, find, forget, reasons
from dsv4attn.core.chunking import round_up
from dsv4attn.core.contract import AttentionCall, DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.workspace import BufferSpec
from dsv4attn.errors import ArgumentError, UnsupportedError

__all__ = ["FlashInferAttention", "Found", "find", "forget", "reasons"]

_LAYOUT = KVCacheLayout.fp8_ds_mla()
_DIM, _RECORD = _LAYOUT.head_dim, _LAYOUT.record_bytes
_LN2 = log(2.0)
_LARGEST_SLOT = 2**31 - 1
_COPY = "pass contiguous memory"


@frozen
class _Plan:
    """Where a call's scratch views are. heads: with padding. padded: whether there is any. copies: rows of indices."""

    heads: int
    padded: bool
    copies: bool
    specs: tuple[BufferSpec, ...]


class FlashInferAttention:
    """One attention a call, of dense rows on pages, by the FlashInfer that was found.

    in_range: whoever makes the indices promises that none is at or past the capacity of its cache. They are then
    passed as they are. Without the promise they are copied, for FlashInfer would read whatever memory they name.
    capturing: tells whether the current stream is being captured; default: the device's own module does.

    Layers share a wrapper, one for each device: all memory that a call writes is given to it, so it keeps nothing but
    plans by shape, and those are good for every layer and stream. Not safe for several threads at once, as theirs is.
    """

    def __init__(self, found: Found, *, in_range: bool = False, capturing: Callable[[], bool] | None = None) -> None:
        """Touch no device."""
        self.found, self.in_range = found, in_range
        self._capturing = capturing
        self._wrappers: dict[torch.device, tuple[Any, Callable[[], bool]]] = {}
        self._ran: set[tuple[object, ...]] = set()
        self._layout = _LAYOUT

    def scratch(self, layer: LayerGeometry, tokens: int, width: int, extra_width: int) -> Sequence[BufferSpec]:
        """Views that `run` needs for so many rows of `width` and `extra_width` columns, of the second cache if any.

        Parts of rows and their lse, where decode kernels run; the lse of whole rows; q, out and sink where heads are
        padded; indices where they are copied.
        """
        return self._plan(layer.num_heads, tokens, width, extra_width).specs

    def _plan(self, heads: int, tokens: int, width: int, extra: int) -> _Plan:
        padded = self.found.padded(heads)
        if padded is None:
            raise UnsupportedError("num_heads", expected=f"at most {max(self.found.heads, default=0)}", actual=heads)
        return _planned(heads, padded, tokens, width, extra, self.found.max_decode_tokens, self.in_range)

    def run(self, call: AttentionCall, scratch: Sequence[Tensor]) -> None:
        """Attend. scratch: views as `scratch` says for this call's widths. No memory is allocated, nothing is read.

        With an lse asked for, FlashInfer runs without the sink, which is applied to out afterwards: a sum that a sink
        of 1e4 or +inf dominates has lost the keys' part. That rounds out to bf16 a second time.
        Raises ArgumentError, before any write, for tensors it cannot take, and UnsupportedError in a capture of shapes
        that never ran before.
        """
        if not call.q.shape[0]:
            return
        q, out, lse, sink = call.q, call.out, call.lse, call.attn_sink
        heads, keys = q.shape[1], _paged(call)
        plan = self._plan(heads, q.shape[0], *_widths(keys))
        self._check(call, keys, plan)
        mid_out, mid_lse, told, *views = scratch
        wrapper, capturing = self._wrapper(q.device)
        # where lse goes straight to its place, `told` is free for the sink's factor
        if lse is None or plan.padded or lse.stride(1) != 1 or lse.stride(0) < heads:
            out_lse = told
        else:
            out_lse = lse
        passed = sink if lse is None else None
        shape = (*q.shape, q.stride(0), out.stride(0), out_lse.stride(0), passed is None, *_shape_of(keys))
        if capturing() and shape not in self._ran:
            raise UnsupportedError(
                "FlashInfer in a captured graph",
                expected="shapes that ran before the capture",
                actual=f"q of {list(q.shape)} over {' + '.join(map(str, _widths(keys)))} columns for the first time",
                hint="call once with tensors of the same shapes and strides, then capture",
            )
        output = out
        if plan.padded:
            q, output, passed = _padded(q, passed, heads, views)
            del views[:3]
        segments = self._segments(keys, views, plan)
        if not segments:
            _nothing(call)
            return
        pages, indices, lens = segments[0]
        extra = segments[1] if len(segments) > 1 else (None, None, None)
        wrapper.run(
            q,
            pages,
            indices,
            output,
            call.layer.scale,
            topk_length=lens,
            attn_sink=passed,
            extra_kv_cache=extra[0],
            extra_indices=extra[1],
            extra_topk_length=extra[2],
            out_lse=out_lse,
            mid_out=mid_out,
            mid_lse=mid_lse,
            lse_scale=_LN2,
        )
        self._ran.add(shape)
        if lse is not None:
            _finish(call, lse, output, told, out_lse)
        elif plan.padded:
            out.copy_(output[:, :heads])

    def _wrapper(self, device: torch.device) -> tuple[Any, Callable[[], bool]]:
        known = self._wrappers.get(device)
        if known is None:
            capturing = self._capturing
            if capturing is None:
                capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", lambda: False)
            try:
                known = self.found.wrapper(device=device), capturing
            except Exception as error:
                actual = f"{type(error).__name__}: {error}"
                raise UnsupportedError("flashinfer", expected=f"a wrapper for {device}", actual=actual) from error
            self._wrappers[device] = known
        return known

    def _check(self, call: AttentionCall, keys: Sequence[PagedKeys], plan: _Plan) -> None:
        """Raise ArgumentError for what FlashInfer would refuse, or read wrongly."""
        dense = (("q", call.q), ("out", call.out), ("attn_sink", call.attn_sink))
        for name, tensor in () if plan.padded else dense:
            if tensor is not None and (not tensor.is_contiguous() or (tensor.data_ptr() % 16 and tensor.ndim == 3)):
                actual = f"strides {tensor.stride()} at {tensor.data_ptr() % 16} bytes behind one"
                raise ArgumentError(name, expected="contiguous from a multiple of 16 bytes", actual=actual, hint=_COPY)
        for segment in keys:
            rows, cache = _dense(segment), segment.cache
            if cache.layout is not self._layout and cache.layout != self._layout:
                check_layout(cache.layout, _LAYOUT, "cache")
                self._layout = cache.layout
            if cache.tensor.data_ptr() % 16 or (cache.num_blocks > 1 and cache.page_stride % 16):
                actual = f"{cache.tensor.data_ptr() % 16} bytes behind one, {cache.page_stride} bytes apart"
                raise ArgumentError("cache", expected="pages at multiples of 16 bytes", actual=actual)
            if not rows.lens.is_contiguous():
                raise ArgumentError("lens", expected="contiguous", actual=rows.lens.stride(), hint=_COPY)
            if not plan.copies:
                self._check_indices(rows.indices)

    def _check_indices(self, indices: Tensor) -> None:
        """What is passed as it is must be what it takes: decode any rows, prefill dense ones of whole tiles."""
        (tokens, width), (row, column) = indices.shape, indices.stride()
        many = tokens > self.found.max_decode_tokens
        if column != 1 or row < width or (many and (row != width or width % TILE)):
            expected = f"dense rows of whole tiles of {TILE}" if many else "rows that do not overlap"
            actual = f"shape {[tokens, width]}, strides {[row, column]}"
            raise ArgumentError("indices", expected=expected, actual=actual, hint="do not promise in_range")

    def _segments(
        self, keys: Sequence[PagedKeys], views: Sequence[Tensor], plan: _Plan
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(pages, indices, lens) of each cache that has keys: the first is FlashInfer's main one, whichever it is."""
        segments = []
        for i, segment in enumerate(keys):
            rows, cache = _dense(segment), segment.cache
            indices = rows.indices
            if indices.shape[1] and cache.num_blocks:
                if plan.copies:
                    indices = _copied(indices, cache, views[i], views[-1])
                segments.append((_pages(cache), indices, rows.lens))
        return segments


@lru_cache(maxsize=1024)  # every layer of every step asks for the same
def _planned(
    heads: int,
    padded: int,
    tokens: int,
    width: int,
    extra: int,
    most: int,
    in_range: bool,  # noqa: FBT001 - a key
) -> _Plan:
    # prefill kernels write no parts, and still ask for memory of the right types
    specs: list[BufferSpec] = [((8,), torch.bfloat16), ((4,), torch.float32)]
    if tokens <= most:
        # the caches are tiled apart, whichever of them turn out to have keys
        parts = tokens, padded if padded == 8 else round_up(padded, 16), -(-width // TILE) - (-extra // TILE)
        specs = [((*parts, _DIM), torch.bfloat16), (parts, torch.float32)]
    specs.append(((tokens, padded), torch.float32))
    if padded != heads:
        specs += [((tokens, padded, _DIM), torch.bfloat16)] * 2
        specs.append(((padded,), torch.float32))
    if not in_range:
        unit = 1 if tokens <= most else TILE
        rows = [(tokens, round_up(width, unit)), (tokens, round_up(extra, unit))]
        specs += [(shape, torch.int32) for shape in rows]
        specs.append(((tokens, max(width, extra)), torch.bool))
    return _Plan(padded, padded != heads, not in_range, tuple(specs))


def _paged(call: AttentionCall) -> Sequence[PagedKeys]:
    """The caches of a call. Raises ArgumentError for keys in any other form."""
    keys = call.keys
    if isinstance(keys, GatheredKeys):
        raise ArgumentError("keys", expected="pages", actual="gathered rows")
    if not 1 <= len(keys) <= 2:
        raise ArgumentError("keys", expected="one or two caches", actual=len(keys))
    for segment in keys:
        if not isinstance(segment.rows, DenseIndices):
            raise ArgumentError("indices", expected="dense rows", actual="ragged rows")
    return keys


def _widths(keys: Sequence[PagedKeys]) -> tuple[int, int]:
    """Columns of the window and of the other cache, which may not be."""
    return _dense(keys[0]).indices.shape[1], _dense(keys[1]).indices.shape[1] if len(keys) > 1 else 0


def _dense(segment: PagedKeys) -> DenseIndices:
    rows = segment.rows
    assert isinstance(rows, DenseIndices)
    return rows


def _shape_of(keys: Sequence[PagedKeys]) -> tuple[int, ...]:
    """Numbers that say everything of a call's keys that FlashInfer plans by."""
    numbers: list[int] = []
    for segment in keys:
        rows, cache = _dense(segment), segment.cache
        numbers += (rows.indices.shape[1], rows.indices.stride(0), rows.lens.stride(0))
        numbers += (cache.num_blocks, cache.block_size, cache.page_stride)
    return tuple(numbers)


def _pages(cache: PagedKVCache) -> Tensor:
    """[B, P, 1, 584] view of the bytes. The stride of a single page, which says nothing, is one that is accepted."""
    blocks, size = cache.num_blocks, cache.block_size
    stride = cache.page_stride if blocks > 1 else round_up(size * _RECORD, 16)
    return cache.tensor.as_strided((blocks, size, 1, _RECORD), (stride, _RECORD, _RECORD, 1))


def _copied(indices: Tensor, cache: PagedKVCache, memory: Tensor, beyond: Tensor) -> Tensor:
    """Rows with -1 for whatever does not exist, and in columns that fill up a tile. memory: [T, >= K]. beyond: bool."""
    width = indices.shape[1]
    rows, mask = memory[:, :width], beyond[:, :width]
    torch.clamp(indices, min=-1, out=rows)
    torch.ge(indices, min(cache.capacity, _LARGEST_SLOT), out=mask)
    rows.masked_fill_(mask, -1)
    if width < memory.shape[1]:
        memory[:, width:].fill_(-1)
    return memory


def _padded(
    q: Tensor, sink: Tensor | None, heads: int, views: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Copies of q and sink with heads of zeros and without a sink behind them, and memory for as many outputs."""
    wide, output, sinks = views[:3]
    wide[:, :heads].copy_(q)
    wide[:, heads:].zero_()
    if sink is None:
        return wide, output, None
    sinks[:heads].copy_(sink)
    sinks[heads:].fill_(-inf)
    return wide, output, sinks


def _nothing(call: AttentionCall) -> None:
    """Where no cache has a column or a page, no row has a key."""
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(call.empty_lse)


def _finish(call: AttentionCall, lse: Tensor, output: Tensor, told: Tensor, out_lse: Tensor) -> None:
    """Put lse and out where they belong, out times sigmoid(lse - sink). told: [T, >= H] fp32, free from here on."""
    heads, sink = lse.shape[1], call.attn_sink
    if out_lse is told:
        lse.copy_(told[:, :heads])
    if sink is not None:
        factor = told[:, :heads]
        torch.sub(lse, sink, out=factor)
        # not a number without keys and without a sink; out is zero then
        factor.nan_to_num_(nan=0.0, posinf=inf, neginf=-inf).sigmoid_()
        torch.mul(output[:, :heads], factor.unsqueeze(-1), out=call.out)
    elif output is not call.out:
        call.out.copy_(output[:, :heads])
    if call.empty_lse != -inf:
        torch.nan_to_num(lse, nan=nan, posinf=inf, neginf=call.empty_lse, out=lse)
