"""The oracle of DeepSeek-V4.1's steps around attention, in float64 numpy; it shares no code with what it judges."""

from __future__ import annotations

import numpy as np

from dsv4attn.testing.oracle import F64

__all__ = ["collapse", "ring_rows"]


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
