"""Matrix products whose row bits do not depend on the number of rows: the launchers of `kernels_products`.

Every tile sums over k in one order. So the tile may follow the number of rows, where the tiles use one kind of matrix
instruction. That is compared on a device, not assumed: `TILES` has the architectures on which a test has found the
bits of all tiles equal. Everywhere else all products have one tile, that of `base_tile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import torch
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.projections.kernels_products import described_product_kernel, product_kernel
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.core.tensorspec import check_tensor
from dsv4attn.core.torch_modes import without_modes
from dsv4attn.core.torch_ops.tiles import batch_invariant_linear
from dsv4attn.errors import ArgumentError


@frozen
class Tile:
    """Rows, columns and summed columns of a tile, and warps and pipeline stages of its program.

    swapped: whether weights are the left operand, which has 64 rows or more in the instructions of Hopper.
    described: whether a copy engine reads the tiles. A program then makes several of them.
    programs: of a described tile, that a multiprocessor holds at once.
    flat: of a described tile: whether the loads of a program's next tile begin before its tile is stored, which takes
        memory for both.
    cost: time of a tile of many rows in units of the time that a multiprocessor's share of a full device needs for
        each element.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool = False
    described: bool = False
    programs: int = 1
    flat: bool = True
    cost: float = 1.0


@frozen
class Tiles:
    """Tiles of an architecture, whose bits are equal.

    few: for up to `few.rows` rows.
    slim: for more rows, up to `slim.rows`, and at most SLIM columns.
    small: the same for more columns; and for more rows where larger tiles are too few for all multiprocessors.
    large: for more rows than `small.rows`, with results in bf16.
    wide: the same with results in fp32, for which some of the others lack memory.
    """

    few: Tile
    slim: Tile
    small: Tile
    large: tuple[Tile, ...]
    wide: tuple[Tile, ...]

    def large_of(self, out_dtype: torch.dtype) -> tuple[Tile, ...]:
        """Tiles of many rows with results of a dtype."""
        return self.wide if out_dtype == torch.float32 else self.large

    def every(self, out_dtype: torch.dtype) -> tuple[Tile, ...]:
        """All tiles with results of a dtype."""
        return tuple(dict.fromkeys((self.few, self.slim, self.small, *self.large_of(out_dtype))))


BASE = Tile(64, 64, 64, 4, 4)
BASES: Mapping[str, Tile] = {
    **dict.fromkeys(("sm_120", "sm_121"), Tile(64, 64, 64, 8, 3)),
    **dict.fromkeys(("gfx1100", "gfx1151", "gfx1201"), Tile(64, 64, 64, 8, 4)),
}
"""Base tiles of architectures where `BASE` spills registers (compiled with Triton 3.6 and 3.9; not measured)."""
TILES: Mapping[str, Tiles] = {
    "sm_90": Tiles(
        Tile(16, 64, 128, 4, 6, swapped=True),
        Tile(64, 16, 128, 4, 5),
        Tile(64, 64, 128, 4, 6, described=True, cost=3.0),
        (
            Tile(128, 256, 64, 8, 3, described=True),
            Tile(256, 128, 64, 8, 4, described=True, cost=1.02),
            Tile(128, 128, 64, 8, 4, described=True, cost=1.3),
        ),
        (
            Tile(128, 256, 64, 8, 3, described=True, flat=False),
            Tile(256, 128, 64, 8, 4, described=True, flat=False, cost=1.02),
            Tile(128, 128, 64, 8, 4, described=True, cost=1.3),
        ),
    )
}
"""Time of cuBLAS as a multiple of the time of the tile that is chosen, for V4's products in bf16 (H100, torch 2.11,
Triton 3.6, 2026-11-27): 2,048 rows 0.81 to 1.00; 8,192 rows 0.92 to 1.05; 64 rows 0.99 to 1.07, and 0.86 to 0.96 for up
to SLIM columns; 1 and 16 rows 1.02 to 1.21, and 0.75 to 0.95. Inputs of layers with a compressor, with results in fp32,
in another run: 2,048 rows 0.93, and 0.91 in two launches in Pro; 8,192 rows 0.95, and 0.89 in Pro. `small` for more
rows than it has is chosen by its time for 64 rows.
"""
TWO_LAUNCHES = 0.9
"""Time of two launches, as a multiple of that of one, below which columns are divided between two tiles."""
DIVIDED_ROWS = 1024
"""Rows of a product from which columns may be divided: those of fewer take as long as their weights are read."""
SLIM = 2048
"""Columns of a product for which tiles of 64 columns are too few for all multiprocessors."""
GROUP = 8
"""Tiles of rows that share the weights that the cache of the device holds."""
UNIT = 16
"""Divides the columns of every product of a model, and the addresses of the rows of its result."""


def base_tile(arch: str) -> Tile:
    """The tile for operands of all forms, and for all products of architectures that `TILES` does not have."""
    return BASES.get(arch, BASE)


@lru_cache(4096)
def tile_for(rows: int, columns: int, arch: str, out_dtype: torch.dtype) -> Tile:
    """Tile of a product. No bits depend on it."""
    tiles = TILES.get(arch)
    if tiles is None:
        return base_tile(arch)
    if rows <= tiles.few.rows:
        return tiles.few
    if rows <= tiles.small.rows:
        return tiles.slim if columns <= SLIM else tiles.small
    return _fastest((*tiles.large_of(out_dtype), tiles.small), rows, columns)


def large_tile(rows: int, columns: int, arch: str, out_dtype: torch.dtype) -> Tile:
    """Large tile of a product, on an architecture of `TILES`."""
    return _fastest(TILES[arch].large_of(out_dtype), rows, columns)


def _fastest(tiles: tuple[Tile, ...], rows: int, columns: int) -> Tile:
    return min(tiles, key=lambda tile: _time(tile, rows, columns))


@lru_cache(4096)
def parts_of(rows: int, columns: int, arch: str, out_dtype: torch.dtype) -> tuple[tuple[Tile, int], ...]:
    """Tiles of a product, and how many columns each one makes. No bits depend on it.

    Where the last round of tiles would leave most multiprocessors without one, its columns have smaller tiles in a
    launch of their own.
    """
    one = tile_for(rows, columns, arch, out_dtype)
    tiles = TILES.get(arch)
    if tiles is None or rows < DIVIDED_ROWS:
        return ((one, columns),)
    parts: tuple[tuple[Tile, int], ...] = ((one, columns),)
    best = TWO_LAUNCHES * _time(one, rows, columns)
    for tile in tiles.large_of(out_dtype):
        in_round = multiprocessors() * tile.programs
        whole = -(-rows // tile.rows) * (columns // tile.columns) // in_round * in_round
        first = whole // -(-rows // tile.rows) * tile.columns
        if 0 < first < columns:
            last = tile_for(rows, columns - first, arch, out_dtype)
            time = _time(tile, rows, first) + _time(last, rows, columns - first)
            if time < best:
                best, parts = time, ((tile, first), (last, columns - first))
    return parts


def _time(tile: Tile, rows: int, columns: int) -> float:
    """Estimate of the time of a product with many rows: whole rounds of tiles on all multiprocessors."""
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
    rounds = -(-tiles // (multiprocessors() * tile.programs))
    return rounds * tile.programs * tile.rows * tile.columns * tile.cost


@without_modes
def linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """X [..., K] times weight [N, K] transposed, with fp32 sums: [..., N].

    Bits of a row depend neither on the other rows nor on how many there are.

    x: bf16; rows may lie apart. weight: bf16; rows may lie apart. Other dtypes, and elements that lie apart, are
        multiplied by torch, see `torch_ops.tiles.batch_invariant_linear`.
    out_dtype: of the result: bf16 or fp32; default: bf16.
    out: memory of the result, [..., N]; its dtype is that of the result.
    Raises ArgumentError before a launch unless x fits the weight, and out the result.
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        expected = f"[..., columns], with the columns of a matrix weight {list(weight.shape)}"
        raise ArgumentError("x", expected=expected, actual=list(x.shape))
    if out is not None:
        out_dtype = out.dtype
    elif out_dtype is None:
        out_dtype = torch.promote_types(x.dtype, weight.dtype)
    if not _is_served(x, weight, out_dtype):
        wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), out_dtype)
        result = batch_invariant_linear(x.to(wide), weight.to(wide)).to(out_dtype)
        return result if out is None else out.copy_(result)
    if out is None:
        out = x.new_empty(*x.shape[:-1], weight.shape[0], dtype=out_dtype)
    else:
        shape = " ".join(map(str, (*x.shape[:-1], weight.shape[0])))
        check_tensor("out", out, shape, out_dtype, {}, written=True)
    if out.numel():
        rows, columns = x.shape[:-1].numel(), weight.shape[0]
        flat, results, end = x.reshape(rows, x.shape[-1]), out.view(rows, columns), 0
        for tile, count in parts_of(rows, columns, architecture(), out.dtype):
            first, end = end, end + count
            product(flat, weight[first:end], results[:, first:end], tile)
    return out


def _is_served(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the kernels multiply these."""
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and out_dtype in (torch.bfloat16, torch.float32)
        and (x.stride(-1) == 1 or x.shape[-1] <= 1)
        and (weight.stride(-1) == 1 or weight.shape[-1] <= 1)
    )


def product(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> None:
    """Write x [T, K] times weight [N, K] transposed to out [T, N]. tile: of rows that can be read fast."""
    (rows, depth), columns, arch = x.shape, weight.shape[0], architecture()
    fast = columns % UNIT == 0 and depth > 0 and alignment_of_rows(x, weight, out) == WIDE
    if tile.described and fast:
        x_rows, w_rows = (
            TensorDescriptor(matrix, [*matrix.shape], [matrix.stride(0), 1], [size, tile.depth])
            for matrix, size in ((x, tile.rows), (weight, tile.columns))
        )
        m_tiles, n_tiles = cdiv(rows, tile.rows), cdiv(columns, tile.columns)
        launch(
            described_product_kernel,
            (min(m_tiles * n_tiles, multiprocessors() * tile.programs),),
            (out, x_rows, w_rows, rows, columns // UNIT, depth, out.stride(0)),
            _described_constants(tile, arch),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return
    fast = fast and depth % tile.depth == 0
    tile = tile if fast else base_tile(arch)
    launch(
        product_kernel,
        (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),),
        (
            x, weight, out, rows, columns // UNIT if fast else columns, depth, x.stride(0), weight.stride(0),
            out.stride(0),
        ),
        _constants(tile, arch, fast=fast, few=rows < tile.rows or not fast),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def _constants(tile: Tile, arch: str, *, fast: bool, few: bool) -> Constants:
    of_operands = {"FEW": few, "WHOLE": fast, "ALIGNED": WIDE if fast else 1, "UNIT": UNIT if fast else 1}
    return Constants({**tile_constants(tile, arch), "SWAPPED": tile.swapped, **of_operands})


@cache
def _described_constants(tile: Tile, arch: str) -> Constants:
    return Constants({**tile_constants(tile, arch), "SWAPPED": tile.swapped, "UNIT": UNIT, "FLAT": tile.flat})


def tile_constants(tile: Tile, arch: str) -> dict[str, Any]:
    """Constants of kernels that multiply rows of bf16."""
    return {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "GROUP": GROUP,
        # interpreted bf16 is multiplied as bit patterns, and sums of fp32 depend on the place of a row in its tile
        "DT": tl.float64 if INTERPRETED else tl.bfloat16,
        "EXACT_CASTS": not INTERPRETED,
        "PDL": uses_pdl(arch) and not INTERPRETED,
    }


@recorded
def variants(out_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> None:
    """Every variant that `linear` can need. out_dtypes: of results."""
    tiles, base = TILES.get(architecture()), base_tile(architecture())
    for out_dtype in out_dtypes:
        for tile in dict.fromkeys((*(tiles.every(out_dtype) if tiles else ()), base)):
            variants_of(tile, out_dtype)


@recorded
def variants_of(tile: Tile, out_dtype: torch.dtype) -> None:
    """Every variant of a tile; those of the base tile have all forms of operands."""
    for alignment in (WIDE, 1)[: 1 + (tile == base_tile(architecture()))]:
        x, weight = (
            meta_rows(n, tile.depth, dtype=torch.bfloat16, alignment=alignment) for n in (tile.rows, tile.columns)
        )
        out = meta_rows(tile.rows, tile.columns, dtype=out_dtype, alignment=alignment)
        for rows in (1, tile.rows):
            product(x[:rows], weight, out[:rows], tile)
