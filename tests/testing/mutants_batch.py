"""Backends that say they are deterministic, and whose bits depend on the batch: more mutants for the kit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.torch_ops import hyper_connections, merge

FEW = 4
"""Most rows that a mutant takes for few."""


def exact(wrong: Callable[[AttentionCall], None] | None = None) -> Any:
    """The deterministic reference. wrong: its attention in both phases."""
    backend: Any = ReferenceBackend(deterministic=True)
    if wrong is not None:
        backend.decode = wrong
    return backend


def attend(call: AttentionCall) -> None:
    """The attention of the deterministic reference."""
    ReferenceBackend(deterministic=True).decode(call)


class ProductByRows(ReferenceBackend):
    """A product of few rows is summed in two halves, as libraries do that split sums to fill a device."""

    def __init__(self) -> None:
        super().__init__(deterministic=True)

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Any, num_groups: int
    ) -> Tensor:
        product = super().inv_rope_o_proj
        if o.shape[0] > FEW:
            return product(o, positions, cos_sin_cache, wo_a, num_groups)
        half = o.shape[1] // num_groups // 2
        parts = []
        for heads in (slice(half), slice(half, None)):
            part = torch.zeros_like(o, dtype=torch.float32)
            part.unflatten(1, (num_groups, -1))[:, :, heads] = o.unflatten(1, (num_groups, -1))[:, :, heads].float()
            parts.append(product(part, positions, cos_sin_cache, wo_a, num_groups))
        return (parts[0] + parts[1]).to(o.dtype)


class ScaleOfTheBatch(ReferenceBackend):
    """Outputs are rounded to fp8 under one scale for all rows, before they are projected."""

    def __init__(self) -> None:
        super().__init__(deterministic=True)

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Any, num_groups: int
    ) -> Tensor:
        scale = o.nan_to_num().abs().amax().float().clamp(min=1e-10) / 448 if o.shape[0] else 1.0
        rounded = ((o.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(o.dtype)
        return super().inv_rope_o_proj(rounded, positions, cos_sin_cache, wo_a, num_groups)


def _segments(call: AttentionCall) -> Sequence[PagedKeys]:
    """Keys of a deterministic call, which are in pages."""
    assert not isinstance(call.keys, GatheredKeys)
    return call.keys


def _halves(segment: PagedKeys) -> list[PagedKeys]:
    """The left and the right half of the columns of a segment."""
    assert isinstance(segment.rows, DenseIndices)
    indices, lens = segment.rows.indices, segment.rows.lens
    middle = indices.shape[1] // 2
    left = DenseIndices(indices[:, :middle], lens.clamp(max=middle))
    right = DenseIndices(indices[:, middle:], (lens - middle).clamp(min=0))
    return [evolve(segment, rows=rows) for rows in (left, right)]


def combined_by_rows(call: AttentionCall) -> None:
    """Partials of a row's splits are combined in an order that depends on the number of rows."""
    outs, lses = [], []
    for segment in _segments(call):
        for half in _halves(segment):
            out = torch.empty_like(call.out, dtype=torch.float32, memory_format=torch.contiguous_format)
            lses.append(torch.empty(out.shape[:2], dtype=torch.float32))
            attend(evolve(call, q=call.q.float(), out=out, lse=lses[-1], attn_sink=None, keys=[half]))
            outs.append(out)
    order = slice(None, None, -1) if call.q.shape[0] > FEW else slice(None)
    specs = merge.merge_scratch(*call.out.shape)
    scratch = [torch.empty(shape, dtype=dtype) for shape, dtype in specs]
    lse = torch.empty_like(lses[0]) if call.lse is None else call.lse
    merge.merge_partials(torch.stack(outs[order]), torch.stack(lses[order]), call.out, lse, call.attn_sink, scratch)


def in_order_of_pages(call: AttentionCall) -> None:
    """Keys are summed in the order in which they stand in the caches, which is that of the pages."""

    def sorted_rows(segment: PagedKeys) -> PagedKeys:
        assert isinstance(segment.rows, DenseIndices)
        indices, lens = segment.rows.indices, segment.rows.lens
        columns = torch.arange(indices.shape[1])
        absent = columns >= lens[:, None]
        in_order = indices.masked_fill(absent, 2**31 - 1).sort(dim=1).values
        return evolve(segment, rows=DenseIndices(in_order, lens))

    attend(evolve(call, keys=[sorted_rows(segment) for segment in _segments(call)]))


def with_op(name: str, wrong: Callable[..., Any]) -> Callable[[], Any]:
    """A deterministic reference with another layer op."""

    def make() -> Any:
        backend = exact()
        backend.layer_ops = evolve(backend.layer_ops, **{name: wrong})
        return backend

    return make


def mixes_from_the_other_end(residual: Tensor, weights: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of the mixes of many tokens begin at the last element of the streams."""
    post, comb, layer_input = hyper_connections.mhc_pre(residual, weights, deterministic=True)
    if residual.shape[0] > FEW:
        flipped = residual.flatten(1).flip(-1).unflatten(1, residual.shape[1:])
        reversed_weights = evolve(weights, fn=weights.fn.flip(-1))
        post, comb, _ = hyper_connections.mhc_pre(flipped, reversed_weights, deterministic=True)
    return post, comb, layer_input


def streams_of_nan(_x: Tensor, residual: Tensor, _post: Tensor, _comb: Tensor) -> Tensor:
    """New streams that are NaN."""
    return torch.full_like(residual, torch.nan)
