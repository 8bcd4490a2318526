"""The layer's kernels, compiled for devices that are not here: nothing spills, and every block fits.

A kernel or two for a target of each vendor; `compiling/test_gates`, with `-m slow`, compiles all of them for every
target.
"""

from __future__ import annotations

import pytest

from tests.backends._triton.compiling.gates import broken_limits


@pytest.mark.parametrize(
    ("target", "kernels"),
    [("sm_100", ("score_kernel", "choose_kernel")), ("gfx942", ("compress_kernel", "index_query_kernel"))],
)
def test_they_keep_every_limit(target: str, kernels: tuple[str, ...]) -> None:
    options = [word for kernel in kernels for word in ("--kernel", kernel)]

    assert broken_limits("triton", [target], *options) == []
