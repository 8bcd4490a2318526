"""Tuning tables of the shared attention kernels: numbers that change times, and results only by rounding."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.core.contract.backend import Phase

__all__ = ["CDNA", "COMPILED", "DEFAULT", "HOPPER", "INTERPRETER", "RDNA", "Tuning", "padded", "tuning_for"]


@frozen
class Tuning:
    """Numbers of one architecture for `attention` and `reduce`.

    heads: most heads of a program, the rows of its matrix products. keys: of a tile. warps: of a program; narrow_warps:
    of a program that has fewer heads. reduce_warps: of a program that combines splits.
    reduce_parts: splits that are loaded together to be combined, a power of two; other numbers give other bits. On an
    H200, 8 of them are faster for 8 tokens of 128 heads (4.0 us, not 4.2) and slower for 64 tokens of 64 heads (8.1 us,
    not 5.5).
    chained: whether both products of a tile may share one layout; see `attention.product`.
    prefetch: whether the next tile's records are in flight, in registers, while a tile is multiplied.
    reload: whether registers are too few for q and keys: q is loaded for each tile, plain keys for each product.
    assembly: whether codes are decoded four at a time in PTX; otherwise by plain integer operations.
    converts: whether that PTX converts codes of OCP's e4m3, which the processor then has to have instructions for.
    run: tiles of a split when results must not depend on the batch.
    pdl: whether launches overlap, see `launching.kernels_pdl`; set by `on`.
    measured: on what, when, and by which command; or that nothing was measured.
    prefill: numbers of prefill, if they differ from those of decode.
    small: numbers of decodes so small that each program has one tile, see `of_call`.
    """

    heads: int = 64
    keys: int = 64
    warps: int = 8
    narrow_warps: int = 4
    reduce_warps: int = 4
    reduce_parts: int = 1
    chained: bool = True
    prefetch: bool = True
    reload: bool = False
    assembly: bool = False
    converts: bool = False
    run: int = 16
    pdl: bool = False
    measured: str = "not measured"
    prefill: Tuning | None = None
    small: tuple[Tuning, ...] = ()

    def of(self, phase: Phase) -> Tuning:
        """The tuning of a phase."""
        return self.prefill or self if phase is Phase.PREFILL else self

    def of_call(self, tokens: int, heads: int, width: int, programs: int) -> Tuning:
        """The first of `small` with which each tile of a decode has one of so many programs to itself; else these.

        tokens, heads, width: of the decode, whose rows have at most so many keys. Rows of one tile are not split.
        """
        for one in self.small:
            if width > one.keys and tokens * one.blocks(heads) * -(-width // one.keys) <= programs:
                return one
        return self

    def blocks(self, heads: int) -> int:
        """Programs that share the heads of a token."""
        return -(-heads // min(self.heads, padded(heads)))

    def on(self, arch: str) -> Tuning:
        """These numbers on an architecture, which may be another than the one that they were measured on."""
        converts = self.converts and arch.startswith("sm_") and int(arch[3:]) >= _CONVERTING
        small = tuple(one.on(arch) for one in self.small)
        prefill = self.prefill and self.prefill.on(arch)
        there = evolve(self, pdl=uses_pdl(arch), converts=converts, prefill=prefill, small=small)
        return self if there == self else there


_CONVERTING = 89
"""NVIDIA's first architecture with instructions that convert e4m3 codes."""


def padded(n: int) -> int:
    """The smallest power of two that is at least n, and at least what a matrix product takes."""
    return max(16, 1 << (n - 1).bit_length())


COMPILED = "compiled with Triton 3.9, 2026-11-22: no spills, fits; not measured on this hardware"
"""`measured` of a row that has run on no such device."""

_MEASURED = (
    "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench decode prefill --backend triton, before conversions"
)
# records in flight spill 4 to 24 bytes a thread, with Triton 3.6 and 3.9, which the gates forbid; they would save 5 and
# 3 % for 64 and 256 tokens of c4a. Conversions save 4, 7 and 4 % for 8, 64 and 256 tokens, beside shifts (2026-11-25)
# programs of 16 and 32 heads take 0.65 to 0.88 of the time with 8 warps, and with 4 spill
_LARGE = Tuning(narrow_warps=8, chained=False, assembly=True, converts=True, prefetch=False, measured=_MEASURED)
# a program of few heads loads less of q and stores less of a part, and decodes its keys anew
_MEASURED_SMALL = "H200, torch 2.11, Triton 3.6, 2026-11-23: 1 to 32 tokens, 12 forms beside each other"
_SMALL = evolve(_LARGE, chained=True, measured=_MEASURED_SMALL)
HOPPER = evolve(
    _LARGE,
    small=(
        evolve(_SMALL, heads=16, keys=32, reduce_parts=8),
        evolve(_SMALL, heads=16, reduce_parts=8),
        evolve(_SMALL, heads=32),
    ),
)
"""sm_90, for every backend that uses the shared kernel."""

# each block of heads unpacks keys anew, so 64 of them; 32 keys spill, with Triton 3.6 or where rows are gathered, and
# 8 warps take 50 % more instructions for each key
CDNA = Tuning(heads=64, keys=16, warps=4, run=32, measured=COMPILED)
"""gfx942 and gfx950."""

# a thread has 256 registers, and operands of the matrix unit take many: q is not held, and a tile has 16 keys
RDNA = Tuning(heads=16, keys=16, warps=8, narrow_warps=8, prefetch=False, reload=True, measured=COMPILED)
"""gfx1100, gfx1151 and gfx1201."""

INTERPRETER = Tuning(keys=128, measured="interpreted: large tiles, because there each operation costs the same")

DEFAULT = "default"
"""Name of the row for all other devices; every table has it."""


def tuning_for(table: Mapping[str, Tuning], arch: str, kind: str) -> Tuning:
    """The row of an architecture, else of its kind of device, else the default row."""
    return table.get(arch) or table.get(kind) or table[DEFAULT]
