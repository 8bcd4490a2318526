"""The room's own kernel, compiled for cards that are not here: 99 KiB of shared memory, no spills, matrix units."""

from __future__ import annotations

import pytest

from dsv4attn.backends.sm120.tuning import ROWS
from tests.backends._triton.gates import broken_limits


@pytest.mark.parametrize("target", ["sm_120"])
def test_attention_keeps_every_limit(target: str) -> None:
    assert broken_limits("sm120", [target], "--kernel", "attention", "--kernel", "reduce") == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("target", ["sm_120", "sm_90"])
def test_every_kernel_keeps_every_limit(target: str, model: str) -> None:
    assert broken_limits("sm120", [target], "--model", model) == []


def test_both_cards_have_a_row_of_sixteen_heads() -> None:
    for arch in ("sm_120", "sm_121"):
        assert (ROWS[arch].heads, ROWS[arch].measured) == (16, "compiled, not measured")
