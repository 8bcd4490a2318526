"""Named tuples that travel through the attention kernel: what is compiled in, and the numbers of a launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4attn.backends._triton.compiling.number_tuples import Float32, Int32, Int64


class SegmentForm(NamedTuple):
    """What one segment of keys compiles to.

    kind: one of the readers in `keys`.
    unit: elements of rows, or bytes of records. Page and row strides are multiples of it, so that loads can be wide.
    interleaved: whether the scales of a record follow its data, instead of all data of the page.
    fnuz: whether e4m3 codes are FNUZ.
    group: codes of a scale.
    scales: bytes of a record's scales.
    coding: which codes and scales a record has, see `numerics`.
    """

    kind: int
    unit: int
    interleaved: bool = False
    fnuz: bool = False
    group: int = 0
    scales: int = 0
    coding: int = 0


class RowForm(NamedTuple):
    """What rows of q, of the results and of the indices compile to.

    heads: of a row.
    nope, rope: columns of a key before its rope, and of its rope.
    segments: 1 or 2.
    ragged: whether the indices of all rows are one list.
    unit: elements. Strides of q and out are multiples of it.
    """

    heads: int
    nope: int
    rope: int
    segments: int
    ragged: bool
    unit: int


class TileForm(NamedTuple):
    """How a program computes.

    heads: rows of its products. With groups they are heads / group heads of each row of a group.
    keys: keys of a tile.
    columns, pieces: columns of a piece of a key, and 1 or 2 pieces, see `keys`.
    dtype: of the operands of the products.
    assembly: how words are decoded, see ASM in `keys`.
    chained: whether the first product may feed the second one directly, see `kernels.product`.
    prefetch: whether the next tile's words are loaded while a tile is multiplied.
    reload: whether q is read from memory for each tile.
    exact_casts: whether casts round; interpreted, they do not.
    group: rows of a group, see `kernels_groups`; 1 if each row is by itself.
    """

    heads: int
    keys: int
    columns: int
    pieces: int
    dtype: Any
    assembly: int
    chained: bool
    prefetch: bool
    reload: bool
    exact_casts: bool
    group: int


class Strides(NamedTuple):
    """Strides of q and of the results, by token and by head. Those of q and out are in units of `RowForm.unit`."""

    q_token: Int64
    q_head: Int64
    out_token: Int64
    out_head: Int64
    lse_token: Int64
    lse_head: Int64
    max_token: Int64
    max_head: Int64


class SegmentNumbers(NamedTuple):
    """Numbers of one segment of keys.

    width: columns of its indices. index_stride: elements between the indices of two rows, or of a ragged list.
    page_size, page_factor, page_log: rows of a page, and how to divide by them, see `keys.page_and_row`.
    page_stride, row_stride: in units of `SegmentForm.unit`. Records of a page are contiguous; their row_stride is 0.
    last_slot: the last one of the cache.
    """

    width: Int32
    index_stride: Int64
    page_size: Int32
    page_factor: Int32
    page_log: Int32
    page_stride: Int64
    row_stride: Int64
    last_slot: Int32


class CallNumbers(NamedTuple):
    """The other numbers of a launch.

    requests, tokens: see `kernels_groups.Groups`. splits: of each row.
    tiles_per_split: tiles of each split, or 0 to share a row's tiles evenly.
    runtime_one: 1, which the compiler cannot prove. scale: of the logits. empty_lse: of a row without keys.
    """

    requests: Int32
    tokens: Int32
    splits: Int32
    tiles_per_split: Int32
    runtime_one: Int32
    scale: Float32
    empty_lse: Float32
