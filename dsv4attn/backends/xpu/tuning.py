"""Tuning of the Intel backend, per architecture, and its default form of decode."""

from __future__ import annotations

from collections.abc import Mapping

from dsv4attn.backends._triton.tuning import COMPILED, DEFAULT, HOPPER, INTERPRETER, RDNA, Tuning

FUSED, GATHERED = "fused", "gathered"
DECODE = {DEFAULT: FUSED}
"""Meaning of "auto". Fused everywhere: it reads 584 bytes of each key once. Gathering reads them, writes 1,024, and
reads those again, with two more launches and a workspace. Gathering remains for a device whose compiler is slow with
integer arithmetic between loads and matrix products, which only a measurement there can show."""

RUN_BYTES = 256 * 2**20
"""Memory for gathered keys. A step that needs more is cut into runs of tokens: with a million tokens of context, a
c128a layer selects 8 MiB of keys for each."""

TUNING: Mapping[str, Tuning] = {
    DEFAULT: Tuning(heads=16, keys=32, warps=4, prefetch=False, measured=COMPILED),
    # A work group of any Intel GPU may have 64 KiB of shared memory, and a tile of 16 keys fits. Twice the warps of
    # other backends, because a warp has 16 lanes where matrix engines are used.
    "xpu": Tuning(heads=16, keys=16, warps=8, narrow_warps=8, prefetch=False, measured="not measured"),
    "cpu": INTERPRETER,
    "sm_90": HOPPER,
    "sm_120": Tuning(heads=16, keys=16, warps=4, prefetch=False, measured=COMPILED),
    "sm_121": Tuning(heads=16, keys=16, warps=4, prefetch=False, measured=COMPILED),
    "gfx1100": RDNA,
    "gfx1151": RDNA,
    "gfx1201": RDNA,
}
