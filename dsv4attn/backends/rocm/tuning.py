"""Numbers of the ROCm room, per architecture.

A row that nobody has measured was chosen by cross-compiling: no spills, no scratch memory, matrix instructions, and
within the device's local memory, with Triton 3.6 and 3.9; among those, by the instructions of the loop for each key.
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
    # each block of heads unpacks keys anew, so 64; 32 keys spill where rows are gathered, and 8 warps take 50 % more
    "gfx942": Tuning(heads=64, keys=16, warps=4, run=32, measured=_COMPILED),
    # the same; 32 keys would take 4 % fewer instructions with Triton 3.9, and spill 256 bytes a thread with 3.6
    "gfx950": Tuning(heads=64, keys=16, warps=4, run=32, measured=_COMPILED),
}
