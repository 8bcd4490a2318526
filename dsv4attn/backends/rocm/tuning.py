"""Tuning of the ROCm backend, per architecture.

Rows without a measurement were chosen by cross-compiling: no spills, no scratch memory, matrix instructions, and within
the device's local memory, with Triton 3.6 and 3.9; among those, by the instructions of the loop for each key.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsv4attn.backends._triton.tuning import CDNA, COMPILED, DEFAULT, HOPPER, INTERPRETER, RDNA, Tuning

TUNING: Mapping[str, Tuning] = {
    # fits 64 KiB of local memory and any register file
    DEFAULT: Tuning(heads=16, keys=32, warps=4, prefetch=False, measured=COMPILED),
    "cpu": INTERPRETER,
    "sm_90": HOPPER,
    "gfx942": CDNA,
    "gfx950": CDNA,
    "gfx1100": RDNA,
    "gfx1151": RDNA,
    "gfx1201": RDNA,
}
