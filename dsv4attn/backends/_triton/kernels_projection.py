"""Kernels of the output projection: a matrix product whose left tiles are rotated on their way into it, or before it.

Of many tokens the rotation is undone once, in a launch of its own: otherwise each tile of ranks would do that again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton.language as tl

from dsv4attn.backends._triton.launching.kernels_pdl import wait_then_launch_dependents
from dsv4attn.backends._triton.launching.runtime import stable_kernel
from dsv4attn.backends._triton.layer.projections.kernels_products import add_product, no_sums, store_tile, tile_numbers
from dsv4attn.backends._triton.numerics import angles_of, rotate, round_to
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2


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
    rank_tiles: tl.constexpr = cdiv(RANK, BLOCK_N)
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

    steps: tl.constexpr = cdiv(NOPE, BLOCK_K)
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
    block: tl.constexpr = 16 if ROPE < 16 else next_power_of_2(ROPE)
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


@stable_kernel
def turn_back_kernel(
    O,  # [tokens, HEADS, NOPE + ROPE] # noqa: E741
    POSITIONS,  # [tokens] int64
    TABLE,  # [num_positions, ROPE] fp32, cosines before sines
    TURNED,  # [tokens, HEADS, ROPE], dense
    o_stride: tl.int64, head_stride: tl.int64, table_stride: tl.int64, num_positions: tl.int64,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, EXACT_CASTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens * parts,): of a token, the trailing columns of BLOCK_H heads with their rotation undone.

    BLOCK_H divides HEADS. Rows begin at multiples of 16 bytes. ROPE: a power of two.
    """
    wait_then_launch_dependents(PDL)
    parts: tl.constexpr = HEADS // BLOCK_H
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = tl.program_id(0) % parts * BLOCK_H + tl.arange(0, BLOCK_H)
    k, pair = tl.arange(0, ROPE), tl.arange(0, ROPE // 2)
    row = tl.multiple_of(O + (token * o_stride + head * head_stride + NOPE), 16)
    x = tl.load(row[:, None] + k[None, :]).to(tl.float32)
    angles = angles_of(POSITIONS + token, TABLE, table_stride, num_positions)
    cos, sin = tl.load(angles + pair)[None, :], tl.load(angles + ROPE // 2 + pair)[None, :]
    even, odd = tl.split(tl.reshape(x, (BLOCK_H, ROPE // 2, 2)))
    even, odd = rotate(even, odd, cos, -sin)
    turned = round_to(tl.reshape(tl.join(even, odd), (BLOCK_H, ROPE)), O.dtype.element_ty, EXACT_CASTS)
    out = tl.multiple_of(TURNED + (token * HEADS + head) * ROPE, 16)
    tl.store(out[:, None] + k[None, :], turned)


@stable_kernel
def project_turned_kernel(
    OUT,  # [tokens, groups * RANK]
    O,  # descriptor of [tokens, groups * HEADS * (NOPE + ROPE)], blocks of BLOCK_M x BLOCK_K # noqa: E741
    TURNED,  # descriptor of [tokens, groups * HEADS * ROPE], blocks of BLOCK_M x BLOCK_K
    W,  # descriptor of [groups * RANK, HEADS * (NOPE + ROPE)], blocks of BLOCK_N x BLOCK_K
    tokens: tl.int32, groups: tl.int32, out_stride: tl.int64,
    HEADS: tl.constexpr, RANK: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr,
    DT: tl.constexpr, EXACT_CASTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`project_kernel` of outputs whose rotation is undone: of O the columns without one, of TURNED the others.

    Grid: any number of programs, which share the tiles. The order of sums is that of `project_kernel`. BLOCK_K divides
    NOPE and ROPE, and BLOCK_N divides RANK. Rows of OUT begin at multiples of UNIT.
    """
    wait_then_launch_dependents(PDL)
    dim: tl.constexpr = NOPE + ROPE
    plain_steps: tl.constexpr = NOPE // BLOCK_K
    turned_steps: tl.constexpr = ROPE // BLOCK_K
    columns = groups * RANK
    m_tiles, n_tiles = tl.cdiv(tokens, BLOCK_M), columns // BLOCK_N
    for tile in range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        m_tile, n_tile = tile_numbers(tile, m_tiles, n_tiles, GROUP)
        first, rank = m_tile * BLOCK_M, n_tile * BLOCK_N
        group = rank // RANK
        acc = no_sums(BLOCK_M, BLOCK_N, False, DT)
        for step in range(HEADS * plain_steps):
            column = step // plain_steps * dim + step % plain_steps * BLOCK_K
            a, b = O.load([first, group * (HEADS * dim) + column]), W.load([rank, column])
            acc = add_product(acc, a, b, False, DT)
        for step in range(HEADS * turned_steps):
            column = step // turned_steps * dim + NOPE + step % turned_steps * BLOCK_K
            a, b = TURNED.load([first, group * (HEADS * ROPE) + step * BLOCK_K]), W.load([rank, column])
            acc = add_product(acc, a, b, False, DT)
        m, n = first + tl.arange(0, BLOCK_M), rank + tl.arange(0, BLOCK_N)
        store_tile(OUT, out_stride, acc, m, n, tokens, columns, False, UNIT, EXACT_CASTS)
