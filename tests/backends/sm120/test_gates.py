"""The backend's own kernel, compiled for cards that are not here: 99 KiB of shared memory, no spills, matrix units."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4attn.backends._triton.tuning import COMPILED
from dsv4attn.backends.sm120.tuning import TUNING
from tests.backends._triton.compiling.gates import broken_limits
from tests.programs import told_by


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_120"])
def test_attention_keeps_every_limit(target: str) -> None:
    assert broken_limits("sm120", [target], "--kernel", "attention", "--kernel", "reduce") == []


@pytest.mark.matrix
def test_what_stands_around_flashinfer_keeps_every_limit() -> None:
    kernels = told_by(str(Path(__file__).with_name("compiles.py")))

    assert [name for name in kernels if kernels[name]["reasons"]] == []
    wide = {name for name in kernels if kernels[name]["wide"]}
    # a row of q or of out is moved 16 bytes at a time where it may be
    assert wide == {name for name in kernels if " 8 " in name and "moves heads" in name}
    assert len(wide) >= 8


def test_both_cards_have_a_row_of_sixteen_heads() -> None:
    for arch in ("sm_120", "sm_121"):
        assert (TUNING[arch].heads, TUNING[arch].measured) == (16, COMPILED)
