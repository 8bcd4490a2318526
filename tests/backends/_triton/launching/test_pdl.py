"""Launches that overlap: a kernel touches no memory before the kernels before it have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4attn.backends._triton.compiling.variant import launch_options
from dsv4attn.backends._triton.launching import pdl
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from tests.programs import told_by


@pytest.fixture(scope="module")
def waits_by_name() -> Any:
    """What `compiled_waits.py` says."""
    return told_by(str(Path(__file__).with_name("compiled_waits.py")))


FIRST = "products_kernel"
"""The kernel that is launched as usual, and lets the next one begin."""


def test_every_kernel_of_a_step_waits_before_it_touches_memory_on_sm_90(waits_by_name: Any) -> None:
    on = {name: form for name, form in waits_by_name.items() if name.startswith("sm_90")}
    for name in [name for name in on if name.split()[-1] == FIRST]:
        form = on.pop(name)
        assert (form["waits"], form["lets"], form["option"]) == (False, 1, False), name

    assert {name.split()[-1] for name in on} >= {
        "attention",
        "insert_kernel",
        "mix_kernel",
        "project_codes_kernel",
        "qnorm_rope_kv_insert_kernel",
        "quantize_output_kernel",
        "reduce",
        "translate_kernel",
    }
    for name, form in on.items():
        assert (form["waits"], form["lets"], form["early"], form["option"]) == (True, 1, 0, True), name
        assert form["accesses"] > 0, name
        # 512 bytes of each row at a time, of 64 rows or more
        assert (form["ahead"], form["late"]) == (form["asked"] // 512, 0), name
    assert any(form["ahead"] for form in on.values())


def test_no_kernel_does_where_that_was_not_measured(waits_by_name: Any) -> None:
    off = [form for name, form in waits_by_name.items() if name.startswith("sm_80")]

    assert off
    assert not any(form["waits"] or form["lets"] or form["option"] or form["ahead"] for form in off)
    assert not any(map(uses_pdl, ("cpu", "sm_80", "sm_120", "gfx942", "xpu")))


@pytest.mark.parametrize(("driver", "said"), [(12020, False), (12030, True), (13000, True)])
def test_no_kernel_does_where_graphs_cannot_capture_it(
    driver: int, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    pdl._driver.cache_clear()
    try:
        assert uses_pdl("sm_90") == said
    finally:
        pdl._driver.cache_clear()


def test_the_launch_option_follows_from_the_constant() -> None:
    assert launch_options({"PDL": True}) == {"launch_pdl": True}
    assert launch_options({"PDL": False}) == launch_options({}) == {}
