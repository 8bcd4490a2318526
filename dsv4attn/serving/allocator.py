"""Allocation of physical blocks of a paged cache, and the block table of each request.

One `BlockAllocator` serves one cache; one `BlockTable` a request and cache. Both are plain Python: the tables become
tensors only when a step is built. Neither is thread-safe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

from dsv4attn.core.argument_checks import check_count
from dsv4attn.core.reprs import one_line
from dsv4attn.errors import ArgumentError, OutOfPagesError

__all__ = ["BlockAllocator", "BlockTable"]


class BlockAllocator:
    """Hands out the block ids 0 to `num_blocks` - 1.

    With `shuffle_seed` ids come in a random order, reproducible from the seed, so that tables are not contiguous.
    Without it a fresh allocator counts upwards, and reuses first what was freed last.
    num_blocks: number of blocks.
    shuffle_seed: seed of a random order of ids; None: ascending.
    """

    def __init__(self, num_blocks: int, *, shuffle_seed: int | None = None) -> None:
        self.num_blocks = check_count("num_blocks", num_blocks, 0)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken = bytearray(num_blocks)
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)  # noqa: S311 - nothing secret

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Blocks in use, and all blocks."""
        yield f"{self.num_blocks - self.num_free} of {self.num_blocks} blocks in use"

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take `n` blocks, or raise `OutOfPagesError` and take none.

        n: number of blocks.
        """
        if check_count("n", n, 0) > len(self._free):
            cure = "give the cache more blocks, or serve fewer or shorter requests at a time"
            have = f"{len(self._free)} of {self.num_blocks} are free"
            raise OutOfPagesError(f"allocate: {n} blocks needed, {have} -> {cure}")
        if self._random is not None:
            for last in range(len(self._free) - 1, len(self._free) - 1 - n, -1):
                other = self._random.randint(0, last)
                self._free[last], self._free[other] = self._free[other], self._free[last]
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._taken[block] = 1
        return blocks

    def take(self, blocks: Iterable[int]) -> None:
        """Take these blocks again, which are free, as `allocate` does: it undoes `free`.

        blocks: ids of free blocks.
        """
        wanted = set(blocks)
        self._free = [block for block in self._free if block not in wanted]
        for block in wanted:
            self._taken[block] = 1

    def free(self, blocks: Iterable[int]) -> None:
        """Free blocks. Raises ArgumentError, and frees none, for a block that is free already or named twice.

        blocks: ids that `allocate` returned.
        """
        blocks = list(blocks)
        seen: set[int] = set()
        for block in blocks:
            if type(block) is not int or not 0 <= block < self.num_blocks:
                expected = f"block ids from 0 to {self.num_blocks - 1}"
                hint = "free only what this allocator gave"
                raise ArgumentError("blocks", expected=expected, actual=repr(block), hint=hint)
            if not self._taken[block] or block in seen:
                actual = f"{block}, which is free already" if not self._taken[block] else f"{block} twice"
                expected = "blocks that are allocated"
                raise ArgumentError("blocks", expected=expected, actual=actual, hint="free each block once")
            seen.add(block)
        for block in blocks:
            self._taken[block] = 0
        self._free.extend(reversed(blocks))


class BlockTable:
    """The blocks of one request in one cache, in token order.

    `blocks[i]` holds tokens i * tokens_per_block and following (of the request, before any compression). It is -1 where
    all its tokens come before `first_token`. Read both freely; only the methods change them.

    first_token: the table has the contents of no token before this one. `release_before` gave their blocks back, or the
    table began later, with `skip_before`. A block may begin earlier: then its first records hold nothing.
    allocator: where blocks come from and go to.
    tokens_per_block: tokens of the request that one block stands for.
    """

    def __init__(self, allocator: BlockAllocator, tokens_per_block: int) -> None:
        self._allocator = allocator
        self.tokens_per_block = check_count("tokens_per_block", tokens_per_block, 1)
        self.blocks: list[int] = []
        self.first_token = 0
        self._released = 0

    @one_line
    def __repr__(self) -> Iterator[str]:
        """Number of blocks, and tokens of each."""
        yield f"{len(self.blocks)} blocks of {self.tokens_per_block} tokens"
        yield f"without tokens before {self.first_token}" if self.first_token else ""

    def missing(self, num_tokens: int) -> int:
        """Return how many blocks `ensure(num_tokens)` would take.

        num_tokens: tokens of the request, from its first token on.
        """
        blocks_needed = -(-check_count("num_tokens", num_tokens, 0) // self.tokens_per_block)
        return max(blocks_needed - len(self.blocks), 0)

    def ensure(self, num_tokens: int) -> None:
        """Grow until `num_tokens` tokens have a block, by all the blocks this takes or by none; never shrink.

        num_tokens: tokens of the request, from its first token on.
        """
        self.blocks += self._allocator.allocate(self.missing(num_tokens))

    def shrink(self, count: int) -> None:
        """Free the blocks after the first `count`, which undoes `ensure`.

        count: number of blocks that stay.
        """
        self._allocator.free(self.blocks[count:])
        del self.blocks[count:]

    def skip_before(self, token: int) -> None:
        """Begin an empty table at position `token`: blocks wholly before it are never allocated.

        token: position of the first token that the cache holds.
        """
        if self.blocks:
            raise ArgumentError("table", expected="an empty one", actual=f"{len(self.blocks)} blocks")
        self.first_token = check_count("token", token, 0)
        self._released = token // self.tokens_per_block
        self.blocks = [-1] * self._released

    def release_before(self, token: int) -> None:
        """Free the blocks that lie wholly before position `token`, leaving -1 in their place.

        A sliding window calls this with the oldest position that a later query can still see.
        token: position of the first token that is still needed.
        """
        end = min(check_count("token", token, 0) // self.tokens_per_block, len(self.blocks))
        if end > self._released:
            self._allocator.free(self.blocks[self._released : end])
            self.blocks[self._released : end] = [-1] * (end - self._released)
            self._released = end
            self.first_token = max(self.first_token, end * self.tokens_per_block)

    def release(self) -> Callable[[], None]:
        """Free every block and become empty; the table can be used again.

        Returns what undoes it, as long as nobody else has taken the blocks.
        """
        blocks, first_token, released = self.blocks, self.first_token, self._released
        self._allocator.free(blocks[released:])
        self.blocks = []
        self.first_token = self._released = 0

        def undo() -> None:
            self._allocator.take(blocks[released:])
            self.blocks, self.first_token, self._released = blocks, first_token, released

        return undo
