"""Clause D2 of the kit on the deterministic triton backend, in Triton's interpreter.

On an accelerator `tests/backends/test_layer_device.py` runs these cases on every backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.testing.case import Case, chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.backends._triton.triton_backends import QuickHistory
from tests.fast_interpreter.products import multiplied_alike

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="test_layer_device runs these cases on an accelerator")


class Quick(QuickHistory, GenericBackend): ...


DEFAULT = "any-cut-layer-swa"
"""The case of the default run, which is the quickest one of a whole layer."""
LONG = {f"any-cut-layer-{name}" for name in ("c128a", "fp32", "ranks", "v41")}
"""Whole layers that take up to 40 s each; `any-cut-layer-c4a` has most of what they have."""


def mark_of(case: Case) -> Any:
    """When a case runs."""
    if case.name == DEFAULT:
        return ()
    return pytest.mark.slow if case.name in LONG else pytest.mark.matrix


@pytest.mark.matrix
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=mark_of(case)) for case in chosen(CASES, "D2,!graph")],
)
def test_g24_interpreted_kernels_keep_the_clause(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", multiplied_alike)
    # steps of whole layers have more keys than `Quick` takes for few, and the reference writes what they read anyway
    backend = (GenericBackend if "layer" in case.name else Quick)(deterministic=True)

    certificate = conform(Subject.of(backend), [case])

    assert certificate.ok, certificate.outcomes[0].message
