"""Heads that ranks of a context divide: queries are gathered, and each rank is sent the parts of its own heads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

from dsv4attn.core.context_parallel.exchange import RankExchange
from dsv4attn.core.memory.rank_buffers import attention_bytes
from dsv4attn.errors import ArgumentError

__all__ = ["by_rank", "check_heads", "gather_queries"]


def check_heads(context: RankExchange, what: str, mine: tuple[int, int] | None) -> None:
    """Raise ArgumentError on every rank unless each has its own part of the heads, in the order of ranks.

    mine: (part, parts) of the heads of this rank; None on all ranks: not known. what: the layer, for the error.
    """
    parts_by_rank = context.gather_objects(mine, f"the heads of {what}")
    for rank, part in enumerate(parts_by_rank):
        if part != (rank, len(parts_by_rank)) and parts_by_rank != [None] * len(parts_by_rank):
            expected = f"part {rank} of {len(parts_by_rank)} on rank {rank}, as ranks of the context divide heads"
            actual = "all heads" if part is None else f"part {part[0]} of {part[1]}"
            hint = "pass the group of the context as process_group, and weights.shard(rank, size)"
            raise ArgumentError(f"{what}: heads", expected=expected, actual=actual, hint=hint)


def gather_queries(context: RankExchange, q: Tensor, to: Tensor, sent: Tensor, received: Tensor) -> None:
    """Write the heads of all ranks, in the order of ranks.

    q: [T, H, D] of this rank. to: [T, ranks * H, D] like q, contiguous. sent: [places, n] and received: [places, ranks
    * n] bytes, n those of out and lse of a piece; as many exchanges are under way as there are places.
    """
    ranks, (rows, heads, dim) = context.ownership.size, q.shape
    under_way = deque[tuple[Tensor, Callable[[], Tensor]]]()

    def write() -> None:
        rows_of, finish = under_way.popleft()
        rows_of.unflatten(1, (ranks, heads)).copy_(finish().movedim(0, 1))

    for number, piece in enumerate(context.pieces(rows, attention_bytes(heads, dim, q.element_size()))):
        if len(under_way) == len(sent):
            write()
        piece_q, place = q[piece], number % len(sent)
        size = piece_q.numel() * piece_q.element_size()
        piece_sent = sent[place][:size].view(q.dtype).view(piece_q.shape)
        piece_sent.copy_(piece_q)
        piece_received = received[place][: ranks * size].view(q.dtype).view(-1, heads, dim)
        under_way.append((to[piece], context.start(piece_sent, "queries", out=piece_received)))
    while under_way:
        write()


def by_rank(ranks: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """([ranks, T, H, D] out, [ranks, T, H] lse) views of those of all heads, by the rank that the heads are of."""
    return out.unflatten(1, (ranks, -1)).movedim(1, 0), lse.unflatten(1, (ranks, -1)).movedim(1, 0)
