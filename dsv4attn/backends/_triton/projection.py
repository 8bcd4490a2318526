"""Output projection: the rotation of the outputs undone and each group of heads multiplied by its own matrix.

One kernel: a matrix product whose left tiles are rotated, where they need it, on their way into the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.insert import angles_of, rotate
from dsv4attn.backends._triton.cache.records import alignment_of_rows, row_alignments
from dsv4attn.backends._triton.compiling.variant import Variant, pointer_type
from dsv4attn.backends._triton.launching.runtime import ALIGNMENT, INTERPRETED, architecture, launch, stable_kernel
from dsv4attn.backends._triton.numerics import round_to

__all__ = ["inv_rope_o_proj", "variants"]


@frozen
class Tile:
    """Tokens, ranks and summed columns of a tile, and how a program works on them."""

    tokens: int
    ranks: int
    columns: int
    warps: int
    stages: int


SMALL = Tile(16, 64, 64, 4, 6)
"""A few tokens: the matrices are read once, with much of them in flight."""
MIDDLE = Tile(64, 64, 64, 4, 4)
LARGE = Tile(128, 128, 64, 8, 3)
PLAIN = Tile(32, 32, 16, 4, 2)
"""fp32 on ordinary units, and rows out of step, which no wide access can read: what fits into registers anywhere."""
TILES: Mapping[str, tuple[Tile, Tile, Tile]] = dict.fromkeys(
    ("gfx1100", "gfx1151", "gfx1201"), (SMALL, Tile(64, 64, 64, 8, 4), Tile(128, 64, 32, 8, 3))
)
"""Small, middle and large tiles of architectures where those above spill: 256 registers of a thread do not hold them
(compiled with Triton 3.9, 2026-11-22; not measured)."""


def tiles_of(arch: str) -> tuple[Tile, Tile, Tile]:
    """Tiles for a few tokens, for up to 128, and for more."""
    return TILES.get(arch, (SMALL, MIDDLE, LARGE))


def tile_of(tokens: int, dtype: torch.dtype, aligned: int, arch: str = "") -> Tile:
    """Tile of a product in this dtype. LARGE ones fill a device of 128 cores from 129 tokens of the model's on."""
    if dtype == torch.float32 or aligned < ALIGNMENT:
        return PLAIN
    small, middle, large = tiles_of(arch)
    return small if tokens <= 16 else middle if tokens <= 128 else large


@stable_kernel
def project_kernel(
    O,  # noqa: E741
    POSITIONS,
    TABLE,
    W,
    OUT,
    tokens: tl.int32,
    turned: tl.int32,
    o_stride: tl.int64,
    head_stride: tl.int64,
    table_stride: tl.int64,
    num_positions: tl.int64,
    w_stride: tl.int64,
    out_stride: tl.int64,
    group_stride: tl.int64,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    DT: tl.constexpr,
    EXACT_CASTS: tl.constexpr,
):
    """Grid (groups * token tiles * rank tiles,), neighbours share tokens: a tile of one group's product.

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
    # behind the edges the last row is read again, which costs less than a mask
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


def inv_rope_o_proj(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    wo_a: Tensor,
    num_groups: int,
    out: Tensor | None = None,
    *,
    deterministic: bool = False,
    turned: int = 0,
) -> Tensor:
    """Undo the rotation of o [T, H, D] and project each group of its heads; see `contract.Backend`.

    out: [T, G, rank] like o, any strides but that of the last dimension; made here if it is None. deterministic: every
    row is summed in one order, whatever T; otherwise tiles, and with them the order, follow T. turned: leading tokens
    whose rotation is undone already; they are projected as they are.
    """
    tokens, heads, dim = o.shape
    rank, rope = wo_a.shape[0] // num_groups, cos_sin_cache.shape[1]
    out = o.new_empty(tokens, num_groups, rank) if out is None else out
    dtype = torch.promote_types(o.dtype, wo_a.dtype)
    aligned = alignment_of_rows(o, wo_a)
    tile = tile_of(MIDDLE.tokens if deterministic else tokens, dtype, aligned, architecture())
    launch(
        project_kernel,
        (num_groups * triton.cdiv(tokens, tile.tokens) * triton.cdiv(rank, tile.ranks),),
        (
            o, positions, cos_sin_cache, wo_a, out, tokens, turned, o.stride(0), o.stride(1),
            cos_sin_cache.stride(0), cos_sin_cache.shape[0], wo_a.stride(0), out.stride(0), out.stride(1),
        ),
        _constants(
            tile, heads // num_groups, rank, dim - rope, rope, dtype, aligned, alignment_of_rows(out)
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return out


@cache
def _constants(
    tile: Tile, heads: int, rank: int, nope: int, rope: int, dtype: torch.dtype, aligned: int, out_aligned: int
) -> dict[str, Any]:
    # interpreted bf16 is multiplied as bit patterns
    in_bf16 = dtype == torch.bfloat16 and not INTERPRETED
    return {
        "HEADS": heads,
        "RANK": rank,
        "NOPE": nope,
        "ROPE": rope,
        "BLOCK_M": tile.tokens,
        "BLOCK_N": tile.ranks,
        "BLOCK_K": tile.columns,
        "ALIGNED": aligned,
        "OUT_ALIGNED": out_aligned,
        "DT": tl.bfloat16 if in_bf16 else tl.float32,
        "EXACT_CASTS": not INTERPRETED,
    }


def variants(
    heads: int,
    nope: int,
    rope: int,
    num_groups: int,
    rank: int,
    o_dtype: torch.dtype,
    w_dtype: torch.dtype,
    *,
    aligned: bool = True,
    arch: str = "",
) -> Iterator[Variant]:
    """Every form that the step can ask for on an architecture; `aligned` if rows of outputs and matrices are."""
    dtype, width = torch.promote_types(o_dtype, w_dtype), nope + rope
    aligned = aligned and all(width * each.itemsize % ALIGNMENT == 0 for each in (o_dtype, w_dtype))
    tiles = [(PLAIN if dtype == torch.float32 else tile, ALIGNMENT) for tile in tiles_of(arch)]
    if not aligned:
        tiles.append((PLAIN, 1))
    types = {"O": pointer_type(o_dtype), "W": pointer_type(w_dtype), "OUT": pointer_type(o_dtype)}
    types |= {"POSITIONS": "*i64", "TABLE": "*fp32"}
    # results are made here or given by the caller
    outs = row_alignments(rank, o_dtype, aligned=True)
    for (tile, rows), out in product(dict.fromkeys(tiles), outs):
        constants = _constants(tile, heads // num_groups, rank, nope, rope, dtype, rows, out)
        yield Variant.told(project_kernel, types, constants, num_warps=tile.warps, num_stages=tile.stages)
