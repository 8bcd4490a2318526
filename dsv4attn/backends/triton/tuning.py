"""Numbers of the generic room, per architecture.

A row that nobody has measured was chosen by cross-compiling: no spills, and within the device's shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from dsv4attn.backends._triton.tuning import DEFAULT, Tuning

_COMPILED = "compiled, not measured"

_HOPPER = Tuning(chained=False, assembly=True, measured="H200, torch 2.11, Triton 3.6, 2026-11-20")
# with enough programs in flight, registers serve better than loads ahead: 4 % with 128 heads
HOPPER = evolve(_HOPPER, prefill=evolve(_HOPPER, prefetch=False))

ROWS: Mapping[str, Tuning] = {
    # fits 64 KiB of shared memory and any register file
    DEFAULT: Tuning(heads=16, keys=32, warps=4, prefetch=False, measured=_COMPILED),
    "cpu": Tuning(keys=128, measured="interpreted: large tiles, because there each operation costs the same"),
    "sm_80": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=_COMPILED),
    "sm_86": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=_COMPILED),
    "sm_89": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=_COMPILED),
    "sm_90": HOPPER,
    "sm_100": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=_COMPILED),
    "sm_120": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=_COMPILED),
    "sm_121": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=_COMPILED),
    "gfx942": Tuning(heads=64, keys=32, warps=4, measured=_COMPILED),
    "gfx950": Tuning(heads=64, keys=32, warps=4, measured=_COMPILED),
}
