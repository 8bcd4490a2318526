"""Page pools of a replay: one for window caches, one for compressed caches, with the block tables of each request.

Every layer type has its own tensors. Block tables are shared, because all layers of a step hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsv4attn.core.allocator import BlockAllocator, BlockTable
from dsv4attn.errors import ArgumentError
from dsv4attn.tools.replay.request import Request
from dsv4attn.tools.replay.scheduler import Scheduled, Step

__all__ = ["COMPRESSED_BLOCK_TOKENS", "PagedBlocks", "PoolSizes"]

COMPRESSED_BLOCK_TOKENS = 256
"""Tokens that a page of a compressed cache stands for; it holds 256 // ratio records."""


@frozen
class PoolSizes:
    """Sizes of both pools.

    window: pages of the window pool.
    compressed: pages of the compressed pool.
    """

    window: int
    compressed: int

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        *,
        window: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        window_page_bytes: int,
        compressed_page_bytes: int,
        max_bytes: int,
    ) -> PoolSizes:
        """Sizes for the `max_num_seqs` longest requests at once, or as many pages as fit into `max_bytes`.

        page bytes: of one page in the caches of all layer types together; 0 if no layer type has such a cache. The
        window pool never runs out. The compressed pool may, if `max_bytes` binds, and then requests are preempted; it
        always holds the longest one, or this raises ArgumentError.
        """
        # the live blocks of a request overlap the window of its next token and the chunk that is being computed
        idle = (window - 1) // block_size + 3
        bound = max_num_seqs * idle + max_num_batched_tokens // block_size + 1
        whole = sum(_largest([-(-r.attention_tokens // block_size) for r in requests], max_num_seqs))
        for_window = min(bound, whole)
        blocks = [-(-r.attention_tokens // COMPRESSED_BLOCK_TOKENS) for r in requests] if compressed_page_bytes else []
        least, wanted = max(blocks, default=0), sum(_largest(blocks, max_num_seqs))
        needed = for_window * window_page_bytes + least * compressed_page_bytes
        if needed > max_bytes:
            longest = max(requests, key=lambda r: r.attention_tokens)
            raise ArgumentError(
                "max_kv_bytes",
                expected=f"at least {needed}, so that request {longest.index} ({longest.attention_tokens} tokens) fits",
                actual=max_bytes,
                hint="allow more memory for KV pages, shrink the requests, or serve fewer at a time",
            )
        spare = (max_bytes - needed) // compressed_page_bytes if compressed_page_bytes else 0
        return cls(for_window, min(wanted, least + spare))


def _largest(values: list[int], count: int) -> list[int]:
    return sorted(values, reverse=True)[:count]


class PagedBlocks:
    """The scheduler's view of both pools (see `scheduler.KVBlocks`), and the block tables of a step.

    Pages come in random order, so that no table is contiguous by luck.
    """

    def __init__(self, sizes: PoolSizes, block_size: int, window: int, seed: int) -> None:
        """Start with every page free."""
        self._window = window
        self.peak_window = self.peak_compressed = 0
        """Most pages that were in use at once."""
        pools = [(sizes.window, block_size)]
        if sizes.compressed:
            pools.append((sizes.compressed, COMPRESSED_BLOCK_TOKENS))
        self._pools = [(BlockAllocator(n, shuffle_seed=seed), tokens) for n, tokens in pools]
        self._tables: dict[int, list[BlockTable]] = {}

    def _of(self, request: Request) -> list[BlockTable]:
        if request.index not in self._tables:
            self._tables[request.index] = [BlockTable(pool, tokens) for pool, tokens in self._pools]
        return self._tables[request.index]

    def can_allocate(self, request: Request, num_tokens: int) -> bool:
        """Whether both pools can hold the request's first `num_tokens` tokens now."""
        tables = zip(self._of(request), self._pools, strict=True)
        return all(table.missing(num_tokens) <= pool.num_free for table, (pool, _) in tables)

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Hold `num_tokens` tokens of the request in both pools."""
        for table in self._of(request):
            table.ensure(num_tokens)
        used = [pool.num_blocks - pool.num_free for pool, _ in self._pools]
        self.peak_window = max(self.peak_window, used[0])
        self.peak_compressed = max(self.peak_compressed, used[-1] if len(used) > 1 else 0)

    def free(self, request: Request) -> None:
        """Take back all pages of a request."""
        for table in self._tables.pop(request.index):
            table.release()

    def slide(self, step: Step) -> None:
        """After a step, free pages that lie entirely before the window of every later token."""
        for entry in step.scheduled:
            if entry.request.index in self._tables:
                self._tables[entry.request.index][0].release_before(max(entry.seq_len - self._window + 1, 0))

    def tables(self, scheduled: Sequence[Scheduled]) -> list[Tensor]:
        """The window's block table, then the compressed one if there is a pool: [R, N] int32, padded with -1."""
        found = []
        for pool in range(len(self._pools)):
            rows = [self._tables[entry.request.index][pool].blocks for entry in scheduled]
            width = max(len(row) for row in rows)
            found.append(torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32))
        return found

    @property
    def num_used(self) -> int:
        """Pages in use, of both pools."""
        return sum(pool.num_blocks - pool.num_free for pool, _ in self._pools)
