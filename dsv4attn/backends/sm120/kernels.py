"""Launches around FlashInfer: one that puts a call into the shape its kernels take, one that takes results back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import cast

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.attend import Again, may_go_again
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import Constants, stable_kernel
from dsv4attn.core.contract import AttentionCall
from dsv4attn.core.keys import PagedKeys

__all__ = ["Copies", "Results", "prepare", "settle", "variants"]

_COLUMNS, _HEADS = 1024, 8
_BEFORE, _BEHIND = (
    {unit: Constants({"UNIT": unit, **sizes, "HEADS": _HEADS, "MOST": 128, "D": 512}) for unit in (1, 8)}
    for sizes in ({"COLUMNS": _COLUMNS}, {})
)
"""By the elements of which the strides of q, or of out, are multiples."""
_LARGEST_SLOT = 2**31 - 1


@triton.jit
def copy_row(to, rows, token, first, width, room, stride, column_stride, capacity, COLUMNS: tl.constexpr):
    """COLUMNS columns of a token's row, to a row of `room`: -1 for slots the cache has not, and behind `width`."""
    # [N]
    column = first + tl.arange(0, COLUMNS)
    inside = column < width
    slot = tl.load(rows + token * stride + column.to(tl.int64) * column_stride, mask=inside, other=-1)
    tl.store(to + token * room + column, tl.where(slot < capacity, slot, -1), mask=column < room)


@stable_kernel
def prepare(
    q,
    sink,
    rows0,
    rows1,
    wide_q,
    wide_sink,
    to0,
    to1,
    q_token: tl.int64,
    q_head: tl.int64,
    q_dim: tl.int64,
    sink_stride: tl.int64,
    heads: tl.int32,
    wide: tl.int32,
    width0: tl.int32,
    room0: tl.int64,
    stride0: tl.int64,
    column_stride0: tl.int64,
    capacity0: tl.int32,
    width1: tl.int32,
    room1: tl.int64,
    stride1: tl.int64,
    column_stride1: tl.int64,
    capacity1: tl.int32,
    pieces: tl.int32,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    D: tl.constexpr,
):
    """Grid (T * pieces,): a piece is COLUMNS columns of each row of indices, and HEADS heads of q.

    wide_q, wide_sink: copies of q and sink with `wide` heads, the added ones zeros and without a sink. to0, to1: rows
    of indices that may be passed on. What is None is not copied. q's strides are in units of UNIT elements.
    """
    token, piece = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces
    if to0 is not None:
        copy_row(to0, rows0, token, piece * COLUMNS, width0, room0, stride0, column_stride0, capacity0, COLUMNS)
    if to1 is not None:
        copy_row(to1, rows1, token, piece * COLUMNS, width1, room1, stride1, column_stride1, capacity1, COLUMNS)
    if wide_q is not None:
        # [H], [D]
        head, dim = piece * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        row = tl.multiple_of(q + (token * q_token * UNIT + head.to(tl.int64) * q_head * UNIT), 2 * UNIT)
        offset = dim if UNIT > 1 else dim.to(tl.int64) * q_dim
        # [H, D]
        value = tl.load(row[:, None] + offset[None, :], mask=(head < heads)[:, None], other=0.0)
        to = tl.multiple_of(wide_q + (token * wide + head) * D, 16)
        tl.store(to[:, None] + dim[None, :], value, mask=(head < wide)[:, None])
    if wide_sink is not None:
        # [M]; one program writes all of them
        every = tl.arange(0, MOST)
        some = tl.where(tl.program_id(0) == 0, wide, 0)
        logit = tl.load(
            sink + every.to(tl.int64) * sink_stride, mask=every < tl.minimum(heads, some), other=-float("inf")
        )
        tl.store(wide_sink + every, logit, mask=every < some)


@stable_kernel
def settle(
    told,
    lse,
    wide_out,
    out,
    told_token: tl.int64,
    told_head: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    out_token: tl.int64,
    out_head: tl.int64,
    out_dim: tl.int64,
    heads: tl.int32,
    wide: tl.int32,
    pieces: tl.int32,
    empty_lse: tl.float32,
    UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    MOST: tl.constexpr,
    D: tl.constexpr,
):
    """Grid (T * pieces,): a piece is HEADS heads of `out`, which are the first of `wide_out`'s.

    lse: what was told, which may be the same memory, and `empty_lse` for rows without keys. What is None is left.
    out's strides are in units of UNIT elements.
    """
    token, piece = (tl.program_id(0) // pieces).to(tl.int64), tl.program_id(0) % pieces
    if out is not None:
        # [H], [D]
        head, dim = piece * HEADS + tl.arange(0, HEADS), tl.arange(0, D)
        there = (head < heads)[:, None]
        # [H, D]
        value = tl.load(tl.multiple_of(wide_out + (token * wide + head) * D, 16)[:, None] + dim[None, :], mask=there)
        row = tl.multiple_of(out + (token * out_token * UNIT + head.to(tl.int64) * out_head * UNIT), 2 * UNIT)
        offset = dim if UNIT > 1 else dim.to(tl.int64) * out_dim
        tl.store(row[:, None] + offset[None, :], value, mask=there)
    if lse is not None:
        # [M]; the first piece writes all of them
        every = tl.arange(0, MOST).to(tl.int64)
        inside = every < tl.where(piece == 0, heads, 0)
        told_lse = tl.load(told + token * told_token + every * told_head, mask=inside)
        told_lse = tl.where(told_lse == -float("inf"), empty_lse, told_lse)
        tl.store(lse + token * lse_token + every * lse_head, told_lse, mask=inside)


@frozen(eq=False)
class Copies:
    """Launches of `prepare` for calls of one form, dtypes and device included. rows: segments with copied indices."""

    rows: tuple[int, ...]
    pieces: int
    again: Again

    @classmethod
    def of(cls, call: AttentionCall, wide: int, rows: Sequence[tuple[int, PagedKeys, int]]) -> Copies:
        """wide: heads of the copies of q and sink, 0 for none. rows: segments, and columns of the copies of theirs."""
        q, sink = call.q, call.attn_sink
        unit = _unit(q.stride()) if wide else 8
        numbers = [*_units(q.stride(), unit), 0 if sink is None else sink.stride(0), q.shape[1], wide]
        for _, segment, room in rows:
            indices, capacity = segment.rows.indices, segment.cache.capacity
            numbers += (indices.shape[1], room, *indices.stride(), min(capacity, _LARGEST_SLOT))
        numbers += (0,) * (5 * (2 - len(rows)))
        pieces = max(1, -(-wide // _HEADS), *(-(-room // _COLUMNS) for *_, room in rows))
        return cls(tuple(i for i, *_ in rows), pieces, Again(prepare, _BEFORE[unit], (*numbers, pieces)))

    def launch(
        self,
        call: AttentionCall,
        wide_q: Tensor | None,
        wide_sink: Tensor | None,
        to: Sequence[Tensor],
        *,
        usual: bool = True,
    ) -> None:
        """Fill wide_q [T, wide, D], wide_sink [wide], and the copied ones of `to`, which has one for each segment.

        usual: whether what is filled has the dtypes it has in other launches.
        """
        q, keys = call.q, cast("Sequence[PagedKeys]", call.keys)
        rows = [keys[i].rows.indices for i in self.rows]
        none = (None,) * (2 - len(rows))
        sink = None if wide_sink is None else call.attn_sink
        pointers = q, sink, *rows, *none, wide_q, wide_sink, *[to[i] for i in self.rows], *none
        self.again.launch(q.shape[0] * self.pieces, pointers, free=usual and may_go_again(pointers))


@frozen(eq=False)
class Results:
    """Launches of `settle` for calls of one form, dtypes and device included. lse: whether it is written."""

    lse: bool
    pieces: int
    again: Again

    @classmethod
    def of(cls, call: AttentionCall, wide: int, lse: Tensor | None, *, out: bool, direct: bool) -> Results:
        """wide: heads of what FlashInfer wrote. lse, out: whether they are written. direct: whether lse is already."""
        strides = call.out.stride()
        unit = _unit(strides) if out else 8
        to = (0, 0) if lse is None else lse.stride()
        pieces = -(-call.q.shape[1] // _HEADS) if out else 1
        numbers = *(to if direct else (wide, 1)), *to, *_units(strides, unit), call.q.shape[1], wide, pieces
        return cls(lse is not None, pieces, Again(settle, _BEHIND[unit], (*numbers, call.empty_lse)))

    def launch(self, told: Tensor, wide_out: Tensor | None, call: AttentionCall, *, usual: bool = True) -> None:
        """told: what FlashInfer wrote as lse. wide_out: what it wrote as output; None if that is `call.out`.

        usual: whether both have the dtypes they have in other launches.
        """
        out, lse = None if wide_out is None else call.out, call.lse if self.lse else None
        pointers = told, lse, wide_out, out
        self.again.launch(call.q.shape[0] * self.pieces, pointers, free=usual and may_go_again(pointers))


def _unit(strides: Sequence[int]) -> int:
    """Elements of 16 bytes if rows are dense and begin at multiples of them, else 1. The tensor is known to do so."""
    *outer, last = strides
    return 8 if last == 1 and not any(stride % 8 for stride in outer) else 1


def _units(strides: Sequence[int], unit: int) -> tuple[int, ...]:
    token, head, dim = strides
    return token // unit, head // unit, dim


def variants(
    sinks: Sequence[bool], lses: Sequence[bool], *, padded: bool, copies: bool, aligned: bool
) -> Iterator[Variant]:
    """Every form that calls can ask for. padded: whether heads are. copies: whether rows of indices are."""
    units = (8,) if aligned or not padded else (8, 1)
    for unit, sink, segments in product(units, sinks if padded else (False,), (1, 2) if copies else (0,)):
        if padded or segments:
            types = dict.fromkeys(("sink", "wide_sink"), "*fp32" if sink else "none")
            types |= {"q": "*bf16", "wide_q": "*bf16" if padded else "none"}
            for i in range(2):
                types |= dict.fromkeys((f"rows{i}", f"to{i}"), "*i32" if i < segments else "none")
            yield Variant.told(prepare, types, _BEFORE[unit])
    for unit, lse in product(units, lses):
        if padded or lse:
            types = {"told": "*fp32", "lse": "*fp32" if lse else "none", "empty_lse": "fp32"}
            types |= dict.fromkeys(("wide_out", "out"), "*bf16" if padded else "none")
            yield Variant.told(settle, types, _BEHIND[unit])
