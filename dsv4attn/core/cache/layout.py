"""`PagedKVCache`, a tensor with the layout of its bytes. `KVCacheLayout` and its parts are importable from here too."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.core.argument_checks import check_count, check_type, round_up
from dsv4attn.core.cache.record_layout import (
    Arrangement,
    Coding,
    Fp8Format,
    KVCacheLayout,
    Region,
    check_layout,
)
from dsv4attn.core.tensorspec import has_dense_rows, usable_device
from dsv4attn.errors import ArgumentError

__all__ = ["Arrangement", "Coding", "Fp8Format", "KVCacheLayout", "PagedKVCache", "Region", "check_layout"]

_LAYOUTS = "pass KVCacheLayout.fp8_ds_mla(), .v41_fp8(), .v41_fp4(), .of_record(name) or .rows()"


class PagedKVCache:
    """A paged cache: a tensor, and the layout of its bytes. The page stride is that of the tensor; nothing is copied.

    A cache has one memory, that of `tensor`. Its attributes cannot be set: another tensor is another cache. If the
    tensor itself gets other memory (`tensor.data = x`, `set_`), the cache has that memory too; it must have the same
    dtype, shape and strides, which `region` checks. A copy (`copy.copy`) has the memory of the cache; a deep copy, and
    one that was pickled or saved, has memory of its own.

    tensor: quantised records: uint8 [B, P, record_bytes] or [B, 1, P, record_bytes]; pages begin at
            multiples of stride(0), in bytes (token i is not at i * record_bytes). Or [B, bytes], block_size given.
            V4.1's interleaved records: with more than one page, stride(0) is a multiple of record_bytes.
            Rows: bf16 or fp32 [B, P, D] or [B, 1, P, D] with unit stride on the last dimension.
    layout: the meaning of the bytes.
    block_size: records of a page; None: as the tensor's shape says.
    Raises ArgumentError if the tensor cannot be such a cache.
    """

    __slots__ = ("_memory", "_regions", "_shape", "block_size", "layout", "num_blocks", "page_stride", "tensor")

    tensor: Tensor
    layout: KVCacheLayout
    num_blocks: int
    block_size: int
    page_stride: int
    _regions: dict[str, Tensor]
    _memory: tuple[int, int]
    _shape: tuple[object, ...]

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
        # the views of `region`, and the memory that they are of: no memory yet
        fields |= {"_regions": {}, "_memory": (0, -1), "_shape": (tensor.dtype, tensor.shape, tensor.stride())}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        # bytes from one page to the next
        object.__setattr__(self, "page_stride", self._checked_stride())

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: views, strides and signatures of a cache belong to the tensor and layout that it was made with."""
        hint = "make another cache, PagedKVCache(tensor, layout), and bind that"
        raise ArgumentError(f"PagedKVCache.{name}", expected="to stay what it is", actual="a new value", hint=hint)

    def __delattr__(self, name: str) -> None:
        """Refuse, as `__setattr__`."""
        setattr(self, name, None)

    def __reduce__(self) -> tuple[object, ...]:
        """How a cache is copied and pickled: by its tensor, without the views of it."""
        return _restored, (self.tensor, self.layout, self.block_size)

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
        return cls(flat.as_strided((num_blocks, block_size, last), (stride // element, last, 1)), layout)

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

    def region(self, name: str) -> Tensor:
        """[B, P, count] strided, typed view of one field of every record: "nope", "rope", "scale", or "row".

        A region that records do not have, such as "rope" where all dims are codes, raises KeyError. Raises
        ArgumentError if the tensor has got memory of another dtype, shape or strides.
        name: the field.
        """
        # views stay with the storage that they were made of; the tensor may have got another one since
        memory = self.tensor.untyped_storage()._cdata, self.tensor.storage_offset()  # noqa: SLF001 - its identity
        if memory != self._memory:
            shape = self.tensor.dtype, self.tensor.shape, self.tensor.stride()
            if shape != self._shape:
                hint = "make another cache of the new memory, PagedKVCache(tensor, layout)"
                raise ArgumentError("cache tensor", expected=_shown(self._shape), actual=_shown(shape), hint=hint)
            self._checked_stride()
            with torch.inference_mode(False):  # as `allocate`
                object.__setattr__(self, "_regions", dict(self._views()))
            object.__setattr__(self, "_memory", memory)
        return self._regions[name]

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        if not self.layout.is_quantised:
            yield "row", self.tensor
            return
        for region in self.layout.regions(self.block_size):
            if not region.count:
                continue
            size = (self.num_blocks, self.block_size, region.count * region.dtype.itemsize)
            start = self.tensor.storage_offset() + region.offset
            raw = self.tensor.as_strided(size, (self.page_stride, region.stride, 1), start)
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


def _restored(tensor: Tensor, layout: KVCacheLayout, block_size: int) -> PagedKVCache:
    """A cache that was copied or pickled."""
    return PagedKVCache(tensor, layout, block_size=block_size)


def _shown(shape: tuple[object, ...]) -> str:
    """Dtype, shape and strides, for errors."""
    dtype, sizes, strides = shape
    return f"{dtype}, shape {[*sizes]}, strides {[*strides]}"  # type: ignore[misc]
