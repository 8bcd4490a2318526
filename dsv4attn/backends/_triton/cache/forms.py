"""Named tuples that travel through kernels of a cache: its records, which are compiled in, and its pages."""

from __future__ import annotations

from typing import NamedTuple

from dsv4attn.backends._triton.compiling.number_tuples import Int32, Int64


class RecordForm(NamedTuple):
    """What the records of a cache compile to.

    aligned: bytes that divide the address of every record.
    nope, rope: dims that are codes, and bf16 values after them. Of plain rows, all are values.
    group: codes of a scale; 0 if records are not quantised.
    coding: which codes and scales a record has, see `numerics`. fnuz: whether e4m3 codes are FNUZ.
    exact_casts: whether casts round; interpreted, they do not.
    """

    aligned: int
    nope: int
    rope: int
    group: int
    coding: int
    fnuz: bool
    exact_casts: bool


class WriterForm(NamedTuple):
    """What the records of a cache compile to where they are written.

    aligned, group, coding, fnuz, exact_casts: as of `RecordForm`.
    nope, rope: dims before those that rotate, and these. coded: leading dims that a record holds as codes, nope or all.
    scales: bytes of a record's scales, with padding.
    largest, floor: the largest code and a group's smallest maximum, by their bits in fp32.
    """

    aligned: int
    nope: int
    rope: int
    coded: int
    group: int
    scales: int
    coding: int
    fnuz: bool
    largest: int
    floor: int
    exact_casts: bool


class PageNumbers(NamedTuple):
    """Numbers of a cache's pages: how many, their records, and `CacheMemory.record_strides`."""

    num_blocks: Int32
    block_size: Int32
    page_stride: Int64
    data_stride: Int64
    scale_offset: Int64
    scale_stride: Int64


class TableNumbers(NamedTuple):
    """Numbers of a block table: its requests and columns, and elements between two of its rows."""

    requests: Int32
    columns: Int32
    stride: Int64
