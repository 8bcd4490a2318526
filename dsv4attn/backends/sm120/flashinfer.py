"""Attention by FlashInfer on SM120: its wrapper under our contract, in both phases, on pages as they are.

What differs, and is put right here: above 64 tokens heads are 8, 16, 32, 64 or 128, and rows of indices are dense and
whole tiles wide; an index is absent only if it is negative; lse has base 2 and counts the sink.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from math import inf, log
from typing import Any, TypeAlias, TypeVar, cast

import torch
from attrs import define, evolve, frozen
from torch import Tensor

from dsv4attn.backends.sm120.flashinfer_launches import Copies, Results
from dsv4attn.backends.sm120.probe import InstalledFlashInfer
from dsv4attn.backends.sm120.served import TILE, reasons, record_of
from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import KVCacheLayout, check_layout
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall, Run
from dsv4attn.core.contract.problem import CacheFacts, Problem
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec, signature
from dsv4attn.errors import ArgumentError, Dsv4AttnError, UnsupportedError

_LAYOUT = KVCacheLayout.fp8_ds_mla()
_DIM = _LAYOUT.head_dim
_LN2 = log(2.0)
_COPY = "pass contiguous memory"
_Sizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a view."""
_View: TypeAlias = tuple["weakref.ref[Tensor]", _Sizes, Tensor]
"""The tensor of a cache, and a view of its memory in FlashInfer's shape."""
MIN_PART_HEADS, PART_HEADS = 8, 16
"""Heads of a part that decode kernels write: 8 for 8 heads of q, else the next multiple of 16."""
MOST_SHAPES = 1024
"""Most entries of a cache by shapes: more than an engine uses, for its graph sizes and recent eager shapes."""
_K = TypeVar("_K")
_V = TypeVar("_V")
_NAMES = ("kv_cache", "indices", "topk_length"), ("extra_kv_cache", "extra_indices", "extra_topk_length")


def remember(table: dict[_K, _V], key: _K, value: _V) -> _V:
    """Put a value into a table, which removes its oldest entry when it is full; widths of batches are unbounded."""
    if len(table) >= MOST_SHAPES:
        table.pop(next(iter(table)), None)
    table[key] = value
    return value


@frozen
class _Plan:
    """The scratch of a call. heads: of FlashInfer's call. padded, copies: whether heads are padded, indices copied."""

    heads: int
    padded: bool
    copies: bool
    specs: tuple[BufferSpec, ...]
    dtypes: tuple[torch.dtype, ...]


@define(eq=False)
class _Form:
    """What follows from the shapes and strides of a call.

    installed: FlashInfer for the format of the caches.
    pages: for each cache with keys, its number and the sizes of its view.
    direct: whether FlashInfer writes lse to the call's tensor, and not to scratch memory. copies, results: launches
    before and after FlashInfer. ran: whether all of them have run.
    """

    installed: InstalledFlashInfer
    plan: _Plan
    direct: bool
    pages: tuple[tuple[int, _Sizes], ...]
    copies: Copies | None
    results: Results | None
    ran: bool = False


class FlashInferAttention:
    """One attention a call, of dense rows on pages, by the installed FlashInfer.

    in_range: a promise that no index is at or past the capacity of its cache. Indices are then passed as they are.
    Without the promise they are copied, since FlashInfer reads whatever memory they address.
    capturing: whether the current stream is being captured; the default asks the device's own module.
    lossy: whether formats are served whose kernels round queries and weights to 4 bits.

    Layers share one wrapper for each device. Calls give it all memory that it writes, so it stores only plans by shape,
    which serve every layer and stream. Plans and forms of the last `MOST_SHAPES` shapes are cached.
    """

    def __init__(
        self,
        installed: InstalledFlashInfer,
        *,
        in_range: bool = False,
        capturing: Callable[[], bool] | None = None,
        lossy: bool = False,
    ) -> None:
        """Touch no device."""
        self.installed, self.in_range = installed, in_range
        self._capturing, self._lossy = capturing, lossy
        served = [installed, *(other for other in installed.others if lossy or not other.format.is_lossy)]
        # scratch is planned before the format of the caches is known
        self._decode_heads = frozenset.intersection(*[one.heads for one in served])
        self._wrappers: dict[tuple[torch.device, str], Any] = {}
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._views: dict[int, _View] = {}

    def scratch(self, layer: LayerGeometry, tokens: int, width: int, extra_width: int) -> Sequence[BufferSpec]:
        """Views that `run` needs for `tokens` rows.

        width, extra_width: columns of a row in the window cache and in the second cache, 0 without one.
        The views hold parts of rows and their lse, where decode kernels run; the lse of whole rows, without the sink
        and with it; q, out and sink where heads are padded; indices where they are copied.
        """
        return self._plan(layer.num_heads, tokens, width, extra_width).specs

    def _plan(self, heads: int, tokens: int, width: int, extra: int) -> _Plan:
        plan = self._plans.get((heads, tokens, width, extra))  # every layer of every step asks for the same
        if plan is None:
            padded = self._padded(heads, tokens)
            specs = tuple(self._specs(heads, padded, tokens, width, extra))
            plan = _Plan(padded, padded != heads, not self.in_range, specs, tuple(dtype for _, dtype in specs))
            remember(self._plans, (heads, tokens, width, extra), plan)
        return plan

    def _padded(self, heads: int, tokens: int) -> int:
        """Heads of q in FlashInfer's call, for every format that is served. Raises UnsupportedError for too many."""
        is_decode = tokens <= self.installed.max_decode_tokens
        counts = self._decode_heads if is_decode else self.installed.head_counts(tokens)
        padded = min((count for count in counts if count >= heads), default=None)
        if padded is None:
            raise UnsupportedError("num_heads", expected=f"at most {max(counts, default=0)}", actual=heads)
        return padded

    def _specs(self, heads: int, padded: int, tokens: int, width: int, extra: int) -> Iterator[BufferSpec]:
        if tokens <= self.installed.max_decode_tokens:
            # caches are tiled apart, whichever of them turn out to have keys
            rows = padded if padded == MIN_PART_HEADS else round_up(padded, PART_HEADS)
            parts = tokens, rows, -(-width // TILE) - (-extra // TILE)
            yield from (((*parts, _DIM), torch.bfloat16), (parts, torch.float32))
        else:
            # prefill kernels write no parts, and still ask for memory of the right types
            yield from (((8,), torch.bfloat16), ((4,), torch.float32))
        yield from [((tokens, padded), torch.float32)] * 2
        if padded != heads:
            yield from [((tokens, padded, _DIM), torch.bfloat16)] * 2
            yield (padded,), torch.float32
        if not self.in_range:
            unit = 1 if tokens <= self.installed.max_decode_tokens else TILE
            yield (tokens, round_up(width, unit)), torch.int32
            yield (tokens, round_up(extra, unit)), torch.int32

    def fit(self, call: AttentionCall) -> _Form | None:
        """The form of a call, for `run`; None if `run` would refuse the call for its memory or for its options."""
        try:
            form = self._form(call)
        except Dsv4AttnError:
            return None
        needed, offered = [tuple(shape) for shape, _ in form.plan.specs], [tuple(view.shape) for view in call.scratch]
        return form if needed == offered else None

    def prepare(self, call: AttentionCall, form: _Form | None = None) -> Run:
        """See `contract.Backend`. form: of this call, from `fit`. Raises as `run` does."""
        form = form or self._form(call)
        return lambda tensors: self.run(call.with_tensors(tensors), call.scratch, form)

    def run(self, call: AttentionCall, scratch: Sequence[Tensor], form: _Form | None = None) -> None:
        """Attend. scratch: views as `scratch` says for this call's widths. No memory is allocated, nothing is read.

        form: of this call, from `fit`. With an lse and a sink, FlashInfer runs twice: without the sink for the
        lse, with it for out, so that asking for an lse changes no bit of out.
        Raises ArgumentError, before a result is written, for tensors it cannot take, and UnsupportedError in a capture
        of shapes that never ran before.
        """
        if not call.q.shape[0]:
            return
        form = form or self._form(call)
        if not form.ran:
            self._require_no_capture(call)
        if not form.pages:
            _nothing(call)
            return
        mid_out, mid_lse, scratch_lse, rest, *views = scratch
        wrapper, plan = self._wrapper(call.q.device, form.installed), form.plan
        keys = cast("Sequence[PagedKeys]", call.keys)
        q, output, sink, lse = call.q, call.out, call.attn_sink, call.lse
        rows = [segment.rows.indices for segment in keys]
        if plan.padded:
            q, output, wide_sink = views[:3]
            sink = None if sink is None else wide_sink
        if plan.copies:
            rows = views[-2:]
        if form.copies is not None:
            usual = _dtypes(scratch) == plan.dtypes
            form.copies.launch(call, q if plan.padded else None, sink if plan.padded else None, rows, usual=usual)
        arguments = {"q": q, "output": output, "sm_scale": call.layer.scale, "lse_scale": _LN2}
        arguments["mid_out"], arguments["mid_lse"] = mid_out, mid_lse
        self._name(arguments, form, keys, rows)
        if lse is not None:
            # without the sink: the keys' part cannot be had from a sum that a sink of 1e4 or +inf dominates
            wrapper.run(**arguments, attn_sink=None, out_lse=lse if form.direct else scratch_lse)
        if lse is None or sink is not None:
            wrapper.run(**arguments, attn_sink=sink, out_lse=rest)
        if form.results is not None:
            usual = _dtypes(scratch) == plan.dtypes
            its_lse = lse if lse is not None and form.direct else scratch_lse
            form.results.launch(its_lse, output if plan.padded else None, call, usual=usual)
        form.ran = True

    def _name(self, arguments: dict[str, Any], form: _Form, keys: Sequence[PagedKeys], rows: Sequence[Tensor]) -> None:
        """Add pages, rows of indices and lens of each cache that has keys, by FlashInfer's names."""
        for (cache, indices, lens), (i, sizes) in zip(_NAMES, form.pages, strict=False):
            arguments[cache] = self._pages_of(keys[i].cache.tensor, sizes)
            arguments[indices], arguments[lens] = rows[i], cast("DenseIndices", keys[i].rows).lens

    def _pages_of(self, memory: Tensor, sizes: _Sizes) -> Tensor:
        """A view of a cache in FlashInfer's shape.

        Views are cached by the identity of the cache's tensor, as long as both have the same address. A view whose
        storage was released has none.
        """
        cached = self._views.get(id(memory))
        if cached is not None and cached[0]() is memory and cached[1] == sizes:
            view = cached[2]
            if view.data_ptr() == memory.data_ptr():
                return view
        # a tensor on the same storage: a view of this tensor would prevent its release
        with torch.inference_mode(False):  # it outlives the mode of the call that made it
            view = memory.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), *sizes)
        number, views = id(memory), self._views
        gone = weakref.ref(memory, lambda _: views.pop(number, None))
        self._views[number] = gone, sizes, view
        return view

    def _require_no_capture(self, call: AttentionCall) -> None:
        if self._is_capturing(call.q.device):
            columns = " + ".join(map(str, _widths(call)))
            raise UnsupportedError(
                "FlashInfer in a captured graph",
                expected="shapes that ran before the capture",
                actual=f"q of {list(call.q.shape)} over {columns} columns for the first time",
                hint="call once with tensors of the same shapes and strides, then capture",
            )

    def _is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of a device is captured. Only a GPU can capture."""
        is_capturing = self._capturing or getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
        return is_capturing is not None and is_capturing()

    def _wrapper(self, device: torch.device, installed: InstalledFlashInfer) -> Any:  # noqa: ANN401 - without types
        """FlashInfer's wrapper for a device and a format."""
        key = device, installed.format.name
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            try:
                wrapper = self._wrappers[key] = installed.wrapper(device=device)
            except Exception as error:
                actual = f"{type(error).__name__}: {error}"
                raise UnsupportedError("flashinfer", expected=f"a wrapper for {device}", actual=actual) from error
        return wrapper

    def _form(self, call: AttentionCall) -> _Form:
        """The form of a call's signature. Raises unless FlashInfer can read tensors of these layouts and addresses."""
        tensors, sizes, keys = [call.q, call.out, call.lse, call.attn_sink], [], _paged(call)
        for segment in keys:
            rows, cache = segment.rows, segment.cache
            tensors += [rows.indices, rows.lens, cache.tensor]
            sizes.append((cache.layout.fingerprint, cache.block_size, cache.page_stride))
        key = signature(*tensors), *sizes, call.layer.scale, call.empty_lse, call.max_logits is None
        form = self._forms.get(key)
        return form or remember(self._forms, key, self._formed(call))

    def _formed(self, call: AttentionCall) -> _Form:
        """The form of a call. Raises ArgumentError for what FlashInfer refuses, wherever the tensors stand."""
        q, lse, keys = call.q, call.lse, _paged(call)
        installed = self._installed_for(call)
        begins = [q, call.out, *(segment.cache.tensor for segment in keys)]
        if any(tensor.data_ptr() % 16 for tensor in begins):
            actual = [tensor.data_ptr() % 16 for tensor in begins]
            expected = "q, out and caches to begin at multiples of 16 bytes"
            raise ArgumentError("tensors", expected=expected, actual=f"{actual} bytes after one", hint=_COPY)
        if call.max_logits is not None:
            raise ArgumentError("max_logits", expected="None: FlashInfer does not return them", actual="a tensor")
        if q.dtype is not torch.bfloat16:
            raise ArgumentError("q", expected="bfloat16", actual=str(q.dtype).removeprefix("torch."))
        plan = self._plan(q.shape[1], q.shape[0], *_widths(call))
        for name, tensor in (("q", q), ("out", call.out), ("attn_sink", call.attn_sink)):
            if tensor is not None and not plan.padded and not tensor.is_contiguous():
                raise ArgumentError(name, expected="contiguous", actual=tensor.stride(), hint=_COPY)
        pages = tuple(self._pages(installed, keys, copies=plan.copies))
        direct = lse is not None and not plan.padded and lse.stride(1) == 1 and lse.stride(0) >= q.shape[1]
        copied = [(i, keys[i], plan.specs[i - 2][0][1]) for i, *_ in pages] if plan.copies else []
        copies = Copies.of(call, plan.heads if plan.padded else 0, copied) if plan.padded or copied else None
        rewritten = None if direct and call.empty_lse == -inf else lse
        results = Results.of(call, plan.heads, rewritten, out=plan.padded, direct=direct)
        return _Form(installed, plan, direct, pages, copies, results if plan.padded or rewritten is not None else None)

    def _installed_for(self, call: AttentionCall) -> InstalledFlashInfer:
        """FlashInfer for the format of the caches that have keys. Raises for formats and shapes that it does not have.

        Scratch was planned by shapes, for the first format; that of others is the same for as many heads.
        """
        segments = _paged(call)
        present = [segment for segment in segments if segment.rows.indices.shape[1] and segment.cache.num_blocks]
        facts = [CacheFacts.of(segment.cache.layout, segment.cache.block_size) for segment in present or segments]
        second = None if len(facts) == 1 else facts[1]
        chosen = self.installed.for_caches(record_of(facts[0]), None if second is None else record_of(second))
        if chosen is None or chosen is self.installed:
            for segment in segments:
                check_layout(segment.cache.layout, _LAYOUT, "cache")
            return self.installed
        if chosen.format.is_lossy and not self._lossy:
            hint = "ask for option kernel=flashinfer"
            name = chosen.format.name
            raise UnsupportedError(name, expected="a format that keeps queries in fp8", actual=name, hint=hint)
        layer = evolve(call.layer, kind=LayerKind.CSA if second else LayerKind.SWA)
        columns = present[0].rows.indices.shape[1]
        layer = evolve(layer, window=columns, topk=layer.topk if second else 0)
        problem = Problem("decode", layer, facts[0], second, layer.topk)
        for reason in reasons(self.installed, problem, tokens=call.q.shape[0], in_range=self.in_range):
            raise UnsupportedError(reason.code, expected=reason.allowed, actual=reason.actual, hint=reason.cure)
        if self._padded(layer.num_heads, call.q.shape[0]) not in chosen.head_counts(call.q.shape[0]):
            expected = f"as many heads after padding as of {self.installed.format.name}"
            raise UnsupportedError("HEADS", expected=expected, actual=layer.num_heads)
        return chosen

    def _pages(
        self, installed: InstalledFlashInfer, keys: Sequence[PagedKeys], *, copies: bool
    ) -> Iterator[tuple[int, _Sizes]]:
        main = True
        for i, segment in enumerate(keys):
            rows, cache = segment.rows, segment.cache
            assert isinstance(rows, DenseIndices)
            if not rows.lens.is_contiguous():
                raise ArgumentError("lens", expected="contiguous", actual=rows.lens.stride(), hint=_COPY)
            blocks, size, record = cache.num_blocks, cache.block_size, cache.layout.record_bytes
            sizes = installed.extra_page_sizes if i else installed.page_sizes
            if sizes is not None and size not in sizes:
                expected = f"pages of {', '.join(map(str, sorted(sizes)))} with flashinfer {self.installed.version}"
                raise ArgumentError("cache", expected=expected, actual=size)
            if blocks > 1 and cache.page_stride % 16:
                raise ArgumentError("cache", expected="pages at multiples of 16 bytes", actual=cache.page_stride)
            if blocks > 1 and installed.format.dense_pages and cache.page_stride != size * record:
                expected = f"pages every {size * record} bytes, without padding, for {installed.format.name}"
                raise ArgumentError("cache", expected=expected, actual=cache.page_stride)
            if rows.indices.shape[1] and blocks:
                if not copies:
                    self._check_indices(rows.indices, main=main, dense=installed.format.dense_rows)
                # the stride of a single page, which says nothing, must be one that is accepted
                stride = cache.page_stride if blocks > 1 else round_up(size * record, 16)
                yield i, ((blocks, size, 1, record), (stride, record, record, 1))
                main = False

    def _check_indices(self, indices: Tensor, *, main: bool, dense: bool) -> None:
        """What is passed as it is must be what it takes: decode any rows, prefill dense ones, and whole tiles first."""
        (tokens, width), (row, column) = indices.shape, indices.stride()
        many = tokens > self.installed.max_decode_tokens
        if (
            column != 1
            or row < width
            or (dense and row != width)
            or (many and (row != width or (main and width % TILE)))
        ):
            whole = f" of whole tiles of {TILE}" if main and many else ""
            expected = f"dense rows{whole}" if many or dense else "rows that do not overlap"
            actual = f"shape {[tokens, width]}, strides {[row, column]}"
            raise ArgumentError("indices", expected=expected, actual=actual, hint="do not promise in_range")


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


def _dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([tensor.dtype for tensor in tensors])


def _nothing(call: AttentionCall) -> None:
    """Where no cache has a column or a page, no row has a key."""
    call.out.zero_()
    if call.lse is not None:
        call.lse.fill_(call.empty_lse)
