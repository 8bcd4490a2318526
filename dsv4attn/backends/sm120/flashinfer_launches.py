"""Launches before and after FlashInfer: copies of a call for its kernels, and the conversion of their results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import cast

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.attention.meta_calls import meta_calls, meta_pages
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_cache, meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import Launch
from dsv4attn.backends.sm120.kernels import prepare, settle
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.cache.selected_keys import PagedKeys
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry

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


@recorded
def variants(sinks: Sequence[bool], lses: Sequence[bool], *, padded: bool, copies: bool, aligned: bool) -> None:
    """Every variant that calls can need.

    sinks, lses: whether heads have sinks, and whether the log-sum-exp is an output. padded: whether heads are padded.
    copies: whether indices are copied. aligned: whether rows of q and out begin at multiples of 16 bytes.
    """
    layer, wide = ModelGeometry.preset("flash").layer_of_kind(LayerKind.SWA), _HEADS if padded else 0
    keys, dim, dtype = meta_pages([meta_cache(KVCacheLayout.fp8_ds_mla())] * 2), layer.head_dim, torch.bfloat16
    lists, flash_lse = [meta_rows(2, 2)] * 2, meta_rows(2, _HEADS, dtype=torch.float32)
    for apart, sink, lse in product((0,) if aligned or not padded else (0, 1), sinks, lses):
        # rows of a multiple of 8 elements, or of one element more
        q = torch.empty(2, layer.num_heads, dim + apart, dtype=dtype, device="meta")[..., :dim]
        wide_q, wide_sink = q if padded else None, flash_lse[0] if padded and sink else None
        (call,) = (evolve(call, q=q, out=q) for call in meta_calls(layer, keys, dtype, sinks=(sink,), lses=(lse,)))
        for segments in (1, 2) if copies else (0,):
            if padded or segments:
                rows = [(i, keys[i], 2) for i in range(segments)]
                Copies.of(call, wide, rows).launch(call, wide_q, wide_sink, lists)
        if padded or lse:
            Results.of(call, wide, call.lse, out=padded, direct=False).launch(flash_lse, wide_q, call)
