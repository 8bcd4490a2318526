"""Paged caches: block tables, pages, and a cache whose bytes the oracle wrote, to judge a reader without its writer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.testing.case import SkipCase
from dsv4attn.testing.kit.tolerances import F64, U8, read_row, written

AFTER_PAGE = 4096
"""Bytes at the start of a gap that are filled, poisoned and compared. A gap may be gigabytes of untouched memory."""


class Pages:
    """Block tables of the requests.

    live: records [first, end) of each request that have a page.
    dead: entry of all other blocks of the table. The table has two such columns after the longest request.
    spare: number of pages that belong to no request.
    key: seed of the order of the pages.
    """

    def __init__(
        self, live: Sequence[tuple[int, int]], block_size: int, *, spare: int, dead: int, key: tuple[int, ...]
    ) -> None:
        """Assign the pages."""
        blocks = [(first // block_size, -(-end // block_size)) for first, end in live]
        self.block_size, self.live = block_size, list(live)
        self.count = sum(end - first for first, end in blocks) + spare
        left = np.random.default_rng(key).permutation(self.count)
        self.table: NDArray[np.int32] = np.full(
            (len(blocks), 2 + max((end for _, end in blocks), default=0)), dead, dtype=np.int32
        )
        for row, (first, end) in zip(self.table, blocks, strict=True):
            row[first:end], left = left[: end - first], left[end - first :]

    def slots(self, request: int, records: Iterable[int]) -> NDArray[np.int64]:
        """Slots of some records of a request."""
        numbers = np.fromiter(records, dtype=np.int64)
        page = self.table[request, numbers // self.block_size].astype(np.int64)
        return np.asarray(page * self.block_size + numbers % self.block_size)


def body(cache: PagedKVCache, gap: int = 0) -> Tensor:
    """Bytes of the pages [B, bytes], each with at most `gap` bytes of the gap that follows it."""
    element, layout = cache.tensor.itemsize, cache.layout
    stride, page = cache.tensor.stride(0) * element, layout.page_bytes(cache.block_size)
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.tensor.untyped_storage())
    size, start = (cache.num_blocks, min(stride, page + gap)), cache.tensor.storage_offset() * element
    return raw.as_strided(size, (stride, 1), storage_offset=start)


def poison(cache: PagedKVCache, named: NDArray[np.int64], byte: int) -> None:
    """Write `byte` over all of the cache but the records in the slots `named`: other records, pad bytes, gaps."""
    raw = body(cache, AFTER_PAGE)
    spared = torch.zeros(raw.shape, dtype=torch.bool, device="cpu")
    slots = torch.from_numpy(np.unique(named))
    for region in cache.layout.regions(cache.block_size):
        # only scale bytes of existing groups: the others are padding
        size = cache.layout.num_groups if region.name == "scale" else region.count * region.dtype.itemsize
        start = region.offset + slots % cache.block_size * region.stride
        spared[(slots // cache.block_size)[:, None], start[:, None] + torch.arange(size, device="cpu")] = True
    raw.masked_fill_(~spared.to(raw.device), byte)


UNWRITTEN = 0xFF
"""Value of every byte that belongs to no written record: NaN in every type a cache has."""


@attrs.frozen
class PagePlacement:
    """Placement of pages in memory.

    block_size: records of a page.
    gap: bytes between pages, in addition to the page stride of the layout. V4.1's interleaved pages are whole records,
       so the sum is rounded up to whole records.
    bytes_before: bytes in front of the first page.
    """

    block_size: int = 64
    gap: int = 0
    bytes_before: int = 0

    def memory(self, layout: KVCacheLayout, blocks: int, device: str, fill: int = UNWRITTEN) -> PagedKVCache:
        """Pages and the starts of their gaps, filled with a byte. Raises SkipCase if there is too little memory."""
        stride = layout.page_stride(self.block_size) + self.gap
        if layout.has_whole_record_pages:
            stride = round_up(stride, layout.record_bytes)
        element, last = layout.dtype.itemsize, layout.record_bytes // layout.dtype.itemsize
        total = self.bytes_before + max(blocks - 1, 0) * stride + layout.page_bytes(self.block_size) + AFTER_PAGE
        try:
            flat = torch.empty(-(-total // element), dtype=layout.dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise SkipCase(f"{total / 2**30:.1f} GiB of memory cannot be had on {device}") from error
        size, strides = (blocks, self.block_size, last), (stride // element, last, 1)
        cache = PagedKVCache(flat.as_strided(size, strides, storage_offset=self.bytes_before // element), layout)
        body(cache, AFTER_PAGE).fill_(fill)
        return cache


def place_of(layout: KVCacheLayout, offset: int, block_size: int) -> NDArray[np.int64]:
    """Offset in a page of each byte of its `offset`-th record: data first, then scales."""
    data, scales = np.arange(layout.data_bytes), np.arange(layout.scale_bytes)
    if layout.is_quantised and layout.arrangement is Arrangement.SPLIT:
        return np.concatenate(
            [offset * layout.data_bytes + data, block_size * layout.data_bytes + offset * layout.scale_bytes + scales]
        )
    return offset * layout.record_bytes + np.concatenate([data, layout.data_bytes + scales])


@attrs.frozen(eq=False)
class OracleCache:
    """A cache and its contents.

    cache: the paged cache.
    placement: placement of its pages.
    values: [capacity, D] float64, the row that each slot reads as; NaN in slots that were never written.
    """

    cache: PagedKVCache
    placement: PagePlacement
    values: F64

    @classmethod
    def blank(
        cls, layout: KVCacheLayout, blocks: int, placement: PagePlacement, device: str, fill: int = UNWRITTEN
    ) -> OracleCache:
        """A cache without records, filled with a byte."""
        values = np.full((blocks * placement.block_size, layout.head_dim), math.nan)
        return cls(placement.memory(layout, blocks, device, fill), placement, values)

    def write(self, slots: Sequence[int] | NDArray[np.int64], rows: F64) -> OracleCache:
        """Write rows [n, D] to slots."""
        return self.write_records(slots, [written(row, self.cache.layout) for row in rows])

    def write_records(self, slots: Sequence[int] | NDArray[np.int64], records: Sequence[U8]) -> OracleCache:
        """Write bytes of records to slots."""
        pages = self.pages()
        blocks = sorted({self.place(slot)[0] for slot in slots})
        bytes_of = dict(zip(blocks, pages[blocks].cpu().numpy(), strict=True))
        for slot, record in zip(slots, records, strict=True):
            block, place = self.place(slot)
            bytes_of[block][place] = record
            self.values[int(slot)] = read_row(record, self.cache.layout)
        for block, page in bytes_of.items():
            pages[block] = torch.from_numpy(page).to(pages.device)
        return self

    def place(self, slot: int | np.int64) -> tuple[int, NDArray[np.int64]]:
        """Page and bytes of the record in a slot: an index of `bytes`."""
        page, offset = divmod(int(slot), self.placement.block_size)
        return page, place_of(self.cache.layout, offset, self.placement.block_size)

    def pages(self, gap: int = 0) -> Tensor:
        """`body` of the cache."""
        return body(self.cache, gap)

    def bytes(self) -> U8:
        """All pages as they are now [B, bytes], each with the first bytes of the gap after the page."""
        pages: U8 = self.pages(AFTER_PAGE).cpu().numpy().copy()
        return pages
