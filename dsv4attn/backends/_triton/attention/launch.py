"""The launcher of `attention` and `reduce`: what a call compiles to, and how many programs share a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.forms import (
    CallNumbers,
    RowForm,
    SegmentForm,
    SegmentNumbers,
    Strides,
    TileForm,
)
from dsv4attn.backends._triton.attention.kernels import attention
from dsv4attn.backends._triton.attention.kernels_combine import reduce
from dsv4attn.backends._triton.attention.keys import (
    BYTES,
    CODE_WORDS,
    CODES,
    CONVERTED,
    FP4_WORDS,
    NIBBLE_WORDS,
    NIBBLES,
    ROWS,
    SHIFTED,
    WORDS,
)
from dsv4attn.backends._triton.codings import CODINGS
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import recorded
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.backends._triton.sizes import next_power_of_2
from dsv4attn.backends._triton.tuning import Tuning, padded
from dsv4attn.core.attention.checks import check_attention_strides
from dsv4attn.core.cache.layout import Arrangement, Coding, Fp8Format, KVCacheLayout
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, Run
from dsv4attn.core.memory.workspace import ALIGNMENT
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.core.tensorspec import BufferSpec

MOST_SLOTS = 2**31
"""Slots of a cache that indices in int32 can name."""


_BY_WORD = {
    (Coding.FP8, (448, 64, 64, 8)): WORDS.value,
    (Coding.NVFP4, (448, 64, 16, 32)): FP4_WORDS.value,
    (Coding.FP8, (512, 0, 32, 16)): CODE_WORDS.value,
    (Coding.NVFP4, (512, 0, 16, 32)): NIBBLE_WORDS.value,
}
"""Readers of aligned records that take whole words, and the records that they know: their coding, and numbers of codes,
of bf16 values, of codes of a scale, and of bytes of scales."""
_IN_TURN = (WORDS.value, FP4_WORDS.value)
"""Readers whose columns alternate, see `keys.columns`."""
_BY_BYTE = {CODE_WORDS.value: CODES.value, NIBBLE_WORDS.value: NIBBLES.value, **dict.fromkeys(_IN_TURN, BYTES.value)}
"""The reader of the same records that takes a byte at a time, for any dims."""


def segment_form(layout: KVCacheLayout, *, aligned: bool) -> SegmentForm:
    """The form of a cache. aligned: whether its pages and rows begin at multiples of 16 bytes."""
    if not layout.is_quantised:
        return SegmentForm(ROWS.value, WIDE // layout.dtype.itemsize if aligned else 1)
    record, scales = layout.key_record, (layout.group_size, layout.scale_bytes)
    sizes = layout.coded_dims, layout.plain_dims, *scales
    by_word = _BY_WORD.get((layout.coding, sizes)) if aligned else None
    if by_word is not None:
        kind, unit = by_word, WIDE
    elif record is None or not record.codes_rope:
        kind, unit = BYTES.value, 1
    else:
        kind, unit = CODES.value if layout.fp8_format else NIBBLES.value, 1
    interleaved, fnuz = layout.arrangement is Arrangement.INTERLEAVED, layout.fp8_format is Fp8Format.FNUZ
    return SegmentForm(kind, unit, interleaved, fnuz, *scales, CODINGS[layout.coding])


def _by_byte(form: SegmentForm) -> SegmentForm:
    """The form that reads the same cache by the byte, 64 columns at a time if need be."""
    return form._replace(kind=_BY_BYTE.get(form.kind, form.kind))


def _in_order(form: SegmentForm) -> SegmentForm:
    """The form that reads the same cache with columns in their order, by the byte if need be."""
    return _by_byte(form) if form.kind in _IN_TURN else form


@frozen
class Shape:
    """What determines the constants of the kernel, besides a backend's tuning.

    unit: elements; strides of q and out are multiples of them. ragged: whether indices are.
    exact: whether q or keys are fp32.
    """

    heads: int
    nope: int
    rope: int
    segments: tuple[SegmentForm, ...]
    unit: int
    ragged: bool
    exact: bool


@lru_cache(maxsize=256)
def constants(shape: Shape, tuning: Tuning, group: int = 1) -> dict[str, Any]:
    """Constants of `attention` except SPLIT. group: of `TileForm`."""
    width, exact = padded(shape.nope + shape.rope), shape.exact
    pieces = 1 if width <= 256 else 2
    first, second = shape.segments[0], shape.segments[-1]
    alike = all((s.kind, s.interleaved) == (first.kind, first.interleaved) for s in shape.segments)
    first, second = (s if alike else _in_order(s) for s in (first, second))
    words = first.kind == second.kind == WORDS.value
    if tuning.reload and not words:
        first, second = _by_byte(first), _by_byte(second)
    block = min(tuning.heads, padded(shape.heads)) if group == 1 else padded(next_power_of_2(shape.heads) * group)
    tile = TileForm(
        # fp32 products take twice the memory and no matrix unit: smaller tiles
        heads=min(block, 16) if exact and group == 1 else block,
        keys=min(tuning.keys, 32) if exact else tuning.keys,
        columns=width // pieces,
        pieces=pieces,
        dtype=tl.float32 if INTERPRETED or exact else tl.bfloat16,
        assembly=0 if INTERPRETED or exact else _assembly(tuning, shape.segments),
        chained=tuning.chained or INTERPRETED or exact or block < tuning.heads,
        prefetch=tuning.prefetch and words and not exact,
        reload=tuning.reload and not exact,
        exact_casts=not INTERPRETED,
        group=group,
    )
    row = RowForm(shape.heads, shape.nope, shape.rope, len(shape.segments), shape.ragged, shape.unit)
    pdl = tuning.pdl and not INTERPRETED
    return {"WINDOW": first, "COMPRESSED": second, "ROW": row, "TILE": tile, "PDL": pdl}


def group_of_call(call: AttentionCall, tuning: Tuning) -> int:
    """Rows of a group of a call: 1 unless requests have several rows, and rows fill the device without splits."""
    rows = call.request_rows
    if rows is None or call.scratch or isinstance(call.keys, GatheredKeys):
        return 1
    exact = torch.float32 in (call.q.dtype, *_key_dtypes(call.keys))
    return tuning.group_of(call.layer, rows.max_tokens, exact=exact) if rows.are_several else 1


def _assembly(tuning: Tuning, segments: Sequence[SegmentForm]) -> int:
    """Which assembly decodes words, see `keys`."""
    if not tuning.assembly:
        return 0
    converts = tuning.converts and not any(s.fnuz for s in segments)
    return int((CONVERTED if converts else SHIFTED).value)


@lru_cache(maxsize=256)
def divider(size: int) -> tuple[int, int]:
    """Factor (the bits of an int32) and log with which `keys.page_and_row` divides slots below 2^31 by a page size.

    slot // size is (2 slot * factor) >> (32 + log), for log = ceil(log2 size) and factor = 2^(31 + log) // size + 1:
    the factor is too large by at most 2^-31 of itself, which no slot is large enough to show.
    """
    log = (size - 1).bit_length()
    factor = 2 ** (31 + log) // size + 1
    return (factor - 2**32 if factor >= 2**31 else factor), log


def splits_of(tokens: int, heads: int, width: int, tuning: Tuning, programs: int) -> int:
    """Programs that share a token's keys: enough to fill the device, at most one a tile. A function of shapes."""
    return max(1, min(programs // max(tokens * tuning.blocks(heads), 1), -(-width // tuning.keys)))


def fixed_splits(width: int, tuning: Tuning, tiles_per_split: int) -> int:
    """Splits of `tiles_per_split` tiles that are enough for rows of `width` keys of two segments."""
    return -(-(-(-width // tuning.keys) + 1) // tiles_per_split)


def scratch(tokens: int, layer: LayerGeometry, splits: int) -> Sequence[BufferSpec]:
    """Splits of each row, their lse and their largest logits, when programs share rows."""
    if splits == 1:
        return ()
    rows = tokens, splits, layer.num_heads
    return [((*rows, layer.head_dim), torch.float32), (rows, torch.float32), (rows, torch.float32)]


def fixed_scratch(tokens: int, layer: LayerGeometry, splits: int, most: int) -> Sequence[BufferSpec]:
    """Memory of `prepare_fixed`: splits of the rows of one launch, and the number of splits of every row.

    splits: of `fixed_splits`; 0 for a layer whose rows are never split, which needs no memory.
    most: splits of all rows of a launch, at most, unless one row has more.
    """
    if not splits:
        return ()
    # where no row has several splits, nothing is written to the memory for splits
    rows = (max(min(tokens, most // splits), 1) if splits > 1 else 1), splits, layer.num_heads
    return [
        ((*rows, layer.head_dim), torch.float32),
        (rows, torch.float32),
        (rows, torch.float32),
        ((max(tokens, 1),), torch.int32),
    ]


def scratch_bound(layer: LayerGeometry, rows: int) -> int:
    """Upper bound in bytes of `scratch` for this many rows, tokens x splits."""
    return 4 * rows * layer.num_heads * (layer.head_dim + 2) + 3 * ALIGNMENT if rows else 0


def attend(
    call: AttentionCall, tuning: Tuning, *, tiles_per_split: int = 0, angles: tuple[Tensor, Tensor] | None = None
) -> int:
    """Attend over the keys of one call; see `prepare`. Returns how many leading rows were rotated back: all, or none.

    angles: positions [T] int64 and the table of cosines and sines. The output's rotation is undone where splits are
    combined, and not where a row is one split.
    """
    run = prepare(call, tuning, tiles_per_split=tiles_per_split, angles=angles)
    run(call.tensors)
    return call.q.shape[0] if angles is not None and call.scratch else 0


def prepare_fixed(call: AttentionCall, tuning: Tuning, tiles_per_split: int) -> Run:
    """Plan the launches of a call whose rows have bits that do not depend on the batch.

    Every row is cut after each `tiles_per_split` tiles of `tuning.keys` keys. The same kernel serves all calls of a
    layer: the one without splits if `call.scratch` is empty, and otherwise the one that counts the splits of each row.
    As many rows are launched together as `call.scratch` has memory for.
    """
    tokens = call.q.shape[0]
    # in a group a row's bits would depend on the rows that it is computed with
    call = evolve(call, request_rows=None)
    if not call.scratch:
        return prepare(call, tuning)
    *parts, counts = call.scratch
    rows_at_once, splits = parts[0].shape[:2]
    if splits == 1 or tokens <= rows_at_once:
        return prepare(call, tuning, tiles_per_split=tiles_per_split)
    check_attention_strides(call)
    runs = []
    for first in range(0, tokens, rows_at_once):
        rows = slice(first, min(first + rows_at_once, tokens))
        top = None if call.max_logits is None else call.max_logits[rows]
        part = evolve(
            call.with_tensors(call.tensors.of_tokens(rows)),
            keys=rows_of(call.keys, rows),
            scratch=[*parts, counts[rows]],
            options=evolve(call.options, max_logits=top),
        )
        runs.append((rows, prepare(part, tuning, tiles_per_split=tiles_per_split)))

    def run(tensors: AttentionTensors) -> None:
        for rows, attend_rows in runs:
            attend_rows(tensors.of_tokens(rows))

    return run


def prepare(
    call: AttentionCall, tuning: Tuning, *, tiles_per_split: int = 0, angles: tuple[Tensor, Tensor] | None = None
) -> Run:
    """Plan the launches of a call. As many programs share a row as `call.scratch` has splits for it.

    tiles_per_split: tiles of `tuning.keys` in each split, so that a row is cut the same whatever the batch; the splits
    must be enough for the longest row, and `call.scratch` is of `fixed_scratch`. 0: a row's tiles are shared evenly.
    angles: see `attend`.
    """
    check_attention_strides(call)
    q, layer, keys, top = call.q, call.layer, call.keys, call.max_logits
    tokens, heads, _ = q.shape
    part, part_lse, part_max, counts = (*call.scratch, None, None, None, None)[:4]
    maxima = None if top is None else part_max
    splits = 1 if part is None else part.shape[1]
    segments = _segments(keys)
    forms = tuple(form for form, _ in segments)
    unit = min(wide_unit(tensor, *tensor.stride()[:2]) for tensor in (q, call.out))
    ragged = isinstance(index_rows(keys)[0], RaggedIndices)
    exact = torch.float32 in (q.dtype, *_key_dtypes(keys))
    shape = Shape(heads, layer.nope_dim, layer.rope_dim, forms, unit, ragged, exact)
    group = group_of_call(call, tuning)
    requests = starts = None
    if group > 1 and call.request_rows is not None:
        requests, starts = call.request_rows.token_to_req, call.request_rows.query_start_loc
    tile, results = constants(shape, tuning, group)["TILE"], result_strides(call, unit)
    attention_constants, combine_constants = _launched(shape, tuning, split=part is not None, group=group)
    # a tile may be smaller than `tuning.keys`, and a split still has `tiles_per_split * tuning.keys` keys
    known = 0 if starts is None else starts.shape[0] - 1
    tiles = tiles_per_split * tuning.keys // tile.keys
    numbers = (
        Strides(q.stride(0) // unit, q.stride(1) // unit, *results),
        # an only segment is passed twice
        segments[0][1],
        segments[-1][1],
        CallNumbers(known, tokens, splits, tiles, 1, layer.scale, call.empty_lse),
    )
    attention_launch = Launch(attention, attention_constants, numbers, _warps(tile, tuning))
    positions, table = angles or (None, None)
    turns = (0, 0) if table is None else (table.stride(0), table.shape[0])
    combine = Launch(reduce, combine_constants, (*results, splits, *turns, call.empty_lse), tuning.reduce_warps)
    programs = tokens * splits * -(-heads // (tile.heads // group))
    # with counts, a row of one split is not combined
    combining = 0 if part is None or (counts is not None and splits == 1) else tokens * heads
    window_indices, window_ends, compressed_indices, compressed_ends = index_tensors(keys)
    has_compressed, gathered = len(segments) > 1, keys.kv if isinstance(keys, GatheredKeys) else None

    def run(tensors: AttentionTensors) -> None:
        q, out, lse, attn_sink, _, window_cache, compressed_cache = tensors
        window = compressed = window_cache.tensor if gathered is None else gathered
        if has_compressed and compressed_cache is not None:
            compressed = compressed_cache.tensor
        attention_launch(
            programs,
            (
                q, out, lse, top, attn_sink, part, part_lse, maxima, counts,
                window, window_indices, window_ends, compressed, compressed_indices, compressed_ends,
                requests, starts,
            ),
        )  # fmt: skip
        if combining:
            combine(combining, (part, part_lse, maxima, counts, out, lse, top, attn_sink, positions, table))

    return run


@lru_cache(maxsize=512)  # calls that differ in strides alone share what compiles
def _launched(shape: Shape, tuning: Tuning, *, split: bool, group: int = 1) -> tuple[Constants, Constants]:
    """Constants of both kernels' launches."""
    chosen = constants(shape, tuning, group)
    return Constants({**chosen, "SPLIT": split}), Constants(_reduce_constants(chosen, tuning))


def _warps(tile: TileForm, tuning: Tuning) -> int:
    return tuning.warps if tile.heads == tuning.heads else tuning.narrow_warps


def _reduce_constants(chosen: dict[str, Any], tuning: Tuning) -> dict[str, Any]:
    row, dim = chosen["ROW"], chosen["ROW"].nope + chosen["ROW"].rope
    dims = {"H": row.heads, "D": dim, "DP": padded(dim), "ROPE": row.rope, "UNIT": row.unit, "N": tuning.reduce_parts}
    return {**dims, "EXACT_CASTS": chosen["TILE"].exact_casts, "PDL": chosen["PDL"]}


@recorded
def variants(
    calls: Iterable[AttentionCall], tuning: Tuning, *, splits: Sequence[bool] = (False, True), tiles_per_split: int = 0
) -> None:
    """Every variant that `prepare` can need for calls on meta tensors, without the rotation.

    calls: without scratch.
    splits: whether rows are split.
    tiles_per_split: as of `prepare`.
    """
    for call, split in product(calls, splits):
        tokens, layer = call.q.shape[0], call.layer
        of_splits = fixed_scratch(tokens, layer, 2, 2 * tokens) if tiles_per_split else scratch(tokens, layer, 2)
        specs = of_splits if split else ()
        memory = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]
        prepare(evolve(call, scratch=memory), tuning, tiles_per_split=tiles_per_split)(call.tensors)


def result_strides(call: AttentionCall, unit: int = 1) -> list[int]:
    """Strides of out in units, and of lse and the largest logits, zeros for those that are None."""
    strides = [stride // unit for stride in call.out.stride()[:2]]
    for optional in (call.lse, call.max_logits):
        strides += (0, 0) if optional is None else optional.stride()
    return strides


def index_rows(keys: Sequence[PagedKeys] | GatheredKeys) -> list[Any]:
    """Indices of each segment."""
    return [keys.rows] if isinstance(keys, GatheredKeys) else [segment.rows for segment in keys]


def rows_of(keys: Sequence[PagedKeys] | GatheredKeys, rows: slice) -> Sequence[PagedKeys] | GatheredKeys:
    """Keys of some of the tokens of a call. rows: these tokens."""
    if isinstance(keys, GatheredKeys):
        return evolve(keys, rows=_part_of(keys.rows, rows))
    return [evolve(segment, rows=_part_of(segment.rows, rows)) for segment in keys]


def _part_of(indices: DenseIndices | RaggedIndices, rows: slice) -> DenseIndices | RaggedIndices:
    """Indices of some of the tokens."""
    if isinstance(indices, RaggedIndices):
        return evolve(indices, indptr=indices.indptr[rows.start : rows.stop + 1])
    return DenseIndices(indices.indices[rows], indices.lens[rows])


def index_tensors(keys: Sequence[PagedKeys] | GatheredKeys) -> list[Tensor]:
    """Indices and lens, or indptr, of the window and of the compressed segment; an only segment comes twice."""
    rows = index_rows(keys)
    window, compressed = rows[0], rows[-1]
    return [window.indices, _ends(window), compressed.indices, _ends(compressed)]


def _ends(rows: DenseIndices | RaggedIndices) -> Tensor:
    """What says where each row ends: lens, or indptr."""
    return rows.indptr if isinstance(rows, RaggedIndices) else rows.lens


def _key_dtypes(keys: Sequence[PagedKeys] | GatheredKeys) -> list[torch.dtype]:
    """The dtype of each segment's elements."""
    return [keys.kv.dtype] if isinstance(keys, GatheredKeys) else [segment.cache.layout.dtype for segment in keys]


def _segments(keys: Sequence[PagedKeys] | GatheredKeys) -> list[tuple[SegmentForm, SegmentNumbers]]:
    """What each segment compiles to, and its numbers."""
    if isinstance(keys, GatheredKeys):
        kv, stride = keys.kv, keys.kv.stride(0)
        unit, last_slot = wide_unit(kv, stride), min(kv.shape[0], MOST_SLOTS) - 1
        pages = 1, *divider(1), stride // unit, 0, last_slot
        return [(SegmentForm(ROWS.value, unit), SegmentNumbers(*_columns(keys.rows), *pages))]
    segments = []
    for segment in keys:
        cache, layout = segment.cache, segment.cache.layout
        stride, row = cache.page_stride // layout.dtype.itemsize, 0 if layout.is_quantised else cache.tensor.stride(1)
        form = segment_form(layout, aligned=wide_unit(cache.tensor, stride, row) > 1)
        last_slot, size = min(cache.capacity, MOST_SLOTS) - 1, cache.block_size
        pages = size, *divider(size), stride // form.unit, row // form.unit, last_slot
        segments.append((form, SegmentNumbers(*_columns(segment.rows), *pages)))
    return segments


def _columns(rows: DenseIndices | RaggedIndices) -> tuple[int, int]:
    """`width` and `index_stride` of `SegmentNumbers`."""
    indices = rows.indices
    return rows.width, indices.shape[0] if isinstance(rows, RaggedIndices) else indices.stride(0)


def wide_unit(tensor: Tensor, *strides: int) -> int:
    """Elements of a wide access if the tensor's address and these strides are multiples of them, else 1."""
    unit = WIDE // tensor.element_size()
    return unit if tensor.data_ptr() % WIDE == 0 and not any(stride % unit for stride in strides) else 1
