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

from dsv4attn.backends._triton.attention.kernels import attention
from dsv4attn.backends._triton.attention.kernels_combine import reduce
from dsv4attn.backends._triton.attention.keys import BYTES, ROWS, WORDS
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, Constants, Launch
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.checks import check_attention_strides
from dsv4attn.core.contract import AttentionCall, Run
from dsv4attn.core.geometry import LayerGeometry
from dsv4attn.core.keys import GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.core.workspace import ALIGNMENT, BufferSpec

__all__ = ["Segment", "Shape", "attend", "constants", "prepare", "scratch", "scratch_bound", "splits_of", "variants"]


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
    call: AttentionCall, tuning: Tuning, *, tiles_per_split: int = 0, angles: tuple[Tensor, Tensor] | None = None
) -> int:
    """Attend over the keys of one call; see `prepare`. Returns how many leading rows were rotated back: all, or none.

    angles: positions [T] int64 and the table of cosines and sines. The output's rotation is undone where parts of rows
    are combined, and not where a row is one part.
    """
    run = prepare(call, tuning, tiles_per_split=tiles_per_split, angles=angles)
    run(call.q, call.out, call.lse, call.attn_sink, call.caches)
    return call.q.shape[0] if angles is not None and call.scratch else 0


def prepare(
    call: AttentionCall, tuning: Tuning, *, tiles_per_split: int = 0, angles: tuple[Tensor, Tensor] | None = None
) -> Run:
    """Plan the launches of a call. As many programs share a row as `call.scratch` has parts for it.

    tiles_per_split: tiles of `tuning.keys` in each part, so that a row is cut the same whatever the batch; the parts
    must be enough for the longest row. 0: a row's tiles are shared evenly. angles: see `attend`.
    """
    check_attention_strides(call)
    q, out, layer, keys, top = call.q, call.out, call.layer, call.keys, call.max_logits
    tokens, heads, _ = q.shape
    part, part_lse, maxima = (
        (*call.scratch[:2], call.scratch[2] if top is not None else None) if call.scratch else _NONE
    )
    splits = 1 if part is None else part.shape[1]
    segments, numbers = _segments(keys)
    (q_token, q_head, _), (out_token, out_head, _) = q.stride(), out.stride()
    unit = min(_unit(q, q_token, q_head), _unit(out, out_token, out_head))
    rows = _listed(keys)
    ragged = isinstance(rows[0], RaggedIndices)
    shape = Shape(heads, layer.nope_dim, layer.rope_dim, segments, q.dtype, unit, ragged)
    chosen = constants(shape, tuning)
    results = [out_token // unit, out_head // unit]
    for optional in (call.lse, top):
        results += (0, 0) if optional is None else optional.stride()
    attention_constants, combine_constants = _launched(shape, tuning, split=part is not None)
    # a tile may be smaller than the tuning says, and a part must not
    cut = splits, tiles_per_split * tuning.keys // chosen["N"], 1, layer.scale, call.empty_lse
    strides = q_token // unit, q_head // unit, *results
    attention_launch = Launch(attention, attention_constants, (*strides, *numbers, *cut), _warps(chosen, tuning))
    positions, table = angles or (None, None)
    turns = (0, 0) if table is None else (table.stride(0), table.shape[0])
    combine = Launch(reduce, combine_constants, (*results, splits, *turns, call.empty_lse), tuning.reduce_warps)
    programs, combining = tokens * splits * -(-heads // chosen["BH"]), 0 if part is None else tokens * heads
    indices, ends = [row.indices for row in rows], [row.indptr if ragged else row.lens for row in rows]
    # the only segment stands in the places of two
    first, first_ends, last, last_ends = indices[0], ends[0], indices[-1], ends[-1]
    gathered = (keys.kv,) if isinstance(keys, GatheredKeys) else None

    def run(
        q: Tensor, out: Tensor, lse: Tensor | None, attn_sink: Tensor | None, caches: Sequence[PagedKVCache]
    ) -> None:
        one, other = (caches[0].tensor, caches[-1].tensor) if gathered is None else (gathered[0], gathered[0])
        results = q, out, lse, top, attn_sink, part, part_lse, maxima
        attention_launch(programs, (*results, one, first, first_ends, other, last, last_ends))
        if combining:
            combine(combining, (part, part_lse, maxima, out, lse, top, attn_sink, positions, table))

    return run


_NONE = None, None, None


@lru_cache(maxsize=512)  # calls that differ in strides alone share what compiles
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
