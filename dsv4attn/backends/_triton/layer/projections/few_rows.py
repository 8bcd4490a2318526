"""Products of few rows with bf16 weights, or with e4m3 codes as they are: the launchers of `kernels_few_rows`.

Bits of a row depend neither on the number of rows nor on the tile, where all tiles use one kind of instruction, and are
those of a product with the bf16 copy of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch
from dsv4attn.backends._triton.layer.projections.kernels_few_rows import few_rows_kernel
from dsv4attn.backends._triton.layer.projections.products import UNIT, Tile, tile_constants
from dsv4attn.backends._triton.sizes import cdiv
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.core.model.weight_scales import factors_of
from dsv4attn.core.reprs import frozen

BLOCK = 128
"""Rows and columns under one scale of codes."""
PLAIN_RUN = 128
"""Columns that follow each other in every operand, of products whose inputs are not heads."""
HEAD_RUN = 64
"""The same of products whose inputs are heads."""


@frozen
class CodedTiles:
    """Tiles of products with codes on an architecture, and which of these products take less time than those of bf16.

    tiles: with ascending rows; a product has the first tile that has as many rows, and none has more than the last.
    least_columns: of a weight; tiles of fewer columns do not fill the device.
    """

    tiles: tuple[Tile, ...]
    least_columns: int

    def of(self, rows: int) -> Tile:
        """The tile of a product."""
        return next(tile for tile in self.tiles if rows <= tile.rows)


CODED: Mapping[str, CodedTiles] = {
    "sm_90": CodedTiles((Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3)), least_columns=7168)
}
"""Tiles of products with codes by architecture. No codes are read on architectures that are not here.

Bits of a tile are compared with those of `products` on a device before it is here. The time of `products` as a multiple
of that of these on an H100, by rows (Triton 3.6, 2026-11-27):

    weight                 1      16     32     64
    wq_b, 64 heads         1.74   1.65   1.53   1.18
    of the indexer         1.27   1.27   1.22   1.02
    wo_b of Pro            1.39   1.33   1.37   1.01
    wo_b of Flash          0.98   0.97   0.97   0.68   (4,096 columns)
"""
HEADS: Mapping[str, tuple[Tile, ...]] = {"sm_90": (Tile(16, 64, 128, 4, 6), Tile(64, 64, 64, 4, 8))}
"""Tiles of products of heads with bf16 weights, as `CodedTiles.tiles`; `projection.MANY` has their times."""
_POWERS = range(127 - 30, 127 + 31)
"""Exponent fields of factors with which sums can be in units of a factor: no unit makes a sum too large or small.

On an H100 (2026-11-27) bits were those of products with bf16 copies for factors of 2^-30 to 2^30, and not for those of
2^-60 to 2^60, with which sums of small rows become subnormal in some unit.
"""


@frozen
class Heads:
    """What the inputs of a product are: heads, of which the trailing columns are read from another tensor.

    nope, rope: columns of a head. turned: [rows, groups * heads * rope], dense: the trailing columns.
    """

    nope: int
    rope: int
    turned: Tensor

    @property
    def run(self) -> int:
        """Columns that follow each other in every operand."""
        return HEAD_RUN


def is_served(x: Tensor, weight: Tensor | BlockScaledWeight, out: Tensor, tile: Tile, num_groups: int = 1) -> bool:
    """Whether the kernel multiplies these."""
    if isinstance(weight, BlockScaledWeight):
        if weight.block_size != (BLOCK, BLOCK) or BLOCK % tile.depth or BLOCK % tile.columns:
            return False
        codes, dtype = weight.weight, torch.float8_e4m3fn
    else:
        codes, dtype = weight, torch.bfloat16
    columns, depth = codes.shape
    return (
        alignment_of_rows(x, codes, out) == WIDE
        and x.stride(-1) == codes.stride(-1) == out.stride(-1) == 1
        and depth > 0
        and depth % tile.depth == 0
        and columns % (num_groups * tile.columns) == 0
        and codes.dtype == dtype
    )


def most_rows(weight: BlockScaledWeight) -> int:
    """See `CodedProducts.rows`. Waits for the device, as all factors must be powers of two."""
    coded = CODED.get(architecture())
    columns, depth = weight.weight.shape
    # scales on the meta device have no values
    if coded is None or columns < coded.least_columns or weight.scale.is_meta:
        return 0
    x = weight.weight.new_empty(0, depth, dtype=torch.bfloat16)
    if not all(is_served(x, weight, x.new_empty(0, columns), tile) for tile in coded.tiles):
        return 0
    return coded.tiles[-1].rows if _are_powers(weight.scale) else 0


def _are_powers(scale: Tensor) -> bool:
    """Whether all factors are powers of two, and none so large or small that sums cannot be in units of it."""
    bits = factors_of(scale).view(torch.int32)
    # the fields of negative factors are negative here
    exponents = bits >> 23
    is_power = ((bits & 0x7FFFFF) == 0) & (exponents >= _POWERS[0]) & (exponents <= _POWERS[-1])
    return bool(is_power.all())


def multiply_codes(x: Tensor, weight: BlockScaledWeight, out: Tensor) -> None:
    """See `CodedProducts.multiply`. x has at most `most_rows(weight)` rows."""
    rows = x.reshape(-1, x.shape[-1])
    # not flatten, which copies where rows do not follow each other at one distance
    out = out.view(rows.shape[0], out.shape[-1])
    if rows.stride(-1) != 1 or alignment_of_rows(rows) < WIDE:
        rows = rows.clone(memory_format=torch.contiguous_format)
    multiply(rows, weight, out, CODED[architecture()].of(rows.shape[0]))


def multiply(
    x: Tensor,
    weight: Tensor | BlockScaledWeight,
    out: Tensor,
    tile: Tile,
    num_groups: int = 1,
    heads: Heads | None = None,
) -> None:
    """Write x [T, G * K] times each group's matrix of a weight [G * N, K], transposed, to out [T, G * N].

    heads: of x, if some of their columns are read from another tensor.
    """
    if isinstance(weight, BlockScaledWeight):
        codes, scales = weight.weight.view(torch.uint8), weight.scale
        scales = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
    else:
        codes = scales = weight
    (columns, depth), rows = codes.shape, x.shape[0]
    turned = x if heads is None else heads.turned
    dims = (0, 0, PLAIN_RUN) if heads is None else (heads.nope, heads.rope, heads.run)
    launch(
        few_rows_kernel,
        (cdiv(rows, tile.rows) * cdiv(columns, tile.columns),),
        (
            x, turned, codes, scales, out, rows, columns // UNIT, depth, columns // num_groups // UNIT, x.stride(0),
            turned.stride(0), codes.stride(0), scales.stride(0), scales.stride(1), out.stride(0),
        ),
        _constants(tile, *dims, architecture(), coded=codes is not weight),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@cache
def _constants(tile: Tile, nope: int, rope: int, run: int, arch: str, *, coded: bool) -> Constants:
    of_heads = {"NOPE": nope, "ROPE": rope, "RUN": run}
    return Constants({**tile_constants(tile, arch), **of_heads, "CODED": coded, "BLOCK": BLOCK, "UNIT": UNIT})


@recorded
def variants() -> None:
    """Every variant of products with codes that a layer can need."""
    coded = CODED.get(architecture())
    for tile in () if coded is None else coded.tiles:
        for dtype in (torch.float32, torch.uint8):
            variants_of(tile, torch.bfloat16, dtype)


@recorded
def variants_of(tile: Tile, out_dtype: torch.dtype, scales: torch.dtype | None) -> None:
    """The variant of a tile. scales: dtype of the scales of codes; None: of a product with bf16."""
    x, weight = (meta_rows(BLOCK, BLOCK, dtype=dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    of_codes = x if scales is None else BlockScaledWeight(weight, meta_rows(1, 1, dtype=scales))
    multiply(x, of_codes, meta_rows(BLOCK, BLOCK, dtype=out_dtype), tile)
