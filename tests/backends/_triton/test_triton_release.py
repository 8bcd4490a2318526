"""Triton backends refuse a release of Triton that is too old for their kernels."""

from __future__ import annotations

import pytest
from attrs import evolve

from dsv4attn.backends._triton.support import require_release
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import explain
from tests.backends.built_in import triton_backends

PROBLEM = Problem.of(ModelGeometry.preset("flash"), "c4a", "decode")


@pytest.mark.parametrize("version", ["3.2.0", "3.5.1", "3.5.1+git1b2c", "2.3.1"])
@pytest.mark.parametrize(("name", "cure"), [("h200", "torch>=2.10"), ("mi300x", "for ROCm"), ("b580", "for XPU")])
def test_an_old_triton_is_refused_by_every_backend_and_automatic_choice(version: str, name: str, cure: str) -> None:
    selection = explain(PROBLEM, device=evolve(DeviceFacts.named(name), triton_version=version), backend="auto")
    refused = {c.name: c.reasons[0] for c in selection.trace if c.reasons and c.reasons[0].code == "TRITON"}

    assert selection.chosen is None
    assert {*triton_backends(DeviceFacts.named(name))} <= {*refused}
    assert {(r.actual, r.allowed) for r in refused.values()} == {(f"Triton {version}", "Triton 3.6 or newer")}
    assert all(cure in reason.cure for reason in refused.values())


@pytest.mark.parametrize("version", ["3.6.0", "3.10.0", "4.0.0", "any"])
def test_newer_releases_are_taken(version: str) -> None:
    selection = explain(PROBLEM, device=evolve(DeviceFacts.named("h200"), triton_version=version), backend="auto")

    assert selection.chosen is not None
    assert selection.chosen.info.name == "sm90"


def test_kernels_are_not_imported_with_an_old_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    require_release()
    old = evolve(DeviceFacts.named("cpu"), triton_version="3.3.1")
    monkeypatch.setattr(DeviceFacts, "named", lambda _: old)

    with pytest.raises(ArgumentError, match=r"triton: expected Triton 3.6 or newer, got Triton 3.3.1 -> pip install"):
        require_release()
