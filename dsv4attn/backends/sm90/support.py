"""What the Hopper room accepts: everything that the shared kernels do. Which kernel serves a call, `choice` says."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.answers import answers
from dsv4attn.core.device import DeviceFacts
from dsv4attn.core.problem import Problem, Reason


def support(device: DeviceFacts, problem: Problem) -> Sequence[Reason]:
    """All reasons why not."""
    return answers(device, problem)
