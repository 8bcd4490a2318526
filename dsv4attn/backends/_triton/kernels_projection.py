"""The kernel of the output projection: a matrix product whose left tiles are rotated on their way into it."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.numerics import angles_of, rotate, round_to


@stable_kernel
def project_kernel(
    O,  # [tokens, groups * HEADS, NOPE + ROPE] # noqa: E741
    POSITIONS,  # [tokens] int64
    TABLE,  # [num_positions, ROPE] fp32, cosines before sines
    W,  # [groups * RANK, HEADS * (NOPE + ROPE)]
    OUT,  # [tokens, groups, RANK]
    tokens: tl.int32, turned: tl.int32, o_stride: tl.int64, head_stride: tl.int64, table_stride: tl.int64,
    num_positions: tl.int64, w_stride: tl.int64, out_stride: tl.int64, group_stride: tl.int64,
    HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, DT: tl.constexpr, EXACT_CASTS: tl.constexpr,
):  # fmt: skip
    """Grid: (groups * token tiles * rank tiles,), neighbours share tokens: a tile of one group's product.

    turned: leading tokens whose rotation is undone already. HEADS: of a group. DT: what is multiplied; sums are fp32.
    ALIGNED, OUT_ALIGNED: bytes that divide the address of every row of O and W, and of OUT.
    """
    dim: tl.constexpr = NOPE + ROPE
    rank_tiles: tl.constexpr = triton.cdiv(RANK, BLOCK_N)
    token_tiles = tl.cdiv(tokens, BLOCK_M)
    tile = tl.program_id(0) // rank_tiles
    group = (tile // token_tiles).to(tl.int64)
    m = (tile % token_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % rank_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    # tokens past the end read the last row again, which costs less than a mask
    token = tl.minimum(m, tokens - 1).to(tl.int64)
    row = O + (token * o_stride + group * HEADS * head_stride)
    column = tl.multiple_of(W + (group * RANK + tl.minimum(n, RANK - 1)) * w_stride, ALIGNED)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    steps: tl.constexpr = triton.cdiv(NOPE, BLOCK_K)
    for step in range(HEADS * steps):
        head = step // steps
        k = step % steps * BLOCK_K + tl.arange(0, BLOCK_K)
        # [M, K], [K, N]
        left = tl.multiple_of(row + head * head_stride, ALIGNED)[:, None] + k[None, :]
        right = column[None, :] + (head * dim + k)[:, None]
        if NOPE % BLOCK_K:
            a = tl.load(left, mask=(k < NOPE)[None, :], other=0.0)
            b = tl.load(right, mask=(k < NOPE)[:, None], other=0.0)
        else:
            a, b = tl.load(left), tl.load(right)
        acc = tl.dot(a.to(DT), b.to(DT), acc, input_precision="ieee")

    # 16 is the least that a product may sum over
    block: tl.constexpr = 16 if ROPE < 16 else triton.next_power_of_2(ROPE)
    k, pair = tl.arange(0, block), tl.arange(0, block // 2)
    # [M, ROPE / 2]
    angle = angles_of(POSITIONS + token, TABLE, table_stride, num_positions)[:, None] + pair[None, :]
    turns = (token >= turned)[:, None] & (pair < ROPE // 2)[None, :]
    cos = tl.load(angle, mask=turns, other=1.0)
    sin = tl.load(angle + ROPE // 2, mask=turns, other=0.0)
    for head in range(HEADS):
        left = tl.multiple_of(row + head * head_stride, ALIGNED)[:, None] + (NOPE + k)[None, :]
        right = column[None, :] + (head * dim + NOPE + k)[:, None]
        x = tl.load(left, mask=(k < ROPE)[None, :], other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, (BLOCK_M, block // 2, 2)))
        even, odd = rotate(even, odd, cos, -sin)
        a = round_to(tl.reshape(tl.join(even, odd), (BLOCK_M, block)), O.dtype.element_ty, EXACT_CASTS)
        b = tl.load(right, mask=(k < ROPE)[:, None], other=0.0)
        acc = tl.dot(a.to(DT), b.to(DT), acc, input_precision="ieee")

    # [M, N]
    out = tl.multiple_of(OUT + (m.to(tl.int64) * out_stride + group * group_stride), OUT_ALIGNED)
    live = (m < tokens)[:, None] & (n < RANK)[None, :]
    tl.store(out[:, None] + n[None, :], round_to(acc, OUT.dtype.element_ty, EXACT_CASTS), mask=live)
