"""Attention by FlashInfer on SM120: its wrapper under our contract, in both phases, on pages as they are.

What differs, and is put right here: heads are 8, 16, 32, 64 or 128; an index is absent only if it is negative; above 64
tokens rows of indices are dense and whole tiles wide; lse has base 2 and counts the sink.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, log, nan
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.backends.sm120.probe import TILE, Found, find, forget, reasons
from dsv4attn.core.chunking import round_up
from dsv4attn.core.contract import AttentionCall, DenseIndices, GatheredKeys
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.layout import KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.workspace import BufferSpec
from dsv4attn.errors import ArgumentError, Dsv4AttnError, UnsupportedError

__all__ = ["FlashInferAttention", "Found", "find", "forget", "reasons"]

_LAYOUT = KVCacheLayout.fp8_ds_mla()
_DIM, _RECORD = _LAYOUT.head_dim, _LAYOUT.record_bytes
_LN2 = log(2.0)
_LARGEST_SLOT = 2**31 - 1
_COPY = "pass contiguous memory"
_EXTRA = ("extra_kv_cache", "extra_indices", "extra_topk_length")


@frozen
class _Plan:
    """What a call's scratch holds. padded: whether heads are. copies: whether rows of indices are."""

    padded: bool
    copies: bool
    specs: tuple[BufferSpec, ...]


@frozen
class _Form:
    """What follows from shapes and strides alone. pages: of each cache with keys, its number, and its view's sizes.

    direct: whether FlashInfer can write lse to its place, and not to scratch memory.
    """

    plan: _Plan
    direct: bool
    pages: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


class FlashInferAttention:
    """One attention a call, of dense rows on pages, by the FlashInfer that was found.

    in_range: whoever makes the indices promises that none is at or past the capacity of its cache. They are then
    passed as they are. Without the promise they are copied, for FlashInfer would read whatever memory they name.
    capturing: tells whether the current stream is being captured; default: the device's own module does.

    Layers share a wrapper, one for each device: all memory that a call writes is given to it, so it keeps nothing but
    plans by shape, and those are good for every layer and stream. We keep what we know of each shape too.
    """

    def __init__(self, found: Found, *, in_range: bool = False, capturing: Callable[[], bool] | None = None) -> None:
        """Touch no device."""
        self.found, self.in_range = found, in_range
        self._capturing = capturing
        self._wrappers: dict[torch.device, tuple[Any, Tensor]] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._layout = _LAYOUT

    def scratch(self, layer: LayerGeometry, tokens: int, width: int, extra_width: int) -> Sequence[BufferSpec]:
        """Views that `run` needs for so many rows of `width` and `extra_width` columns, of the second cache if any.

        Parts of rows and their lse, where decode kernels run; the lse of whole rows; q, out and sink where heads are
        padded; indices where they are copied.
        """
        return self._plan(layer.num_heads, tokens, width, extra_width).specs

    def _plan(self, heads: int, tokens: int, width: int, extra: int) -> _Plan:
        plan = self._plans.get((heads, tokens, width, extra))  # every layer of every step asks for the same
        if plan is None:
            padded = self.found.padded(heads)
            if padded is None:
                most = max(self.found.heads, default=0)
                raise UnsupportedError("num_heads", expected=f"at most {most}", actual=heads)
            plan = _Plan(padded != heads, not self.in_range, tuple(self._specs(heads, padded, tokens, width, extra)))
            self._plans[heads, tokens, width, extra] = plan
        return plan

    def _specs(self, heads: int, padded: int, tokens: int, width: int, extra: int) -> Iterator[BufferSpec]:
        if tokens <= self.found.max_decode_tokens:
            # caches are tiled apart, whichever of them turn out to have keys
            parts = tokens, padded, -(-width // TILE) - (-extra // TILE)
            yield from (((*parts, _DIM), torch.bfloat16), (parts, torch.float32))
        else:
            # prefill kernels write no parts, and still ask for memory of the right types
            yield from (((8,), torch.bfloat16), ((4,), torch.float32))
        yield (tokens, padded), torch.float32
        if padded != heads:
            yield from [((tokens, padded, _DIM), torch.bfloat16)] * 2
            yield (padded,), torch.float32
        if not self.in_range:
            unit = 1 if tokens <= self.found.max_decode_tokens else TILE
            yield (tokens, round_up(width, unit)), torch.int32
            yield (tokens, round_up(extra, unit)), torch.int32
            yield (tokens, max(width, extra)), torch.bool

    def takes(self, call: AttentionCall) -> bool:
        """Whether `run` would not refuse a call: neither its memory, nor what it asks for."""
        try:
            if _key(call) not in self._forms:
                self._formed(call)
            self._check_memory(call)
        except Dsv4AttnError:
            return False
        plan = self._plan(call.q.shape[1], call.q.shape[0], *_widths(call))
        return len(call.scratch) == len(plan.specs)

    def run(self, call: AttentionCall, scratch: Sequence[Tensor]) -> None:
        """Attend. scratch: views as `scratch` says for this call's widths. No memory is allocated, nothing is read.

        With an lse and a sink, FlashInfer runs twice: without the sink for the lse, with it for out, so that asking for
        an lse changes no bit of out.
        Raises ArgumentError, before a result is written, for tensors it cannot take, and UnsupportedError in a capture
        of shapes that never ran before.
        """
        q, out, lse, sink = call.q, call.out, call.lse, call.attn_sink
        if not q.shape[0]:
            return
        key = _key(call)
        known = self._forms.get(key)
        form = known or self._formed(call)
        self._check_memory(call)
        if known is None and self._is_capturing(q.device):
            raise UnsupportedError(
                "FlashInfer in a captured graph",
                expected="shapes that ran before the capture",
                actual=f"q of {list(q.shape)} over {' + '.join(map(str, _widths(call)))} columns for the first time",
                hint="call once with tensors of the same shapes and strides, then capture",
            )
        if not form.pages:
            _nothing(call)
            return
        mid_out, mid_lse, told, *views = scratch
        heads, output, passed = q.shape[1], out, sink
        if form.plan.padded:
            q, output, passed = _padded(q, passed, heads, views)
            del views[:3]
        wrapper, none = self._wrapper(q.device)
        (pages, indices, lens), extra = _given(call, form, views, none)
        attend = partial(
            wrapper.run,
            q,
            pages,
            indices,
            output,
            call.layer.scale,
            topk_length=lens,
            **extra,
            mid_out=mid_out,
            mid_lse=mid_lse,
            lse_scale=_LN2,
        )
        if lse is not None:
            # without the sink: the keys' part cannot be had from a sum that a sink of 1e4 or +inf dominates
            attend(attn_sink=None, out_lse=lse if form.direct else told)
            _tell(lse, told, call.empty_lse, direct=form.direct)
        if lse is None or passed is not None:
            attend(attn_sink=passed, out_lse=told)
        if known is None:
            self._forms[key] = form
        if form.plan.padded:
            out.copy_(output[:, :heads])

    def _is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream is; no device but a GPU can be."""
        asked = self._capturing or getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        return asked is not None and asked()

    def _wrapper(self, device: torch.device) -> tuple[Any, Tensor]:
        """Their wrapper for a device, and a -1 that lies there."""
        known = self._wrappers.get(device)
        if known is None:
            try:
                wrapper = self.found.wrapper(device=device)
            except Exception as error:
                actual = f"{type(error).__name__}: {error}"
                raise UnsupportedError("flashinfer", expected=f"a wrapper for {device}", actual=actual) from error
            known = self._wrappers[device] = wrapper, torch.full((), -1, dtype=torch.int32, device=device)
        return known

    def _formed(self, call: AttentionCall) -> _Form:
        """Raise ArgumentError for shapes and strides that FlashInfer would refuse; else say what follows from them."""
        q, lse, keys = call.q, call.lse, _paged(call)
        pages: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        plan = self._plan(q.shape[1], q.shape[0], *_widths(call))
        for name, tensor in (("q", q), ("out", call.out), ("attn_sink", call.attn_sink)):
            if tensor is not None and not plan.padded and not tensor.is_contiguous():
                raise ArgumentError(name, expected="contiguous", actual=tensor.stride(), hint=_COPY)
        for i, segment in enumerate(keys):
            rows, cache = segment.rows, segment.cache
            if not rows.lens.is_contiguous():
                raise ArgumentError("lens", expected="contiguous", actual=rows.lens.stride(), hint=_COPY)
            blocks, size, sizes = cache.num_blocks, cache.block_size, self.found.page_sizes
            if sizes is not None and size not in sizes:
                expected = f"pages of {', '.join(map(str, sorted(sizes)))} with flashinfer {self.found.version}"
                raise ArgumentError("cache", expected=expected, actual=size)
            if blocks > 1 and cache.page_stride % 16:
                raise ArgumentError("cache", expected="pages at multiples of 16 bytes", actual=cache.page_stride)
            if rows.indices.shape[1] and blocks:
                if not plan.copies:
                    self._check_indices(rows.indices, main=not pages)
                # the stride of a single page, which says nothing, must be one that is accepted
                stride = cache.page_stride if blocks > 1 else round_up(size * _RECORD, 16)
                pages.append((i, (blocks, size, 1, _RECORD), (stride, _RECORD, _RECORD, 1)))
        direct = lse is not None and not plan.padded and lse.stride(1) == 1 and lse.stride(0) >= q.shape[1]
        return _Form(plan, direct, tuple(pages))

    def _check_memory(self, call: AttentionCall) -> None:
        """Raise unless bytes mean what FlashInfer thinks, and begin where it can load them."""
        if call.max_logits is not None:
            raise ArgumentError("max_logits", expected="None: FlashInfer does not tell them", actual="a tensor")
        if call.q.dtype is not torch.bfloat16:
            raise ArgumentError("q", expected="bfloat16", actual=str(call.q.dtype).removeprefix("torch."))
        start, keys = call.q.data_ptr() | call.out.data_ptr(), _paged(call)
        for segment in keys:
            layout = segment.cache.layout
            if layout is not self._layout and layout != self._layout:
                check_layout(layout, _LAYOUT, "cache")
                self._layout = layout
            start |= segment.cache.tensor.data_ptr()
        if start % 16:
            begins = [call.q, call.out, *(segment.cache.tensor for segment in keys)]
            actual = [tensor.data_ptr() % 16 for tensor in begins]
            expected = "q, out and caches to begin at multiples of 16 bytes"
            raise ArgumentError("tensors", expected=expected, actual=f"{actual} bytes behind one", hint=_COPY)

    def _check_indices(self, indices: Tensor, *, main: bool) -> None:
        """What is passed as it is must be what it takes: decode any rows, prefill dense ones, and whole tiles first."""
        (tokens, width), (row, column) = indices.shape, indices.stride()
        many = tokens > self.found.max_decode_tokens
        if column != 1 or row < width or (many and (row != width or (main and width % TILE))):
            whole = f" of whole tiles of {TILE}" if main else ""
            expected = f"dense rows{whole}" if many else "rows that do not overlap"
            actual = f"shape {[tokens, width]}, strides {[row, column]}"
            raise ArgumentError("indices", expected=expected, actual=actual, hint="do not promise in_range")


def _key(call: AttentionCall) -> tuple[object, ...]:
    """All that FlashInfer plans by, and that the checks look at. Raises ArgumentError for other forms of keys."""
    q, lse, sink = call.q, call.lse, call.attn_sink
    key: list[object] = [
        q.device,
        q.shape,
        q.stride(),
        call.out.stride(),
        None if lse is None else lse.stride(),
        None if sink is None else sink.stride(),
    ]
    for segment in _paged(call):
        rows, cache = segment.rows, segment.cache
        key += (rows.indices.shape, rows.indices.stride(), rows.lens.stride())
        key += (cache.num_blocks, cache.block_size, cache.page_stride)
    return tuple(key)


def _paged(call: AttentionCall) -> Sequence[Any]:
    """The caches of a call, with dense rows of slots. Raises ArgumentError for keys in any other form."""
    keys = call.keys
    if isinstance(keys, GatheredKeys):
        raise ArgumentError("keys", expected="pages", actual="gathered rows")
    if not 1 <= len(keys) <= 2:
        raise ArgumentError("keys", expected="one or two caches", actual=len(keys))
    for segment in keys:
        if not isinstance(segment.rows, DenseIndices):
            raise ArgumentError("indices", expected="dense rows", actual="ragged rows")
    return keys


def _widths(call: AttentionCall) -> tuple[int, int]:
    """Columns of the window, and of the other cache if there is one."""
    first, *other = [segment.rows.indices.shape[1] for segment in _paged(call)]
    return first, sum(other)


def _copied(indices: Tensor, cache: PagedKVCache, memory: Tensor, beyond: Tensor, none: Tensor) -> Tensor:
    """Rows with -1 for slots the cache has not, and in columns that fill up a tile.

    memory: [T, >= K] int32. beyond: [T, >= K] bool. none: -1.
    """
    width = indices.shape[1]
    mask = beyond[:, :width]
    torch.ge(indices, min(cache.capacity, _LARGEST_SLOT), out=mask)
    torch.where(mask, none, indices, out=memory[:, :width])
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


def _given(
    call: AttentionCall, form: _Form, views: Sequence[Tensor], none: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
    """(pages, indices, lens) of the first cache that has keys, and those of the second by the names they have there."""
    given, keys = [], _paged(call)
    for i, size, strides in form.pages:
        cache, rows = keys[i].cache, keys[i].rows
        assert isinstance(rows, DenseIndices)
        indices = _copied(rows.indices, cache, views[i], views[-1], none) if form.plan.copies else rows.indices
        given.append((cache.tensor.as_strided(size, strides), indices, rows.lens))
    return given[0], dict(zip(_EXTRA, given[1], strict=True)) if len(given) > 1 else {}


def _tell(lse: Tensor, told: Tensor, empty: float, *, direct: bool) -> None:
    """Put an lse where it belongs, if it is not there, and what the call says for rows without keys."""
    if not direct:
        lse.copy_(told[:, : lse.shape[1]])
    if empty != -inf:
        torch.nan_to_num(lse, nan=nan, posinf=inf, neginf=empty, out=lse)
