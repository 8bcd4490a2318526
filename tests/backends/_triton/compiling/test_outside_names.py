"""Kernels compile where an engine has replaced functions of `triton`: they read its languages and the package alone.

SGLang puts a plain function in the place of `triton.next_power_of_2`. The interpreter calls it, but the compiler
refuses it, so these tests run a program that interprets nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsv4attn.backends._triton.layer.projections import kernels_norms
from tests.programs import ROOT, told_by

PROGRAM = "tests.backends._triton.compiling.replaced_helpers"
TWICE = """
import triton
import triton.language as tl
from dsv4attn.backends._triton.launching.kernels_pdl import launch_dependents_of_few

FEW_ROWS = tl.constexpr(16.0)


@triton.jit
def kernel(rows, entries):
    if rows <= FEW_ROWS:
        launch_dependents_of_few(rows, entries, True)
"""


@pytest.mark.matrix
def test_kernels_read_no_name_that_others_can_replace(tmp_path: Path) -> None:
    """Planted files show that it is found: a name of `triton`, and one that was imported from there.

    Nor do they and their helpers have constants of the same name and different values.
    """
    text = Path(kernels_norms.__file__).read_text(encoding="utf-8")
    attribute, imported = tmp_path / "planted_attribute.py", tmp_path / "planted_import.py"
    attribute.write_text(text.replace("next_power_of_2(Q_DIM)", "triton.next_power_of_2(Q_DIM)"), encoding="utf-8")
    imported.write_text(text.replace("dsv4attn.backends._triton.sizes", "triton"), encoding="utf-8")

    twice = tmp_path / "planted_twice.py"
    twice.write_text(TWICE, encoding="utf-8")

    told = told_by("-m", PROGRAM, str(attribute), str(imported), str(twice))

    assert {*told["replaced"]} >= {"cdiv", "next_power_of_2"}
    assert told["functions"] > 400
    assert told["outside"] == {
        "planted_attribute.norm_kernel": ["triton.next_power_of_2"],
        "planted_import.norm_kernel": ["next_power_of_2"],
    }
    assert told["unstable"] == {"planted_twice.kernel": ["FEW_ROWS"]}
    # Triton says so, too
    assert told["errors"].keys() == told["outside"].keys()
    assert all(re.search("Unsupported function referenced.*next_power_of_2", e) for e in told["errors"].values())


def test_the_wheels_and_the_examples_have_no_kernels_of_their_own() -> None:
    """The test above reads the backends of this package. `test_layers` lets no other module of it import triton."""
    files = [*ROOT.glob("integrations/*/dsv4attn_*/**/*.py"), *ROOT.glob("examples/**/*.py")]

    assert len(files) > 20
    assert [path for path in files if re.search(r"^\s*(import|from) triton", path.read_text(), re.MULTILINE)] == []


@pytest.mark.matrix
def test_every_kernel_compiles_after_functions_of_triton_were_replaced() -> None:
    told = told_by("-m", PROGRAM, "compile")

    assert {name: error for name, error in told["said"].items() if error} == {}
    # those that run in the interpreter alone
    assert [name for name in told["missing"] if ".interpreted." not in name] == []
