"""`BoundSources`: the layers of DeepSeek-V4.1 that a layer reads from, found among those made before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import ReferenceType

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.indexer import Candidates
from dsv4attn.core.metadata.forward_context import ForwardContext
from dsv4attn.core.metadata.metadata import AttentionMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerSources, ModelGeometry
from dsv4attn.errors import ArgumentError, Dsv4AttnError

__all__ = ["BoundSources", "SourceLayer", "own_buffer"]


class SourceLayer(Protocol):
    """What a layer reads of the layers before it: the attributes of `DeepseekV4Attention`."""

    prefix: str
    index: int
    geometry: ModelGeometry
    limits: Limits
    device: torch.device
    caches: DeepseekV4Caches | None
    topk_indices: Tensor | None
    candidates: Candidates | None
    selected_in: tuple[ReferenceType[WindowMetadata], ReferenceType[ForwardContext]] | None


@frozen(eq=False)
class BoundSources:
    """Layers that a layer reads from; None where it has the thing itself, or where there is no such thing.

    kv: owns its compressed cache and index keys.
    index: its indexer selects the entries.
    candidates: its indexer publishes the candidate blocks.
    """

    kv: SourceLayer | None = None
    index: SourceLayer | None = None
    candidates: SourceLayer | None = None

    @classmethod
    def find(
        cls,
        layer_sources: LayerSources,
        layers: Iterable[SourceLayer],
        geometry: ModelGeometry,
        limits: Limits,
        device: torch.device,
    ) -> BoundSources:
        """Find the sources of a layer by number. Raises ArgumentError for one that is missing or does not fit."""
        sources: dict[str, SourceLayer] = {}
        by_index = {layer.index: layer for layer in layers}
        for name in ("kv", "index", "candidates"):
            number: int | None = getattr(layer_sources, name)
            if number is None or number == layer_sources.layer:
                continue
            if number not in by_index:
                expected = f"layer {number}, whose {_WHAT[name]} layer {layer_sources.layer} reads"
                hint = "make layers in order, and pass all that were made before: sources=layers"
                raise ArgumentError("sources", expected=expected, actual=f"layers {sorted(by_index)}", hint=hint)
            _check(by_index[number], layer_sources.layer, geometry, limits, device)
            sources[name] = by_index[number]
        return cls(**sources)

    def caches(self, caches: DeepseekV4Caches, layer: int, *, index: bool) -> DeepseekV4Caches:
        """Caches of a layer, with those of its source where the layer's own are None.

        index: whether the layer's indexer reads index keys. Raises ArgumentError for another cache than the source's.
        """
        source = self.kv
        if source is None:
            return caches
        if source.caches is None:
            raise Dsv4AttnError(
                f"layer {source.prefix} has no caches -> bind layers in order: layer {layer} reads its entries"
            )
        shared, attention = source.caches, caches.attention
        for name, cache, source_cache in (
            ("compressed", attention.compressed, shared.attention.compressed),
            ("index", caches.index, shared.index),
        ):
            if cache is not None and not _same_cache(cache, source_cache):
                expected = f"the cache of layer {source.index}, the source of layer {layer}, or None"
                raise ArgumentError(f"caches.{name}", expected=expected, actual="another cache", hint=_ONE_OWNER)
        compressed = LayerCaches(attention.swa, shared.attention.compressed)
        return DeepseekV4Caches(compressed, caches.state, shared.index if index else None, caches.index_state)

    def rows(self, metadata: AttentionMetadata, context: ForwardContext, prefix: str) -> Tensor | None:
        """Rows [T] int64 of what a source selected that the rows of a layer are; None: the same rows.

        metadata, context: of the layer's step. prefix: of the layer. Raises ArgumentError unless the layers whose
        entries, and whose selection or candidate blocks, are read ran last with these metadata, or with those that
        `AttentionMetadata.source_rows` names.
        """
        if self.kv is None or not metadata.swa.num_actual_tokens:
            return None
        chooser = self.candidates if self.index is None else self.index
        if chooser is not self.kv:
            _rows_in(self.kv, metadata, context, prefix)
        return None if chooser is None else _rows_in(chooser, metadata, context, prefix)


def _rows_in(source: SourceLayer, metadata: AttentionMetadata, context: ForwardContext, prefix: str) -> Tensor | None:
    """See `BoundSources.rows`. Every layer that owns entries selects, so it has run if its indexer has."""
    swa, part = metadata.swa, metadata.source_rows
    ran = source.selected_in
    last = None if ran is None else ran[0]()
    if last is swa:
        return None
    tokens = swa.num_actual_tokens
    if last is not None and part is not None and part.source is last:
        if part.rows.shape[0] < tokens:
            expected, actual = f"a row for each of the {tokens} tokens", f"{part.rows.shape[0]} rows"
            raise ArgumentError("metadata.source_rows.rows", expected=expected, actual=actual)
        return part.rows
    # engines may have an object for each layer, of the same tensors
    if last is not None and ran is not None and ran[1]() is context and _same_tokens(last, swa):
        return None
    expected = f"the metadata with which layer {source.prefix}, from which it reads, ran last in this step"
    other = "it has not run with them" if last is None else f"it ran with others, of {last.num_actual_tokens} tokens"
    actual = f"metadata of {tokens} tokens, but {other}"
    hint = "run layers in order with the same metadata; for some rows of a step, give AttentionMetadata.source_rows"
    raise ArgumentError(f"attn_metadata of {prefix}", expected=expected, actual=actual, hint=hint)


_WHAT = {"kv": "compressed entries", "index": "selected entries", "candidates": "candidate blocks"}
_ONE_OWNER = "layers that share a compressed cache have the same object, which only its owner writes"


def _check(source: SourceLayer, layer: int, geometry: ModelGeometry, limits: Limits, device: torch.device) -> None:
    """Raise ArgumentError unless a source fits a layer."""
    name = f"sources: layer {source.index}"
    if source.geometry != geometry:
        expected = f"one of the same geometry, {geometry.name}, as layer {layer}"
        raise ArgumentError(name, expected=expected, actual=f"another geometry, {source.geometry.name}")
    if source.device != device:
        expected = f"one on {device}, as the weights of layer {layer} are"
        raise ArgumentError(name, expected=expected, actual=str(source.device))
    rows, source_rows = limits.max_num_batched_tokens, source.limits.max_num_batched_tokens
    if source_rows < rows:
        expected = f"limits of at least {rows} tokens in a step, as layer {layer} has"
        raise ArgumentError(name, expected=expected, actual=source_rows)


def own_buffer(
    name: str, buffer: Tensor | None, source: Tensor | None, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """The int32 buffer that a layer writes, or that its source writes: the given one, the source's, or a new one.

    shape: least rows, and columns. Raises ArgumentError for a given one that does not fit.
    """
    if buffer is None:
        return torch.full(shape, -1, dtype=torch.int32, device=device) if source is None else source
    rows, columns = shape
    sizes = tuple(buffer.shape)
    if len(sizes) != 2 or sizes[0] < rows or sizes[1] != columns:
        expected = f"{columns} columns, and at least {rows} rows, the tokens of a step"
        raise ArgumentError(name, expected=expected, actual=list(sizes))
    if buffer.dtype != torch.int32 or buffer.device != device:
        expected = f"int32 on {device}"
        actual = f"{str(buffer.dtype).removeprefix('torch.')} on {buffer.device}"
        raise ArgumentError(name, expected=expected, actual=actual)
    if source is not None and not _same(buffer, source):
        raise ArgumentError(name, expected="None, or the tensor of the layer's source", actual="another tensor")
    return buffer


def _same_tokens(left: WindowMetadata, right: WindowMetadata) -> bool:
    """Whether two metadata are of the same tokens, as their tensors are the same objects."""
    return (
        left.num_actual_tokens == right.num_actual_tokens
        and left.query_start_loc is right.query_start_loc
        and left.seq_lens is right.seq_lens
    )


def _same_cache(cache: PagedKVCache, source_cache: PagedKVCache | None) -> bool:
    if source_cache is None:
        return False
    return cache is source_cache or (cache.layout == source_cache.layout and _same(cache.tensor, source_cache.tensor))


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same elements of memory."""
    facts = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (left, right)]
    return facts[0] == facts[1]
