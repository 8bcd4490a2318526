"""Named tuples that travel through the kernels of the compressor: what is compiled in."""

from __future__ import annotations

from typing import NamedTuple

from dsv4attn.backends._triton.cache.forms import WriterForm


class EntryForm(NamedTuple):
    """What an entry, or an index key, compiles to that is stored from registers.

    dim, rope: channels, and the last of them, which rotate. ratio: tokens of an entry.
    nope, group: channels that are codes, and codes of a scale; of plain rows, both are `dim`.
    scales: scale bytes of a record; 0 of plain rows. float_scale: whether these are one fp32 number.
    groups, size: places in registers are groups of codes, and groups of `size` channels that are not codes after them.
    in_order: whether channels follow each other without empty places. An odd number of channels before those that
        rotate then has one empty place before it, so that pairs are pairs.
    """

    dim: int
    rope: int
    ratio: int
    nope: int
    group: int
    scales: int
    float_scale: bool
    groups: int
    size: int
    in_order: bool
    writer: WriterForm


class PoolForm(NamedTuple):
    """How a program reads the states of a window.

    dim: channels of an entry. ratio: tokens of an entry. overlap: whether a window is twice as long.
    rows, lanes: of a tile, which is rows * lanes states. tiles: that are read at a time.
    block: channels that a program pools. aligned: bytes that divide the address of every state.
    """

    dim: int
    ratio: int
    overlap: bool
    rows: int
    lanes: int
    tiles: int
    block: int
    aligned: int
