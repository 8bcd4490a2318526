"""Numbers of the ROCm room, per architecture.

A row that nobody has measured was chosen by cross-compiling: no spills, no scratch memory, matrix instructions, and
within the device's local memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsv4attn.backends._triton.tuning import DEFAULT, HOPPER, INTERPRETER, Tuning

_COMPILED = "compiled, not measured"

ROWS: Mapping[str, Tuning] = {
    # fits 64 KiB of local memory and any register file
    DEFAULT: Tuning(heads=16, keys=32, warps=4, prefetch=False, measured=_COMPILED),
    "cpu": INTERPRETER,
    "sm_90": HOPPER,
    "gfx942": Tuning(heads=64, keys=32, warps=4, measured=_COMPILED),
    "gfx950": Tuning(heads=64, keys=32, warps=4, measured=_COMPILED),
}
