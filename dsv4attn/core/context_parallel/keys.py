"""`KeyGathering`: the compressed pages of the prefill requests, of all ranks, in one cache of the workspace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.memory.rank_buffers import KEYS_ARENA, key_specs
from dsv4attn.core.memory.workspace import WorkspaceManager

__all__ = ["KeyGathering", "place_entries"]


class KeyGathering:
    """Gathers pages of all ranks in bounded pieces; two exchanges are under way at a time.

    context: the ranks. cache: of this rank. pages: [requests, n] int32 - its pages that are gathered, negative for
    none; as many on all ranks. What is sent, received and placed lies in arena `keys` of the workspace.
    """

    def __init__(self, context: RankExchange, cache: PagedKVCache, pages: Tensor, workspace: WorkspaceManager) -> None:
        """Begin the exchanges that there is memory for."""
        self._context, self._cache, count = context, cache, pages.numel() if cache.num_blocks else 0
        layout, size, ranks = cache.layout, cache.block_size, context.ownership.size
        specs = key_specs(ranks, pages.numel(), layout.page_bytes(size))
        numbers, whole, self._sent, self._received = workspace.get_simultaneous(
            *specs, arena=KEYS_ARENA, caller=f"keys of all ranks on {context.label}"
        )
        # a page that is none holds no key that a token sees; any other is sent in its place
        self._numbers = torch.clamp(pages.view(-1), 0, max(cache.num_blocks - 1, 0), out=numbers)
        self._whole, piece = whole, self._sent.shape[1]
        self._waiting = deque(slice(first, min(first + piece, count)) for first in range(0, count, piece))
        self._place, self._under_way = 0, deque[tuple[slice, Callable[[], Tensor]]]()
        while self._waiting and len(self._under_way) < len(self._sent):
            self._send()

    def finish(self) -> PagedKVCache:
        """All entries of the requests, in their order: request i has the pages from i * pages / requests on."""
        while self._under_way:
            self._place_one()
        layout, size = self._cache.layout, self._cache.block_size
        whole = self._whole
        if not layout.is_quantised:
            whole = whole.view(layout.dtype).view(whole.shape[0], size, layout.head_dim)
        return PagedKVCache(whole, layout, block_size=size)

    def _send(self) -> None:
        piece, ranks = self._waiting.popleft(), self._context.ownership.size
        count = piece.stop - piece.start
        sent, received = self._sent[self._place][:count], self._received[self._place][: ranks * count]
        _copy_pages(self._cache, self._numbers[piece], sent)
        self._under_way.append((piece, self._context.start(sent, "keys", out=received)))
        self._place = (self._place + 1) % len(self._sent)

    def _place_one(self) -> None:
        piece, finish = self._under_way.popleft()
        ranks = self._context.ownership.size
        to = self._whole[ranks * piece.start : ranks * piece.stop]
        place_entries(self._context.ownership, finish(), to, self._cache.layout, self._cache.block_size)
        if self._waiting:
            self._send()


def _copy_pages(cache: PagedKVCache, numbers: Tensor, to: Tensor) -> None:
    """Copy pages with these numbers to [n, page bytes] bytes."""
    source = cache.tensor
    if cache.layout.is_quantised:
        # without what lies between pages
        source = source.as_strided((cache.num_blocks, to.shape[1]), (cache.page_stride, 1))
    torch.index_select(source, 0, numbers, out=to.view(source.dtype).view(-1, *source.shape[1:]))


def place_entries(ownership: Ownership, pages: Tensor, to: Tensor, layout: KVCacheLayout, block_size: int) -> None:
    """Put the entries of all ranks in their order.

    pages: [R, n, page bytes] uint8, n consecutive pages of each rank. to: [R * n, page bytes], the pages of one rank
    that would have all of these entries.
    """
    ranks, count, _ = pages.shape
    runs = block_size // ownership.interleave
    page, place = _places(ranks, runs, to.device)
    for theirs, ours in zip(
        _fields(pages.flatten(0, 1), layout, block_size), _fields(to, layout, block_size), strict=True
    ):
        # run u of page j of rank r is run (j * runs + u) * R + r of them all
        source = theirs.unflatten(0, (ranks, count)).unflatten(2, (runs, -1)).permute(1, 2, 0, 3, 4)
        ours.unflatten(0, (count, ranks)).unflatten(2, (runs, -1))[:, page, place] = source


@lru_cache(maxsize=16)
def _places(ranks: int, runs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[runs, ranks] page, of as many as there are ranks, and run in it, to which a run of a page of a rank goes."""
    with torch.inference_mode(False):
        run = torch.arange(runs * ranks, device=device).view(runs, ranks)
        return run // runs, run % runs


def _fields(pages: Tensor, layout: KVCacheLayout, block_size: int) -> Sequence[Tensor]:
    """[n, block_size, words] views of pages [n, bytes]: what each record has together, in words as wide as may be."""
    split = layout.is_quantised and layout.arrangement is Arrangement.SPLIT
    widths = (layout.data_bytes, layout.scale_bytes) if split else (layout.record_bytes,)
    word = torch.uint8 if any(width % 8 for width in widths) else torch.int64
    areas = pages.split([block_size * width for width in widths], 1)
    return [area.view(word).unflatten(1, (block_size, -1)) for area in areas]
