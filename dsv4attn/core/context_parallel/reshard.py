"""`reshard_cache`: the entries of one rank, from the caches of ranks that divided them another way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4attn.core.cache.layout import PagedKVCache, check_layout
from dsv4attn.core.cache.ownership import Ownership
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.errors import ArgumentError

__all__ = ["reshard_cache"]


@without_modes
def reshard_cache(
    sources: Sequence[tuple[PagedKVCache, Tensor]],
    target: tuple[PagedKVCache, Tensor],
    entries: int,
    ownership: Ownership,
    *,
    interleave: int = 1,
) -> None:
    """Copy the entries of one sequence that a rank will hold, byte by byte, whatever division they come from.

    Call it for each sequence, for each compressed cache and each cache of index keys. Where the caches of other ranks
    are in other processes, the engine moves their pages here first.

    sources: of each rank of the old division, in order: its cache, and the sequence's pages in it [N] int; entry number
       n of the rank is in page n // block_size. One source is a cache that was not divided.
    target: the same of the new rank, in memory of its own and with the layout of the sources.
    entries: complete entries of the sequence.
    ownership: of the new rank. interleave: of the old division.
    Raises LayoutMismatchError or ArgumentError before anything is written.
    """
    cache, _ = target
    numbers = ownership.entry(torch.arange(ownership.count(entries), device=cache.device))
    to = _places("target", *target, ownership.local(numbers))
    moves = []
    for rank, (source, pages) in enumerate(sources):
        name = f"sources[{rank}]"
        check_layout(source.layout, cache.layout, name)
        if cache.overlaps(source):
            raise ArgumentError("target", expected="memory of its own", actual=f"the memory of {name}")
        old = Ownership(rank, len(sources), interleave)
        mine = old.owner(numbers) == rank
        local = old.local(numbers[mine]).to(source.device)
        moves.append((source, _places(name, source, pages, local), (to[0][mine], to[1][mine])))
    if not moves:
        raise ArgumentError("sources", expected="the cache and pages of each rank", actual="none")
    regions = ["row"]
    if cache.layout.is_quantised:
        regions = [region.name for region in cache.layout.regions(cache.block_size) if region.count]
    for source, place, destination in moves:
        for region in regions:
            cache.region(region)[destination] = source.region(region)[place].to(cache.device)


def _places(name: str, cache: PagedKVCache, pages: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Page and record of each entry number of a rank."""
    pages, column = pages.to(cache.device, torch.int64), local // cache.block_size
    if local.numel() and int(column.max()) >= pages.shape[0]:
        expected = f"{int(column.max()) + 1} pages of {cache.block_size} records"
        raise ArgumentError(f"{name} pages", expected=expected, actual=f"{pages.shape[0]} pages")
    page = pages[column]
    wrong = (page < 0) | (page >= cache.num_blocks)
    if bool(wrong.any()):
        expected = f"pages in [0, {cache.num_blocks})"
        raise ArgumentError(f"{name} pages", expected=expected, actual=int(page[wrong][0]))
    return page, local % cache.block_size
