"""Launching `attention`: what a call compiles to, and how many programs share a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import triton.language as tl
from attrs import define, evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.kernels import attention
from dsv4attn.backends._triton.attention.kernels_combine import reduce
from dsv4attn.backends._triton.attention.keys import BYTES, ROWS, WORDS
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching import ready, runtime
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, Constants, launch
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.checks import check_attention_strides
from dsv4attn.core.contract import AttentionCall
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.keys import GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.workspace import ALIGNMENT, BufferSpec

__all__ = [
    "Again",
    "Segment",
    "Shape",
    "attend",
    "constants",
    "may_go_again",
    "scratch",
    "scratch_bound",
    "splits_of",
    "variants",
]


@frozen
class Segment:
    """What one segment of keys compiles to."""

    kind: int
    unit: int
    """Elements of which pages and rows lie a multiple apart, so that loads can be wide."""
    interleaved: bool = False
    fnuz: bool = False
    group: int = 0
    scales: int = 0
    dtype: torch.dtype = torch.uint8
    """Of the cache's elements."""

    @classmethod
    def of(cls, layout: KVCacheLayout, *, aligned: bool) -> Segment:
        """Of a cache whose pages and rows begin at multiples of 16 bytes, or do not."""
        if not layout.is_quantised:
            return cls(ROWS.value, 16 // layout.dtype.itemsize if aligned else 1, dtype=layout.dtype)
        words = aligned and (layout.nope_dim, layout.rope_dim, layout.group_size) == (448, 64, 64)
        kind, unit = (WORDS.value, 16) if words else (BYTES.value, 1)
        interleaved, fnuz = layout.arrangement is Arrangement.INTERLEAVED, layout.fp8_format is Fp8Format.FNUZ
        return cls(kind, unit, interleaved, fnuz, layout.group_size, layout.scale_bytes)

    @property
    def in_order(self) -> Segment:
        """The same, its columns read in their order."""
        return evolve(self, kind=BYTES.value) if self.kind == WORDS.value else self


@frozen
class Shape:
    """What the constants of the kernel follow from, besides a room's tuning."""

    heads: int
    nope: int
    rope: int
    segments: tuple[Segment, ...]
    dtype: torch.dtype
    unit: int
    ragged: bool


@lru_cache(maxsize=256)
def constants(shape: Shape, tuning: Tuning) -> dict[str, Any]:
    """Constants of `attention`, but for SPLIT."""
    width = power_of_two(shape.nope + shape.rope)
    pieces = 1 if width <= 256 else 2
    first, second = shape.segments[0], shape.segments[-1]
    words = all(s.kind == WORDS.value and s.interleaved == first.interleaved for s in shape.segments)
    first, second = (s if words else s.in_order for s in (first, second))
    exact = torch.float32 in (shape.dtype, first.dtype, second.dtype)
    block = min(tuning.heads, power_of_two(shape.heads))
    return {
        "H": shape.heads,
        "NOPE": shape.nope,
        "ROPE": shape.rope,
        "SEGMENTS": len(shape.segments),
        "KIND0": first.kind,
        "KIND1": second.kind,
        "INTERLEAVED0": first.interleaved,
        "INTERLEAVED1": second.interleaved,
        "FNUZ0": first.fnuz,
        "FNUZ1": second.fnuz,
        "GROUP0": first.group,
        "GROUP1": second.group,
        "SCALES0": first.scales,
        "SCALES1": second.scales,
        "UNIT0": first.unit,
        "UNIT1": second.unit,
        "RAGGED": shape.ragged,
        "UNIT": shape.unit,
        # fp32 products take twice the memory and no matrix unit: smaller tiles
        "BH": min(block, 16) if exact else block,
        "N": min(tuning.keys, 32) if exact else tuning.keys,
        "C": width // pieces,
        "PIECES": pieces,
        "DT": tl.float32 if INTERPRETED or exact else tl.bfloat16,
        "ASM": tuning.assembly and not INTERPRETED and not exact,
        "CHAINED": tuning.chained or INTERPRETED or exact or block < tuning.heads,
        "PREFETCH": tuning.prefetch and words and not exact,
        "RELOAD": tuning.reload and not exact,
        "EXACT_CASTS": not INTERPRETED,
    }


@lru_cache(maxsize=256)
def divider(size: int) -> tuple[int, int]:
    """Factor (the bits of an int32) and log with which `keys.place` divides slots below 2^31 by a page size.

    slot // size is (2 slot * factor) >> (32 + log), for log = ceil(log2 size) and factor = 2^(31 + log) // size + 1:
    the factor is too large by at most 2^-31 of itself, which no slot is large enough to show.
    """
    log = (size - 1).bit_length()
    factor = 2 ** (31 + log) // size + 1
    return (factor - 2**32 if factor >= 2**31 else factor), log


def power_of_two(n: int) -> int:
    """Smallest one that is at least n, and at least what a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


def splits_of(tokens: int, heads: int, width: int, tuning: Tuning, programs: int) -> int:
    """How many programs share a token's keys: enough to fill the device, each with a tile. A function of shapes."""
    blocks = -(-heads // min(tuning.heads, power_of_two(heads)))
    return max(1, min(programs // max(tokens * blocks, 1), -(-width // tuning.keys)))


def scratch(tokens: int, layer: LayerGeometry, splits: int, *, always: bool = False) -> Sequence[BufferSpec]:
    """Parts of each row, their lse and their largest logits, when rows are shared.

    always: also where a row is one part, so that its bits do not tell how many there are.
    """
    if splits == 1 and not always:
        return ()
    rows = tokens, splits, layer.num_heads
    return [((*rows, layer.head_dim), torch.float32), (rows, torch.float32), (rows, torch.float32)]


def scratch_bound(layer: LayerGeometry, rows: int) -> int:
    """Bytes of `scratch` for at most so many rows, tokens x splits."""
    return 4 * rows * layer.num_heads * (layer.head_dim + 2) + 3 * ALIGNMENT if rows else 0


def attend(
    call: AttentionCall,
    tuning: Tuning,
    *,
    tiles_per_split: int = 0,
    angles: tuple[Tensor, Tensor] | None = None,
) -> int:
    """Attend over the keys of a call. Rows are shared by as many programs as `call.scratch` has parts.

    tiles_per_split: tiles of `tuning.keys` in each part, so that a row is cut the same whatever the batch; the parts
    must be enough for the longest row. 0: a row's tiles are shared evenly.
    angles: positions [T] int64 and the table of cosines and sines, to undo the rotation of the output where parts are
    added up anyway. Returns how many leading rows that happened to: all, or, where rows are not shared, none.
    """
    q, out, lse, top, sink, parts = call.q, call.out, call.lse, call.max_logits, call.attn_sink, call.scratch
    tokens, heads, _ = q.shape
    if not tokens:
        return 0
    part, part_lse, maxima = (parts[0], parts[1], parts[2] if top is not None else None) if parts else _NO_PARTS
    splits = 1 if part is None else part.shape[1]
    pointers, plan = _planned(call, tuning, tiles_per_split, splits)
    given = (q, out, lse, top, sink, part, part_lse, maxima, *pointers)
    free = may_go_again(given)
    plan.attention.launch(tokens * splits * plan.blocks, given, free=free)
    if part is None:
        return 0
    if angles is None:
        given = (part, part_lse, maxima, out, lse, top, sink, None, None)
        plan.reduce.launch(tokens * heads, given, free=free)
        return 0
    numbers = *plan.to, splits, angles[1].stride(0), angles[1].shape[0], call.empty_lse
    args = part, part_lse, maxima, out, lse, top, sink, *angles, *numbers
    launch(reduce, (tokens * heads,), args, plan.reduce.constants, num_warps=tuning.reduce_warps)
    return tokens


_NO_PARTS = None, None, None


def may_go_again(pointers: Iterable[Any]) -> bool:
    """Whether nobody watches or traces launches, and none of the tensors has to be looked at each time."""
    if runtime._observers or runtime.FAR_FORMS or torch.compiler.is_dynamo_compiling():  # noqa: SLF001 - no public name
        return False
    return ready.is_plain(pointers) and not ready.watched()


@define(eq=False)
class Again:
    """Launches of a kernel over and over, in which only pointers and the number of programs change.

    Whoever has one sees to it that device, dtypes, and which pointers are None, are the same in each launch. bound:
    how it goes, once Triton has compiled it.
    """

    kernel: Any
    constants: Constants
    numbers: tuple[float, ...]
    warps: int = 4
    bound: ready.Bound | None = None

    def launch(self, programs: int, pointers: Sequence[Any], *, free: bool) -> None:
        """Launch so many programs on the device of the first pointer. free: as `may_go_again` says of the pointers."""
        free = free and programs > 0
        if free and self.bound is not None and self.bound.launch(programs, pointers):
            return
        args = (*pointers, *self.numbers)
        launch(self.kernel, (programs,), args, self.constants, num_warps=self.warps)
        if free:
            # what `launch` tells a form by: not far, one stage, products added before they are rounded
            told = pointers[0].device.index or 0, False, self.warps, 1, True
            self.bound = ready.bound(ready.form_of(self.kernel, args, self.constants, *told), self.numbers)


@frozen(eq=False)
class _Plan:
    """What follows from shapes, strides, dtypes, alignments and the device. blocks: programs of a part of a token.

    to: numbers that say where results go. kept: what the key of the plan knows by identity, and may not go before it.
    """

    attention: Again
    reduce: Again
    blocks: int
    to: tuple[int, ...]
    kept: tuple[Any, ...]


_plans: dict[tuple[Any, ...], _Plan] = {}
"""By all that constants and numbers follow from, and by which forms of the two kernels differ besides: the device,
dtypes, and which pointers are None; not by the number of tokens, which only programs follow from."""
_MOST_PLANS = 1024


def _planned(call: AttentionCall, tuning: Tuning, run: int, splits: int) -> tuple[list[Tensor], _Plan]:
    """Pointers of the segments, and the plan of a call. run: tiles of `tuning.keys` in each part."""
    q, out, lse, top, sink = call.q, call.out, call.lse, call.max_logits, call.attn_sink
    layer, keys, parts = call.layer, call.keys, call.scratch
    # the kernels too, of which a test may have others
    seen: list[Any] = [id(attention), id(reduce), id(tuning), run, splits]
    seen += (layer.head_dim, layer.rope.dim, layer.softmax_scale, call.empty_lse)
    seen += (q.get_device(), q.dtype, out.dtype, q.shape[1], q.stride(), out.stride())
    seen += ((q.data_ptr() | out.data_ptr()) % 16, sink if sink is None else (sink.dtype, sink.stride()))
    seen += (lse if lse is None else (lse.dtype, lse.stride()), top if top is None else (top.dtype, top.stride()))
    seen += [part.dtype for part in parts[:3]]
    pointers: list[Tensor] = []
    for segment in (keys,) if isinstance(keys, GatheredKeys) else keys:
        rows = segment.rows
        if isinstance(segment, GatheredKeys):
            tensor = segment.kv
            seen += (rows.planned_by, tensor.data_ptr() % 16, tensor.dtype, tensor.shape[0], tensor.stride())
        else:
            cache = segment.cache
            tensor, layout = cache.tensor, cache.layout
            seen += (rows.planned_by, tensor.data_ptr() % 16, id(layout), cache.num_blocks, cache.block_size)
            # a cache's dtype is its layout's, and its strides are but for those of plain rows
            seen += (cache.page_stride, None if layout.is_quantised else tensor.stride())
        pointers += (tensor, rows.indices, rows.indptr if isinstance(rows, RaggedIndices) else rows.lens)
    key = tuple(seen)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan_of(call, tuning, run, splits)
    return pointers if len(pointers) > 3 else pointers * 2, plan


def _plan_of(call: AttentionCall, tuning: Tuning, run: int, splits: int) -> _Plan:
    check_attention_strides(call)
    q, out, layer, keys = call.q, call.out, call.layer, call.keys
    segments, numbers = _segments(keys)
    (q_token, q_head, _), (out_token, out_head, _) = q.stride(), out.stride()
    unit = min(_unit(q, q_token, q_head), _unit(out, out_token, out_head))
    ragged = isinstance(_listed(keys)[0], RaggedIndices)
    shape = Shape(q.shape[1], layer.nope_dim, layer.rope_dim, segments, q.dtype, unit, ragged)
    chosen = constants(shape, tuning)
    to = [out_token // unit, out_head // unit]
    for told in (call.lse, call.max_logits):
        to += (0, 0) if told is None else told.stride()
    constant, reduced = _launched(shape, tuning, split=bool(call.scratch))
    # a tile may be smaller than the tuning says, and a part must not
    how = splits, run * tuning.keys // chosen["N"], 1, layer.scale, call.empty_lse
    return _Plan(
        Again(attention, constant, (q_token // unit, q_head // unit, *to, *numbers, *how), _warps(chosen, tuning)),
        Again(reduce, reduced, (*to, splits, 0, 0, call.empty_lse), tuning.reduce_warps),
        -(-q.shape[1] // chosen["BH"]),
        tuple(to),
        (tuning, *([] if isinstance(keys, GatheredKeys) else [segment.cache.layout for segment in keys])),
    )


@lru_cache(maxsize=512)  # plans that differ in strides alone share what compiles
def _launched(shape: Shape, tuning: Tuning, *, split: bool) -> tuple[Constants, Constants]:
    """Constants of both kernels, as they are launched."""
    chosen = constants(shape, tuning)
    return Constants({**chosen, "SPLIT": split}), Constants(_reduce_constants(chosen, tuning))


def _warps(chosen: dict[str, Any], tuning: Tuning) -> int:
    return tuning.warps if chosen["BH"] == tuning.heads else tuning.narrow_warps


def _reduce_constants(chosen: dict[str, Any], tuning: Tuning) -> dict[str, Any]:
    dim = chosen["NOPE"] + chosen["ROPE"]
    same = {name: chosen[name] for name in ("H", "ROPE", "UNIT", "EXACT_CASTS")}
    return {"D": dim, "DP": power_of_two(dim), "N": tuning.reduce_parts, **same}


def variants(shape: Shape, tuning: Tuning, *, sinks: Sequence[bool], lses: Sequence[bool]) -> Iterator[Variant]:
    """Every form that `attend` can ask for with q and segments like these.

    Without the largest logits and the rotation, which `forward_mqa` asks for neither.
    """
    chosen, q = constants(shape, tuning), pointer_type(shape.dtype)
    caches = [pointer_type(segment.dtype) for segment in (shape.segments[0], shape.segments[-1])]
    pointers = {
        "q": q,
        "out": q,
        "max_logits": "none",
        "part_max": "none",
        "positions": "none",
        "table": "none",
        "cache0": caches[0],
        "cache1": caches[1],
        "scale": "fp32",
        "empty_lse": "fp32",
    }
    pointers |= dict.fromkeys(("rows0", "lens0", "rows1", "lens1"), "*i32")
    for sink, lse, split in product(sinks, lses, (False, True)):
        told = {"sink": "*fp32" if sink else "none", "lse": "*fp32" if lse else "none"}
        parts = dict.fromkeys(("part", "part_lse"), "*fp32" if split else "none")
        types = {**pointers, **told, **parts}
        yield Variant.from_types(attention, types, {**chosen, "SPLIT": split}, num_warps=_warps(chosen, tuning))
        if split:
            reduced = _reduce_constants(chosen, tuning)
            yield Variant.from_types(reduce, types, reduced, num_warps=tuning.reduce_warps)


def _listed(keys: Sequence[PagedKeys] | GatheredKeys) -> list[Any]:
    return [keys.rows] if isinstance(keys, GatheredKeys) else [segment.rows for segment in keys]


def _segments(keys: Sequence[PagedKeys] | GatheredKeys) -> tuple[tuple[Segment, ...], list[int]]:
    """Constants and numbers of each segment; the numbers of an only one fill the places of two."""
    found: list[tuple[Segment, list[int]]] = []
    if isinstance(keys, GatheredKeys):
        kv, stride = keys.kv, keys.kv.stride(0)
        unit = _unit(kv, stride)
        found = [(Segment(ROWS.value, unit, dtype=kv.dtype), [1, *divider(1), stride // unit, 0, kv.shape[0]])]
    else:
        for cache in (segment.cache for segment in keys):
            tensor, itemsize = cache.tensor, cache.layout.dtype.itemsize
            stride, row = cache.page_stride // itemsize, 0 if cache.layout.is_quantised else tensor.stride(1)
            segment = Segment.of(cache.layout, aligned=_unit(tensor, stride, row) > 1)
            slots = min(cache.capacity, 2**31 - 1)
            size = cache.block_size
            found.append((segment, [size, *divider(size), stride // segment.unit, row // segment.unit, slots]))
    numbers: list[int] = []
    for (_, page), rows in zip(found, _listed(keys), strict=True):
        if isinstance(rows, RaggedIndices):
            numbers += (rows.width, rows.indices.shape[0], *page)
        else:
            numbers += (rows.indices.shape[1], rows.indices.stride(0), *page)
    return tuple(segment for segment, _ in found), numbers if len(found) > 1 else numbers * 2


def _unit(tensor: Tensor, *strides: int) -> int:
    """Elements of 16 bytes if the tensor and its strides are multiples of them, else 1."""
    unit = 16 // tensor.element_size()
    return unit if tensor.data_ptr() % 16 == 0 and not any(stride % unit for stride in strides) else 1
