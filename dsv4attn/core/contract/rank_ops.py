"""`RankOps`: attention over ranks, what is sent and the merge, one field an op. Part of the contract.

`torch_ops.merge` has the definition of every op, which is the default of its field and says what the op computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.core.torch_ops import merge

__all__ = ["MergeScratch", "RankOps"]

Op: TypeAlias = Callable[..., Any]
MergeScratch: TypeAlias = Callable[[int, int, int], Sequence[BufferSpec]]


@frozen
class RankOps:
    """The ops of attention over ranks. The default of each is torch's definition. No op allocates anything.

    pack_partial: out and lse of a rank, where they are sent from. A decode that is one piece is not packed: attention
       writes it where it is sent from.
    merge_partials: attention over the keys of all ranks, from the partials of each rank.
    merge_scratch: `merge_scratch(tokens, heads, dim)`, views of the workspace that `merge_partials` gets for a piece.
    """

    pack_partial: Op = merge.pack_partial
    merge_partials: Op = merge.merge_partials
    merge_scratch: MergeScratch = merge.merge_scratch
