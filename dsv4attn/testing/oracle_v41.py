"""The oracle of DeepSeek-V4.1's steps around attention, in float64 numpy; it shares no code with what it judges."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsv4attn.testing.oracle import F64

__all__ = ["block_scores", "collapse", "inside_blocks", "ring_rows"]


def collapse(streams: F64, previous_pre: F64 | None) -> F64:
    """Return the input [d] of a sublayer: the first of the streams [n, d], or all by the weights of the one before."""
    if previous_pre is None:
        return np.array(streams[0])
    return np.asarray(np.einsum("n,nd->d", previous_pre, streams))


def ring_rows(steps: list[range], ring: int) -> dict[int, int]:
    """Return the position that each row of a request's ring holds after some steps, by row."""
    held: dict[int, int] = {}
    for step in steps:
        for position in step:
            held[position % ring] = position
    return held


def block_scores(scores: F64, size: int) -> F64:
    """Return the largest score of each block of `size` entries, NaN left out; -inf where a block has no other."""
    filled = np.where(np.isnan(scores), -np.inf, scores)
    return np.array([filled[start : start + size].max() for start in range(0, len(scores), size)])


def inside_blocks(blocks: Sequence[int], size: int, count: int) -> NDArray[np.bool_]:
    """Return for each of `count` entries whether its block is one of those."""
    wanted = {*blocks}
    return np.array([entry // size in wanted for entry in range(count)], dtype=np.bool_)
