"""Output projection: the launchers of `kernels_projection`, with tiles by architecture, dtype and alignment.

The rotation of the outputs is undone, and each group of heads multiplied by its own matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, alignment_of_tokens, row_alignments
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.kernels_projection import project_kernel, project_turned_kernel, turn_back_kernel
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.projections import few_rows, products
from dsv4attn.backends._triton.layer.projections.products import Tile
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.backends._triton.support import ONE_ORDER

SMALL = Tile(16, 64, 64, 4, 6)
"""A few tokens: the matrices are read once, with much of them in flight."""
MIDDLE = Tile(64, 64, 64, 4, 4)
LARGE = Tile(128, 128, 64, 8, 3)
PLAIN = Tile(32, 32, 16, 4, 2)
"""For fp32, which uses no matrix unit, and for unaligned rows: it fits into the registers of every device."""
MANY = 128
"""Tokens above which the rotation is undone in a launch of its own, as it is of few tokens (`few_rows.HEADS`).

Times of an H100 (torch 2.11, Triton 3.6, 2026-11-27) with wo_a of Flash, both launches, and before of one: 1 token 29.0
us (30.1, deterministic 42.7), 16 tokens 30.7 (30.5, 39.5), 64 tokens 32.2 (36.0, 36.1), 256 tokens 45.3 (52.8), 2,048
tokens 216 (316), 8,192 tokens 831 (1,239). `torch.bmm`, which undoes no rotation, takes 27.7, 27.9, 30.2, 39.5, 178 and
684 us.
"""
TURNED_HEADS, TURNING_WARPS = 32, 4
TILES: Mapping[str, tuple[Tile, Tile, Tile]] = dict.fromkeys(
    ("gfx1100", "gfx1151", "gfx1201"), (SMALL, Tile(64, 64, 64, 8, 4), Tile(128, 64, 32, 8, 3))
)
"""Small, middle and large tiles of architectures where the tiles above spill 256 registers of a thread
(compiled with Triton 3.9, 2026-11-22; not measured)."""


def tiles_for(arch: str) -> tuple[Tile, Tile, Tile]:
    """Tiles for a few tokens, for up to 128, and for more."""
    return TILES.get(arch, (SMALL, MIDDLE, LARGE))


def tile_of(tokens: int, dtype: torch.dtype, aligned: int, arch: str = "", *, deterministic: bool = False) -> Tile:
    """Tile of a product in this dtype. With 129 tokens of the model or more, LARGE tiles fill a device of 128 cores.

    deterministic: bits of a row must not depend on the tile. Middle and large tiles sum the same columns in one order,
    and where they use one matrix instruction too, their bits are equal.
    """
    if dtype == torch.float32 or aligned < WIDE:
        return PLAIN
    small, middle, large = tiles_for(arch)
    if deterministic:
        return large if tokens > 128 and arch in ONE_ORDER else middle
    return small if tokens <= 16 else middle if tokens <= 128 else large


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

    out: [T, G, rank] like o, any strides but that of the last dimension; made here if it is None. deterministic: bits
    of a row do not depend on T; otherwise tiles, and with them the order of sums, follow T. turned: leading tokens
    whose rotation is undone already; they are projected as they are.
    """
    tokens, heads, dim = o.shape
    rank, rope = wo_a.shape[0] // num_groups, cos_sin_cache.shape[1]
    out = o.new_empty(tokens, num_groups, rank) if out is None else out
    dtype = torch.promote_types(o.dtype, wo_a.dtype)
    aligned = min(alignment_of_tokens(o), alignment_of_rows(wo_a))
    if not turned and _is_dense(o, wo_a, out):
        few = few_tile(tokens, heads, num_groups, rank, dim - rope, rope, architecture())
        if few is not None:
            of_heads = few_rows.Heads(dim - rope, rope, turn_back(o, positions, cos_sin_cache).flatten(1))
            few_rows.multiply(o.flatten(1), wo_a, out.flatten(1), few, num_groups, of_heads)
            return out
        large = turned_tile(tokens, num_groups, rank, dim - rope, rope, architecture()) if tokens > MANY else None
        if large is not None:
            project_turned(o, turn_back(o, positions, cos_sin_cache), wo_a, out, large)
            return out
    tile = tile_of(tokens, dtype, aligned, architecture(), deterministic=deterministic)
    launch(
        project_kernel,
        (num_groups * cdiv(tokens, tile.rows) * cdiv(rank, tile.columns),),
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


def transient_bytes(max_tokens: int, heads: int, rope: int, arch: str) -> int:
    """Upper bound on the temporaries of a projection: the columns whose rotation a launch of its own undoes."""
    is_turned = arch in products.TILES or arch in few_rows.HEADS
    return max_tokens * heads * rope * torch.bfloat16.itemsize if is_turned else 0


def few_tile(tokens: int, heads: int, groups: int, rank: int, nope: int, rope: int, arch: str) -> Tile | None:
    """Tile of a product of few tokens whose rotation is undone before; None where `project_kernel` multiplies them."""
    tile = next((tile for tile in few_rows.HEADS.get(arch, ()) if tokens <= tile.rows), None)
    if (
        tile is None
        or rope & (rope - 1)
        or nope % few_rows.HEAD_RUN
        or rope % few_rows.HEAD_RUN
        or heads // groups * nope % tile.depth
        or heads // groups * rope % tile.depth
        or rank % tile.columns
    ):
        return None
    return tile


def turned_tile(tokens: int, groups: int, rank: int, nope: int, rope: int, arch: str) -> Tile | None:
    """Tile of `project_turned` in bf16; None where `project_kernel` multiplies all numbers of tokens."""
    tiles = products.TILES.get(arch)
    if (
        tiles is None
        or rope & (rope - 1)
        or any(t.depth > rope or rank % t.columns or nope % t.depth for t in tiles.large)
    ):
        return None
    return products.large_tile(tokens, groups * rank, arch, torch.bfloat16)


def _is_dense(o: Tensor, wo_a: Tensor, out: Tensor) -> bool:
    """Whether `project_turned` reads and writes these: bf16, in rows that hold all heads or groups without gaps."""
    return (
        o.dtype == wo_a.dtype == out.dtype == torch.bfloat16
        and (o.stride(1), o.stride(2)) == (o.shape[2], 1)
        and wo_a.stride(1) == 1
        and (out.stride(1), out.stride(2)) == (out.shape[2], 1)
        and alignment_of_tokens(o) == alignment_of_rows(wo_a, out) == WIDE
    )


def turn_back(o: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> Tensor:
    """The trailing columns of o [T, H, D] with their rotation undone, rounded to its dtype: [T, H, rope], dense."""
    (tokens, heads, dim), rope = o.shape, cos_sin_cache.shape[1]
    turned = o.new_empty(tokens, heads, rope)
    constants = _turn_constants(heads, dim - rope, rope, architecture())
    launch(
        turn_back_kernel,
        (tokens * (heads // constants["BLOCK_H"]),),
        (
            o, positions, cos_sin_cache, turned, o.stride(0), o.stride(1), cos_sin_cache.stride(0),
            cos_sin_cache.shape[0],
        ),
        constants,
        num_warps=TURNING_WARPS,
    )  # fmt: skip
    return turned


def project_turned(o: Tensor, turned: Tensor, wo_a: Tensor, out: Tensor, tile: Tile) -> None:
    """Write o [T, H, D], with `turned` in the place of its trailing columns, times wo_a to out [T, G, rank]."""
    (tokens, heads, dim), rope, (_, groups, rank) = o.shape, turned.shape[2], out.shape
    described = (
        TensorDescriptor(matrix, [*matrix.shape], [matrix.stride(0), 1], [size, tile.depth])
        for matrix, size in ((o.flatten(1), tile.rows), (turned.flatten(1), tile.rows), (wo_a, tile.columns))
    )
    tiles = cdiv(tokens, tile.rows) * (groups * rank // tile.columns)
    launch(
        project_turned_kernel,
        (min(tiles, multiprocessors() * tile.programs),),
        (out, *described, tokens, groups, out.stride(0)),
        _turned_constants(tile, heads // groups, rank, dim - rope, rope, architecture()),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@cache
def _turn_constants(heads: int, nope: int, rope: int, arch: str) -> Constants:
    dims = {"HEADS": heads, "BLOCK_H": min(TURNED_HEADS, heads & -heads), "NOPE": nope, "ROPE": rope}
    return Constants({**dims, "EXACT_CASTS": not INTERPRETED, "PDL": uses_pdl(arch) and not INTERPRETED})


@cache
def _turned_constants(tile: Tile, heads: int, rank: int, nope: int, rope: int, arch: str) -> Constants:
    dims = {"HEADS": heads, "RANK": rank, "NOPE": nope, "ROPE": rope}
    return Constants({**dims, **products.tile_constants(tile, arch), "UNIT": products.UNIT})


@cache
def _constants(
    tile: Tile, heads: int, rank: int, nope: int, rope: int, dtype: torch.dtype, aligned: int, out_aligned: int
) -> Constants:
    # interpreted bf16 is multiplied as bit patterns
    in_bf16 = dtype == torch.bfloat16 and not INTERPRETED
    dims = {"HEADS": heads, "RANK": rank, "NOPE": nope, "ROPE": rope}
    block = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth}
    of_operands = {"ALIGNED": aligned, "OUT_ALIGNED": out_aligned, "DT": tl.bfloat16 if in_bf16 else tl.float32}
    return Constants({**dims, **block, **of_operands, "EXACT_CASTS": not INTERPRETED})


@recorded
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
) -> None:
    """Every variant that the op can need. aligned: whether rows of outputs and matrices are, to 16 bytes."""
    dim, dtypes, arch = nope + rope, (o_dtype, w_dtype), architecture()
    may_align = all(dim * dtype.itemsize % WIDE == 0 for dtype in dtypes)
    # with all of these numbers of tokens, each tile of each kernel has its turn but those of `project_turned`
    points = dict.fromkeys((*(tile.rows for tile in few_rows.HEADS.get(arch, ())), 16, 128, 129))
    positions, table = meta_rows(129, dtype=torch.int64), meta_rows(2, rope, dtype=torch.float32)
    large = products.TILES[arch].large if turned_tile(129, num_groups, rank, nope, rope, arch) else ()
    for rows in (WIDE,) if aligned and may_align else (WIDE, 1):
        o = meta_rows(129, heads, dim, dtype=o_dtype, alignment=rows)
        wo_a = meta_rows(num_groups * rank, heads // num_groups * dim, dtype=w_dtype, alignment=rows)
        # results are made here or given by the caller, and those with gaps have a kernel of their own
        for out_rows, width in product(row_alignments(rank, o_dtype, aligned=True), (rank, 2 * rank)):
            out = meta_rows(129, num_groups, width, dtype=o_dtype, alignment=out_rows)[..., :rank]
            for tokens in points:
                inv_rope_o_proj(o[:tokens], positions[:tokens], table, wo_a, num_groups, out[:tokens])
            for tile in large if _is_dense(o, wo_a, out) else ():
                project_turned(o, turn_back(o, positions, table), wo_a, out, tile)
