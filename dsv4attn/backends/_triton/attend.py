"""Launching `attention`: what a call compiles to, and how many programs share a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.attention import attention
from dsv4attn.backends._triton.keys import BYTES, ROWS, WORDS
from dsv4attn.backends._triton.reduce import reduce
from dsv4attn.backends._triton.runtime import INTERPRETED, Variant, launch, pointer_type
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.contract import AttentionCall, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.layout import Arrangement, Fp8Format, KVCacheLayout
from dsv4attn.core.workspace import ALIGNMENT, BufferSpec

__all__ = ["Segment", "Shape", "attend", "constants", "scratch", "scratch_bound", "splits_of", "variants"]


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
    """How many programs share a token's keys: enough to fill the device, as long as each has a tile to attend.

    A function of shapes, so that plans, captured graphs and launches agree.
    """
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
    q, out, layer = call.q, call.out, call.layer
    parts = call.scratch
    splits = parts[0].shape[1] if parts else 1
    segments, pointers, numbers = _segments(call.keys)
    (q_token, q_head, _), (out_token, out_head, _) = q.stride(), out.stride()
    unit = min(_unit(q, q_token, q_head), _unit(out, out_token, out_head))
    ragged = isinstance(_listed(call.keys)[0], RaggedIndices)
    chosen = constants(Shape(q.shape[1], layer.nope_dim, layer.rope_dim, segments, q.dtype, unit, ragged), tuning)
    maxima = (parts[2] if call.max_logits is not None else None) if parts else None
    to = [out_token // unit, out_head // unit]
    for told in (call.lse, call.max_logits):
        to += (0, 0) if told is None else told.stride()
    # a tile may be smaller than the tuning says, and a part must not
    run = tiles_per_split * tuning.keys // chosen["N"]
    launch(
        attention,
        (q.shape[0] * splits * -(-q.shape[1] // chosen["BH"]),),
        (
            *(q, out, call.lse, call.max_logits, call.attn_sink, *(parts[:2] or (None, None)), maxima, *pointers),
            *(q_token // unit, q_head // unit, *to, *numbers, splits, run, 1, layer.scale, call.empty_lse),
        ),
        {**chosen, "SPLIT": bool(parts)},
        num_warps=_warps(chosen, tuning),
    )
    if parts:
        launch(
            reduce,
            (q.shape[0] * q.shape[1],),
            (
                *(*parts[:2], maxima, out, call.lse, call.max_logits, call.attn_sink, *(angles or (None, None))),
                *(*to, splits, *((angles[1].stride(0), angles[1].shape[0]) if angles else (0, 0)), call.empty_lse),
            ),
            _reduce_constants(chosen),
            num_warps=tuning.reduce_warps,
        )
    return q.shape[0] if parts and angles else 0


def _warps(chosen: dict[str, Any], tuning: Tuning) -> int:
    return tuning.warps if chosen["BH"] == tuning.heads else tuning.narrow_warps


def _reduce_constants(chosen: dict[str, Any]) -> dict[str, Any]:
    dim = chosen["NOPE"] + chosen["ROPE"]
    return {"D": dim, "DP": power_of_two(dim), **{name: chosen[name] for name in ("H", "ROPE", "UNIT", "EXACT_CASTS")}}


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
        yield Variant.told(attention, types, {**chosen, "SPLIT": split}, num_warps=_warps(chosen, tuning))
        if split:
            reduced = _reduce_constants(chosen)
            yield Variant.told(reduce, types, reduced, num_warps=tuning.reduce_warps)


def _listed(keys: Sequence[PagedKeys] | GatheredKeys) -> list[Any]:
    return [keys.rows] if isinstance(keys, GatheredKeys) else [segment.rows for segment in keys]


def _segments(keys: Sequence[PagedKeys] | GatheredKeys) -> tuple[tuple[Segment, ...], list[Tensor], list[int]]:
    """Constants, pointers and numbers of each segment; an only one fills the places of two."""
    found: list[tuple[Segment, Tensor, list[int]]] = []
    if isinstance(keys, GatheredKeys):
        kv, stride = keys.kv, keys.kv.stride(0)
        unit = _unit(kv, stride)
        found = [(Segment(ROWS.value, unit, dtype=kv.dtype), kv, [1, *divider(1), stride // unit, 0, kv.shape[0]])]
    else:
        for cache in (segment.cache for segment in keys):
            tensor, itemsize = cache.tensor, cache.layout.dtype.itemsize
            stride, row = cache.page_stride // itemsize, 0 if cache.layout.is_quantised else tensor.stride(1)
            segment = Segment.of(cache.layout, aligned=_unit(tensor, stride, row) > 1)
            slots = min(cache.capacity, 2**31 - 1)
            size = cache.block_size
            found.append((segment, tensor, [size, *divider(size), stride // segment.unit, row // segment.unit, slots]))
    pointers: list[Tensor] = []
    numbers: list[int] = []
    for (_, tensor, page), rows in zip(found, _listed(keys), strict=True):
        if isinstance(rows, RaggedIndices):
            pointers += (tensor, rows.indices, rows.indptr)
            numbers += (rows.width, rows.indices.shape[0], *page)
        else:
            pointers += (tensor, rows.indices, rows.lens)
            numbers += (rows.indices.shape[1], rows.indices.stride(0), *page)
    if len(found) == 1:
        pointers, numbers = pointers * 2, numbers * 2
    return tuple(segment for segment, _, _ in found), pointers, numbers


def _unit(tensor: Tensor, *strides: int) -> int:
    """Elements of 16 bytes if the tensor and its strides are multiples of them, else 1."""
    unit = 16 // tensor.element_size()
    return unit if tensor.data_ptr() % 16 == 0 and not any(stride % unit for stride in strides) else 1
