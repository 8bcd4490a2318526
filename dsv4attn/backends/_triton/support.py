"""Which problems the shared Triton kernels serve on a device. Imports neither torch nor triton."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsv4attn.backends._triton.codings import CODINGS
from dsv4attn.core.contract.device import NEWER_TRITON, TRITON_SOURCES, DeviceFacts, release_of
from dsv4attn.core.contract.problem import Problem, Reason, layout_reasons, layouts_coded_by
from dsv4attn.core.model.layer_geometry import LayerKind
from dsv4attn.errors import ArgumentError

INTERPRETER_CURE = "set TRITON_INTERPRET=1 before Python starts, or ask for reference, which is faster there"
_WIDEST = 512
FP8_UNITS = "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"
"""Architectures that convert to e4m3 codes of OCP, and multiply them, in one instruction."""
ONE_ORDER = frozenset({"sm_90"})
"""Architectures where products of codes, and of bf16, have equal bits in all tiles with 64 rows or more of one operand.

All of these tiles use one matrix instruction there, which adds the products of its columns in an order that does not
depend on its rows. A test on the device compares the bits (`tests/backends/_triton/layer/test_products.py`). Elsewhere
deterministic products have one tile.
"""
_OLDEST = 80
_OLDEST_TRITON = 3, 6
"""Releases 3.2 and 3.3 have no `triton.knobs`. Releases 3.2 to 3.4 lack the packing of arguments in the JIT, by which
kernels are compiled before a launch. With 3.5 the kernels compile, but were never run."""


def support(device: DeviceFacts, problem: Problem) -> Sequence[Reason]:
    """All reasons why the shared kernels cannot serve a problem on a device."""
    reasons = [*_of_device(device), *layout_reasons(problem, layouts_coded_by(CODINGS))]
    if problem.q_dtype not in ("bfloat16", "float32"):
        reasons.append(Reason("Q_DTYPE", problem.q_dtype, "bfloat16 or float32", "cast q"))
    if problem.layer.head_dim > _WIDEST:
        reasons.append(Reason("HEAD_DIM", problem.layer.head_dim, f"at most {_WIDEST}"))
    return reasons


def index_notes(device: DeviceFacts, problem: Problem) -> Sequence[str]:
    """How scores of the indexer are computed on a device, for layers that have one."""
    if problem.layer.kind is not LayerKind.CSA:
        return []
    if device.arch in FP8_UNITS:
        return ["index scores: e4m3 codes go into the matrix unit as they are; other records are decoded"]
    return ["index scores: codes are decoded to fp16, or bf16, for the matrix unit"]


def notes_of_sums(device: DeviceFacts, problem: Problem) -> Sequence[str]:
    """`index_notes` of a backend that has option `index_sums`, and what the option changes on the device."""
    lines = [*index_notes(device, problem)]
    if lines and device.arch in FP8_UNITS:
        lines += ["index_sums=exact would multiply e4m3 codes in 16 bits: index scores keep the bits of fp32, not 14"]
    return lines


def _of_device(device: DeviceFacts) -> list[Reason]:
    if device.kind not in TRITON_SOURCES:
        return [Reason("DEVICE", device.kind, "a device that Triton drives: cuda, hip or xpu", "ask for reference")]
    reasons = []
    if device.triton_version is None:
        reasons.append(Reason("TRITON", "no Triton", "Triton 3.6 or newer", TRITON_SOURCES[device.kind]))
    elif (too_old := _too_old(device)) is not None:
        reasons.append(too_old)
    if device.kind == "cpu" and not device.interpreted:
        reasons.append(Reason("INTERPRETER", "a CPU", "an accelerator, or Triton's interpreter", INTERPRETER_CURE))
    if reasons:
        return reasons
    number = re.fullmatch(r"sm_(\d+)", device.arch)
    if number and int(number[1]) < _OLDEST:
        return [Reason("ARCH", device.arch, f"sm_{_OLDEST} or newer: bf16 matrix products")]
    return []


def _too_old(device: DeviceFacts) -> Reason | None:
    release = release_of(device.triton_version)
    if release is None or release >= _OLDEST_TRITON:
        return None
    return Reason("TRITON", f"Triton {device.triton_version}", "Triton 3.6 or newer", NEWER_TRITON[device.kind])


def require_release() -> None:
    """Raise ArgumentError if the Triton of this installation is too old to compile or launch the kernels."""
    too_old = _too_old(DeviceFacts.named("cpu"))
    if too_old is not None:
        raise ArgumentError("triton", expected=too_old.allowed, actual=too_old.actual, hint=too_old.cure)
