"""The rooms' kernels, compiled for devices that are not here: nothing spills, every block fits, products use matrices.

The attention kernel is what fills a device, so CI compiles it for every target; all other kernels take a minute a
target, and are for `-m slow`.
"""

from __future__ import annotations

import pytest

from tests.backends._triton.gates import broken_limits

TARGETS = ("sm_80", "sm_90", "sm_120", "gfx942", "gfx950")


@pytest.mark.parametrize("target", TARGETS)
def test_attention_of_the_generic_room_keeps_every_limit(target: str) -> None:
    assert broken_limits("triton", [target], "--kernel", "attention", "--kernel", "reduce") == []


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_attention_of_the_intel_room_keeps_every_limit(target: str) -> None:
    assert broken_limits("xpu", [target], "--kernel", "attention") == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("room", ["triton", "xpu", "rocm"])
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_every_kernel_of_every_room_keeps_every_limit(room: str, target: str, model: str) -> None:
    assert broken_limits(room, [target], "--model", model) == []
