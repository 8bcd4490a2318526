"""Tuning tables of the hyper-connections: tiles and blocks by architecture and number of tokens.

They change how long kernels take, and results only by rounding. The functions at the end return the constants that a
kernel is compiled with for a tile or a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from attrs import evolve, frozen

from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.backends._triton.sizes import next_power_of_2

LEAST = 16
"""Smallest number of columns of a matrix product."""
MOST_SPLITS = 128
"""Largest number of splits that are added at a time."""


@frozen
class Tile:
    """How a program of the first launch works.

    tokens, columns: of a tile of each stream.
    warps, stages: of a program.
    held: whether the factors of the program's columns stay in shared memory while the program goes from tile to tile.
       Otherwise a program has one tile.
    programs: with held factors, the largest number of programs on a multiprocessor.
    spills: bytes that a thread may store and load because it has too few registers.
    """

    tokens: int
    columns: int
    warps: int
    stages: int = 1
    held: bool = False
    programs: int = 1
    spills: int = 0


SMALL = Tile(16, 32, 4)
"""For a few tokens, for fp32, and for unaligned rows."""


@frozen
class Block:
    """Tokens and columns of a program of the other launches, and its warps."""

    tokens: int
    columns: int
    warps: int


@frozen
class Tuning:
    """Tiles and blocks of one architecture.

    few, many: tiles of `products_kernel` for up to FEW tokens, and for more tokens.
    fused_few, fused_many: the same where the kernel makes new streams too.
    plain: tile for fp32 and for unaligned rows.
    chunk: tokens of a pair of launches.
    mix_few, mix_many: blocks of `mix_kernel`.
    whole_few, whole_many: blocks of `mix_kernel` with a norm, where a program makes all columns of its tokens, a block
       at a time.
    heads_few, heads_many: tokens of the programs of `mix_kernel` that make post and comb.
    summed: elements of the tile in which these programs add splits.
    by_factors: whether these programs compute Sinkhorn's iterations by factors of rows and columns, on NVIDIA.
    early: whether the other programs of `mix_kernel` first load what does not depend on tokens; the weight of the norm
       only if one block has all columns.
    overlapped: whether the second launch begins before the first has ended, for up to FEW tokens, on Hopper.
    post: block of `post_kernel`.
    """

    few: Tile = SMALL
    many: Tile = Tile(64, 64, 8, held=True, programs=1)
    fused_few: Tile = SMALL
    fused_many: Tile = Tile(64, 64, 8, held=True, programs=1)
    plain: Tile = SMALL
    chunk: int = 1024
    mix_few: Block = Block(1, 1024, 4)
    mix_many: Block = Block(1, 4096, 8)
    whole_few: Block = Block(1, 8192, 8)
    whole_many: Block = Block(1, 8192, 8)
    heads_few: int = 1
    heads_many: int = 8
    summed: int = 8192
    by_factors: bool = False
    early: bool = False
    overlapped: bool = False
    post: Block = Block(1, 2048, 4)


DEFAULT = Tuning()
HOPPER = Tuning(
    many=Tile(128, 64, 8, stages=3, held=True),
    # a tile of 64 x 32 takes up to 1.5 times as long; Triton 3.6 spills 4 bytes, Triton 3.9 28
    fused_many=Tile(64, 64, 4, held=True, programs=2, spills=56),
    mix_many=Block(1, 4096, 4),
    whole_few=Block(1, 8192, 4),
    whole_many=Block(1, 8192, 4),
    heads_many=4,
    by_factors=True,
    early=True,
    overlapped=True,
)
"""docs/kernel-notes.md has the times."""
CDNA = Tuning(many=Tile(32, 64, 4), fused_many=Tile(16, 64, 4))
_NARROW = Tile(16, 32, 8)
RDNA = Tuning(few=_NARROW, many=_NARROW, fused_few=_NARROW, fused_many=_NARROW, plain=_NARROW)
_WIDE, _HELD, _BLOCK = Tile(16, 512, 4), Tile(64, 512, 4, held=True), Block(64, 4096, 4)
INTERPRETER = Tuning(
    few=_WIDE,
    many=_HELD,
    fused_few=_WIDE,
    fused_many=_HELD,
    plain=_HELD,
    mix_few=_BLOCK,
    mix_many=_BLOCK,
    whole_few=_BLOCK,
    whole_many=_BLOCK,
    heads_few=64,
    heads_many=64,
    summed=2**15,
    post=_BLOCK,
)
"""Large tiles, because there each operation costs the same."""
TUNINGS: Mapping[str, Tuning] = {
    "sm_90": HOPPER,
    "gfx90a": CDNA,
    "gfx942": CDNA,
    "gfx950": CDNA,
    "gfx1100": RDNA,
    "gfx1151": RDNA,
    "gfx1201": RDNA,
    "cpu": INTERPRETER,
}
FIXED: Mapping[str, Tuning] = {
    "sm_90": evolve(HOPPER, many=Tile(64, 32, 4, 3, held=True, programs=2), heads_many=2),
}
"""Of deterministic calls, which take tiles and blocks of many tokens for any number of tokens. An architecture without
a row has that of `TUNINGS`.

H100, torch 2.11, Triton 3.6, 2026-11-27, us of `mhc_pre`, measured without `by_factors` and `early`:

| tokens, hidden size | this row | that of `TUNINGS`, for many tokens | plain calls |
|---|---|---|---|
| 64, 4,096 | 11.1 | 15.5 | 11.1 |
| 2,048, 4,096 | 92.3 | 78.0 | 77.7 |
| 64, 7,168 | 13.5 | 17.0 | 13.5 |
| 2,048, 7,168 | 163.0 | 125.9 | 125.7 |
"""
MOST_STREAMS = 4
"""Largest number of streams of the large tiles."""
FEW = 64
"""Largest number of tokens of the tiles for a few tokens."""
LEAST_EPS = 1e-30
"""Smallest epsilon of Sinkhorn's iterations by factors, which may become as large as one over it."""


def tuning_for(arch: str, *, deterministic: bool = False) -> Tuning:
    """The tuning of plain or deterministic calls on an architecture."""
    tuning = TUNINGS.get(arch, DEFAULT)
    return FIXED.get(arch, tuning) if deterministic else tuning


def tile_of(tuning: Tuning, tokens: int, n: int, dtype: torch.dtype, aligned: int, *, fused: bool) -> Tile:
    """Tile of the first launch for n streams of this dtype. aligned: bytes that divide the address of every row.

    The factors of more than four streams are too many to stay in shared memory.
    """
    if n > MOST_STREAMS:
        return tuning.plain if dtype != torch.bfloat16 or aligned < WIDE else tuning.few
    if dtype != torch.bfloat16 or aligned < WIDE:
        return tuning.plain
    if tokens <= FEW:
        return tuning.fused_few if fused else tuning.few
    return tuning.fused_many if fused else tuning.many


def heads_of(tuning: Tuning, count: int) -> int:
    """Tokens of a program of the second launch that makes post and comb. count: tokens of the call."""
    return tuning.heads_few if count <= FEW else tuning.heads_many


def uses_factors(tuning: Tuning, n: int, eps: float) -> bool:
    """Whether Sinkhorn's iterations of n streams change factors of rows and columns. eps: theirs.

    Matrices of more than four streams are too large for the registers of a thread.
    """
    return tuning.by_factors and n <= MOST_STREAMS and eps >= LEAST_EPS


def overlaps(tuning: Tuning, count: int) -> bool:
    """Whether the second launch begins before the first has ended. count: tokens that tiles are chosen for."""
    return tuning.overlapped and count <= FEW and uses_pdl("sm_90") and not INTERPRETED


def mix_block(tuning: Tuning, count: int, dtype: torch.dtype, *, normed: bool) -> Block:
    """Block of the second launch. count: tokens of the call. Columns take as many registers in every dtype."""
    few, many = (tuning.whole_few, tuning.whole_many) if normed else (tuning.mix_few, tuning.mix_many)
    block = few if count <= FEW else many
    return evolve(block, columns=block.columns // 2) if dtype == torch.float32 else block


def alignment(hidden: int, dtype: torch.dtype) -> int:
    """Alignment of the rows of a dense tensor [.., hidden]."""
    return 1 if hidden * dtype.itemsize % WIDE else WIDE


@cache
def products_constants(
    tile: Tile, n: int, hidden: int, mixes: int, dtype: torch.dtype, aligned: int, fn_aligned: int, *, overlapped: bool
) -> Constants:
    dims = {"N": n, "HIDDEN": hidden, "MIXES": mixes, "BLOCK_C": max(next_power_of_2(mixes), LEAST)}
    of_tile = {"BLOCK_M": tile.tokens, "BLOCK_K": tile.columns, "STAGES": tile.stages, "HELD": tile.held}
    rows = {"ALIGNED": aligned, "FN_ALIGNED": fn_aligned, "OUT_ALIGNED": alignment(hidden, dtype)}
    # interpreted bf16 is multiplied as bit patterns
    casts = {"IN_BF16": dtype == torch.bfloat16 and not INTERPRETED, "EXACT_CASTS": not INTERPRETED}
    return Constants({**dims, **of_tile, **rows, **casts, "NEXT": overlapped})


@cache
def post_constants(block: Block, n: int, hidden: int, aligned: int, out_aligned: int) -> Constants:
    dims = {"N": n, "HIDDEN": hidden, "BLOCK_M": block.tokens, "BLOCK": min(block.columns, next_power_of_2(hidden))}
    return Constants({**dims, "ALIGNED": aligned, "OUT_ALIGNED": out_aligned, "EXACT_CASTS": not INTERPRETED})


@cache
def mix_constants(
    block: Block, rows: int, summed: int, n: int, hidden: int, mixes: int, splits: int,
    aligned: int, norm_aligned: int, out_aligned: int, *, by_factors: bool, early: bool, overlapped: bool,
) -> Constants:  # fmt: skip
    added, most = max(summed // (rows * next_power_of_2(mixes + 1)), 1), next_power_of_2(splits)
    sums = {"SPLITS": splits, "BLOCK_R": rows, "BLOCK_S": min(most, added), "BLOCK_A": min(most, MOST_SPLITS)}
    how = {"NORM_ALIGNED": norm_aligned, "BY_FACTORS": by_factors, "EARLY": early, "PDL": overlapped}
    return Constants({**post_constants(block, n, hidden, aligned, out_aligned), "MIXES": mixes, **sums, **how})
