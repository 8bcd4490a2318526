"""The layer's kernels, compiled for devices that are not here: nothing spills, every block fits.

The forms that need most, for targets of every kind. `compiling/test_gates`, with `-m slow`, compiles all forms for all
targets.
"""

from __future__ import annotations

import pytest

from tests.programs import told_by


@pytest.mark.matrix
@pytest.mark.parametrize("words", [(), pytest.param(("alike",), marks=pytest.mark.slow)], ids=" ".join)
def test_the_fullest_kernels_keep_every_limit(words: tuple[str, ...]) -> None:
    """Slow: forms that need as much as others that are compiled."""
    kernels = told_by("-m", "tests.backends._triton.layer.compiles", *words)
    assert {name: facts["reasons"] for name, facts in kernels.items() if facts["reasons"]} == {}
    # as many as are meant: no form has got lost because a constant has another name
    assert {name: facts["forms"] for name, facts in kernels.items()} == (ALIKE if words else FORMS)


FORMS = {
    "sm_80 decoded_codes": 1,
    "sm_80 candidates_of_ranks": 2,
    "sm_90 streams": 3,
    "sm_90 wide_streams": 1,
    "sm_90 native_codes": 2,
    "sm_90 decoded_codes": 1,
    "sm_90 multiplied": 3,
    "sm_90 turned": 3,
    "sm_90 of_few_rows": 2,
    "sm_100 selection": 3,
    "sm_100 latest": 5,
    "sm_120 streams": 3,
    "sm_120 native_codes": 1,
    "sm_120 multiplied": 1,
    "gfx942 streams": 3,
    "gfx942 decoded_codes": 1,
    "gfx942 compressor": 4,
    "gfx950 streams": 2,
    "gfx1100 decoded_codes": 1,
    "gfx1100 multiplied": 1,
}
ALIKE = {"sm_90 multiplied": 2, "sm_90 turned": 1, "sm_100 selection": 1, "sm_100 latest": 1, "gfx950 streams": 1}
