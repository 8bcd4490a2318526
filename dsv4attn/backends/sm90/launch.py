"""The Backend of the Hopper room: its own kernels where they serve a call, the shared one where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.attention import attend
from dsv4attn.backends._triton.attention.attend import divider
from dsv4attn.backends._triton.backend import TritonBackend
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, Constants, Launch, multiprocessors
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.backends.sm90.choice import MOST_HEADS
from dsv4attn.backends.sm90.kernels_parts import add_up
from dsv4attn.backends.sm90.kernels_schedule import PAGES
from dsv4attn.backends.sm90.kernels_schedule import ROWS as BF16_ROWS
from dsv4attn.backends.sm90.tuning import PAGED, ROWED, ROWS, Roles
from dsv4attn.core.checks import check_attention_strides
from dsv4attn.core.contract import AttentionCall, KeyForm, Phase, Run
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.keys import DenseIndices, GatheredKeys
from dsv4attn.core.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.warmup_spec import Bounds
from dsv4attn.core.workspace import ALIGNMENT, BufferSpec
from dsv4attn.errors import ArgumentError

if INTERPRETED:
    from dsv4attn.backends.sm90.kernels_twin import attention
else:
    from dsv4attn.backends.sm90.kernels import attention

__all__ = ["Sm90Backend"]

HEADS, DIM, WIDE = 64, 512, 16
"""Heads of a block, dims of a key, and bytes of which everything must lie a multiple apart."""
FARTHEST = WIDE * 2**31
"""Bytes from page to page, or from row to row, which the kernel no longer counts."""
LINE = 1024
"""Rows of a call that a program looks at together when it works out its chunk."""


class Sm90Backend(TritonBackend):
    """Attention on pages in decode, and in prefill on pages or on bf16 rows that core gathers.

    prefill: "paged" gathers nothing and takes no workspace for keys; "gathered" pays for long chunks of many heads.
    tuning: of the shared kernel, see `TritonBackend`. deterministic: leaves every call to the shared kernel, because
    the room's own cuts rows where the batch makes it.
    """

    name = "sm90"
    rows = ROWS

    def __init__(
        self, *, prefill: str = KeyForm.PAGED.value, tuning: str = "auto", deterministic: bool = False
    ) -> None:
        """Choose a form of prefill and numbers, touch no device."""
        super().__init__(tuning=tuning, deterministic=deterministic)
        if prefill not in (*KeyForm,):
            expected = " or ".join(f"'{form.value}'" for form in KeyForm)
            raise ArgumentError("prefill", expected=expected, actual=repr(prefill))
        self.forms = evolve(self.forms, prefill_keys=KeyForm(prefill))

    def _may_serve(self, layer: LayerGeometry) -> bool:
        """Whether some calls of a layer go to the room's own kernel."""
        return not self.deterministic and layer.num_heads <= MOST_HEADS and layer.head_dim == DIM

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        """Two parts of each program, their lse and largest logits, and who shares which row.

        In the same memory the shared kernel finds room for its parts.
        """
        if not self._may_serve(layer):
            return super().scratch(phase, layer, tokens, width)
        lines = _programs(layer.num_heads) * 2 * HEADS
        return [
            ((lines, DIM), torch.float32),
            ((lines,), torch.float32),
            ((lines,), torch.float32),
            ((max(tokens, 1), 2), torch.int32),
        ]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        """See `scratch`: only the last view grows with the call."""
        if not self._may_serve(layer):
            return super().scratch_bound(phase, layer, max_tokens, max_width)
        return _programs(layer.num_heads) * 2 * HEADS * (DIM + 2) * 4 + max(max_tokens, 1) * 8 + 4 * ALIGNMENT

    def prepare(self, phase: Phase, call: AttentionCall) -> Run:
        """See `contract.BackendDefaults`. Either form of keys is served, whichever core was asked for."""
        if not call.scratch or not self._may_serve(call.layer):
            return super().prepare(phase, call)
        check_attention_strides(call)
        found = _segments_of(call)
        if found is not None:
            return _prepare(call, *found)
        # the parts of the shared kernel, in the same memory
        splits = self._splits(phase, call.layer, call.q.shape[0], _width(call))
        shapes = [shape for shape, _ in attend.scratch(call.q.shape[0], call.layer, splits)]
        pairs = zip(call.scratch, shapes, strict=False)
        parts = [own.view(-1)[: prod(shape)].view(*shape) for own, shape in pairs]
        return super().prepare(phase, evolve(call, scratch=parts))

    def _attention_variants(self, bounds: Bounds, layer: LayerGeometry, tuning: Tuning) -> Iterator[Variant]:
        """The room's own forms, and the shared ones where calls may go there."""
        layouts = [layout for layout, _ in bounds.caches(layer)]
        sources = [(layouts, self._paged_variants)]
        if self.forms.prefill_keys is KeyForm.GATHERED:
            swa = bounds.swa
            rows = KVCacheLayout.rows(swa.nope_dim, swa.rope_dim, dtype=swa.row_dtype)
            sources.append(([rows], self._gathered_variants))
        may = self._may_serve(layer) and bounds.q_dtype == torch.bfloat16
        for read, shared in sources:
            kind = _kind_of(read) if may else None
            # which of these keys the room's own kernels read: all rows, all aligned records, some plain pages
            every = shared == self._gathered_variants or (bounds.aligned and kind == PAGES.value)
            for one in shared(bounds, layer, tuning):
                # and of q and out, wide rows only
                if kind is None or not every or dict(one.constants)["UNIT"] == 1:
                    yield one
            if kind is not None:
                yield from variants(len(read), kind, layer.num_heads, sinks=bounds.with_sink, lses=bounds.with_lse)


def _programs(heads: int) -> int:
    """Of the room's own kernel: all that run at once, as many for each block of heads."""
    blocks = -(-heads // HEADS)
    return max(multiprocessors() // blocks, 1) * blocks


def _prepare(call: AttentionCall, kind: int, numbers: Sequence[int]) -> Run:
    """Launches of the own kernel, which leaves parts of rows, and of the one that combines them."""
    q, top, keys = call.q, call.max_logits, call.keys
    tokens, heads, _ = q.shape
    roles = _roles(kind)
    constants, combining = _constants(1 if isinstance(keys, GatheredKeys) else len(keys), kind, heads)
    each, chosen = combining[tokens * heads > roles.few]
    results = [*call.out.stride()[:2]]
    for optional in (call.lse, top):
        results += (0, 0) if optional is None else optional.stride()
    scale, empty_lse = call.layer.scale, call.empty_lse
    own = Launch(attention, constants, (*q.stride()[:2], *results, *numbers, tokens, roles.least, scale, empty_lse))
    combine = Launch(add_up, chosen, (*results, empty_lse), roles.warps)
    programs, combiners = _programs(heads) if tokens else 0, tokens * each
    part, part_lse, part_max, table = call.scratch
    maxima = None if top is None else part_max
    gathered = keys.kv if isinstance(keys, GatheredKeys) else None
    rows: list[Any] = [keys.rows] if isinstance(keys, GatheredKeys) else [segment.rows for segment in keys]
    # the only segment stands in the places of two
    (first, first_lens), (last, last_lens) = ((one.indices, one.lens) for one in (rows[0], rows[-1]))

    def run(
        q: Tensor, out: Tensor, lse: Tensor | None, attn_sink: Tensor | None, caches: Sequence[PagedKVCache]
    ) -> None:
        one, other = (caches[0].tensor, caches[-1].tensor) if gathered is None else (gathered, gathered)
        parts = part, part_lse, maxima, table
        own(programs, (q, out, lse, top, attn_sink, *parts, one, first, first_lens, other, last, last_lens))
        combine(combiners, (*parts, out, lse, top, attn_sink))

    return run


def _segments_of(call: AttentionCall) -> tuple[int, Sequence[int]] | None:
    """Kind and numbers of the keys; None if the shared kernel serves the call."""
    q, out, keys = call.q, call.out, call.keys
    if q.dtype != torch.bfloat16 or out.dtype != torch.bfloat16 or not (_is_wide(q) and _is_wide(out)):
        return None
    if isinstance(keys, GatheredKeys):
        return _rows(keys)
    return _segments(keys) if all(isinstance(segment.rows, DenseIndices) for segment in keys) else None


def _roles(kind: int) -> Roles:
    """Numbers of the own kernel for one kind of keys."""
    return PAGED if kind == PAGES.value else ROWED


@cache
def _constants(segments: int, kind: int, heads: int) -> tuple[Constants, tuple[tuple[int, Constants], ...]]:
    """Of the kernel; and of `add_up`, with its programs for each token, where heads are few, and else."""
    roles = _roles(kind)
    chosen = {"SEGMENTS": segments, "H": heads, "BT": LINE}
    # the twin is one for both kinds
    chosen |= {"KIND": kind} if INTERPRETED else {"VALUES": roles.values, "PRODUCE": roles.produce}
    adding = tuple(
        (-(-heads // own), Constants({"H": heads, "R": own, "N": parts, "EXACT_CASTS": not INTERPRETED}))
        for own, parts in roles.adding
    )
    return Constants(chosen), adding


def _is_wide(tensor: Tensor) -> bool:
    """Whether a tensor and its rows begin at multiples of 16 bytes."""
    unit = WIDE // tensor.element_size()
    return tensor.data_ptr() % WIDE == 0 and not any(stride % unit for stride in tensor.stride()[:-1])


def _kind_of(layouts: Sequence[KVCacheLayout]) -> int | None:
    """What the room's own kernels read of caches like these that are aligned; None if they do not."""
    if all(map(_is_record, layouts)):
        return int(PAGES.value)
    (first, *others) = layouts
    rows = not first.is_quantised and first.dtype == torch.bfloat16 and first.head_dim == DIM and not others
    return int(BF16_ROWS.value) if rows else None


def _is_record(layout: KVCacheLayout) -> bool:
    dims = layout.nope_dim, layout.rope_dim, layout.group_size
    dialect = layout.fp8_format is Fp8Format.OCP and layout.arrangement is Arrangement.SPLIT
    return layout.is_quantised and dims == (448, 64, 64) and layout.scale_bytes == 8 and dialect


def _segments(keys: Sequence[Any]) -> tuple[int, tuple[int, ...]] | None:
    """Kind, and numbers of both segments; None if the kernel does not read them."""
    caches = [segment.cache for segment in keys]
    kind = _kind_of([cache.layout for cache in caches])
    if kind is None or any(cache.tensor.data_ptr() % WIDE or cache.page_stride % WIDE for cache in caches):
        return None
    numbers: list[int] = []
    for segment in keys:
        cache, indices, size = segment.cache, segment.rows.indices, segment.cache.block_size
        pitch = cache.page_stride
        if kind == BF16_ROWS.value:
            pitch = cache.tensor.stride(1) * 2 if size > 1 else pitch
            # pages of rows that stand one behind the other are rows
            if pitch * size != cache.page_stride or pitch % WIDE:
                return None
        if pitch >= FARTHEST:
            return None
        slots = min(cache.capacity, 2**31 - 1)
        numbers += (indices.shape[1], indices.stride(0), size, *divider(size), pitch // WIDE, slots)
    return kind, tuple(numbers * (3 - len(keys)))


def _rows(keys: GatheredKeys) -> tuple[int, tuple[int, ...]] | None:
    """The same of gathered rows."""
    kv, rows, pitch = keys.kv, keys.rows, keys.kv.stride(0) * 2
    if kv.dtype != torch.bfloat16 or not _is_wide(kv) or pitch >= FARTHEST or not isinstance(rows, DenseIndices):
        return None
    slots = min(kv.shape[0], 2**31 - 1)
    numbers = rows.indices.shape[1], rows.indices.stride(0), 1, *divider(1), pitch // WIDE, slots
    return int(BF16_ROWS.value), numbers * 2


def _width(call: AttentionCall) -> int:
    """Columns of all segments."""
    keys: Any = call.keys
    rows = [keys.rows] if isinstance(keys, GatheredKeys) else [segment.rows for segment in keys]
    return sum(one.indices.shape[1] if isinstance(one, DenseIndices) else one.width for one in rows)


def variants(segments: int, kind: int, heads: int, *, sinks: Sequence[bool], lses: Sequence[bool]) -> Iterator[Variant]:
    """Every form of these kernels that `forward_mqa` can ask for: it never asks for the largest logits."""
    roles = _roles(kind)
    constants, adding = _constants(segments, kind, heads)
    cache = "*u8" if kind == PAGES.value else "*bf16"
    types = {"q": "*bf16", "out": "*bf16", "max_logits": "none", "part_max": "none", "table": "*i32"}
    types |= dict.fromkeys(("part", "part_lse"), "*fp32") | dict.fromkeys(("scale", "empty_lse"), "fp32")
    types |= dict.fromkeys(("rows0", "lens0", "rows1", "lens1"), "*i32") | {"cache0": cache, "cache1": cache}
    for sink, lse in product(sinks, lses):
        told = {**types, "sink": "*fp32" if sink else "none", "lse": "*fp32" if lse else "none"}
        yield Variant.from_types(attention, told, constants)
        for _, chosen in adding:
            yield Variant.from_types(add_up, told, chosen, num_warps=roles.warps)
