"""Named tuples that travel through kernels that score index keys: what is compiled in, and the numbers of a launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from dsv4attn.backends._triton.compiling.number_tuples import Int32, Int64


class ScoreForm(NamedTuple):
    """What scores of index keys compile to.

    kind: of keys and queries: NATIVE, CODES, NIBBLES or ROWS of `kernels`. fnuz: of e4m3 codes.
    heads, dim: of a query. padded: heads of a product, a power of two and at least 16.
    tokens, block: tokens and keys of a tile.
    dtype: of operands that are decoded.
    aligned, q_aligned: bytes that divide the address of every record, and of every head of a query.
    stride: of records, if those of a tile are contiguous and in one page; or 0.
    lanes: maxima of a token and a run of tiles. group: see `kernels.store_maxima`.
    fill: whether entries that a token does not see are written too, as -inf.
    stages: of the pipeline. assembly: whether there may be instructions of NVIDIA's.
    """

    kind: int
    fnuz: bool
    heads: int
    padded: int
    dim: int
    tokens: int
    block: int
    dtype: Any
    aligned: int
    q_aligned: int
    stride: int
    lanes: int = 1
    group: int = 0
    fill: bool = False
    stages: int = 1
    assembly: bool = False


class QueryStrides(NamedTuple):
    """Strides of queries by token and by head, of their scales by token, and of weights by token."""

    token: Int64
    head: Int64
    scale: Int64
    weight: Int64


class KeyNumbers(NamedTuple):
    """Numbers of pages of index keys: those of `PageNumbers`, and how to divide by `page_size`, see `page_of`."""

    num_blocks: Int32
    page_size: Int32
    factor: Int32
    log: Int32
    page_stride: Int64
    data_stride: Int64
    scale_offset: Int64
    scale_stride: Int64
