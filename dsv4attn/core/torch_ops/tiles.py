"""Tiles of rows with a bound on temporaries, and arithmetic whose rows do not depend on each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

__all__ = [
    "INVARIANT",
    "PLAIN",
    "TILE_BYTES",
    "Arithmetic",
    "Linear",
    "arithmetic_of",
    "batch_invariant_linear",
    "gives_fp32",
    "linear",
    "sigmoid",
    "tiles",
]


class Linear(Protocol):
    """`linear(x, weight)`: x [..., K] times weight [N, K] transposed, with fp32 sums.

    out_dtype: of the result; default: the wider dtype of both. fp32 of bf16 factors is the sum as it is, unrounded.
    """

    def __call__(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """The product: [..., N]."""


TILE_BYTES = 64 * 2**20
"""Most bytes of temporaries of a tile; large enough that matrix products dominate."""
INVARIANT_ROWS = 32
"""Rows of every product of `batch_invariant_linear`."""
INVARIANT_BATCH = 8
"""Products of every call of `batch_invariant_bmm`."""


def tiles(n: int, row_bytes: int) -> Iterator[slice]:
    """Cut n rows so that a tile's temporaries stay within TILE_BYTES."""
    step = max(TILE_BYTES // max(row_bytes, 1), 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


@cache
def gives_fp32(device_type: str) -> bool:
    """Whether torch multiplies bf16 on a device into an fp32 result, without fp32 copies of the factors.

    torch 2.8 and later do so on some devices. A product is tried once.
    """
    try:
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device_type)
        return bool(torch.mm(x, x, out_dtype=torch.float32).dtype == torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `Linear`. Where torch does not multiply into out_dtype, both factors are converted to it before."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if out_dtype is None or out_dtype == dtype:
        return torch_linear(x.to(dtype), weight.to(dtype))
    if out_dtype == torch.float32 and gives_fp32(x.device.type):
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        return torch.mm(rows, weight.to(dtype).t(), out_dtype=out_dtype).view(*x.shape[:-1], weight.shape[0])
    return torch_linear(x.to(out_dtype), weight.to(out_dtype))


def batch_invariant_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """As `linear`, with bits of a row that do not depend on the other rows, nor on how many there are.

    A library picks a kernel, and with it the order of its sums, by the shape of a product. Here every product has
    INVARIANT_ROWS rows, those past the last row of x being zeros: the price is that of a larger product for few rows,
    and of more products for many.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not rows.shape[0]:
        return linear(x, weight, out_dtype)
    rows = pad(rows, (0, 0, 0, -rows.shape[0] % INVARIANT_ROWS))
    parts = [linear(part.contiguous(), weight, out_dtype) for part in rows.split(INVARIANT_ROWS)]
    return torch.cat(parts)[: x.shape[:-1].numel()].reshape(*x.shape[:-1], weight.shape[0])


def mean_square(x: Tensor) -> Tensor:
    """Mean of the squares of each row of x [..., d]: [..., 1]."""
    return x.square().mean(-1, keepdim=True)


def batch_invariant_mean_square(x: Tensor) -> Tensor:
    """As `mean_square`, by folding rows in halves: a sum of a library may depend on the number of rows."""
    total, count = x.square(), x.shape[-1]
    while count > 1:
        half = count // 2
        folded = total[..., :half] + total[..., half : 2 * half]
        if count % 2:
            folded[..., :1] += total[..., -1:]
        total, count = folded, half
    return total / x.shape[-1]


def batch_invariant_bmm(a: Tensor, b: Tensor) -> Tensor:
    """As `torch.bmm`, with INVARIANT_BATCH products in each call, those past the last being zeros."""
    if not a.shape[0]:
        return torch.bmm(a, b)
    missing = -a.shape[0] % INVARIANT_BATCH
    parts = (pad(factor, (0, 0, 0, 0, 0, missing)).split(INVARIANT_BATCH) for factor in (a, b))
    return torch.cat([torch.bmm(*pair) for pair in zip(*parts, strict=True)])[: a.shape[0]]


@frozen
class Arithmetic:
    """The sums that libraries order by the shape of a call.

    linear: x [..., K] times weight [N, K] transposed.
    mean_square: of each row.
    bmm: products of matrices in pairs.
    """

    linear: Linear
    mean_square: Callable[[Tensor], Tensor]
    bmm: Callable[[Tensor, Tensor], Tensor]


PLAIN = Arithmetic(linear, mean_square, torch.bmm)
INVARIANT = Arithmetic(batch_invariant_linear, batch_invariant_mean_square, batch_invariant_bmm)
"""Bits of a row depend neither on the other rows nor on how many there are."""


def arithmetic_of(deterministic: bool) -> Arithmetic:  # noqa: FBT001 - the option itself
    """The arithmetic of an op with option `deterministic`."""
    return INVARIANT if deterministic else PLAIN


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), with bits of an element that do not depend on its place in x.

    On a CPU `torch.sigmoid` computes the elements that fill no vector register at the end of x by another exp.
    """
    return 1 / (1 + torch.exp(-x))
