"""Tuning tables of the shared attention kernels. A tuning changes times, and results only by rounding."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from dsv4attn.backends._triton.launching.pdl import uses_pdl
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind

MOST_ROWS = 8
"""Rows of a group."""
SHARING_HEADS = 16
"""Fewest heads of window-only layers whose decodes are computed in groups. 64 requests of 4 tokens with groups and
without (H200, torch 2.11, Triton 3.6, 2026-11-28): 21.7 us and 20.8 with 8 heads, 20.3 and 22.7 with 16, 23.3 and 30.7
with 32."""


@frozen
class Tuning:
    """Numbers of one architecture for `attention` and `reduce`.

    heads: largest number of heads of a program, which are the rows of its matrix products.
    keys: keys of a tile.
    warps: warps of a program.
    narrow_warps: warps of a program with fewer heads than `heads`.
    reduce_warps: warps of a program that combines splits.
    reduce_parts: number of splits that are loaded together to be combined, a power of two. It changes bits of results.
    On an H200, 8 splits are faster for 8 tokens of 128 heads (4.0 us, not 4.2) and slower for 64 tokens of 64 heads
    (8.1 us, not 5.5).
    chained: whether both products of a tile may share one layout, see `attention.product`.
    prefetch: whether the records of the next tile are loaded to registers while a tile is multiplied.
    reload: whether to load q again for each tile, and plain keys for each product, where registers are too few.
    assembly: whether codes are decoded four at a time in PTX. Otherwise plain integer operations decode them.
    converts: whether that PTX uses instructions that convert OCP e4m3 codes.
    split_keys: keys of a split when results must not depend on the batch; see `tiles_per_split`.
    pdl: whether kernels use programmatic dependent launch, see `launching.kernels_pdl`. Set by `on`.
    measured: hardware, versions, date and command of the measurement, or that nothing was measured.
    prefill: tuning of prefill, if it differs from the tuning of decode.
    small: tunings of decodes so small that each program has one tile, see `of_call`.
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
    split_keys: int = 640
    pdl: bool = False
    measured: str = "not measured"
    prefill: Tuning | None = None
    small: tuple[Tuning, ...] = ()

    def of(self, phase: Phase) -> Tuning:
        """The tuning of a phase."""
        return self.prefill or self if phase is Phase.PREFILL else self

    def of_call(self, tokens: int, heads: int, width: int, programs: int) -> Tuning:
        """The first tuning of `small` with which each tile of a decode has its own program; otherwise this tuning.

        Rows of one tile are not split.

        tokens, heads: of the decode.
        width: largest number of keys of a row.
        programs: number of programs that run at once.
        """
        for tuning in self.small:
            if width > tuning.keys and tokens * tuning.blocks(heads) * -(-width // tuning.keys) <= programs:
                return tuning
        return self

    def blocks(self, heads: int) -> int:
        """Number of programs that share the heads of a token."""
        return -(-heads // min(self.heads, padded(heads)))

    def group_of(self, layer: LayerGeometry, most: int, *, exact: bool = False) -> int:
        """Largest number of rows of a group for requests of at most `most` rows; 1 if each row is by itself.

        A program has no more rows of products than without groups. On c4a layers only windows are alike, which are few
        of the keys. On window-only layers short groups of few heads are no faster, see `SHARING_HEADS`.

        exact: whether q or keys are fp32.
        """
        few = layer.kind is LayerKind.SWA and layer.num_heads < SHARING_HEADS and most < MOST_ROWS
        if layer.kind is LayerKind.CSA or few or most < 2:
            return 1
        rows, window = min(self.heads, 16) if exact else self.heads, 1 << layer.window.bit_length() >> 1
        return max(min(_power_of_two(most), MOST_ROWS, window, rows // _power_of_two(layer.num_heads)), 1)

    def tiles_per_split(self, layer: LayerGeometry) -> int:
        """Tiles of a split of fixed length, so that results do not depend on the batch.

        A layer's selected keys are one split unless they are more than twice `split_keys`: those of Flash and of Pro
        then need no memory for splits, and nothing is combined. Each of two segments may end with a tile that is not
        full.

        layer: geometry of the layer.
        """
        splits = [keys for keys in (self.split_keys, layer.window + layer.topk) if keys <= 2 * self.split_keys]
        return -(-max(splits) // self.keys) + 1

    def on(self, arch: str) -> Tuning:
        """This tuning for an architecture, which need not be the architecture of the measurement."""
        converts = self.converts and arch.startswith("sm_") and int(arch[3:]) >= _CONVERTING
        small = tuple(tuning.on(arch) for tuning in self.small)
        prefill = self.prefill and self.prefill.on(arch)
        tuning = evolve(self, pdl=uses_pdl(arch), converts=converts, prefill=prefill, small=small)
        return self if tuning == self else tuning


_CONVERTING = 89
"""First architecture of NVIDIA with instructions that convert e4m3 codes."""


def padded(n: int) -> int:
    """The smallest power of two that is at least n and at least 16, the smallest side of a matrix product."""
    return max(16, _power_of_two(n))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


COMPILED = "compiled with Triton 3.9, 2026-11-22: no spills, fits; not measured on this hardware"
"""`measured` of a row that has run on no such device."""

_MEASURED = (
    "H200, torch 2.11, Triton 3.6, 2026-11-22: dsv4attn bench decode prefill --backend triton, before conversions"
)
# records in flight spill 4 to 24 bytes a thread, with Triton 3.6 and 3.9, which the gates forbid; they would save 5 and
# 3 % for 64 and 256 tokens of c4a. Conversions save 4, 7 and 4 % for 8, 64 and 256 tokens, over shifts (2026-11-25)
# programs of 16 and 32 heads take 0.65 to 0.88 of the time with 8 warps, and with 4 spill
_LARGE = Tuning(narrow_warps=8, chained=False, assembly=True, converts=True, prefetch=False, measured=_MEASURED)
# a program of few heads loads less of q and stores less of a part, and decodes its keys anew
_MEASURED_SMALL = "H200, torch 2.11, Triton 3.6, 2026-11-23: 1 to 32 tokens, 12 forms in turn"
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
CDNA = Tuning(heads=64, keys=16, warps=4, measured=COMPILED)
"""gfx942 and gfx950."""

# a thread has 256 registers, and operands of the matrix unit take many: q is not held, and a tile has 16 keys
RDNA = Tuning(heads=16, keys=16, warps=8, narrow_warps=8, prefetch=False, reload=True, measured=COMPILED)
"""gfx1100, gfx1151 and gfx1201."""

INTERPRETER = Tuning(keys=128, measured="interpreted: large tiles, because there each operation costs the same")

DEFAULT = "default"
"""Name of the row for all other devices; every table has it."""


def tuning_for(table: Mapping[str, Tuning], arch: str, kind: str) -> Tuning:
    """The row of the architecture; without one the row of the kind of device; without both the default row."""
    return table.get(arch) or table.get(kind) or table[DEFAULT]
