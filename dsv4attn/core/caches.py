"""`LayerCaches`: the caches that attention of a layer reads, with their signature; `DeepseekV4Caches`: all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from attrs import frozen

from dsv4attn.core.geometry import LayerGeometry, LayerKind
from dsv4attn.core.layout import PagedKVCache
from dsv4attn.core.record_layout import check_window
from dsv4attn.core.tensorspec import signature
from dsv4attn.core.values import check_type

__all__ = ["DeepseekV4Caches", "LayerCaches"]

_CURE = "pass PagedKVCache(tensor, layout), or PagedKVCache.allocate(...)"


@frozen(slots=False)
class LayerCaches:
    """The paged caches of one layer.

    swa: the window cache, of any layout but `v41_fp4`.
    compressed: the compressed cache, which window-only layers do not have.
    """

    swa: PagedKVCache
    compressed: PagedKVCache | None = None

    def __attrs_post_init__(self) -> None:
        check_type("swa", self.swa, PagedKVCache, cure=_CURE)
        check_window(self.swa.layout, "swa")
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

    def __reduce__(self) -> tuple[object, ...]:
        """How they are copied and pickled: without the signature, which has addresses and is known by its identity."""
        return type(self), (self.swa, self.compressed)

    def segments(self, layer: LayerGeometry) -> Sequence[PagedKVCache]:
        """The caches that a layer of this kind reads."""
        if layer.kind is LayerKind.SWA or self.compressed is None:
            return (self.swa,)
        return self.swa, self.compressed


@frozen(eq=False)
class DeepseekV4Caches:
    """All paged caches of one layer: what a request holds in them is its whole state.

    attention: the window cache, and the compressed cache of layers that have one.
    state: states of the compressor, on layers that have a compressed cache.
    index: index keys, on c4a layers.
    index_state: states of the indexer's compressor, on c4a layers.
    """

    attention: LayerCaches
    state: PagedKVCache | None = None
    index: PagedKVCache | None = None
    index_state: PagedKVCache | None = None

    @property
    def present(self) -> dict[str, PagedKVCache]:
        """Every cache that there is, by name."""
        found = {"swa": self.attention.swa, "compressed": self.attention.compressed, "state": self.state}
        found |= {"index": self.index, "index_state": self.index_state}
        return {name: cache for name, cache in found.items() if cache is not None}


@lru_cache(maxsize=1024)
def _one(signature: tuple[object, ...]) -> tuple[object, ...]:
    """The first of equal signatures."""
    return signature
