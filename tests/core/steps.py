"""The steps a builder can run on the CPU: torch, and Triton's kernels in its interpreter, where Triton is there."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dsv4attn.core.contract.backend import BuilderSteps
from dsv4attn.core.torch_ops import index_ops as indices

STEPS: dict[str, BuilderSteps] = {"torch": indices}
_reason = "Triton is not installed"
if find_spec("triton"):
    from dsv4attn.backends._triton.index_ops import builder as builder_steps
    from dsv4attn.backends._triton.launching.runtime import INTERPRETED

    STEPS["triton"] = builder_steps
    _reason = "" if INTERPRETED else "kernels are compiled here, and cannot run on the CPU"
_off_cpu = pytest.mark.skipif(bool(_reason), reason=_reason)

all_builder_steps = pytest.mark.parametrize("steps", ["torch", pytest.param("triton", marks=_off_cpu)])
