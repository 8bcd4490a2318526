"""Prefill over the keys of all ranks: each rank attends to all of them, for its share of the tokens or of the heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import Tensor

from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.memory.rank_buffers import share_pieces

__all__ = ["Shares"]


class Shares:
    """Which prefill tokens each rank attends to, and the exchange of their rows, in place.

    A piece is as many tokens of each rank, in the order of ranks; what is left over, fewer tokens than ranks, all
    attend to. Where ranks divide heads, each attends to all tokens with its own heads, and nothing is sent.
    """

    def __init__(self, context: RankExchange, tokens: int) -> None:
        self._context, ranks, rank = context, context.ownership.size, context.ownership.rank
        rank_tokens = tokens // ranks
        pieces = 0 if context.divides_heads else share_pieces(rank_tokens)
        starts = [rank_tokens * i // pieces for i in range(pieces + 1)] if pieces else [0]
        pairs = [(first, last - first) for first, last in pairwise(starts)]
        self._pieces = deque((ranks * first, count) for first, count in pairs)
        rank_ranges = [(ranks * first + rank * count, ranks * first + (rank + 1) * count) for first, count in pairs]
        rest = ranks * starts[-1]
        self.ranges = (*rank_ranges, *([(rest, tokens)] if rest < tokens else []))
        """(first token, end) of this rank's runs of tokens, ascending."""
        self._under_way = list[Callable[[], object]]()

    def reached(self, stop: int, rows: Sequence[Tensor]) -> None:
        """Send the pieces whose tokens end here, or before. rows: prefill rows of what is sent, [tokens, ...] each."""
        rank, ranks = self._context.ownership.rank, self._context.ownership.size
        while self._pieces:
            first, count = self._pieces[0]
            rank_rows = slice(first + rank * count, first + (rank + 1) * count)
            if rank_rows.stop > stop:
                return
            self._pieces.popleft()
            for tensor in rows:
                self._under_way.append(self._start(tensor[rank_rows], tensor[first : first + ranks * count]))

    def finish(self) -> None:
        """Wait for all rows."""
        for finish in self._under_way:
            finish()
        self._under_way.clear()

    def _start(self, sent: Tensor, received: Tensor) -> Callable[[], object]:
        if received.is_contiguous():
            return self._context.start(sent, "attention", out=received)
        finish = self._context.start(sent.contiguous(), "attention")
        return lambda: received.copy_(finish().flatten(0, 1))
