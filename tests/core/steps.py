"""The steps a builder can run on the CPU: torch, and Triton's kernels in its interpreter."""

from __future__ import annotations

import pytest

from dsv4attn.backends._triton import builder_steps
from dsv4attn.backends._triton.runtime import INTERPRETED
from dsv4attn.core import indices
from dsv4attn.core.contract import BuilderSteps

STEPS: dict[str, BuilderSteps] = {"torch": indices, "triton": builder_steps}
_off_cpu = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, and cannot run on the CPU")

all_builder_steps = pytest.mark.parametrize("steps", ["torch", pytest.param("triton", marks=_off_cpu)])
