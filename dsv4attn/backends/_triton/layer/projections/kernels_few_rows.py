"""The kernel of matrix products of few rows, whose weights are bf16 or e4m3 codes under a scale for each block.

A product of few rows takes as long as its weights are read, and codes are half of the bytes of bf16. Factors are powers
of two: a code times its factor is a bf16 value, and sums in units of a factor round as sums of these values do. So a
product has the bits of a product with the bf16 copy. Sums have the order of `kernels_products`.

Codes times factors as factors of a product were tried: ptxas then lets no two matrix instructions overlap, and products
with long rows took half as long again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.projections.kernels_output import factors
from dsv4attn.backends._triton.layer.projections.kernels_products import add_product, no_sums, store_tile, tile_numbers


@triton.jit
def power_ratio(a, b):
    """A / b of powers of two in fp32."""
    bits = a.to(tl.int32, bitcast=True) - b.to(tl.int32, bitcast=True) + (127 << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def head_columns(j, depth, NOPE: tl.constexpr, ROPE: tl.constexpr):
    """Columns of heads in the order in which they are summed: all that have no rotation, then all that have one.

    j: places in this order, of `depth`.
    """
    place = j - depth // (NOPE + ROPE) * NOPE
    return tl.where(place < 0, j + j // NOPE * ROPE, place + (place // ROPE + 1) * NOPE)


@stable_kernel
def few_rows_kernel(
    X,  # [rows, groups * depth]; with ROPE heads of NOPE + ROPE columns
    TURNED,  # [rows, groups * heads * ROPE]: those columns of X whose rotation is undone; X if ROPE is 0
    W,  # [UNIT * units, depth], bf16, or uint8 codes
    SCALES,  # [UNIT * units / BLOCK, depth / BLOCK] fp32, or uint8 exponents; W if that is bf16
    OUT,  # [rows, UNIT * units]
    rows: tl.int32, units: tl.int32, depth: tl.int32, group_units: tl.int32, x_stride: tl.int64,
    turned_stride: tl.int64, w_stride: tl.int64, scale_stride: tl.int64, scale_step: tl.int64, out_stride: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, RUN: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    DT: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * column tiles,): a tile of X times W transposed, weights being the left operand.

    group_units: columns that multiply the same columns of X, in units; a multiple of a tile. depth: a multiple of
    BLOCK_K. RUN: columns that follow each other in every operand. CODED: whether W is codes, of inputs without ROPE;
    BLOCK_K and BLOCK_N divide BLOCK then, and sums are in units of the factor of a step. Rows of X, TURNED and W begin
    at multiples of 16 bytes, those of OUT at multiples of UNIT. DT: what is multiplied; sums are fp32.
    """
    wait_then_launch_dependents(PDL)
    columns = units * UNIT
    m_tile, n_tile = tile_numbers(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP)
    m, n = m_tile * BLOCK_M + tl.arange(0, BLOCK_M), n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    group = (n_tile * BLOCK_N // (group_units * UNIT)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    # [M], [N]
    token, is_row = tl.minimum(m, rows - 1).to(tl.int64), (m < rows)[:, None]
    row = tl.multiple_of(X + token * x_stride + group * depth, 16)
    column = tl.multiple_of(W + tl.minimum(n, columns - 1).to(tl.int64) * w_stride, 16)
    if CODED:
        column = column.to(tl.pointer_type(tl.float8e4nv))
        scale = SCALES + (n_tile * BLOCK_N // BLOCK) * scale_stride
        factor = factors(tl.load(scale))
        ratio = power_ratio(factor, factor)
    if ROPE:
        plain_depth = depth // (NOPE + ROPE) * NOPE
        turned = TURNED + token * turned_stride + group * (depth - plain_depth)
    acc = no_sums(BLOCK_M, BLOCK_N, True, DT)
    for start in range(0, depth, BLOCK_K):
        at = start + k
        if ROPE:
            of_weights = tl.max_contiguous(tl.multiple_of(head_columns(at, depth, NOPE, ROPE), RUN), RUN)
            is_plain = start < plain_depth
            a_row = tl.multiple_of(tl.where(is_plain, row, turned), 16)
            a_at = tl.where(is_plain, of_weights, at - plain_depth)
            a_at = tl.max_contiguous(tl.multiple_of(a_at, RUN), RUN)
        else:
            of_weights, a_row, a_at = at, row, at
        # [M, K], [N, K]
        a = tl.load(a_row[:, None] + a_at[None, :], mask=is_row, other=0.0)
        b = tl.load(column[:, None] + of_weights[None, :])
        if CODED:
            # a step ahead, so that no product waits for them. The loop carries the ratio: of two names for one factor
            # before a loop Triton 3.6 takes the one that gets the other's value in each step for a constant
            following = tl.minimum(start + BLOCK_K, depth - BLOCK_K)
            following_factor = factors(tl.load(scale + following // BLOCK * scale_step))
            acc *= ratio
            acc = add_product(acc, a, b.to(tl.float32).to(DT), True, DT)
            ratio = power_ratio(factor, following_factor)
            factor = following_factor
        else:
            acc = add_product(acc, a, b, True, DT)
    if CODED:
        # of the last step, which follows itself
        acc *= factor
    store_tile(OUT, out_stride, acc, m, n, rows, columns, True, UNIT, EXACT_CASTS)
