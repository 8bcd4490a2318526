"""`LayerSharing`: which layers of DeepSeek-V4.1 own a compressed cache or an indexer, and whose the others use."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from attrs import frozen

from dsv4attn.core.model.layer_geometry import LayerKind
from dsv4attn.errors import GeometryError

__all__ = ["LayerRole", "LayerSharing", "LayerSources"]


class LayerRole(str, Enum):
    """What a layer owns in addition to the window cache, which every layer has.

    WINDOW_ONLY: nothing. FULL: a compressed cache that it fills, and an indexer if its kind selects entries.
    REINDEX: an indexer over the keys of another layer. REUSE: neither; it takes the entries that another layer
    selected.
    """

    WINDOW_ONLY = "window-only"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@frozen
class LayerSources:
    """The layers that a layer reads from, by number; its own number where it has the thing itself.

    layer: number of the layer.
    kv: layer whose compressed cache, and index keys, it reads; None on window-only layers. Only that layer inserts.
    index: layer whose selected entries it attends to; None where no indexer selects.
    candidates: layer whose candidate blocks its indexer is restricted to, or None.
    """

    layer: int
    kv: int | None = None
    index: int | None = None
    candidates: int | None = None

    @property
    def role(self) -> LayerRole:
        """What the layer has of its own."""
        if self.kv is None:
            return LayerRole.WINDOW_ONLY
        if self.kv == self.layer:
            return LayerRole.FULL
        return LayerRole.REINDEX if self.index == self.layer else LayerRole.REUSE


@frozen
class LayerSharing:
    """Layers that share compressed caches and selected entries, by the field names of the configuration.

    kv_source_layer_ids: layers that own a compressed cache; a layer reads that of the last one up to itself.
    index_source_layer_ids: layers that run an indexer; a layer takes the entries of the last one up to itself.
    candidate_source_layer_id: layer whose indexer publishes candidate blocks, to which later indexers over the same
       keys are restricted; -1 for none.
    candidate_topk_blocks: most candidate blocks of a token.
    candidate_block_size: compressed entries of a candidate block, a power of two.
    """

    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int = -1
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0

    def sources(self, index: int) -> LayerSources:
        """The sources of a layer with a compressed cache; see `check`."""
        kv, chooser = _last(self.kv_source_layer_ids, index), _last(self.index_source_layer_ids, index)
        publisher: int | None = self.candidate_source_layer_id
        consumes = chooser == index > self.candidate_source_layer_id >= 0
        if not consumes or _last(self.kv_source_layer_ids, self.candidate_source_layer_id) != kv:
            publisher = None
        return LayerSources(index, kv, chooser, publisher)

    def check(self, layers: Sequence[tuple[LayerKind, int]]) -> None:
        """Raise GeometryError unless every layer with a compressed cache finds its sources. layers: as of the model."""
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            self._check_ids(name, layers)
        for i in self.kv_source_layer_ids:
            if i not in self.index_source_layer_ids:
                expected = f"every layer of kv_source_layer_ids, {i} too"
                hint = f"add {i}: a layer that owns a compressed cache selects its entries itself"
                raise _wrong("index_source_layer_ids", expected, list(self.index_source_layer_ids), hint)
        for i, (kind, ratio) in enumerate(layers):
            if kind is LayerKind.SWA:
                continue
            source = _last(self.kv_source_layer_ids, i)
            if source is None or layers[source][1] != ratio:
                expected = f"a layer of ratio {ratio}, as layer {i} has, as the last one up to {i}"
                actual = "none" if source is None else f"layer {source} of ratio {layers[source][1]}"
                raise _wrong("kv_source_layer_ids", expected, actual, "list the first layer of each ratio")
        self._check_candidates()

    def _check_ids(self, name: str, layers: Sequence[tuple[LayerKind, int]]) -> None:
        ids = getattr(self, name)
        for previous, current in pairwise(ids):
            if current <= previous:
                raise _wrong(name, "ascending layer numbers", list(ids), "list each source once, in layer order")
        for i in ids:
            if not 0 <= i < len(layers) or layers[i][0] is not LayerKind.CSA:
                expected = "layers with selected entries"
                if 0 <= i < len(layers):
                    actual, cure = f"layer {i}, which is window-only", "list layers whose compress ratio is above 0"
                else:
                    actual, cure = f"layer {i} of {len(layers)}", f"list layers from 0 to {len(layers) - 1}"
                raise _wrong(name, expected, actual, cure)

    def _check_candidates(self) -> None:
        source, size = self.candidate_source_layer_id, self.candidate_block_size
        if source == -1:
            return
        if source not in self.index_source_layer_ids:
            expected = f"one of index_source_layer_ids, {list(self.index_source_layer_ids)}, or -1 for none"
            raise _wrong("candidate_source_layer_id", expected, source, "name the layer whose indexer publishes blocks")
        if self.candidate_topk_blocks < 1:
            hint = "or set candidate_source_layer_id to -1"
            raise _wrong("candidate_topk_blocks", "at least 1", self.candidate_topk_blocks, hint)
        if size < 1 or size & (size - 1):
            hint = "or set candidate_source_layer_id to -1"
            raise _wrong("candidate_block_size", "a power of two", size, hint)


def _last(ids: Sequence[int], index: int) -> int | None:
    """The largest of ascending ids that is not above the index."""
    place = bisect_right(ids, index)
    return ids[place - 1] if place else None


def _wrong(field: str, expected: str, actual: object, hint: str) -> GeometryError:
    return GeometryError(f"{field}: expected {expected}, got {actual} -> {hint}")
