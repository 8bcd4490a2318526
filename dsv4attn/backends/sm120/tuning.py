"""Tuning of the SM120 backend's own kernel, per architecture."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4attn.backends._triton.tuning import COMPILED, DEFAULT, HOPPER, INTERPRETER, RDNA, Tuning

# A block may have 99 KiB of shared memory: 16 heads and 32 keys take 80. With the next tile prefetched to registers,
# one variant of the kernel spills.
_SM120 = Tuning(heads=16, keys=32, warps=8, narrow_warps=8, prefetch=False, assembly=True, measured=COMPILED)

TUNING: Mapping[str, Tuning] = {
    DEFAULT: Tuning(heads=16, keys=32, warps=4, prefetch=False, measured=COMPILED),
    "cpu": INTERPRETER,
    "sm_90": HOPPER,
    "sm_120": _SM120,
    "sm_121": _SM120,
    "gfx1100": RDNA,
    "gfx1151": RDNA,
    "gfx1201": RDNA,
}
