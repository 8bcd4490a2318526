"""`LayerCaches`: the window cache and the compressed cache of one layer, with their signature."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from attrs import frozen

from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.values import check_type

__all__ = ["LayerCaches"]

_CURE = "pass PagedKVCache(tensor, layout), or PagedKVCache.allocate(...)"


@frozen(slots=False)
class LayerCaches:
    """The paged caches of one layer.

    swa: the window cache.
    compressed: the compressed cache, which window-only layers do not have.
    """

    swa: PagedKVCache
    compressed: PagedKVCache | None = None

    def __attrs_post_init__(self) -> None:
        check_type("swa", self.swa, PagedKVCache, cure=_CURE)
        if self.compressed is not None:
            check_type("compressed", self.compressed, PagedKVCache, cure=_CURE)

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """Of both caches: the signature of the tensor, the layout's fingerprint and the page size.

        Equal signatures are one object, so that a key can name it by identity.
        """
        caches = [self.swa] if self.compressed is None else [self.swa, self.compressed]
        formats = [(cache.layout.fingerprint, cache.block_size) for cache in caches]
        return _one((*signature(*[cache.tensor for cache in caches]), *formats))

    def segments(self, layer: LayerGeometry) -> Sequence[PagedKVCache]:
        """The caches that a layer of this kind reads."""
        if layer.kind is LayerKind.SWA or self.compressed is None:
            return (self.swa,)
        return self.swa, self.compressed


@lru_cache(maxsize=1024)
def _one(signature: tuple[object, ...]) -> tuple[object, ...]:
    """The first of equal signatures."""
    return signature
