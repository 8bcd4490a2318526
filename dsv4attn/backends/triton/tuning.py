"""Numbers of the generic backend, per architecture.

A row that was not measured was chosen by cross-compiling: no spills, and within the device's shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsv4attn.backends._triton.tuning import CDNA, COMPILED, DEFAULT, HOPPER, INTERPRETER, RDNA, Tuning

TUNING: Mapping[str, Tuning] = {
    # fits 64 KiB of shared memory and any register file
    DEFAULT: Tuning(heads=16, keys=32, warps=4, prefetch=False, measured=COMPILED),
    "cpu": INTERPRETER,
    "sm_80": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "sm_86": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "sm_89": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "sm_90": HOPPER,
    "sm_100": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "sm_103": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "sm_120": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "sm_121": Tuning(heads=32, keys=32, warps=8, assembly=True, measured=COMPILED),
    "gfx942": CDNA,
    "gfx950": CDNA,
    "gfx1100": RDNA,
    "gfx1151": RDNA,
    "gfx1201": RDNA,
}
