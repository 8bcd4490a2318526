"""What every form of every Triton backend keeps: launches are announced, memory is bounded, no step asks the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.tuning import Tuning
from dsv4attn.core.cache.selected_keys import RaggedIndices
from dsv4attn.core.contract.backend import IndexForm, KeyForm, Phase
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.memory.workspace import simultaneous_bytes
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.case import Bench
from dsv4attn.testing.checks.attention import any_cut_same_bits
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.attention.attention_trials import OCP, Trial
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import Engine, launching_nothing
from tests.backends._triton.index_ops.index_trials import FILLS, VIEWS, operations
from tests.backends._triton.triton_backends import bounds_of, planned, problems
from tests.backends.built_in import forms
from tests.harness import all_kinds

FORMS = forms()
FLASH = ModelGeometry.preset("flash")
LIMITS = Limits(max_num_reqs=6, max_num_batched_tokens=96, max_model_len=1024, num_speculative_tokens=1)
META = torch.device("meta")
each_form = pytest.mark.parametrize("form", FORMS)
each_mode = pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])


@pytest.mark.in_turn
@each_mode
@each_form
def test_nothing_is_launched_that_was_not_announced(form: str, deterministic: bool) -> None:
    backend, device, names = FORMS[form](deterministic=deterministic), DeviceFacts.here(DEVICE), set[str]()
    for scenario in problems():
        announced = set(backend.kernel_variants(bounds_of(scenario), device))
        with observed() as seen:
            scenario.run(backend)

        assert [variant for variant in seen if variant not in announced] == []
        names |= {variant.name for variant in seen}

    assert {"attention", "qnorm_rope_kv_insert_kernel"} <= names


@each_form
def test_warm_up_counts_every_kernel(form: str) -> None:
    bounds, backend = bounds_of(problems()[0]), FORMS[form]()

    assert backend.warmup(bounds, DEVICE) >= len(set(backend.kernel_variants(bounds, DeviceFacts.here(DEVICE))))


@all_kinds
@each_mode
@each_form
def test_scratch_keeps_within_its_bound(form: str, deterministic: bool, kind: LayerKind) -> None:
    backend = FORMS[form](deterministic=deterministic)
    for heads in (1, 7, 64, 65, 128, 129):
        layer = evolve(FLASH.layer_of_kind(kind), num_heads=heads)
        for phase in Phase:
            bound = backend.scratch_bound(phase, layer, 200, 640)
            for tokens in (0, 1, 7, 63, 64, 65, 200):
                for width in (0, 1, 128, 129, 640):
                    assert simultaneous_bytes(list(backend.scratch(phase, layer, tokens, width))) <= bound


@pytest.mark.matrix
@pytest.mark.in_turn
@all_kinds
@each_form
def test_a_deterministic_token_has_the_same_bits_in_any_cut_and_company(form: str, kind: LayerKind) -> None:
    """Rows of several splits, which only a small tuning makes of the few keys of a quick test."""
    backend = FORMS[form](deterministic=True)
    backend.tuning = Tuning(heads=16, keys=16, split_keys=16)
    geometry = tiny_geometry(window=24, topk=20, ratios=(2, 4))
    inputs = StepFixture(
        kind=kind,
        requests=[(90, 3), (0, 2)],
        geometry=geometry,
        topk="holes",
        compressed_block_tokens=32,
        device=DEVICE.type,
    )

    any_cut_same_bits((1, 2))(Bench(backend), inputs)


def planned_decode(backend: Any) -> Any:
    """A decode over two caches, in the form of indices that the backend takes."""
    ragged = backend.capabilities.decode_indices is IndexForm.RAGGED
    form: Any = "ragged" if ragged else "dense"
    return planned(backend, Trial(layouts=(OCP, OCP), pages=(64, 2), widths=(40, 30), tokens=5, form=form))


@each_mode
@each_form
def test_decode_reads_no_value_and_allocates_nothing(form: str, deterministic: bool) -> None:
    backend = FORMS[form](deterministic=deterministic)
    call = planned_decode(backend)
    with launching_nothing(), observed() as launched, operations() as ran:
        backend.decode(call)

    assert launched
    assert {name for name, _ in ran} <= VIEWS


def test_a_decode_that_reads_or_allocates_is_found() -> None:
    backend = next(iter(FORMS.values()))()
    call = planned_decode(backend)
    rows = call.keys[0].rows
    ends: Tensor = rows.indptr if isinstance(rows, RaggedIndices) else rows.lens
    with launching_nothing(), operations() as ran:
        ends.new_empty(int(ends.max().item()), 512)
        backend.decode(call)

    assert {name for name, _ in ran} - VIEWS >= {"max", "_local_scalar_dense", "new_empty"}


STEPS = {
    "decode": [(300, 1), (999, 2), (0, 1)],
    "prefill": [(0, 30), (500, 40)],
    "mixed": [(300, 1), (9, 2), (0, 30), (900, 5)],
    "nothing": [(0, 0)],
}
LENGTHS = {"unbind", "copy_", "sub", "div", "clamp", "add_"}
"""What core works out of a chunk's requests before keys are gathered; on a device we see that it allocates nothing."""


@pytest.mark.pairwise
@pytest.mark.skipif(not INTERPRETED, reason="on a device steps are real: see test_device and test_hot_path")
@each_form
@pytest.mark.parametrize("step", STEPS)
@all_kinds
def test_g11_a_step_reads_no_value_and_allocates_nothing(kind: LayerKind, step: str, form: str) -> None:
    """From its metadata to its attention: a value of the meta device cannot be read."""
    backend = FORMS[form]()
    recorded = Engine(backend, FLASH, LIMITS, kind, META).recorded_step(STEPS[step])

    for name, where in (*recorded.of_metadata, *recorded.of_layer):
        assert where == "cpu" or name in VIEWS | FILLS, name
    gathers = backend.capabilities.prefill_keys is KeyForm.GATHERED and step in ("prefill", "mixed")
    on_host = {name for name, where in recorded.of_layer if where == "cpu"}
    assert on_host <= VIEWS | (LENGTHS if gathers else set())
    if step != "nothing":
        assert "qnorm_rope_kv_insert_kernel" in recorded.launched
        assert {"attention", "attend_tile"} & {*recorded.launched}
