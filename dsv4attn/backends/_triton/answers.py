"""What every Triton room can answer before it looks closer. Imports neither torch nor triton."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsv4attn.core.device import TRITON_SOURCES, DeviceFacts
from dsv4attn.core.problem import CacheFacts, Problem, Reason

__all__ = ["answers"]

INTERPRETER_CURE = "set TRITON_INTERPRET=1 before Python starts, or ask for reference, which is faster there"
_ROWS = "allocate the cache as bfloat16 rows"
_LAYOUTS = {"fp8_ds_mla": ("e4m3fn", "e4m3fnuz"), "rows": ("bfloat16", "float32")}
_WIDEST = 512
_OLDEST = 80


def answers(device: DeviceFacts, problem: Problem) -> Sequence[Reason]:
    """All reasons why the shared kernels cannot serve a problem on a device."""
    reasons = [*_of_device(device)]
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
    if problem.layer.head_dim > _WIDEST:
        reasons.append(Reason("HEAD_DIM", problem.layer.head_dim, f"at most {_WIDEST}"))
    return reasons


def _of_device(device: DeviceFacts) -> list[Reason]:
    if device.kind not in TRITON_SOURCES:
        return [Reason("DEVICE", device.kind, "a device that Triton drives: cuda, hip or xpu", "ask for reference")]
    if device.triton_version is None:
        return [Reason("TRITON", "no Triton", "Triton 3.6 or newer", TRITON_SOURCES[device.kind])]
    if device.kind == "cpu" and not device.interpreted:
        return [Reason("INTERPRETER", "a CPU", "an accelerator, or Triton's interpreter", INTERPRETER_CURE)]
    number = re.fullmatch(r"sm_(\d+)", device.arch)
    if number and int(number[1]) < _OLDEST:
        return [Reason("ARCH", device.arch, f"sm_{_OLDEST} or newer: bf16 matrix products")]
    return []


def _row_dtype(cache: CacheFacts) -> str:
    return "float32" if cache.dtype == "float32" else "bfloat16"
