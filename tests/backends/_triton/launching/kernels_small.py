"""Kernels that are made to be compiled."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from dsv4attn.backends._triton.compiling.number_tuples import Float32, Int32, Int64
from dsv4attn.backends._triton.launching.runtime import stable_kernel

__all__ = ["RowNumbers", "attend", "broken", "careless", "rows", "rows_in_tuples", "valued"]


class RowNumbers(NamedTuple):
    """Every type of number."""

    n: Int32
    stride: Int64
    eps: Float32


class Columns(NamedTuple):
    """What is compiled in."""

    block: int
    half: bool


@stable_kernel
def rows_in_tuples(out, numbers: RowNumbers, COLUMNS: tl.constexpr):
    """Numbers and constants in named tuples."""
    at = tl.arange(0, COLUMNS.block)
    value = tl.program_id(0) + numbers.eps * (0.5 if COLUMNS.half else 1.0)
    tl.store(out + at.to(tl.int64) * numbers.stride, value.to(out.dtype.element_ty), mask=at < numbers.n)


@triton.jit(do_not_specialize=["n", "stride"], do_not_specialize_on_alignment=["idx"])
def rows(x, idx, scale, out, n: tl.int32, stride: tl.int64, eps: tl.float32, BLOCK: tl.constexpr, DT: tl.constexpr):
    """Gather, scale and shift rows: an optional pointer, an index pointer, every type of number."""
    i = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    row = tl.load(idx + i).to(tl.int64)
    value = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    if scale is not None:
        value *= tl.load(scale + at, mask=at < n, other=0.0)
    tl.store(out + i.to(tl.int64) * stride + at, (value + eps).to(DT), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def attend(q, k, out, n: tl.int32, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Two chained products with an accumulator of H x D: as large as one wishes."""
    at, head, key = tl.arange(0, D), tl.arange(0, H), tl.arange(0, R)
    query = tl.load(q + head[:, None] * D + at[None, :])
    total = tl.zeros([H, D], tl.float32)
    for j in range(0, n, R):
        keys = tl.load(k + (j + key).to(tl.int64)[:, None] * D + at[None, :], mask=(j + key < n)[:, None], other=0.0)
        total += tl.dot(tl.dot(query, tl.trans(keys)).to(tl.bfloat16), keys)
    tl.store(out + head[:, None] * D + at[None, :], total)


@triton.jit
def careless(out, n: tl.int32, m):
    """Values of both numbers are compiled in."""
    tl.store(out, n + m)


@triton.jit
def valued(out, n: tl.int32):
    """Compiles anew for multiples of 16."""
    tl.store(out, n)


@triton.jit
def columns(out, B: tl.constexpr):
    """It does not compile for every B: a block is a power of two."""
    return out + tl.arange(0, B)


@triton.jit(do_not_specialize=["n"])
def broken(out, n: tl.int32, B: tl.constexpr):
    """It calls what does not compile."""
    tl.store(columns(out, B), n)
