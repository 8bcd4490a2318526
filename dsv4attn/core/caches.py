"""The caches of one layer."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.layout import PagedKVCache

__all__ = ["LayerCaches"]


@frozen
class LayerCaches:
    """swa: the window cache. compressed: the compressed cache, which window-only layers do not have."""

    swa: PagedKVCache
    compressed: PagedKVCache | None = None

    def segments(self, layer: LayerGeometry) -> Sequence[PagedKVCache]:
        """The caches a layer reads. Its kind decides, not what happens to be bound."""
        if layer.kind is LayerKind.SWA or self.compressed is None:
            return (self.swa,)
        return self.swa, self.compressed
