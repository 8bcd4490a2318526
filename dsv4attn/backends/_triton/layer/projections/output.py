"""Output projection in fp8: the launchers of `kernels_output`, with tiles by architecture and number of tokens.

Outputs are turned back and quantised, and multiplied by the codes of block-scaled weights. A scale of outputs has as
many columns as a scale of weights: 128 in checkpoints of V4, 32 in those of V4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from typing import Any, Final

import torch
import triton.language as tl
from attrs import evolve, frozen
from torch import Tensor

from dsv4attn.backends._triton.cache.records import alignment_of_rows, float_bits, row_alignments
from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.launching.recorded import meta_rows, recorded
from dsv4attn.backends._triton.launching.runtime import architecture, launch, multiprocessors
from dsv4attn.backends._triton.layer.projections.kernels_output import project_codes_kernel, quantize_output_kernel
from dsv4attn.backends._triton.sizes import cdiv, next_power_of_2
from dsv4attn.backends._triton.support import FP8_UNITS, ONE_ORDER
from dsv4attn.core.cache.layout import Fp8Format
from dsv4attn.core.model.quantized_weight import BlockScaledWeight
from dsv4attn.core.tensorspec import check_strides, check_tensor
from dsv4attn.errors import ArgumentError

AMAX_FLOOR = 1e-10
"""Smallest maximum of a group that is assumed, so that a group of zeros has a scale."""
FORMATS: Final = {torch.float8_e4m3fn: Fp8Format.OCP, torch.float8_e4m3fnuz: Fp8Format.FNUZ}
DTYPES: Final = {fp8_format: dtype for dtype, fp8_format in FORMATS.items()}
SCALES: Final = {"float32": torch.float32, "ue8m0": torch.uint8}
BLOCKS: Final = (128, 32)
"""Rows and columns under one scale of a weight, for which there are kernels."""
QUANTISED_HEADS = 32
QUANTISE_WARPS = 4


@frozen
class Tile:
    """Tokens and ranks of a tile, and warps and pipeline stages of its program.

    swapped: whether weights are the left operand, which has 64 rows or more on some matrix units.
    """

    tokens: int
    ranks: int
    warps: int
    stages: int
    swapped: bool = False


@frozen
class Tiles:
    """Tiles of one architecture.

    small: for as many tokens as it has, and fewer. middle: for up to 128. large: for more.
    single: instead of middle, the first that gives every multiprocessor at most one tile. Their stages do not fit twice
    on a multiprocessor. many: instead of large, if a product has MANY_TILES of it or more.
    """

    small: Tile
    middle: Tile
    large: Tile
    single: tuple[Tile, ...] = ()
    many: Tile | None = None

    def every(self) -> tuple[Tile, ...]:
        """All of them, each once."""
        found = self.small, self.middle, self.large, *self.single, self.many
        return tuple(tile for tile in dict.fromkeys(found) if tile)


MANY_TILES = 512
"""As 1,024 tokens of Flash have. Fewer were not measured."""
NATIVE_TILES = Tiles(Tile(16, 64, 4, 6, swapped=True), Tile(64, 64, 4, 6), Tile(64, 128, 4, 4))
HOPPER_TILES = evolve(
    NATIVE_TILES,
    single=(Tile(64, 64, 4, 10), Tile(128, 64, 8, 6)),
    many=Tile(128, 128, 8, 4),
)
"""For weights in blocks of 128 x 128. H100, torch 2.11, Triton 3.6, 2026-11-27, weights not in L2, Flash.

Microseconds of a launch that follows the quantisation of its outputs, which is not counted, and in parentheses with
`NATIVE_TILES`: 8 tokens 15.6, 32 tokens 17.9 (18.3), 64 tokens 17.9 (21.2), 128 tokens 21.3 (22.5), 256 tokens 30.3.
Of a launch by itself: 1,024 tokens 89.4 (91.7), 2,048 tokens 174.0 (183.6), 8,192 tokens 674 (768), 2,048 tokens of Pro
343.8 (393.1). With weights in L2 an H200 took 14.1 us for 64 tokens and 23.1 for 256, with `NATIVE_TILES` (2026-11-23).
Up to 128 tokens weights were then fetched into L2 ahead, for up to 1.2 us. Kernels of the backend for Hopper take less
time for most of these numbers of tokens, and have the same bits.
"""
DECODED_TILES = Tiles(Tile(16, 64, 4, 4), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3))
CDNA_TILES = Tiles(Tile(16, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2))
"""More stages are registers here, and Triton 3.6 fails to compile them."""
RDNA_TILES = Tiles(Tile(16, 64, 4, 1), Tile(64, 64, 8, 1), Tile(64, 64, 8, 1))
"""Larger tiles, or more stages, spill 256 registers of a thread (compiled with Triton 3.9; not measured)."""
DECODED: Mapping[str, Tiles] = {
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), CDNA_TILES),
    **dict.fromkeys(("gfx1100", "gfx1151", "gfx1201"), RDNA_TILES),
}


def is_native(fp8_format: Fp8Format, arch: str) -> bool:
    """Whether codes are multiplied as they are. Everywhere else they are decoded to fp16."""
    return fp8_format is Fp8Format.OCP and arch in FP8_UNITS and not INTERPRETED


def tiles_for(fp8_format: Fp8Format, arch: str, *, one_scale: bool = True) -> Tiles:
    """Tiles of an architecture. one_scale: whether no tile has two blocks of weights."""
    if not is_native(fp8_format, arch):
        return DECODED.get(arch, DECODED_TILES)
    return HOPPER_TILES if arch == "sm_90" and one_scale else NATIVE_TILES


def tile_of(
    tokens: int, ranks: int, fp8_format: Fp8Format, arch: str, *, deterministic: bool = False, one_scale: bool = True
) -> Tile:
    """Tile of a product.

    ranks: of all groups. deterministic: bits of a row must not depend on the tile. one_scale: whether no tile has two
    blocks of weights; the factors of others are multiplied in another order in swapped tiles.
    """
    tiles = tiles_for(fp8_format, arch, one_scale=one_scale)
    if deterministic and not (one_scale and arch in ONE_ORDER and is_native(fp8_format, arch)):
        return tiles.middle
    if tokens <= tiles.small.tokens:
        return tiles.small
    if tokens <= 128:
        for tile in tiles.single:
            if -(-tokens // tile.tokens) * ranks <= tile.ranks * multiprocessors():
                return tile
        return tiles.middle
    many = tiles.many
    return many if many and tokens * ranks >= MANY_TILES * many.tokens * many.ranks else tiles.large


def has_one_scale(block: int, rank: int) -> bool:
    """Whether no tile of a group's product has two blocks of weights."""
    return block == 128 and rank % block == 0


def inv_rope_fp8_quant(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    num_groups: int,
    *,
    fp8_format: Fp8Format = Fp8Format.OCP,
    scale_format: str = "float32",
    columns: int = 128,
) -> tuple[Tensor, Tensor]:
    """Undo the rotation of o [T, H, D], and quantise the result in fp32, some columns of a head by themselves.

    o: bf16 or fp32; it is not changed. positions: [T] int64. cos_sin_cache: [positions, rope_dim] fp32. columns: of a
    group that has one factor, 128 or 32. The factor is the smallest power of two with which the largest magnitude of
    the group, taken as at least 1e-10, fits. NaN, and infinity, become a NaN code. A row's bits do not depend on other
    rows.
    Returns codes [T, G, H / G * D] in the fp8 dtype of the format, and scales [T, G, H / G * D / columns], both dense:
    the factors in fp32, or, as "ue8m0", their exponents + 127 in uint8.
    Raises ArgumentError unless D is a multiple of `columns`.
    """
    tokens, heads, dim = o.shape
    if columns not in BLOCKS:
        raise ArgumentError("columns", expected=" or ".join(map(str, BLOCKS)), actual=columns)
    _check_head_dim(dim, columns)
    if scale_format not in SCALES:
        raise ArgumentError("scale_format", expected=f"one of {', '.join(SCALES)}", actual=repr(scale_format))
    check_strides(o=o, positions=positions, cos_sin_cache=cos_sin_cache)
    width = heads // num_groups * dim
    codes = torch.empty(tokens, num_groups, width, dtype=DTYPES[fp8_format], device=o.device)
    scales = torch.empty(tokens, num_groups, width // columns, dtype=SCALES[scale_format], device=o.device)
    facts = alignment_of_rows(o), fp8_format, architecture()
    constants = _quantise_constants(heads, dim, cos_sin_cache.shape[1], columns, *facts)
    launch(
        quantize_output_kernel,
        (tokens * cdiv(heads, constants["BLOCK_H"]) * (dim // columns),),
        (
            o, positions, cos_sin_cache, codes.view(torch.uint8), scales, o.stride(0), o.stride(1),
            cos_sin_cache.stride(0), cos_sin_cache.shape[0],
        ),
        constants,
        num_warps=QUANTISE_WARPS,
        fp_fusion=False,
    )  # fmt: skip
    return codes, scales


def multiply_codes(
    codes: Tensor, scales: Tensor, wo_a: BlockScaledWeight, out: Tensor, *, deterministic: bool = False
) -> None:
    """Write what `fp8_o_proj` returns to out [T, G, rank]. Arguments are not checked."""
    tokens, groups, rank = out.shape
    fp8_format, one_scale = FORMATS[wo_a.weight.dtype], has_one_scale(wo_a.block_size[0], rank)
    tile = tile_of(tokens, groups * rank, fp8_format, architecture(), deterministic=deterministic, one_scale=one_scale)
    multiply_with(tile, codes, scales, wo_a, out)


def multiply_with(tile: Tile, codes: Tensor, scales: Tensor, wo_a: BlockScaledWeight, out: Tensor) -> None:
    """`multiply_codes` with a tile."""
    (tokens, groups, width), rank = codes.shape, out.shape[2]
    weight, w_scales, block = wo_a.weight, as_numbers(wo_a.scale), wo_a.block_size[0]
    launch(
        project_codes_kernel,
        (groups * cdiv(tokens, tile.tokens) * cdiv(rank, tile.ranks),),
        (
            codes.view(torch.uint8), scales, weight.view(torch.uint8), w_scales, out, tokens,
            codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), weight.stride(0),
            w_scales.stride(0), w_scales.stride(1), out.stride(0), out.stride(1),
        ),
        _project_constants(
            tile, rank, width, block, FORMATS[weight.dtype], alignment_of_rows(out), architecture()
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def fp8_o_proj(
    codes: Tensor,
    scales: Tensor,
    wo_a: BlockScaledWeight,
    num_groups: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    multiply: Callable[..., None] = multiply_codes,
) -> Tensor:
    """Multiply each group of quantised outputs by its own matrix: [T, G, rank] in `dtype`.

    codes, scales: as `inv_rope_fp8_quant` returns them, in the fp8 dtype of the weight; rows may lie apart. wo_a:
    [G * rank, K] in blocks of 128 x 128 or 32 x 32, whose rows begin at multiples of 16 bytes. Codes have a scale for
    as many columns. Sums of the columns under one scale, times both factors, are added in fp32; a NaN code of either
    makes what it is multiplied into NaN. deterministic: bits of a row do not depend on T; otherwise tiles, and with
    them the order of sums, follow T. With whole blocks of 128 x 128 all kernels and tiles of Hopper give equal bits,
    so that deterministic calls use them too. multiply: `multiply_codes`, or what does the same.
    Raises ArgumentError unless K is a multiple of these columns, both are of one fp8 dtype, and rows are aligned.
    """
    tokens, rank = codes.shape[0], wo_a.weight.shape[0] // num_groups
    _check_operands(codes, scales, wo_a.weight, num_groups, _block_of(wo_a))
    out = torch.empty(tokens, num_groups, rank, dtype=dtype, device=codes.device)
    multiply(codes, scales, wo_a, out, deterministic=deterministic)
    return out


def project_fp8(
    o: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    wo_a: BlockScaledWeight,
    num_groups: int,
    *,
    deterministic: bool = False,
    multiply: Callable[..., None] = multiply_codes,
) -> Tensor:
    """Undo the rotation of o [T, H, D], quantise the result, and project each group of its heads: [T, G, rank] like o.

    See `inv_rope_fp8_quant` and `fp8_o_proj`; arguments are checked before the first launch. multiply: is
    called directly after `inv_rope_fp8_quant`.
    """
    columns = _block_of(wo_a)
    _check_head_dim(o.shape[2], columns)
    _check_rows(wo_a.weight)
    fp8_format = FORMATS[wo_a.weight.dtype]
    codes, scales = inv_rope_fp8_quant(o, positions, cos_sin_cache, num_groups, fp8_format=fp8_format, columns=columns)
    return fp8_o_proj(codes, scales, wo_a, num_groups, dtype=o.dtype, deterministic=deterministic, multiply=multiply)


def transient_bytes(max_tokens: int, heads: int, dim: int) -> int:
    """Upper bound on the temporaries of `project_fp8`: codes of outputs, and their scales in fp32."""
    return max_tokens * heads * (dim + 4 * -(-dim // min(BLOCKS)))


def _block_of(wo_a: BlockScaledWeight) -> int:
    """Rows and columns under one scale. Raises ArgumentError for blocks that the kernels do not take."""
    rows, columns = wo_a.block_size
    if rows != columns or columns not in BLOCKS:
        expected = f"blocks of {' or '.join(f'{n} x {n}' for n in BLOCKS)} in a product of codes"
        hint = "project in bf16: option projection=bf16"
        raise ArgumentError("wo_a.block_size", expected=expected, actual=f"{rows} x {columns}", hint=hint)
    return columns


def _check_head_dim(dim: int, columns: int) -> None:
    if dim % columns:
        expected = f"a head dim that is a multiple of {columns}, the columns under one scale"
        raise ArgumentError("o", expected=expected, actual=dim, hint="project in bf16: option projection=bf16")


def _check_rows(weight: Tensor) -> None:
    check_strides(**{"wo_a.weight": weight})
    if alignment_of_rows(weight) < WIDE:
        expected, hint = f"rows that begin at multiples of {WIDE} bytes", "pass a copy of it: wo_a.weight.clone()"
        actual = f"address {weight.data_ptr()}, rows {weight.stride(0)} apart"
        raise ArgumentError("wo_a.weight", expected=expected, actual=actual, hint=hint)


def _check_operands(codes: Tensor, scales: Tensor, weight: Tensor, num_groups: int, block: int) -> None:
    """Raise ArgumentError unless codes and weight fit each other, and the kernel."""
    tokens, _, width = codes.shape
    if weight.shape[0] % num_groups or weight.shape[1] != width or width % block:
        expected = f"[{num_groups} * rank, {width}], a matrix for each group, and a multiple of {block} columns"
        raise ArgumentError("wo_a.weight", expected=expected, actual=list(weight.shape))
    letters = {"T": tokens, "G": num_groups}
    check_tensor("codes", codes, f"T G {width}", weight.dtype, letters, like="wo_a.weight")
    check_tensor("scales", scales, f"T G {width // block}", (*SCALES.values(),), letters)
    _check_rows(weight)
    if alignment_of_rows(codes) < WIDE:
        expected, hint = f"rows that begin at multiples of {WIDE} bytes", "pass codes.clone()"
        raise ArgumentError("codes", expected=expected, actual=f"strides {list(codes.stride())}", hint=hint)


def as_numbers(scales: Tensor) -> Tensor:
    """Scales in fp32, or the exponents of others as uint8."""
    return scales if scales.dtype == torch.float32 else scales.view(torch.uint8)


@cache
def _quantise_constants(
    heads: int, dim: int, rope: int, columns: int, aligned: int, fp8_format: Fp8Format, arch: str
) -> Constants:
    dims = {"HEADS": heads, "BLOCK_H": min(QUANTISED_HEADS, next_power_of_2(heads)), "DIM": dim, "ROPE": rope}
    bounds = {"LARGEST": float_bits(fp8_format.max), "FLOOR": float_bits(AMAX_FLOOR)}
    of_codes = {"GROUP": columns, "ALIGNED": aligned, "FNUZ": fp8_format is Fp8Format.FNUZ, **bounds}
    return Constants({**dims, **of_codes, "PDL": uses_pdl(arch) and not INTERPRETED})


@cache
def _project_constants(
    tile: Tile, rank: int, width: int, block: int, fp8_format: Fp8Format, out_aligned: int, arch: str
) -> Constants:
    overlapped, native = uses_pdl(arch) and not INTERPRETED, is_native(fp8_format, arch)
    of_tile = {"BLOCK_M": tile.tokens, "BLOCK_N": tile.ranks, "SWAPPED": tile.swapped, "OUT_ALIGNED": out_aligned}
    # interpreted, fp16 is summed in fp16
    of_codes = {"NATIVE": native, "FNUZ": fp8_format is Fp8Format.FNUZ, "DT": tl.float32 if INTERPRETED else tl.float16}
    fixed = {"EXACT_CASTS": not INTERPRETED, "PDL": overlapped}
    return Constants({"RANK": rank, "K": width, "GROUP": block, **of_tile, **of_codes, **fixed})


@recorded
def variants(
    heads: int,
    head_dim: int,
    rope: int,
    num_groups: int,
    rank: int,
    dtype: torch.dtype,
    *,
    aligned: bool = True,
    blocks: tuple[int, ...] = BLOCKS,
) -> None:
    """Every variant that `project_fp8` can need.

    dtype: of outputs. aligned: whether their rows begin at multiples of 16 bytes. blocks: rows and columns under one
    scale of weights; head dims that are no multiple of them have no form.
    """
    positions, table = meta_rows(2, dtype=torch.int64), meta_rows(2, rope, dtype=torch.float32)
    ranks, width = num_groups * rank, heads // num_groups * head_dim
    for block, fp8_format in product([b for b in blocks if b in BLOCKS and not head_dim % b], Fp8Format):
        for rows in row_alignments(head_dim, dtype, aligned=aligned):
            o = meta_rows(2, heads, head_dim, dtype=dtype, alignment=rows)
            options: dict[str, Any] = {"fp8_format": fp8_format, "columns": block}
            codes, scales = inv_rope_fp8_quant(o, positions, table, num_groups, **options)
        weight = meta_rows(ranks, width, dtype=fp8_format.dtype)
        tiles = tiles_for(fp8_format, architecture(), one_scale=has_one_scale(block, rank)).every()
        outs = row_alignments(rank, dtype, aligned=True)
        for tile, scale_dtype, out_rows in product(tiles, (torch.float32, torch.uint8), outs):
            factors = meta_rows(cdiv(ranks, block), cdiv(width, block), dtype=scale_dtype)
            wo_a = BlockScaledWeight(weight, factors, block_size=(block, block))
            out = meta_rows(2, num_groups, rank, dtype=dtype, alignment=out_rows)
            multiply_with(tile, codes, scales, wo_a, out)
