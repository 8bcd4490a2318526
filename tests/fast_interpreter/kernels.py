"""Small kernels for the tests of the fast interpreter, and functions that launch them."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def upto(n, start):
    total = start
    for i in range(n):
        total += i
    return total


@triton.jit
def sums_kernel(COUNTS, OUT):
    which = tl.program_id(0)
    n = tl.load(COUNTS + which)
    if n > 0:  # noqa: SIM108 - a branch is what is tried
        total = upto(n, 0)
    else:
        total = n
    tl.store(OUT + which, total.to(tl.float32))


def sums(counts: Sequence[int]) -> Tensor:
    out = torch.full((len(counts),), torch.nan)
    sums_kernel[(len(counts),)](torch.tensor(counts, dtype=torch.int32), out)
    return out


@triton.jit
def difference(a, b):
    return a - b


@triton.jit
def differences_kernel(A, B, OUT, SAME: tl.constexpr):
    at = tl.arange(0, 2)
    a, b = tl.load(A + at), tl.load(B + at)
    tl.store(OUT + at, difference(a, a) if SAME else difference(a, b))


def differences(a: Tensor, b: Tensor, same: bool) -> Tensor:
    out = torch.full((2,), torch.nan)
    differences_kernel[(1,)](a, b, out, same)
    return out


@triton.jit
def counted_kernel(FLAG, OUT):
    tl.store(OUT, tl.load(OUT) + 1.0)
    if tl.load(FLAG) > 0:
        tl.store(OUT + 1, tl.load(OUT + 1) + 1.0)


def counted(flag: int) -> Tensor:
    out = torch.zeros(2)
    counted_kernel[(1,)](torch.tensor([flag]), out)
    return out


@triton.jit
def change(x):
    return x * 2.0


@triton.jit
def another_change(x):
    return -x


@triton.jit
def changed_kernel(X, OUT):
    at = tl.arange(0, 2)
    tl.store(OUT + at, change(tl.load(X + at)))


def changed(x: Tensor) -> Tensor:
    out = torch.full((2,), torch.nan)
    changed_kernel[(1,)](x, out)
    return out


@triton.jit
def mixed_kernel(X, OUT):
    at = tl.arange(0, 8)
    x = tl.load(X + at[:, None] * 8 + at[None, :]).to(tl.float32)
    y = tl.dot(x, tl.trans(x), input_precision="ieee")
    even, odd = tl.split(tl.reshape(y, (8, 4, 2)))
    y = tl.reshape(tl.join(odd, even), (8, 8)) - tl.max(y, 1)[:, None] + tl.sum(y, 0)[None, :]
    y += tl.cumsum(x, 1)
    bits = (y.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    y = tl.where(y > 0, bits.to(tl.bfloat16, bitcast=True).to(tl.float32), y)
    tl.store(OUT + at[:, None] * 8 + at[None, :], y.to(OUT.dtype.element_ty))


def mixed(x: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    mixed_kernel[(1,)](x, out)
    return out


@triton.jit
def quotients_kernel(A, B, OUT):
    at = tl.arange(0, 2)
    tl.store(OUT + at, tl.load(A + at) / tl.load(B + at))


def quotients(a: Tensor, b: Tensor) -> Tensor:
    out = torch.full((2,), torch.nan)
    quotients_kernel[(1,)](a, b, out)
    return out
