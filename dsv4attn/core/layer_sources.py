"""`BoundSources`: the layers of DeepSeek-V4.1 that a layer reads from, found among those made before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.caches import DeepseekV4Caches, LayerCaches
from dsv4attn.core.geometry import LayerSources, ModelGeometry
from dsv4attn.core.indexer import Candidates
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.limits import Limits
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
        wanted: LayerSources,
        layers: Iterable[SourceLayer],
        geometry: ModelGeometry,
        limits: Limits,
        device: torch.device,
    ) -> BoundSources:
        """Find the sources of a layer by number. Raises ArgumentError for one that is missing or does not fit."""
        found: dict[str, SourceLayer] = {}
        given = {layer.index: layer for layer in layers}
        for name in ("kv", "index", "candidates"):
            number: int | None = getattr(wanted, name)
            if number is None or number == wanted.layer:
                continue
            if number not in given:
                expected = f"layer {number}, whose {_WHAT[name]} layer {wanted.layer} reads"
                hint = "make layers in order, and pass all that were made before: sources=layers"
                raise ArgumentError("sources", expected=expected, actual=f"layers {sorted(given)}", hint=hint)
            _check(given[number], wanted.layer, geometry, limits, device)
            found[name] = given[number]
        return cls(**found)

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
        shared, own = source.caches, caches.attention
        for name, given, wanted in (
            ("compressed", own.compressed, shared.attention.compressed),
            ("index", caches.index, shared.index),
        ):
            if given is not None and not _same_cache(given, wanted):
                expected = f"the cache of layer {source.index}, the source of layer {layer}, or None"
                raise ArgumentError(f"caches.{name}", expected=expected, actual="another cache", hint=_ONE_OWNER)
        compressed = LayerCaches(own.swa, shared.attention.compressed)
        return DeepseekV4Caches(compressed, caches.state, shared.index if index else None, caches.index_state)

    def check_bound(self, caches: DeepseekV4Caches, prefix: str) -> None:
        """Raise Dsv4AttnError if the source got other caches since those of this layer were bound."""
        source = self.kv
        if source is None or source.caches is None:
            return
        if source.caches.attention.compressed is not caches.attention.compressed:
            said = f"layer {source.prefix} got other caches than those that layer {prefix} reads"
            raise Dsv4AttnError(f"{said} -> bind {prefix} again")


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
    rows, given = limits.max_num_batched_tokens, source.limits.max_num_batched_tokens
    if given < rows:
        expected = f"limits of at least {rows} tokens in a step, as layer {layer} has"
        raise ArgumentError(name, expected=expected, actual=given)


def own_buffer(
    name: str, given: Tensor | None, source: Tensor | None, shape: tuple[int, int], device: torch.device
) -> Tensor:
    """The int32 buffer that a layer writes, or that its source writes: the given one, the source's, or a new one.

    shape: least rows, and columns. Raises ArgumentError for a given one that does not fit.
    """
    if given is None:
        return torch.full(shape, -1, dtype=torch.int32, device=device) if source is None else source
    rows, columns = shape
    found = tuple(given.shape)
    if len(found) != 2 or found[0] < rows or found[1] != columns:
        expected = f"{columns} columns, and at least {rows} rows, the tokens of a step"
        raise ArgumentError(name, expected=expected, actual=list(found))
    if given.dtype != torch.int32 or given.device != device:
        expected = f"int32 on {device}"
        actual = f"{str(given.dtype).removeprefix('torch.')} on {given.device}"
        raise ArgumentError(name, expected=expected, actual=actual)
    if source is not None and not _same(given, source):
        raise ArgumentError(name, expected="None, or the tensor of the layer's source", actual="another tensor")
    return given


def _same_cache(given: PagedKVCache, wanted: PagedKVCache | None) -> bool:
    if wanted is None:
        return False
    return given is wanted or (given.layout == wanted.layout and _same(given.tensor, wanted.tensor))


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same elements of memory."""
    facts = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (left, right)]
    return facts[0] == facts[1]
