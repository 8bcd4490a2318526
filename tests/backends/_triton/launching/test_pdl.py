"""Launches that overlap: a kernel touches no memory before the kernels before it have ended."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4attn.backends._triton.compiling.variant import launch_options
from dsv4attn.backends._triton.launching import pdl
from dsv4attn.backends._triton.launching.pdl import uses_pdl
from tests.programs import ROOT, told_by


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
        "compress_kernel",
        "index_query_kernel",
        "insert_kernel",
        "latent_kernel",
        "mix_kernel",
        "norm_kernel",
        "pool_kernel",
        "project_codes_kernel",
        "qnorm_rope_kv_insert_kernel",
        "quantize_output_kernel",
        "reduce",
        "ring_kernel",
        "save_kernel",
        "store_kernel",
        "translate_kernel",
    }
    for name, form in on.items():
        # this one at its end, and of few tokens before
        lets = 2 if name.endswith(" compress_kernel") else 1
        assert (form["waits"], form["lets"], form["early"], form["option"]) == (True, lets, 0, True), name
        assert form["accesses"] > 0, name


def test_no_kernel_does_where_that_was_not_measured(waits_by_name: Any) -> None:
    off = [form for name, form in waits_by_name.items() if name.startswith("sm_80")]

    assert off
    assert not any(form["waits"] or form["lets"] or form["option"] for form in off)
    assert not any(map(uses_pdl, ("cpu", "sm_80", "sm_120", "gfx942", "xpu")))


BACKENDS = ROOT / "dsv4attn/backends"
SELECTING = [
    BACKENDS / "_triton/layer/indexer/kernels.py",
    BACKENDS / "_triton/layer/selection/kernels.py",
    BACKENDS / "sm90/indexer/kernels.py",
    *(BACKENDS / "sm90/selection").glob("kernels_*.py"),
]
"""Files of the kernels that follow each other in a selection. Compiling them all takes too long for a test."""
HARMLESS = {"Args", "Memory", "allocate_shared_memory", "arange", "cdiv", "multiple_of", "num_programs", "pointer_type",
            "program_id", "to"}  # fmt: skip
"""Functions that read and write no memory of the device."""


def calls_in(*nodes: ast.AST) -> list[str]:
    """Names of the functions that are called in statements."""
    calls = [node for one in nodes for node in ast.walk(one) if isinstance(node, ast.Call)]
    return [call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id for call in calls]  # type: ignore[attr-defined]


def test_every_program_of_a_selection_waits_before_it_touches_memory() -> None:
    kernels = {
        node.name: node.body
        for path in SELECTING
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.decorator_list[0]).startswith("stable_")
    }
    assert {*kernels} == {
        "choose_groups_kernel", "choose_kernel", "list_kernel", "order_kernel", "score_blocks_kernel",
        "score_groups_kernel", "score_index", "score_kernel", "select_index",
    }  # fmt: skip
    for name, body in kernels.items():
        # statements of the kernel itself: no branch goes around them
        said = [ast.unparse(statement) for statement in body]
        wait = said.index("wait_prior_grid(PDL)")
        assert {*calls_in(*body[:wait])} <= HARMLESS, name
        assert said[-1] == "launch_dependents(PDL)", name
        assert not [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Return)], name


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
