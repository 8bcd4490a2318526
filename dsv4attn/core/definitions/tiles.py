"""Tiles of rows with a bound on temporaries, and a matrix product whose rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

__all__ = ["TILE_BYTES", "batch_invariant_linear", "linear", "tiles"]

TILE_BYTES = 64 * 2**20
"""Most bytes of temporaries of a tile; large enough that matrix products dominate."""
INVARIANT_ROWS = 32
"""Rows of every product of `batch_invariant_linear`."""


def tiles(n: int, row_bytes: int) -> Iterator[slice]:
    """Cut n rows so that a tile's temporaries stay within TILE_BYTES."""
    step = max(TILE_BYTES // max(row_bytes, 1), 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """X [..., K] times weight [N, K] transposed, in the wider of both dtypes: [..., N]."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return torch_linear(x.to(dtype), weight.to(dtype))


def batch_invariant_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `linear`, with bits of a row that do not depend on the other rows, nor on how many there are.

    A library picks a kernel, and with it the order of its sums, by the shape of a product. Here every product has
    INVARIANT_ROWS rows, those behind the last row of x being zeros: the price is that of a larger product for few rows,
    and of more products for many.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not rows.shape[0]:
        return linear(x, weight)
    rows = pad(rows, (0, 0, 0, -rows.shape[0] % INVARIANT_ROWS))
    parts = [linear(part.contiguous(), weight) for part in rows.split(INVARIANT_ROWS)]
    return torch.cat(parts)[: x.shape[:-1].numel()].reshape(*x.shape[:-1], weight.shape[0])
