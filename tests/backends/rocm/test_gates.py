"""The backend's kernels, compiled for the devices that it is for: nothing spills, waves are 64 wide, enough blocks fit.

All of it but one planted fault is for `-m slow`; the normal run compiles the form that needs most, with all other
targets, in `tests/backends/_triton/compiling/test_gates.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.backends._triton.compiling.gates import broken_limits
from tests.programs import told_by

TARGETS = ("gfx942", "gfx950")
SHARED = {"gfx942": 65_536, "gfx950": 163_840}
"""Bytes of local memory of a block."""

BLOCKS = {
    "decode window, 64 heads, split": (1, 1),
    "decode both, 64 heads, split": (1, 1),
    "decode mixed, 64 heads": (1, 1),
    "decode mixed, 16 heads, split": (2, 2),
    "prefill gathered, 64 heads": (1, 1),
    "reduce": (8, 8),
    "pack_kernel": (8, 8),
    "fill_kernel": (8, 8),
    "ragged_translate_kernel": (8, 8),
    "project_kernel, 16 tokens": (1, 2),
    "project_kernel, 64 tokens": (1, 2),
    "project_kernel, 128 tokens": (1, 1),
}
"""Least blocks that a CU holds at once, on each target."""
REGISTERS = {"decode": 480, "prefill": 480}
"""Most of a thread where one block fits anyway: what is left of 512 is for releases of Triton that need more."""


@cache
def needs(target: str, *words: str) -> dict[str, Any]:
    """What kernels need, by form; words: see `compiles`."""
    by_form: dict[str, Any] = told_by("-m", "tests.backends.rocm.compiles", target, *words)
    return by_form


def faults(target: str, form: str, need: dict[str, Any]) -> list[str]:
    """Everything about one form that is not as it must be; empty is good."""
    least = BLOCKS[form][TARGETS.index(target)] if form in BLOCKS else 1
    products = form.startswith(("decode", "prefill", "project_kernel"))
    most = REGISTERS.get(form.partition(" ")[0], 512)
    checks = {
        "spills": need["spill_stores"] == need["spill_loads"] == 0,
        "scratch": need["stack"] == 0,
        "shared": need["shared"] <= SHARED[target],
        "wave": need["wave"] == 64,
        "matrix": (need["matrix"] > 0) == products,
        "blocks": need["occupancy"] >= least,
        "registers": need["registers"] <= most,
    }
    return [*(name for name, holds in checks.items() if not holds), *need["broken"]]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_each_kernel_keeps_its_limits_and_its_occupancy(target: str) -> None:
    needed = needs(target, *BLOCKS)

    assert {form: faults(target, form, need) for form, need in needed.items()} == {form: [] for form in BLOCKS}


@pytest.mark.matrix
@pytest.mark.parametrize("target", [TARGETS[0], pytest.param(TARGETS[1], marks=pytest.mark.slow)])
def test_a_row_with_tiles_that_are_too_large_is_caught(target: str) -> None:
    form = "prefill gathered, 64 heads"
    messages = faults(target, form, needs(target, "keys=64", form)[form])

    assert {"spills", "scratch", "registers"} <= {*messages}
    assert any(reason.startswith("SPILLS ") for reason in messages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spill_stores", 4),
        ("stack", 16),
        ("shared", 163_841),
        ("wave", 32),
        ("matrix", 0),
        ("occupancy", 0),
        ("registers", 481),
    ],
)
def test_each_fault_is_found_alone(name: str, value: int) -> None:
    fine = {"spill_stores": 0, "spill_loads": 0, "stack": 0, "shared": 32_768, "wave": 64, "matrix": 48}
    fine |= {"occupancy": 1, "registers": 322, "broken": []}  # type: ignore[dict-item]
    form = "prefill gathered, 64 heads"

    assert faults("gfx950", form, fine) == []
    assert len(faults("gfx950", form, {**fine, name: value})) == 1


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_form_keeps_every_limit(target: str) -> None:
    needed = needs(target)

    assert len(needed) > 2 * len(BLOCKS)
    assert {form: messages for form, need in needed.items() if (messages := faults(target, form, need))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["e4m3fn", "e4m3fnuz", "bfloat16", "float32"])
def test_every_kernel_that_the_backend_foresees_keeps_every_limit(target: str, dtype: str) -> None:
    assert broken_limits("rocm", [target], "--dtype", dtype) == []
