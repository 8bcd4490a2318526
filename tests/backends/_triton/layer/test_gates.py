"""The layer's kernels, compiled for devices that are not here: nothing spills, every block fits.

The forms that need most, for targets of every kind. `compiling/test_gates`, with `-m slow`, compiles all forms for all
targets.
"""

from __future__ import annotations

from tests.programs import told_by


def test_the_fullest_kernels_keep_every_limit() -> None:
    kernels = told_by("-m", "tests.backends._triton.layer.compiles")
    assert {name: facts["reasons"] for name, facts in kernels.items() if facts["reasons"]} == {}
    # as many as are meant: no form has got lost because a constant has another name
    assert {name: facts["forms"] for name, facts in kernels.items()} == FORMS


FORMS = {
    "sm_80 decoded_codes": 1,
    "sm_80 candidates_of_ranks": 2,
    "sm_90 streams": 3,
    "sm_90 wide_streams": 1,
    "sm_90 native_codes": 2,
    "sm_90 decoded_codes": 1,
    "sm_90 multiplied": 5,
    "sm_90 turned": 4,
    "sm_90 of_few_rows": 2,
    "sm_100 selection": 4,
    "sm_100 latest": 5,
    "sm_120 streams": 3,
    "sm_120 native_codes": 1,
    "sm_120 multiplied": 1,
    "gfx942 streams": 3,
    "gfx942 decoded_codes": 1,
    "gfx942 compressor": 4,
    "gfx950 streams": 3,
    "gfx1100 decoded_codes": 1,
    "gfx1100 multiplied": 1,
}
