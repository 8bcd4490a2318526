"""`LayerCaches`: the caches that attention of a layer reads, with their signature; `DeepseekV4Caches`: all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache as cached
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.argument_checks import check_type
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.record_layout import check_window
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import signature
from dsv4attn.errors import ArgumentError

__all__ = [
    "DeepseekV4Caches",
    "LayerCaches",
    "all_caches_of",
    "caches_of",
    "check_op_tensors",
    "have_moved",
    "op_tensor",
]

_CURE = "pass PagedKVCache(tensor, layout), or PagedKVCache.allocate(...)"


@frozen(slots=False)
class LayerCaches:
    """The paged caches of one layer.

    swa: the window cache, of any layout but `v41_fp4`.
    compressed: the compressed cache, which window-only layers do not have.
    """

    swa: PagedKVCache
    compressed: PagedKVCache | None = None
    # tensor, address, strides and bytes of the storage of each cache when `signed` was made
    places: ClassVar[Sequence[tuple[Any, int, tuple[int, ...], int]]]
    # the last `signature`, which holds while `places` does; None: none was made yet
    signed: ClassVar[tuple[object, ...] | None]

    def __attrs_post_init__(self) -> None:
        self._remember((), None)
        check_type("swa", self.swa, PagedKVCache, cure=_CURE)
        check_window(self.swa.layout, "swa")
        if self.compressed is not None:
            check_type("compressed", self.compressed, PagedKVCache, cure=_CURE)

    @property
    def signature(self) -> tuple[object, ...]:
        """For both caches: the signature of the tensor, the fingerprint of the layout and the page size.

        Equal signatures are one object, so that a key can name it by identity. It is made again when the memory of a
        cache has changed. Raises ArgumentError if a cache has memory that it was not made for (`PagedKVCache.memory`).
        """
        caches = [self.swa] if self.compressed is None else [self.swa, self.compressed]
        memories = [(cache.tensor, cache.memory) for cache in caches]
        places = [(tensor, memory.address, memory.strides, memory.storage_bytes) for tensor, memory in memories]
        if self.signed is None or any(new[1:] != old[1:] for new, old in zip(places, self.places, strict=True)):
            formats = [(cache.layout.fingerprint, cache.block_size) for cache in caches]
            self._remember(places, _one((*signature(*[tensor for tensor, _ in memories]), *formats)))
        assert self.signed is not None
        return self.signed

    def _remember(self, places: Sequence[tuple[Any, int, tuple[int, ...], int]], signed: object) -> None:
        object.__setattr__(self, "places", places)
        object.__setattr__(self, "signed", signed)

    def __reduce__(self) -> tuple[object, ...]:
        """How they are copied and pickled: without the signature, which has addresses and is known by its identity."""
        return type(self), (self.swa, self.compressed)

    def segments(self, layer: LayerGeometry) -> Sequence[PagedKVCache]:
        """The caches that a layer of this kind reads.

        layer: geometry of the layer.
        """
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
        names = "swa", "compressed", "state", "index", "index_state"
        return {name: cache for name, cache in zip(names, self.in_order, strict=True) if cache is not None}

    @property
    def in_order(self) -> tuple[PagedKVCache | None, ...]:
        """All five caches, None for those that the layer does not have."""
        return self.attention.swa, self.attention.compressed, self.state, self.index, self.index_state

    def check_memory(self) -> None:
        """Raise ArgumentError if a cache has memory that it was not made for (`PagedKVCache.memory`)."""
        for cache in self.in_order:
            _ = None if cache is None else cache.memory


def caches_of(caches: LayerCaches | None, swa: Tensor | None, compressed: Tensor | None = None) -> LayerCaches | None:
    """The caches, with these tensors as their memory: the same object if they are its tensors.

    A compiled graph gives an op copies of caches, where it has replaced writes by copies. None: the tensor of the
    cache. Without caches there are none.
    """
    if caches is None:
        return None
    window_cache = _on(caches.swa, swa)
    compressed_cache = None if caches.compressed is None else _on(caches.compressed, compressed)
    if window_cache is caches.swa and compressed_cache is caches.compressed:
        return caches
    return LayerCaches(window_cache, compressed_cache)


def all_caches_of(
    caches: DeepseekV4Caches,
    swa: Tensor | None,
    compressed: Tensor | None,
    state: Tensor | None,
    index: Tensor | None,
    index_state: Tensor | None,
) -> DeepseekV4Caches:
    """`caches_of` for all caches of a layer."""
    attention = caches_of(caches.attention, swa, compressed)
    assert attention is not None
    pairs = (caches.state, state), (caches.index, index), (caches.index_state, index_state)
    replaced = [None if cache is None else _on(cache, tensor) for cache, tensor in pairs]
    if attention is caches.attention and all(new is old for new, (old, _) in zip(replaced, pairs, strict=True)):
        return caches
    return DeepseekV4Caches(attention, *replaced)


def op_tensor(cache: PagedKVCache | None) -> Tensor | None:
    """The tensor that an op of torch is given for a cache: that of the cache, or a view of bytes at the same addresses.

    Bytes, if the cache is a part of a larger allocation. Torch compiles writes to several tensors of one allocation
    only if these have one dtype, and are views of the same tensor.
    """
    if cache is None or not cache.tensor.numel():
        return None if cache is None else cache.tensor
    tensor, size = cache.tensor, cache.tensor.element_size()
    storage = tensor.untyped_storage()
    if storage.nbytes() <= cache.num_blocks * cache.layout.page_stride(cache.block_size):
        return tensor
    key = storage.data_ptr(), tensor.device
    with torch.inference_mode(False):  # it outlives the mode of the call that made it
        whole = _allocations.get(key)
        # memory that was released may have come back at its address as that of another storage
        if whole is None or whole.numel() != storage.nbytes() or whole.data_ptr() != storage.data_ptr():
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            _allocations[key] = whole
        *shape, last = tensor.shape
        strides = [size * stride for stride in tensor.stride()[:-1]]
        return whole.as_strided((*shape, size * last), (*strides, 1), size * tensor.storage_offset())


def have_moved(caches: Sequence[PagedKVCache | None], op_tensors: Sequence[Tensor | None]) -> bool:
    """Whether a cache has other memory than when `op_tensor` was asked for it.

    op_tensors: what `op_tensor` returned for each cache.
    """
    return any(
        cache is not None and tensor is not None and tensor.data_ptr() != cache.tensor.data_ptr()
        for cache, tensor in zip(caches, op_tensors, strict=True)
    )


def check_op_tensors(prefix: str, caches: Sequence[PagedKVCache | None], op_tensors: Sequence[Tensor | None]) -> None:
    """Raise ArgumentError if a compiled graph would be given memory that the caches of a layer no longer have.

    prefix: of the layer. caches, op_tensors: as of `have_moved`.
    """
    if have_moved(caches, op_tensors):
        expected, hint = "the memory that they had when they were bound", "call bind_kv_cache again"
        raise ArgumentError(f"caches of {prefix}", expected=expected, actual="other memory", hint=hint)


_allocations: WeakValueDictionary[tuple[int, torch.device], Tensor] = WeakValueDictionary()
"""All bytes of allocations that several caches share, by address. They live as long as one of their views."""


def _on(cache: PagedKVCache, tensor: Tensor | None) -> PagedKVCache:
    """The cache, or one with the same layout in another tensor, that `op_tensor` made or that is a copy of it."""
    if tensor is None or tensor is cache.tensor or tensor.data_ptr() == cache.tensor.data_ptr():
        return cache
    return PagedKVCache(tensor.view(cache.layout.dtype), cache.layout, block_size=cache.block_size)


@cached
def _one(signature: tuple[object, ...]) -> tuple[object, ...]:
    """The first of equal signatures. None is dropped, so that no identity in a key becomes that of another one."""
    return signature
