"""What a room may tune: numbers that change times, never results beyond rounding."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from dsv4attn.core.contract import Phase

__all__ = ["CDNA", "COMPILED", "DEFAULT", "HOPPER", "INTERPRETER", "RDNA", "Tuning", "row_of"]


@frozen
class Tuning:
    """Numbers of one architecture for `attention`."""

    heads: int = 64
    """Most heads one program attends: the rows of its matrix products."""
    keys: int = 64
    """Keys of a tile."""
    warps: int = 8
    narrow_warps: int = 4
    """Warps where a layer has too few heads to fill a program."""
    reduce_warps: int = 4
    reduce_parts: int = 1
    """Parts of a row that are loaded together where they are added up; a power of two; another one gives other bits. On
    an H200, 8 of them serve 8 tokens of 128 heads (4.0 us, not 4.2), and cost 64 tokens of 64 heads (8.1, not 5.5)."""
    chained: bool = True
    """Whether both products of a tile may share one layout; see `attention.product`."""
    prefetch: bool = True
    """Whether the next tile's records are in flight, in registers, while a tile is multiplied."""
    reload: bool = False
    """Whether registers are too few to hold q and keys: q is loaded for each tile, plain keys for each product."""
    assembly: bool = False
    """Whether codes are decoded four at a time in PTX; otherwise by plain integer operations."""
    run: int = 16
    """Tiles of a part when results must not depend on the batch."""
    measured: str = "not measured"
    """On what, when, and by which command; or that nobody did."""
    prefill: Tuning | None = None
    """Numbers of prefill, where they are others than those of decode."""

    def of(self, phase: Phase) -> Tuning:
        """Numbers of a phase."""
        return self.prefill or self if phase is Phase.PREFILL else self


COMPILED = "compiled with Triton 3.9, 2026-11-22: no spills, fits; not measured on this hardware"
"""What a row was chosen by that has run on no such device."""

_MEASURED = "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench decode prefill --backend triton"
# records in flight spill 4 to 24 bytes a thread, with Triton 3.6 and 3.9. Without them 8 tokens decode 1 to 8 % faster,
# 256 tokens 5 to 8 % slower: 1.024 of the time in the geometric mean of 12 shapes
HOPPER = Tuning(chained=False, assembly=True, prefetch=False, measured=_MEASURED)
"""sm_90, for every backend whose kernel is the shared one."""

# each block of heads unpacks keys anew, so 64 of them; 32 keys spill, with Triton 3.6 or where rows are gathered, and
# 8 warps take 50 % more instructions for each key
CDNA = Tuning(heads=64, keys=16, warps=4, run=32, measured=COMPILED)
"""gfx942 and gfx950, likewise."""

# a thread has 256 registers, and operands of the matrix unit take many: q is not held, and a tile has 16 keys
RDNA = Tuning(heads=16, keys=16, warps=8, narrow_warps=8, prefetch=False, reload=True, measured=COMPILED)
"""gfx1100, gfx1151 and gfx1201, likewise."""

INTERPRETER = Tuning(keys=128, measured="interpreted: large tiles, because there each operation costs the same")

DEFAULT = "default"
"""Name of the row for devices without one of their own; every table has it."""


def row_of(rows: Mapping[str, Tuning], arch: str, kind: str) -> Tuning:
    """The row of an architecture, else of its kind of device, else the default one."""
    return rows.get(arch) or rows.get(kind) or rows[DEFAULT]
