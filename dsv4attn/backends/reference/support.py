"""What the reference accepts: everything the contract can say. Reasons here would be gaps in the definition."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.problem import CacheFacts, Problem, Reason

_ROWS = "allocate the cache as bfloat16 rows"
_LAYOUTS = {"fp8_ds_mla": ("e4m3fn", "e4m3fnuz"), "rows": ("bfloat16", "float32")}


def support(device: DeviceFacts, problem: Problem) -> Sequence[Reason]:
    """All reasons why not."""
    reasons = []
    for name, cache in (("window cache", problem.swa), ("compressed cache", problem.compressed)):
        if cache is not None and cache.dtype not in _LAYOUTS.get(cache.layout, ()):
            allowed = ", ".join(f"{layout} of {' or '.join(dtypes)}" for layout, dtypes in _LAYOUTS.items())
            reasons.append(Reason("LAYOUT", f"{name} {cache.layout} of {cache.dtype}", allowed, _ROWS))
    if problem.compressed is not None and _row_dtype(problem.compressed) != _row_dtype(problem.swa):
        both = f"{problem.swa.dtype} beside {problem.compressed.dtype}"
        reasons.append(
            Reason("LAYOUT_PAIR", both, "two caches that read as the same type", "use one row type for both")
        )
    if problem.q_dtype not in ("bfloat16", "float32"):
        reasons.append(Reason("Q_DTYPE", problem.q_dtype, "bfloat16 or float32", "cast q"))
    if problem.capture:
        cure = "capture with another backend, or run eagerly"
        reasons.append(Reason("CAPTURE", "a captured graph", "eager calls: it reads lengths on the host", cure))
    return reasons


def _row_dtype(cache: CacheFacts) -> str:
    return "float32" if cache.dtype == "float32" else "bfloat16"
