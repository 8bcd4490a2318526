"""Page pools of a replay: window caches, compressed caches, compressor states; with the block tables of each request.

Every layer type has its own tensors. Block tables of windows and of compressed caches are shared, because all layers of
a step hold the same tokens; compressor states have a pool for each layer type. Index keys lie in the pages of the
compressed pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from dsv4attn.core.metadata.builder import STATE_BLOCK_SIZES
from dsv4attn.core.model.geometry import LayerGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.serving.allocator import BlockAllocator, BlockTable
from dsv4attn.serving.scheduler import Scheduled, Step
from dsv4attn.tools.replay.request import Request

__all__ = ["COMPRESSED", "COMPRESSED_BLOCK_TOKENS", "WINDOW", "PagedBlocks", "PoolSizes", "StatePool"]

COMPRESSED_BLOCK_TOKENS = 256
"""Tokens that a page of a compressed cache stands for; it holds 256 // ratio records."""
WINDOW, COMPRESSED = "window", "compressed"
"""Names of the two pools that every layer type can share."""


@frozen
class StatePool:
    """The pool of the compressor states of one layer type.

    layer: the layer type.
    page_bytes: bytes of a page in all caches of states.
    """

    layer: LayerGeometry
    page_bytes: int

    @property
    def name(self) -> str:
        """Name of the pool, as `CacheManager` has it."""
        return f"{self.layer.kind.value}_state"

    @property
    def tokens(self) -> int:
        """Tokens of a page."""
        return STATE_BLOCK_SIZES[self.layer.kind]

    @property
    def span(self) -> int:
        """Most states that one sequence needs between two steps, and that of its next token."""
        return self.layer.compress_ratio * (2 if self.layer.overlap else 1)

    @property
    def pages_per_sequence(self) -> int:
        """Most pages that one idle sequence can hold."""
        return (self.span - 1) // self.tokens + 2


@frozen
class PoolSizes:
    """Sizes of all pools.

    window: pages of the window pool.
    compressed: pages of the compressed pool.
    states: pages of the pools of compressor states, by name.
    """

    window: int
    compressed: int
    states: Mapping[str, int] = field(factory=dict)

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
        states: Sequence[StatePool] = (),
        ranks: int = 1,
    ) -> PoolSizes:
        """Sizes for the `max_num_seqs` longest requests at once, or as many pages as fit into `max_bytes`.

        page bytes: of one page in the caches of all layer types together; 0 if no layer type has such a cache. The
        pools of windows and states never run out. The compressed pool may, if `max_bytes` binds, and then requests are
        preempted; it always holds the longest one, or this raises ArgumentError. ranks: those that share compressed
        entries; pages and bytes are of one rank.
        """

        def enough(span: int, size: int) -> int:
            """Pages of `size` tokens, of which a sequence needs the last `span`."""
            # the live pages of a request overlap the span of its next token and the chunk that is being computed
            idle = (span - 1) // size + 3
            bound = max_num_seqs * idle + max_num_batched_tokens // size + 1
            return min(bound, sum(_largest([-(-r.attention_tokens // size) for r in requests], max_num_seqs)))

        for_window = enough(window, block_size)
        for_states = {pool.name: enough(pool.span, pool.tokens) for pool in states}
        size = COMPRESSED_BLOCK_TOKENS * ranks
        blocks = [-(-r.attention_tokens // size) for r in requests] if compressed_page_bytes else []
        least, wanted = max(blocks, default=0), sum(_largest(blocks, max_num_seqs))
        needed = for_window * window_page_bytes + least * compressed_page_bytes
        needed += sum(for_states[pool.name] * pool.page_bytes for pool in states)
        if needed > max_bytes:
            longest = max(requests, key=lambda r: r.attention_tokens)
            raise ArgumentError(
                "max_kv_bytes",
                expected=f"at least {needed}, so that request {longest.index} ({longest.attention_tokens} tokens) fits",
                actual=max_bytes,
                hint="allow more memory for KV pages, shrink the requests, or serve fewer at a time",
            )
        spare = (max_bytes - needed) // compressed_page_bytes if compressed_page_bytes else 0
        return cls(for_window, min(wanted, least + spare), for_states)

    @property
    def by_name(self) -> dict[str, int]:
        """Pages of every pool that there is."""
        compressed = {COMPRESSED: self.compressed} if self.compressed else {}
        return {WINDOW: self.window, **compressed, **self.states}


def _largest(values: list[int], count: int) -> list[int]:
    return sorted(values, reverse=True)[:count]


@frozen(eq=False)
class _Pool:
    """A pool of pages.

    allocator: of its pages.
    tokens: tokens of a page.
    first: the first token that a token at a given position needs.
    """

    allocator: BlockAllocator
    tokens: int
    first: Callable[[int], int]

    @property
    def used(self) -> int:
        return self.allocator.num_blocks - self.allocator.num_free


class PagedBlocks:
    """The scheduler's view of all pools (see `scheduler.KVBlocks`), and the block tables of a step.

    Pages come in random order, so that no table is contiguous by luck.
    """

    def __init__(
        self,
        sizes: PoolSizes,
        block_size: int,
        window: int,
        seed: int,
        states: Sequence[StatePool] = (),
        ranks: int = 1,
    ) -> None:
        """Start with every page free. ranks: as in `PoolSizes.of`."""
        found: dict[str, tuple[int, Callable[[int], int]]] = {
            WINDOW: (block_size, lambda position: max(position - window + 1, 0)),
            COMPRESSED: (COMPRESSED_BLOCK_TOKENS * ranks, lambda _: 0),
            **{pool.name: (pool.tokens, pool.layer.first_state) for pool in states},
        }
        self._pools = {
            name: _Pool(BlockAllocator(pages, shuffle_seed=seed), *found[name]) for name, pages in sizes.by_name.items()
        }
        self._tables: dict[int, dict[str, BlockTable]] = {}
        self.peaks = dict.fromkeys(found, 0)
        """Most pages of each pool that were in use at once."""

    def _of(self, request: Request) -> dict[str, BlockTable]:
        if request.index not in self._tables:
            made = {name: BlockTable(pool.allocator, pool.tokens) for name, pool in self._pools.items()}
            self._tables[request.index] = made
        return self._tables[request.index]

    def can_allocate(self, request: Request, num_tokens: int) -> bool:
        """Whether all pools can hold the request's first `num_tokens` tokens now."""
        tables = self._of(request)
        return all(tables[name].missing(num_tokens) <= p.allocator.num_free for name, p in self._pools.items())

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Hold `num_tokens` tokens of the request in all pools."""
        for table in self._of(request).values():
            table.ensure(num_tokens)
        for name, pool in self._pools.items():
            self.peaks[name] = max(self.peaks[name], pool.used)

    def free(self, request: Request) -> None:
        """Take back all pages of a request."""
        for table in self._tables.pop(request.index).values():
            table.release()

    def slide(self, step: Step) -> None:
        """After a step, free pages that no later token reads."""
        for entry in step.scheduled:
            for name, table in self._tables.get(entry.request.index, {}).items():
                table.release_before(self._pools[name].first(entry.seq_len))

    def tables(self, scheduled: Sequence[Scheduled]) -> dict[str, Tensor]:
        """The block table of each pool: [R, N] int32, padded with -1."""
        found = {}
        for name in self._pools:
            rows = [self._tables[entry.request.index][name].blocks for entry in scheduled]
            width = max(len(row) for row in rows)
            found[name] = torch.tensor(
                [row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32, device="cpu"
            )
        return found

    @property
    def num_used(self) -> int:
        """Pages in use, of all pools."""
        return sum(pool.used for pool in self._pools.values())
