"""Backends that serve some sizes in part, or read a tensor by strides that they assume: more mutants for the kit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.gathered import fill_by_ops
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import ChunkRows, ChunkTokens, DenseIndices, GatheredKeys, PageTable, StepTokens
from dsv4attn.core.contract.backend import AttentionCall, AttentionTensors, EntryIndices, FillRows, Phase, Run
from dsv4attn.core.contract.builder_ops import BuilderOps
from dsv4attn.core.contract.index_ops import IndexOps
from dsv4attn.core.torch_ops import index_ops as indices
from tests.testing.mutants import attend, dense


def assumed_dense(*names: str) -> Callable[[AttentionCall], None]:
    """Arguments whose rows are taken to follow each other."""

    def wrong(call: AttentionCall) -> None:
        given = {name: getattr(call, name) for name in names}
        changed: dict[str, Any] = {name: None if t is None else dense(t) for name, t in given.items()}
        attend(attrs.evolve(call, **changed))

    return wrong


def heads_follow(call: AttentionCall) -> None:
    """The stride of tokens is read, that of heads is taken to be the head's size."""
    q = call.q.as_strided(call.q.shape, (call.q.stride(0), call.q.shape[2], 1), call.q.storage_offset())
    attend(attrs.evolve(call, q=q))


def only_rows(most: int) -> Callable[[AttentionCall], None]:
    """Rows behind the first ones are forgotten."""

    def cut(rows: Any) -> DenseIndices:
        return DenseIndices(rows.indices[:most], rows.lens[:most])

    def wrong(call: AttentionCall) -> None:
        keys: Any = call.keys
        if isinstance(keys, GatheredKeys):
            keys = attrs.evolve(keys, rows=cut(keys.rows))
        else:
            keys = [attrs.evolve(s, rows=cut(s.rows)) for s in keys]
        lse = None if call.lse is None else call.lse[:most]
        attend(attrs.evolve(call, q=call.q[:most], out=call.out[:most], lse=lse, keys=keys))

    return wrong


def only_keys(most: int) -> Callable[[AttentionCall], None]:
    """Keys of a row behind the first ones are forgotten, all segments counted."""

    def wrong(call: AttentionCall) -> None:
        keys: Any = call.keys
        gathered = isinstance(keys, GatheredKeys)
        segments, left = [], torch.full_like(call.q[:, 0, 0], most, dtype=torch.int32)
        for segment in [keys] if gathered else keys:
            lens = torch.minimum(segment.rows.lens, left)
            segments.append(attrs.evolve(segment, rows=DenseIndices(segment.rows.indices, lens)))
            left = left - lens
        attend(attrs.evolve(call, keys=segments[0] if gathered else segments))

    return wrong


def last_heads_zero_of(number: int) -> Callable[[AttentionCall], None]:
    """With exactly this number of heads the last eight are left zero."""

    def wrong(call: AttentionCall) -> None:
        attend(call)
        if call.q.shape[1] == number:
            call.out[:, -8:] = 0

    return wrong


def whole_blocks_of_heads(call: AttentionCall) -> None:
    """Above 64 heads, those after the last whole block of 64 are left zero."""
    attend(call)
    heads = call.q.shape[1]
    if heads > 64:
        call.out[:, heads // 64 * 64 :] = 0


def zero_groups(which: Callable[[int], slice]) -> Callable[[Tensor, dict[str, Any]], Tensor]:
    """Some groups of a projection are left zero. which: takes the number of groups."""

    def zeroed(result: Tensor, _: dict[str, Any]) -> Tensor:
        result[:, which(result.shape[1])] = 0
        return result

    return zeroed


def of_8_bits(slots: Tensor, page: int) -> Tensor:
    """Slots, of whose record in the page only 8 bits are kept."""
    return torch.where(slots >= 0, slots // page * page + slots % page % 256, slots)


def records_of_8_bits(call: AttentionCall) -> None:
    assert not isinstance(call.keys, GatheredKeys)
    segments = []
    for segment in call.keys:
        assert isinstance(segment.rows, DenseIndices)
        slots = of_8_bits(segment.rows.indices, segment.cache.block_size)
        segments.append(attrs.evolve(segment, rows=DenseIndices(slots, segment.rows.lens)))
    attend(attrs.evolve(call, keys=segments))


def slots_of_8_bits(arguments: dict[str, Any]) -> Tensor:
    return of_8_bits(arguments["slot_mapping"], arguments["cache"].block_size)


def later_records_absent(_: None, arguments: dict[str, Any]) -> None:
    """Records of a page from the 256th on are not gathered."""
    page, first, ends = arguments["cache"].block_size, arguments["offset"], arguments["seq_lens"]
    counts = ends if arguments["gather_lens"] is None else arguments["gather_lens"]
    for rows, end, count in zip(arguments["out"], ends.tolist(), counts.tolist(), strict=True):
        gathered = rows[first : first + max(count, 0)]
        positions = end - count + torch.arange(len(gathered))
        gathered[positions % page >= 256] = torch.nan


def clipped_windows(call: AttentionCall) -> None:
    """A window has the layer's columns, and keys behind them are forgotten."""
    assert not isinstance(call.keys, GatheredKeys)
    first, *others = call.keys
    assert isinstance(first.rows, DenseIndices)
    rows = DenseIndices(first.rows.indices[:, : call.layer.window], first.rows.lens)
    attend(attrs.evolve(call, keys=[attrs.evolve(first, rows=rows), *others]))


def _changed(op: Any, change: Callable[[Any], Any], names: Sequence[str]) -> Callable[..., Any]:
    """An op with other arguments, by the names of arguments, or of fields of the structs that it takes."""
    order = [*inspect.signature(op).parameters]

    def changed_struct(value: Any) -> Any:
        if not isinstance(value, (PageTable, StepTokens, ChunkTokens)):
            return value
        fields = {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}
        return type(value)(**{k: change(v) if k in names and v is not None else v for k, v in fields.items()})

    def run(*args: Any, **options: Any) -> Any:
        arguments = {**dict(zip(order, args, strict=False)), **options}
        return op(**{k: change(v) if k in names and v is not None else changed_struct(v) for k, v in arguments.items()})

    return run


def with_arguments(change: Callable[[Any], Any], *names: str) -> ReferenceBackend:
    """A backend whose index ops, those of the builder too, get other arguments."""
    backend = ReferenceBackend()
    ops = "compute_global_topk_indices_and_lens", "combine_topk_swa_indices", "build_ragged_indices_from_dense"
    backend.index_ops = IndexOps(**{name: _changed(getattr(indices, name), change, names) for name in ops})
    builder_ops = {field.name: field.default for field in attrs.fields(BuilderOps)}
    backend.builder_ops = BuilderOps(**{name: _changed(op, change, names) for name, op in builder_ops.items()})
    return backend


class Unbounded(ReferenceBackend):
    """Windows of gathered rows go on before the first row that was gathered: into the rows of another request."""

    def __init__(self) -> None:
        super().__init__()
        self.index_ops = attrs.evolve(IndexOps(), combine_topk_swa_indices=self._combine)

    @staticmethod
    def _combine(topk: Any, tokens: ChunkTokens, *, out: Any, **tables: Any) -> None:
        starts, gather_lens = tokens.query_start_loc, torch.empty_like(tokens.gather_lens)
        indices.build_gather_lens(starts, tokens.seq_lens, tokens.window, out=gather_lens)
        indices.combine_topk_swa_indices(topk, attrs.evolve(tokens, gather_lens=gather_lens), out=out, **tables)
        request = indices.token_to_req_indices(starts - starts[0], out[0].shape[0])
        out[0].sub_((gather_lens - tokens.gather_lens)[request][:, None]).masked_fill_(out[0] < 0, -1)


class Direct(ReferenceBackend):
    """A decode that reads entries itself, with a slip."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slip = slip

    def prepare_entries(self, call: AttentionCall, entries: EntryIndices) -> Run:
        assert not isinstance(call.keys, GatheredKeys)
        rows, visible, request = call.keys[-1].rows, entries.visible_lens, entries.token_to_req
        assert isinstance(rows, DenseIndices)
        run, table = self.prepare(Phase.DECODE, call), entries.pages.block_table
        if self.slip == "a dense table":
            table = dense(table)
        if self.slip == "all are seen":
            visible = torch.full_like(visible, 2**31 - 1)
        if self.slip == "the first request":
            request = torch.zeros_like(request)

        def attend(tensors: AttentionTensors) -> None:
            assert tensors.topk_indices is not None
            first = self.slip == "the first layer"
            given = entries.indices if first else tensors.topk_indices[: len(rows.lens)]
            if self.slip == "-1 is an entry":
                given = given.clamp(min=0)
            to = rows.indices, rows.lens
            indices.compute_global_topk_indices_and_lens(given, visible, request, table, entries.pages.block_size, to)
            run(tensors)

        return attend


class Hasty(ReferenceBackend):
    """An op of its own for a chunk, with a slip."""

    def __init__(self, slip: str) -> None:
        super().__init__(prefill_indices="ragged")
        self.slip = slip
        self.prepare_rows = self._prepare_rows

    def _prepare_rows(
        self, chunk: ChunkRows, topk_indices: Tensor | None, window: PagedKVCache, compressed: PagedKVCache | None
    ) -> FillRows:
        if self.slip == "a part is whole":
            chunk = attrs.evolve(chunk, tail=None)
        if self.slip == "entries of the whole request" and chunk.tail:
            chunk = attrs.evolve(chunk, ratio=max(chunk.ratio // 2, 1))
        if self.slip == "no blocks of entries":
            chunk = attrs.evolve(chunk, compressed=None)
        if self.slip == "no ragged lists":
            chunk = attrs.evolve(chunk, ragged=None)
        fill = fill_by_ops(self, chunk, topk_indices, window, compressed)
        if self.slip == "the first layer's entries":
            return lambda _, window, compressed: fill(topk_indices, window, compressed)
        return fill
