"""The xpu backend: when it is chosen, what it compiles, and what it never does on the host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dsv4attn
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching.runtime import INTERPRETED, observed
from dsv4attn.backends.xpu import INFO, launch
from dsv4attn.backends.xpu.launch import XpuBackend
from dsv4attn.backends.xpu.tuning import TUNING
from dsv4attn.core.contract.backend import AttentionCall, KeyForm, Phase, Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.problem import Problem
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.errors import ArgumentError
from dsv4attn.plugins import PluginRegistry
from dsv4attn.selection import explain, load_backend
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, run_case
from tests.backends._triton.attention.attention_trials import OCP, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import launching_nothing
from tests.backends._triton.index_ops.index_trials import operations
from tests.backends._triton.triton_backends import bounds_of, problems
from tests.programs import told_by

FORMS = ["fused", "gathered"]
each_form = pytest.mark.parametrize("form", FORMS)
KINDS = list(LayerKind)
PACKAGE = Path(dsv4attn.__file__).parent


# selection


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("kind", KINDS)
def test_on_an_intel_gpu_it_is_chosen_before_the_generic_room(kind: LayerKind, phase: Phase) -> None:
    problem = Problem.of(ModelGeometry.preset("flash"), kind, phase.value)
    registry = PluginRegistry.load(entry_points=[])
    selection = explain(problem, device=DeviceFacts.named("xpu"), backend="auto", registry=registry)

    assert selection.chosen is not None
    assert selection.chosen.info.name == "xpu"


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "cpu"])
def test_elsewhere_it_must_be_asked_for(arch: str) -> None:
    facts = DeviceFacts.named(arch)

    assert facts.matches(INFO.runs_on)
    assert not facts.matches(INFO.native)
    assert INFO.rank is Rank.VENDOR


def test_options_say_how_it_decodes() -> None:
    assert not load_backend("xpu").gathers  # type: ignore[attr-defined]
    assert load_backend("xpu", decode="gathered").gathers  # type: ignore[attr-defined]
    for made in (XpuBackend(), XpuBackend(decode="gathered")):
        assert made.capabilities.prefill_keys is KeyForm.GATHERED
        assert made.capabilities.index_alignment == 16
        assert made.capabilities.max_logits


@pytest.mark.parametrize(
    ("options", "argument"),
    [({"decode": "paged"}, "decode"), ({"tuning": "sm_70"}, "tuning"), ({"deterministic": 1}, "deterministic")],
)
def test_an_option_with_a_wrong_value_says_what_it_may_be(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: expected"):
        XpuBackend(**options)


def test_an_intel_gpu_has_its_own_numbers() -> None:
    backend = XpuBackend()

    assert backend._tuning(DeviceFacts.named("xpu")) is TUNING["xpu"]
    assert not backend._gathers(DeviceFacts.named("xpu"))


def test_no_file_names_a_vendors_part_of_torch() -> None:
    """Streams, events and devices are reached through `torch.get_device_module`."""
    files = [path for folder in ("xpu", "_triton") for path in (PACKAGE / "backends" / folder).rglob("*.py")]
    named = re.compile(r"\btorch\.(cuda|xpu)\b|from torch import .*\b(cuda|xpu)\b|getattr\(torch, ")
    found = [f"{path.name}: {line}" for path in files for line in path.read_text().splitlines() if named.search(line)]

    assert len(files) > 12
    assert found == []
    assert named.search("with torch.cuda.stream(s):")
    assert named.search("from torch import Tensor, xpu")


# conformance


SAMPLE = chosen(CASES, "indexer-garbage-decode,max-logits-decode,lse-prefill,scratch-c4a,apart-call-decode")


@each_form
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: str(case.id))
def test_it_keeps_the_contract(form: str, case: Any) -> None:
    outcome = run_case(Subject.named("xpu", device=DEVICE.type, options={"decode": form}), case)

    assert outcome.state == "passed", outcome.message


# what is compiled


@each_form
def test_nothing_is_launched_that_was_not_announced(form: str) -> None:
    backend: Any = XpuBackend(decode=form)
    here, names = DeviceFacts.here(DEVICE), set[str]()
    for scenario in problems():
        announced = set(backend.kernel_variants(bounds_of(scenario), here))
        with observed() as seen:
            scenario.run(backend)

        assert [variant for variant in seen if variant not in announced] == []
        names |= {variant.name for variant in seen}

    assert ("gather_selected" in names) == (form == "gathered")
    assert {"attention", "fill_kernel", "qnorm_rope_kv_insert_kernel"} <= names


def test_only_the_chosen_form_of_decode_is_announced() -> None:
    bounds = WarmupSpec.of(ModelGeometry.preset("flash"), problems()[0].limits)
    announced = {form: set(XpuBackend(decode=form).kernel_variants(bounds, DeviceFacts.named("xpu"))) for form in FORMS}

    def gathers(variants: set[Variant]) -> bool:
        return any(variant.name == "gather_selected" for variant in variants)

    def pages(variants: set[Variant]) -> bool:
        return any(v.name == "attention" and ("cache0", "*u8") in v.types for v in variants)

    assert (gathers(announced["fused"]), pages(announced["fused"])) == (False, True)
    assert (gathers(announced["gathered"]), pages(announced["gathered"])) == (True, False)


@each_form
def test_warm_up_counts_every_kernel(form: str) -> None:
    bounds, backend = bounds_of(problems()[0]), XpuBackend(decode=form)

    assert backend.warmup(bounds, DEVICE) >= len(set(backend.kernel_variants(bounds, DeviceFacts.here(DEVICE))))


def test_its_own_kernels_fit_devices_that_are_not_here() -> None:
    told = told_by("-m", "tests.backends.xpu.compiles", "sm_80", "gfx942")

    assert set(told) == {"sm_80", "gfx942"}
    for outcomes in told.values():
        assert {tuple(one) for one in outcomes} == {("gather_selected",), ("attend_leading_values",), ("fill_kernel",)}


# what the host does


VIEWS = {"slice", "view", "select", "as_strided", "alias"}


def host_operations(backend: XpuBackend, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What torch is asked to do by decode, beside launches."""
    workspace = WorkspaceManager(DEVICE)
    call, _ = trial.call()
    scratch = workspace.get_simultaneous(*backend.scratch(Phase.DECODE, trial.layer, trial.tokens, sum(trial.widths)))
    call = AttentionCall(call.layer, call.q, call.keys, call.attn_sink, call.out, call.lse, scratch, call.options)
    with launching_nothing(), observed() as launched, operations() as ran:
        backend.decode(call)

    assert launched
    return {name for name, _ in ran}


@each_form
@pytest.mark.parametrize("run_bytes", [2**28, 1])
def test_decode_reads_no_value_and_allocates_nothing(
    form: str, run_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RUN_BYTES", run_bytes)
    trial = Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(40, 30), tokens=5)

    assert host_operations(XpuBackend(decode=form), trial, monkeypatch) <= VIEWS


def test_a_backend_that_reads_or_allocates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Original(XpuBackend):
        def decode(self, call: AttentionCall) -> None:
            longest = max(int(segment.rows.lens.max().item()) for segment in call.keys)  # type: ignore[union-attr]
            torch.empty(longest, 512)
            super().decode(call)

    trial = Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(40, 30), tokens=5)
    ran = host_operations(Original(decode="gathered"), trial, monkeypatch)

    assert ran - VIEWS >= {"max", "_local_scalar_dense", "empty"}


@pytest.mark.skipif(not INTERPRETED, reason="counts launches of the interpreter")
def test_decode_on_gathered_rows_launches_once_a_segment_and_then_attends() -> None:
    backend, trial = XpuBackend(decode="gathered", deterministic=True), Trial(layouts=(OCP, OCP), widths=(20, 30))
    call, _ = trial.call()
    workspace = WorkspaceManager(DEVICE)
    scratch = workspace.get_simultaneous(*backend.scratch(Phase.DECODE, trial.layer, trial.tokens, 50))
    with observed() as seen:
        backend.decode(AttentionCall(call.layer, call.q, call.keys, call.attn_sink, call.out, call.lse, scratch))

    assert [variant.name for variant in seen] == ["gather_selected", "gather_selected", "attention", "reduce"]
