"""The xpu backend: its options, what it compiles, and what it never does on the host.

`tests/backends/test_descriptors.py` and `test_forms.py` show what all backends have in common.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dsv4attn
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends.xpu import launch
from dsv4attn.backends.xpu.launch import XpuBackend
from dsv4attn.backends.xpu.tuning import TUNING
from dsv4attn.core.contract.backend import KeyForm
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.selection import load_backend
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, run_case
from tests.backends._triton.attention.attention_trials import OCP, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.index_ops.index_trials import VIEWS, operations
from tests.backends._triton.triton_backends import planned, problems
from tests.programs import told_by

FORMS = ["fused", "gathered"]
each_form = pytest.mark.parametrize("form", FORMS)
PACKAGE = Path(dsv4attn.__file__).parent


# options


def test_options_say_how_it_decodes() -> None:
    assert not load_backend("xpu").gathers  # type: ignore[attr-defined]
    assert load_backend("xpu", decode="gathered").gathers  # type: ignore[attr-defined]
    for backend in (XpuBackend(), XpuBackend(decode="gathered")):
        assert backend.capabilities.prefill_keys is KeyForm.GATHERED
        assert backend.capabilities.index_alignment == 16
        assert backend.capabilities.max_logits


def test_the_form_of_decode_is_checked() -> None:
    with pytest.raises(ArgumentError, match=r"^decode: expected"):
        XpuBackend(decode="paged")


def test_an_intel_gpu_has_its_own_numbers() -> None:
    backend = XpuBackend()

    assert backend._tuning(DeviceFacts.named("xpu")) is TUNING["xpu"]
    assert not backend._gathers(DeviceFacts.named("xpu"))


def test_no_file_names_a_vendors_part_of_torch() -> None:
    """Streams, events and devices are reached through `torch.get_device_module`."""
    files = [path for folder in ("xpu", "_triton") for path in (PACKAGE / "backends" / folder).rglob("*.py")]
    named = re.compile(r"\btorch\.(cuda|xpu)\b|from torch import .*\b(cuda|xpu)\b|getattr\(torch, ")
    lines = [f"{path.name}: {line}" for path in files for line in path.read_text().splitlines() if named.search(line)]

    assert len(files) > 12
    assert lines == []
    assert named.search("with torch.cuda.stream(s):")
    assert named.search("from torch import Tensor, xpu")


# conformance


SAMPLE = chosen(CASES, "indexer-garbage-decode,max-logits-decode,lse-prefill,scratch-c4a,apart-call-decode")


@pytest.mark.in_turn
@each_form
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: str(case.id))
def test_it_keeps_the_contract(form: str, case: Any) -> None:
    outcome = run_case(Subject.named("xpu", device=DEVICE.type, options={"decode": form}), case)

    assert outcome.state == "passed", outcome.message


# what is compiled


def test_only_the_chosen_form_of_decode_is_announced() -> None:
    bounds = WarmupSpec.of(ModelGeometry.preset("flash"), problems()[0].limits)
    announced = {form: set(XpuBackend(decode=form).kernel_variants(bounds, DeviceFacts.named("xpu"))) for form in FORMS}

    def gathers(variants: set[Variant]) -> bool:
        return any(variant.name == "gather_selected" for variant in variants)

    def pages(variants: set[Variant]) -> bool:
        return any(v.name == "attention" and ("window_keys", "*u8") in v.types for v in variants)

    assert (gathers(announced["fused"]), pages(announced["fused"])) == (False, True)
    assert (gathers(announced["gathered"]), pages(announced["gathered"])) == (True, False)


@pytest.mark.matrix
def test_its_own_kernels_fit_devices_that_are_not_here() -> None:
    outcomes_by_target = told_by("-m", "tests.backends.xpu.compiles", "sm_80", "gfx942")

    assert set(outcomes_by_target) == {"sm_80", "gfx942"}
    for outcomes in outcomes_by_target.values():
        assert {tuple(outcome) for outcome in outcomes} == {
            ("gather_selected",),
            ("attend_leading_values",),
            ("fill_kernel",),
        }


# what the host does


def test_decode_in_many_runs_reads_no_value_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RUN_BYTES", 1)
    backend = XpuBackend(decode="gathered")
    call = planned(backend, Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(40, 30), tokens=5))
    with launching_nothing(), observed() as launched, operations() as ran:
        backend.decode(call)

    assert [variant.name for variant in launched].count("gather_selected") == 10
    assert {name for name, _ in ran} <= VIEWS


@pytest.mark.skipif(not INTERPRETED, reason="counts launches of the interpreter")
def test_decode_on_gathered_rows_launches_once_a_segment_and_then_attends() -> None:
    backend = XpuBackend(decode="gathered", deterministic=True)
    call = planned(backend, Trial(layouts=(OCP, OCP), widths=(20, 30)))
    for attend in (backend.decode, backend.prefill):
        with observed() as seen:
            attend(call)

        assert [variant.name for variant in seen] == ["gather_selected", "gather_selected", "attention"]
