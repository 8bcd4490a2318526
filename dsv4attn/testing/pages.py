"""Pages for a scenario: shuffled block tables, caches with gaps, and poison on every byte that no query may read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache

__all__ = ["Pages", "allocate", "body", "page_step", "poison"]

BEHIND_PAGE = 4096
"""Bytes at the start of a gap that are filled, poisoned and compared. A gap may be gigabytes of untouched memory."""


class Pages:
    """Block tables of the requests.

    live: records [first, end) of each request that have a page.
    dead: entry of all other blocks of the table, two columns behind the longest request included.
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


def page_step(layout: KVCacheLayout, block_size: int, gap: int) -> int:
    """Bytes from one page to the next, with a gap. V4.1's interleaved pages are whole records, so the gap rounds up."""
    step = layout.page_stride(block_size) + gap
    whole = layout.name.startswith("v41_") and layout.arrangement is Arrangement.INTERLEAVED
    return round_up(step, layout.record_bytes) if whole else step


def allocate(layout: KVCacheLayout, count: int, block_size: int, padding: int, device: str) -> PagedKVCache:
    """A cache whose pages are zero, `page_step` bytes apart with a gap of `padding`; gaps are untouched."""
    element = layout.dtype.itemsize
    stride, last = page_step(layout, block_size, padding) // element, layout.record_bytes // element
    flat = torch.empty(count * stride, dtype=layout.dtype, device=device)
    cache = PagedKVCache(flat.as_strided((count, block_size, last), (stride, last, 1)), layout)
    body(cache).zero_()
    return cache


def body(cache: PagedKVCache, behind: int = 0) -> Tensor:
    """Bytes of the pages [B, bytes], each with at most `behind` bytes of the gap that follows it."""
    stride, page = cache.tensor.stride(0) * cache.tensor.itemsize, cache.layout.page_bytes(cache.block_size)
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.tensor.untyped_storage())
    return raw.as_strided((cache.num_blocks, min(stride, page + behind)), (stride, 1))


def poison(cache: PagedKVCache, named: NDArray[np.int64], byte: int) -> None:
    """Write `byte` over all of the cache but the records in the slots `named`: other records, pad bytes, gaps."""
    raw = body(cache, BEHIND_PAGE)
    spared = torch.zeros(raw.shape, dtype=torch.bool, device="cpu")
    slots = torch.from_numpy(np.unique(named))
    for region in cache.layout.regions(cache.block_size):
        # only scale bytes of existing groups: the others are padding
        size = cache.layout.num_groups if region.name == "scale" else region.count * region.dtype.itemsize
        start = region.offset + slots % cache.block_size * region.stride
        spared[(slots // cache.block_size)[:, None], start[:, None] + torch.arange(size, device="cpu")] = True
    raw.masked_fill_(~spared.to(raw.device), byte)
