"""`support`: the reasons against a problem. It checks every assumption of the kernels: a yes never fails at launch."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem, Reason

HEADS = 4
"""Heads that one core of the chip takes at a time."""

LAYOUTS = {"fp8_ds_mla": ("e4m3fn", "e4m3fnuz"), "rows": ("bfloat16",)}


def support(device: DeviceFacts, problem: Problem) -> Sequence[Reason]:
    """All reasons against a problem, not only the first."""
    reasons = []
    heads = problem.layer.num_heads
    if heads % HEADS:
        cure = f"pad q to {heads + -heads % HEADS} heads"
        reasons.append(Reason("HEADS", heads, f"a multiple of {HEADS}", cure))
    for name, cache in (("window cache", problem.swa), ("compressed cache", problem.compressed)):
        if cache is not None and cache.dtype not in LAYOUTS.get(cache.layout, ()):
            allowed = ", ".join(f"{layout} of {' or '.join(dtypes)}" for layout, dtypes in LAYOUTS.items())
            cure = "allocate the cache as bfloat16 rows"
            reasons.append(Reason("LAYOUT", f"{name} {cache.layout} of {cache.dtype}", allowed, cure))
    if problem.q_dtype not in ("bfloat16", "float32"):
        reasons.append(Reason("Q_DTYPE", problem.q_dtype, "bfloat16 or float32", "cast q"))
    if problem.capture:
        reasons.append(Reason("CAPTURE", "a captured graph", "eager calls", "run eagerly"))
    return reasons
