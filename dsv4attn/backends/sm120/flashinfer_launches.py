"""Launches before and after FlashInfer: copies of a call for its kernels, and the conversion of their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import cast

from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import Constants, Launch
from dsv4attn.backends.sm120.kernels import prepare, settle
from dsv4attn.core.cache.selected_keys import PagedKeys
from dsv4attn.core.contract.backend import AttentionCall

__all__ = ["Copies", "Results", "variants"]

_COLUMNS, _HEADS = 1024, 8
_PREPARE_CONSTANTS, _SETTLE_CONSTANTS = (
    {unit: Constants({"UNIT": unit, **sizes, "HEADS": _HEADS, "MOST": 128, "D": 512}) for unit in (1, 8)}
    for sizes in ({"COLUMNS": _COLUMNS}, {})
)
"""Constants of `prepare` and `settle`, by the number of elements that divides all strides of q, or of out."""
_LARGEST_SLOT = 2**31 - 1


@frozen(eq=False)
class Copies:
    """The launch of `prepare` for calls whose shapes, strides, dtypes and device are the same.

    rows: numbers of the segments whose indices are copied.
    pieces: programs of a token.
    kernel: the launch.
    """

    rows: tuple[int, ...]
    pieces: int
    kernel: Launch

    @classmethod
    def of(cls, call: AttentionCall, wide: int, rows: Sequence[tuple[int, PagedKeys, int]]) -> Copies:
        """Plan the launch.

        wide: heads of the copies of q and of the sinks; 0: they are not copied.
        rows: for each segment whose indices are copied, its number, the segment, and the columns of the copy.
        """
        q, sink = call.q, call.attn_sink
        unit = _unit(q.stride()) if wide else 8
        numbers = [*_units(q.stride(), unit), 0 if sink is None else sink.stride(0), q.shape[1], wide]
        for _, segment, columns in rows:
            indices, capacity = segment.rows.indices, segment.cache.capacity
            numbers += (indices.shape[1], columns, *indices.stride(), min(capacity - 1, _LARGEST_SLOT))
        numbers += (0,) * (5 * (2 - len(rows)))
        pieces = max(1, -(-wide // _HEADS), *(-(-columns // _COLUMNS) for *_, columns in rows))
        return cls(tuple(i for i, *_ in rows), pieces, Launch(prepare, _PREPARE_CONSTANTS[unit], (*numbers, pieces)))

    def launch(
        self,
        call: AttentionCall,
        wide_q: Tensor | None,
        wide_sink: Tensor | None,
        to: Sequence[Tensor],
        *,
        usual: bool = True,
    ) -> None:
        """Fill wide_q [T, wide, D], wide_sink [wide], and the tensors of `to` whose segments are copied.

        to: memory for the indices of each segment.
        usual: whether the filled tensors have the dtypes of other launches.
        """
        q, keys = call.q, cast("Sequence[PagedKeys]", call.keys)
        rows = [keys[i].rows.indices for i in self.rows]
        none = (None,) * (2 - len(rows))
        sink = None if wide_sink is None else call.attn_sink
        pointers = q, sink, *rows, *none, wide_q, wide_sink, *[to[i] for i in self.rows], *none
        (self.kernel if usual else self.kernel.once)(q.shape[0] * self.pieces, pointers)


@frozen(eq=False)
class Results:
    """The launch of `settle` for calls whose shapes, strides, dtypes and device are the same.

    lse: whether the call's lse is written.
    pieces: programs of a token.
    kernel: the launch.
    """

    lse: bool
    pieces: int
    kernel: Launch

    @classmethod
    def of(cls, call: AttentionCall, wide: int, lse: Tensor | None, *, out: bool, direct: bool) -> Results:
        """Plan the launch.

        wide: heads of FlashInfer's output.
        lse: the call's lse if it is written, else None.
        out: whether the call's output is written.
        direct: whether FlashInfer has written its lse to the call's tensor.
        """
        strides = call.out.stride()
        unit = _unit(strides) if out else 8
        to = (0, 0) if lse is None else lse.stride()
        pieces = -(-call.q.shape[1] // _HEADS) if out else 1
        numbers = *(to if direct else (wide, 1)), *to, *_units(strides, unit), call.q.shape[1], wide, pieces
        return cls(lse is not None, pieces, Launch(settle, _SETTLE_CONSTANTS[unit], (*numbers, call.empty_lse)))

    def launch(self, its_lse: Tensor, wide_out: Tensor | None, call: AttentionCall, *, usual: bool = True) -> None:
        """Write the results of a call.

        its_lse, wide_out: FlashInfer's lse and output. wide_out is None if FlashInfer has written `call.out`.
        usual: whether both have the dtypes of other launches.
        """
        out, lse = None if wide_out is None else call.out, call.lse if self.lse else None
        pointers = its_lse, lse, wide_out, out
        (self.kernel if usual else self.kernel.once)(call.q.shape[0] * self.pieces, pointers)


def _unit(strides: Sequence[int]) -> int:
    """8 elements, which are 16 bytes, if all strides of rows are multiples of 8, else 1. The tensor is aligned."""
    *outer, last = strides
    return 8 if last == 1 and not any(stride % 8 for stride in outer) else 1


def _units(strides: Sequence[int], unit: int) -> tuple[int, ...]:
    token, head, dim = strides
    return token // unit, head // unit, dim


def variants(
    sinks: Sequence[bool], lses: Sequence[bool], *, padded: bool, copies: bool, aligned: bool
) -> Iterator[Variant]:
    """Every variant that calls can need. padded: whether heads are padded. copies: whether indices are copied."""
    units = (8,) if aligned or not padded else (8, 1)
    for unit, sink, segments in product(units, sinks if padded else (False,), (1, 2) if copies else (0,)):
        if padded or segments:
            types = dict.fromkeys(("sink", "wide_sink"), "*fp32" if sink else "none")
            types |= {"q": "*bf16", "wide_q": "*bf16" if padded else "none"}
            for i in range(2):
                types |= dict.fromkeys((f"rows{i}", f"to{i}"), "*i32" if i < segments else "none")
            yield Variant.from_types(prepare, types, _PREPARE_CONSTANTS[unit])
    for unit, lse in product(units, lses):
        if padded or lse:
            types = {"flash_lse": "*fp32", "lse": "*fp32" if lse else "none", "empty_lse": "fp32"}
            types |= dict.fromkeys(("wide_out", "out"), "*bf16" if padded else "none")
            yield Variant.from_types(settle, types, _SETTLE_CONSTANTS[unit])
