"""`PagedKVCache`, a tensor with the layout of its bytes. `KVCacheLayout` and its parts are importable from here too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.core.argument_checks import check_count, check_type, round_up
from dsv4attn.core.cache.record_layout import Arrangement, Coding, Fp8Format, KVCacheLayout, Region, check_layout
from dsv4attn.core.tensorspec import has_dense_rows, usable_device
from dsv4attn.errors import ArgumentError

__all__ = [
    "Arrangement",
    "CacheMemory",
    "Coding",
    "Fp8Format",
    "KVCacheLayout",
    "PagedKVCache",
    "Region",
    "check_layout",
]

_LAYOUTS = "pass KVCacheLayout.fp8_ds_mla(), .v41_fp8(), .v41_fp4(), .of_record(name) or .rows()"
_NEW_MEMORY = (
    "make another cache of the new memory, PagedKVCache(tensor, layout), and bind it; or give the tensor memory with "
    "the same strides, torch.empty_strided(shape, strides)"
)
_ALIGNMENT = 16
"""Bytes of the widest access of a kernel."""


@frozen(eq=False)
class CacheMemory:
    """Where the memory of a cache is, and how pages and records lie in it. It is compared by identity.

    address: address of the first page.
    strides: strides of the tensor, in elements.
    storage_bytes: bytes of the tensor's storage, which other tensors may share.
    page_stride: bytes from one page to the next.
    record_strides: (page stride, data stride, offset of the scales, stride of the scales), in elements of the tensor.
       Record i of page b has its data at b * page stride + i * data stride, and its scales at b * page stride + offset
       of the scales + i * stride of the scales.
    alignment: the largest power of two up to 16 that divides the address, the page stride and the data stride in bytes.
    """

    address: int
    strides: tuple[int, ...]
    storage_bytes: int
    page_stride: int
    record_strides: tuple[int, int, int, int]
    alignment: int


class PagedKVCache:
    """A paged cache: a tensor, and the layout of its bytes. The page stride is that of the tensor; nothing is copied.

    A cache has one memory, that of `tensor`. Its attributes cannot be set: another tensor is another cache. If the
    tensor itself gets other memory (`tensor.data = x`, `set_`, a resized storage), the cache has that memory too. It
    must have the same dtype, shape and strides. `memory` checks that, and every reader of `page_stride`, `region` and
    `memory` gets the check with it. A copy (`copy.copy`) has the memory of the cache; a deep copy, and one that was
    pickled or saved, has memory of its own.

    tensor: quantised records: uint8 [B, P, record_bytes] or [B, 1, P, record_bytes]; pages begin at
            multiples of stride(0), in bytes (token i is not at i * record_bytes). Or [B, bytes], block_size given.
            V4.1's interleaved records: with more than one page, stride(0) is a multiple of record_bytes.
            Rows: bf16 or fp32 [B, P, D] or [B, 1, P, D] with unit stride on the last dimension.
    layout: the meaning of the bytes.
    block_size: records of a page; None: as the tensor's shape says.
    Raises ArgumentError if the tensor cannot be such a cache.
    """

    __slots__ = ("_memory", "_regions", "_shape", "block_size", "layout", "num_blocks", "tensor")

    tensor: Tensor
    layout: KVCacheLayout
    num_blocks: int
    block_size: int
    _shape: tuple[object, ...]
    _memory: CacheMemory | None
    _regions: dict[str, Tensor]

    def __init__(self, tensor: Tensor, layout: KVCacheLayout, *, block_size: int | None = None) -> None:
        check_type("cache tensor", tensor, Tensor, cure="pass memory as a tensor, or PagedKVCache.allocate(...)")
        check_type("layout", layout, KVCacheLayout, cure=_LAYOUTS)
        if tensor.dtype != layout.dtype:
            raise ArgumentError("cache tensor", expected=f"dtype {layout.dtype} for {layout.name}", actual=tensor.dtype)
        last = layout.record_bytes if layout.is_quantised else layout.head_dim
        if tensor.ndim == 4 and tensor.shape[1] == 1:
            tensor = tensor.squeeze(1)
        if tensor.ndim == 3 and tensor.shape[2] == last and (block_size or tensor.shape[1]) == tensor.shape[1]:
            block_size = tensor.shape[1]
        elif not (tensor.ndim == 2 and layout.is_quantised and block_size):
            expected = f"shape [blocks, block_size, {last}] for layout {layout.fingerprint}"
            hint = "pass block_size with a 2-D byte tensor"
            raise ArgumentError("cache tensor", expected=expected, actual=list(tensor.shape), hint=hint)
        layout.check_block_size(block_size)
        fields = {"tensor": tensor, "layout": layout, "num_blocks": tensor.shape[0], "block_size": block_size}
        # what `memory` has seen last, and the views of `region`: nothing yet
        fields |= {"_shape": (tensor.dtype, tensor.shape, tensor.stride()), "_memory": None, "_regions": {}}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self._checked_stride()

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: views, strides and signatures of a cache belong to the tensor and layout that it was made with."""
        hint = "make another cache, PagedKVCache(tensor, layout), and bind that"
        raise ArgumentError(f"PagedKVCache.{name}", expected="to stay what it is", actual="a new value", hint=hint)

    def __delattr__(self, name: str) -> None:
        """Refuse, as `__setattr__`."""
        setattr(self, name, None)

    def __reduce__(self) -> tuple[object, ...]:
        """How a cache is copied and pickled: by its tensor, without the views of it."""
        return partial(PagedKVCache, block_size=self.block_size), (self.tensor, self.layout)

    @classmethod
    def allocate(
        cls, layout: KVCacheLayout, num_blocks: int, block_size: int, device: torch.device | str = "cpu"
    ) -> PagedKVCache:
        """A zeroed cache of our own, with the layout's page stride.

        layout: layout of a record.
        device: where the cache lies.
        num_blocks: pages; a cache of none is meant for runs that only measure memory, before there are pages.
        block_size: records of a page. Raises ArgumentError for a device that is not there.
        """
        check_type("layout", layout, KVCacheLayout, cure=_LAYOUTS)
        device = usable_device(device)
        check_count("num_blocks", num_blocks, 0)
        check_count("block_size", block_size, 1)
        stride, element = layout.page_stride(block_size), layout.dtype.itemsize
        last = layout.record_bytes // element
        with torch.inference_mode(False):  # written outside of the mode that it may be made in
            flat = torch.zeros(num_blocks * stride // element, dtype=layout.dtype, device=device)
            # detached: a view keeps the tensor that it was made of, and that tensor its memory, after `tensor.data = x`
            pages = flat.as_strided((num_blocks, block_size, last), (stride // element, last, 1)).detach()
        return cls(pages, layout)

    def _checked_stride(self) -> int:
        tensor, layout = self.tensor, self.layout
        if not layout.is_quantised:
            if tensor.numel() and tensor.stride(2) != 1:
                raise ArgumentError("cache tensor", expected="unit stride on the last dim", actual=tensor.stride())
            if not has_dense_rows(tensor, written=True):
                expected = "rows that share no memory: they are written"
                raise ArgumentError("cache tensor", expected=expected, actual=f"strides {list(tensor.stride())}")
            return tensor.stride(0) * tensor.element_size()
        page = layout.page_bytes(self.block_size)
        # the shape names bytes that the regions do not follow, so it must mean the same contiguous page
        packed = (layout.record_bytes, 1)[3 - tensor.ndim :]
        inner = zip(tensor.shape[1:], tensor.stride()[1:], packed, strict=True)
        if tensor.numel() and any(n > 1 and stride != packed_stride for n, stride, packed_stride in inner):
            raise ArgumentError("cache tensor", expected=f"pages with strides {packed}", actual=tensor.stride()[1:])
        if tensor.ndim == 2 and self.num_blocks and tensor.shape[1] < page:
            raise ArgumentError("cache tensor", expected=f"at least {page} bytes in a page", actual=tensor.shape[1])
        # the stride of a dimension of size one means nothing
        stride = tensor.stride(0) if self.num_blocks > 1 else round_up(page, 4)
        if stride < page:
            raise ArgumentError("cache tensor", expected=f"a page stride of at least {page} bytes", actual=stride)
        if layout.has_whole_record_pages and self.num_blocks > 1 and stride % layout.record_bytes:
            expected = f"a page stride of whole records, a multiple of {layout.record_bytes} bytes for {layout.name}"
            near = round_up(stride, layout.record_bytes)
            hint = f"allocate pages {near} bytes apart; arrangement='split' names pages with all scales last"
            raise ArgumentError("cache tensor", expected=expected, actual=f"{stride} bytes", hint=hint)
        unit = max(2 if layout.plain_dims else 1, layout.scale_dtype.itemsize)
        if tensor.storage_offset() % unit or stride % unit:
            where = "even bytes" if unit == 2 else f"multiples of {unit} bytes"
            expected = f"pages that begin at {where}, so that the wider parts are aligned"
            actual = f"first page at byte {tensor.storage_offset()}, page stride {stride}"
            raise ArgumentError("cache tensor", expected=expected, actual=actual)
        return stride

    @property
    def memory(self) -> CacheMemory:
        """Where the memory of the tensor is now. The same object is returned until the memory changes.

        Every launch and every key of a prepared call asks for it, so that nothing reads or writes by strides or an
        address that the tensor no longer has. Raises ArgumentError if the tensor has got memory of another dtype, shape
        or strides, or a storage that ends before its last page.
        """
        tensor, memory = self.tensor, self._memory
        if (
            memory is None
            or tensor.data_ptr() != memory.address
            or tensor.stride() != memory.strides
            or tensor.untyped_storage().nbytes() != memory.storage_bytes
        ):
            memory = self._new_memory()
        return memory

    def _new_memory(self) -> CacheMemory:
        """Check memory that was not seen yet, and describe it."""
        tensor, layout = self.tensor, self.layout
        shape = tensor.dtype, tensor.shape, tensor.stride()
        if shape != self._shape:
            raise ArgumentError("cache tensor", expected=_shown(self._shape), actual=_shown(shape), hint=_NEW_MEMORY)
        page_stride, itemsize, size = self._checked_stride(), tensor.element_size(), tensor.untyped_storage().nbytes()
        if layout.is_quantised:
            data, _, scale = layout.regions(self.block_size)
            strides = page_stride, data.stride, scale.offset, scale.stride
            last = (self.num_blocks - 1) * page_stride + layout.page_bytes(self.block_size)
        else:
            strides = page_stride // itemsize, tensor.stride(1), 0, 0
            last = itemsize * (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)))
        end = itemsize * tensor.storage_offset() + last if self.capacity else 0
        if size < end:
            hint = "give the storage its memory back before the cache is used, untyped_storage().resize_(...)"
            raise ArgumentError("cache tensor", expected=f"a storage of at least {end} bytes", actual=size, hint=hint)
        step = tensor.data_ptr() | page_stride | strides[1] * itemsize | _ALIGNMENT
        memory = CacheMemory(tensor.data_ptr(), tensor.stride(), size, page_stride, strides, step & -step)
        # views of memory that the tensor no longer has would keep it from being released
        object.__setattr__(self, "_regions", {})
        object.__setattr__(self, "_memory", memory)
        return memory

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next. Raises as `memory`."""
        return self.memory.page_stride

    def region(self, name: str) -> Tensor:
        """[B, P, count] strided, typed view of one field of every record: "nope", "rope", "scale", or "row".

        A region that records do not have, such as "rope" where all dims are codes, raises KeyError. Raises
        ArgumentError as `memory`.
        name: the field.
        """
        memory, storage, view = self.memory, self.tensor.untyped_storage(), next(iter(self._regions.values()), None)
        # views stay with the storage that they were made of; another storage may have its address
        if view is None or view.untyped_storage() is not storage:
            with torch.inference_mode(False):  # as `allocate`
                object.__setattr__(self, "_regions", dict(self._views(memory.page_stride)))
        return self._regions[name]

    def _views(self, page_stride: int) -> Iterator[tuple[str, Tensor]]:
        if not self.layout.is_quantised:
            yield "row", self.tensor
            return
        for region in self.layout.regions(self.block_size):
            if not region.count:
                continue
            size = (self.num_blocks, self.block_size, region.count * region.dtype.itemsize)
            start = self.tensor.storage_offset() + region.offset
            raw = self.tensor.as_strided(size, (page_stride, region.stride, 1), start)
            yield region.name, raw.view(region.dtype)

    @property
    def capacity(self) -> int:
        """Slots of the cache: global slot ids 0 .. capacity - 1 exist, all others are absent."""
        return self.num_blocks * self.block_size

    @property
    def device(self) -> torch.device:
        """Device of the tensor."""
        return self.tensor.device

    def overlaps(self, other: PagedKVCache) -> bool:
        """Whether some byte belongs to pages of both caches, exactly: pages of one may lie between those of the other.

        The padding between pages belongs to neither cache. Memory that is mapped at two addresses is not seen.
        other: the other cache.
        """
        if self.device != other.device:
            return False
        (mine, size), (theirs, other_size) = self._spans(), other._spans()
        if not (mine.numel() and theirs.numel()):
            return False
        # of the pages here, which are in order and share nothing, the last one that begins before another's end
        last = torch.searchsorted(mine, theirs + other_size) - 1
        return bool(((last >= 0) & (mine[last.clamp(min=0)] + size > theirs)).any())

    def _spans(self) -> tuple[Tensor, int]:
        """Addresses [n] int64 of contiguous stretches of memory in order, on the host, and the bytes of each."""
        layout, tensor = self.layout, self.tensor
        if not self.capacity:
            return torch.empty(0, dtype=torch.int64, device="cpu"), 0
        pages = torch.arange(self.num_blocks, dtype=torch.int64, device="cpu") * self.page_stride + tensor.data_ptr()
        if layout.is_quantised:
            return pages, layout.page_bytes(self.block_size)
        row, rows = layout.record_bytes, torch.arange(self.block_size, dtype=torch.int64, device="cpu")
        step = tensor.stride(1) * tensor.element_size()
        if self.block_size == 1 or step == row:
            return pages.sort().values, row * self.block_size
        return (pages[:, None] + step * rows).flatten().sort().values, row

    def with_layout(self, **changes: object) -> PagedKVCache:
        """The same bytes read another way, e.g. `fp8_format=Fp8Format.FNUZ`; an explicit act, never inferred."""
        dialect = changes.get("fp8_format")
        if isinstance(dialect, Fp8Format):
            changes.setdefault("fp8_max", dialect.max)
        return PagedKVCache(self.tensor, evolve(self.layout, **changes), block_size=self.block_size)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"PagedKVCache({self.layout.fingerprint}, blocks={self.num_blocks}, block_size={self.block_size})"


def _shown(shape: tuple[object, ...]) -> str:
    """Dtype, shape and strides, for errors."""
    dtype, sizes, strides = shape
    return f"{dtype}, shape {[*sizes]}, strides {[*strides]}"  # type: ignore[misc]
