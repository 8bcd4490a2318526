"""Kernels that are compiled for every target without a card: no spills, every block fits, products use matrix units.

The normal run compiles, for each target but the twins of others, the form of the attention kernel that needs most, and
the steps whose numbers are the target's own: `CASES` and `TWINS` of largest_kernels.py. Every kernel, preset, dialect
and backend takes minutes a target: `-m slow`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.core.contract.device import DeviceFacts
from tests.backends._triton.compiling.gates import broken_limits
from tests.backends._triton.compiling.largest_kernels import CASES, TWINS
from tests.backends.built_in import triton_backends
from tests.programs import told_by

PAIRS = [(backend, target) for target in TARGETS for backend in triton_backends(DeviceFacts.named(target))]
"""Each target of the table with each Triton backend that runs on it."""


@cache
def compiled(*targets: str) -> dict[str, list[dict[str, Any]]]:
    """Outcomes by target, from one process that interprets nothing."""
    outcomes: dict[str, list[dict[str, Any]]] = told_by(
        "-m", "tests.backends._triton.compiling.largest_kernels", *targets
    )
    return outcomes


@pytest.mark.matrix
@pytest.mark.parametrize("target", [pytest.param(t, marks=pytest.mark.slow if t in TWINS else ()) for t in TARGETS])
def test_the_fullest_kernels_keep_every_limit(target: str) -> None:
    kernels = compiled(*(name for name in CASES if (name in TWINS) == (target in TWINS)))[target]

    assert {kernel["kernel"] for kernel in kernels} == {"attention", *CASES[target].others}
    assert {kernel["kernel"]: kernel["reasons"] for kernel in kernels if kernel["verdict"] != "ok"} == {}


def test_no_target_is_left_out() -> None:
    assert set(CASES) == set(TARGETS)
    assert not {*TWINS} & {*TWINS.values()}
    assert {case.model for case in CASES.values()} == {"flash", "pro"}
    assert {case.dtype for case in CASES.values()} == {"e4m3fn", "e4m3fnuz"}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "target"), PAIRS)
@pytest.mark.parametrize("model", ["flash", "pro"])
@pytest.mark.parametrize("dtype", ["e4m3fn", "e4m3fnuz"])
def test_every_kernel_of_every_backend_keeps_every_limit(backend: str, target: str, model: str, dtype: str) -> None:
    assert broken_limits(backend, [target], "--model", model, "--dtype", dtype) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100"])
@pytest.mark.parametrize("record", ["v41_fp4", "v4_nvfp4"])
def test_the_attention_over_records_of_four_bits_keeps_every_limit(record: str, target: str) -> None:
    assert broken_limits("triton", [target], "--dtype", record, "--kernel", "attention") == []
