"""Kernels of matrix products whose row bits do not depend on the number of rows.

Every element of a result is one sum over k, in fp32, from the first block of columns to the last: no kernel cuts k into
parts that are added later. A matrix unit adds the products of some columns at once, 16 of them in bf16 on Hopper, in an
order of its own. Which columns those are depends on the kind of instruction, and not on the rows and columns of a tile.
So tiles may follow the number of rows where all of them use one kind of instruction; `products` has them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import round_to


@triton.jit
def tile_numbers(tile, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Numbers (m, n) of the rows and columns of a tile. GROUP tiles of rows, one after the other, share their weights.

    So the tiles that run at the same time read few rows and few weights, which the cache of the device holds.
    """
    per_group = GROUP * n_tiles
    first = tile // per_group * GROUP
    size = tl.minimum(m_tiles - first, GROUP)
    return first + tile % per_group % size, tile % per_group // size


@triton.jit
def no_sums(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr, DT: tl.constexpr):
    """Zeros of a tile, of the form that `add_product` adds to: fp32, or fp64 in the interpreter."""
    shape: tl.constexpr = [COLUMNS, ROWS] if SWAPPED else [ROWS, COLUMNS]
    return tl.zeros(shape, tl.float64 if tl.float64 == DT else tl.float32)


@triton.jit
def add_product(acc, a, b, SWAPPED: tl.constexpr, DT: tl.constexpr):
    """Acc plus a [M, K] times b [N, K] transposed: [M, N], or [N, M] if SWAPPED."""
    if SWAPPED:
        acc = tl.dot(b.to(DT), tl.trans(a.to(DT)), acc, out_dtype=acc.dtype)
    else:
        acc = tl.dot(a.to(DT), tl.trans(b.to(DT)), acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def store_tile(
    OUT, out_stride, acc, m, n, rows, columns, SWAPPED: tl.constexpr, UNIT: tl.constexpr, EXACT_CASTS: tl.constexpr
):  # fmt: skip
    """Round acc, of `add_product`, and store its rows m < rows and columns n < columns."""
    if SWAPPED:
        acc = tl.trans(acc)
    out = tl.multiple_of(OUT + m.to(tl.int64) * out_stride, UNIT)
    live = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out[:, None] + n[None, :], round_to(acc.to(tl.float32), OUT.dtype.element_ty, EXACT_CASTS), mask=live)


@stable_kernel
def product_kernel(
    X,  # [rows, depth]
    W,  # [UNIT * units, depth]
    OUT,  # [rows, UNIT * units]
    rows: tl.int32, units: tl.int32, depth: tl.int32, x_stride: tl.int64, w_stride: tl.int64, out_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr,
    FEW: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, UNIT: tl.constexpr, DT: tl.constexpr,
    EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * column tiles,): a tile of X times W transposed.

    SWAPPED: weights are the left operand, for tiles of few rows. FEW: rows past the end are not read; otherwise the
    last row is read again. WHOLE: depth is a multiple of BLOCK_K. ALIGNED: bytes that divide the address of every row
    of X and W. UNIT: divides the number of columns, and the address of every row of OUT in bytes. DT: what is
    multiplied; sums are fp32.
    """
    wait_then_launch_dependents(PDL)
    columns = units * UNIT
    m_tile, n_tile = tile_numbers(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    m, n = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.multiple_of(X + tl.minimum(m, rows - 1).to(tl.int64) * x_stride, ALIGNED)
    column = tl.multiple_of(W + tl.minimum(n, columns - 1).to(tl.int64) * w_stride, ALIGNED)
    acc = no_sums(BLOCK_M, BLOCK_N, SWAPPED, DT)
    for start in range(0, depth, BLOCK_K):
        # [M, K], [N, K]
        left, right = row[:, None] + (start + k)[None, :], column[:, None] + (start + k)[None, :]
        if WHOLE:
            a = tl.load(left, mask=(m < rows)[:, None], other=0.0) if FEW else tl.load(left)
            b = tl.load(right)
        else:
            inside = (start + k < depth)[None, :]
            a = tl.load(left, mask=inside & (m < rows)[:, None], other=0.0)
            b = tl.load(right, mask=inside, other=0.0)
        acc = add_product(acc, a, b, SWAPPED, DT)
    store_tile(OUT, out_stride, acc, m, n, rows, columns, SWAPPED, UNIT, EXACT_CASTS)


@stable_kernel
def described_product_kernel(
    OUT,  # [rows, UNIT * units]
    X,  # descriptor of [rows, depth], blocks of BLOCK_M x BLOCK_K
    W,  # descriptor of [UNIT * units, depth], blocks of BLOCK_N x BLOCK_K
    rows: tl.int32, units: tl.int32, depth: tl.int32, out_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr,
    UNIT: tl.constexpr, FLAT: tl.constexpr, DT: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`product_kernel` with tiles that a copy engine reads. Grid: any number of programs, which share the tiles.

    What a block has past the ends of X and W is zeros. FLAT: the loads of a program's next tile begin before its tile
    is stored.
    """
    wait_then_launch_dependents(PDL)
    columns = units * UNIT
    m_tiles, n_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=FLAT):
        m_tile, n_tile = tile_numbers(tile, m_tiles, n_tiles, GROUP)
        acc = no_sums(BLOCK_M, BLOCK_N, SWAPPED, DT)
        for start in range(0, depth, BLOCK_K):
            a, b = X.load([m_tile * BLOCK_M, start]), W.load([n_tile * BLOCK_N, start])
            acc = add_product(acc, a, b, SWAPPED, DT)
        m, n = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        store_tile(OUT, out_stride, acc, m, n, rows, columns, SWAPPED, UNIT, EXACT_CASTS)
