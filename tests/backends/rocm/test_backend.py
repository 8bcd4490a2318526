"""The rocm backend: its forms, what it compiles, what it reads, and which lists it makes.

`tests/backends/test_descriptors.py` and `test_forms.py` show what all backends have in common.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from dsv4attn.backends._triton.attention import launch as attention_launch
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.tuning import DEFAULT, Tuning
from dsv4attn.backends.rocm.launch import RocmBackend
from dsv4attn.backends.rocm.tuning import TUNING
from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall, IndexForm, KeyForm
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.contract.warmup import WarmupSpec
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.selection import load_backend
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, run_case
from dsv4attn.testing.kit.factories import tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.backends._triton.attention.attention_trials import TINY, Trial
from tests.backends._triton.attention.mutants import mutate
from tests.backends._triton.cache.caches import DEVICE
from tests.backends._triton.engine import Engine
from tests.backends._triton.triton_backends import problems
from tests.harness import all_kinds, assert_same_bits

FLASH = ModelGeometry.preset("flash")
LIMITS = Limits(max_num_reqs=6, max_num_batched_tokens=96, max_model_len=1024, num_speculative_tokens=1)
META = torch.device("meta")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel is neither skipped nor changed")


# options


def test_its_forms_are_ragged_on_pages_in_decode_and_on_gathered_rows_in_prefill() -> None:
    plain: Any = load_backend("rocm")
    exact: Any = load_backend("rocm", deterministic=True)

    assert exact.deterministic
    assert plain.capabilities.prefill_keys is KeyForm.GATHERED
    assert exact.capabilities.prefill_keys is KeyForm.PAGED
    for backend in (plain, exact):
        assert backend.capabilities.decode_indices is backend.capabilities.prefill_indices is IndexForm.RAGGED
        assert backend.capabilities.max_logits
        assert backend.capabilities.empty_lse


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_an_architecture_has_its_own_numbers(arch: str) -> None:
    assert RocmBackend()._tuning(DeviceFacts.named(arch)) is TUNING[arch]
    assert RocmBackend(tuning=arch)._tuning(DeviceFacts.named("gfx90a")) is TUNING[arch]
    assert RocmBackend()._tuning(DeviceFacts.named("gfx90a")) is TUNING[DEFAULT]


# conformance

SAMPLE = chosen(
    CASES,
    "indexer-garbage-decode,max-logits-decode,lse-prefill,scratch-c4a,call-holes-c4a-decode,"
    "call-empty-c4a-decode,pair-ocp-fnuz-decode,apart-call-decode",
)


@pytest.mark.in_turn
@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "deterministic"])
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: str(case.id))
def test_it_keeps_the_contract(case: Any, *, deterministic: bool) -> None:
    subject = Subject.named("rocm", device=DEVICE.type, options={"deterministic": deterministic})
    outcome = run_case(subject, case)

    assert outcome.state == "passed", outcome.message


class InParts(RocmBackend):
    """The backend, with tiles so small that the keys of a quick test are several parts of several tiles."""

    tunings = {DEFAULT: Tuning(heads=16, keys=16, split_keys=16)}  # noqa: RUF012 - as backends declare it


@all_kinds
def test_in_deterministic_mode_a_row_has_the_same_bits_in_any_company(kind: LayerKind) -> None:
    geometry = tiny_geometry(window=24, topk=20, ratios=(2, 4))
    whole = StepFixture(
        kind=kind,
        requests=[(40, 1), (90, 1), (0, 1), (13, 2)],
        geometry=geometry,
        num_speculative_tokens=1,
        compressed_block_tokens=32,
        device=DEVICE.type,
    )
    backend = InParts(deterministic=True)
    out, lse = whole.check(backend)
    first = 0
    for i, (_, count) in enumerate(whole.requests):
        step = whole.at(*((context, n if i == j else 0) for j, (context, n, *_) in enumerate(whole.requests)))
        assert_same_bits(step.run(backend), (out[first : first + count], lse[first : first + count]))
        first += count


# indptr that holds anything

CAPACITY, WIDTH = 40, 24
MOST, LEAST = 2**31 - 1, -(2**31)
SPANS = [
    (0, 10),
    (10, 40),  # longer than the width
    (-5, 10),
    (LEAST, 7),
    (20, 5),
    (5, -3),
    (30, 100),
    (39, MOST),
    (40, 60),
    (60, 70),
    (MOST, MOST),
    (LEAST, MOST),
    (LEAST, LEAST),
    (MOST, 3),
    # their difference does not fit into 32 bits
    (MOST, LEAST),
    (39, LEAST),
    (5, LEAST),
]


def misread(span: tuple[int, int], form: Any, splits: int) -> tuple[Trial, AttentionCall]:
    """A row from begin to end of a list that stands among slots whose keys are NaN; and what it should give."""
    tuning = Tuning(heads=16, keys=16)
    trial = Trial(layouts=(TINY,), widths=(WIDTH,), tokens=1, form=form, tuning=tuning, splits=splits, seed=4)
    (segment,) = trial.segments
    unwritten = np.isnan(segment.values).any(1)
    good, bad = np.flatnonzero(~unwritten).tolist(), np.flatnonzero(unwritten).tolist()
    assert min(len(good), len(bad)) > 5
    rng = Random(0)
    memory = [rng.choice(bad) for _ in range(CAPACITY + 2 * WIDTH)]
    inside = [rng.choice([*good, -1]) for _ in range(CAPACITY)]
    memory[WIDTH : WIDTH + CAPACITY] = inside
    begin, end = (max(bound, 0) for bound in span)
    row = (inside[begin:end] + [-1] * WIDTH)[:WIDTH]
    trial.__dict__["segments"] = [segment._replace(slots=np.array([row]), lens=np.array([WIDTH]))]
    call, _ = trial.call()
    flat, indptr = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (memory, span))
    rows = RaggedIndices(flat[WIDTH : WIDTH + CAPACITY], indptr, WIDTH)
    keys: Any = call.keys
    keys = GatheredKeys(keys.kv, rows) if form.startswith("gathered") else (PagedKeys(keys[0].cache, rows),)
    return trial, evolve(call, keys=keys)


def error_of(trial: Trial, call: AttentionCall) -> float:
    attention_launch.attend(call, trial.tuning)
    answer: Any = call
    return trial.error(answer)


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("form", ["ragged", "gathered-ragged"])
@pytest.mark.parametrize("span", SPANS, ids=str)
def test_whatever_indptr_holds_nothing_beside_the_list_is_read(span: tuple[int, int], form: str, splits: int) -> None:
    assert error_of(*misread(span, form, splits)) <= 1


BOUNDS = {
    "negative begins believed": ("tl.maximum(tl.load(lens + token), 0)", "tl.load(lens + token)", (-5, 10)),
    "ends behind the list believed": (
        "tl.minimum(tl.maximum(tl.load(lens + token + 1), 0).to(tl.int64), numbers.index_stride).to(tl.int32)",
        "tl.load(lens + token + 1)",
        (30, 100),
    ),
    "rows longer than the width": ("tl.minimum(tl.maximum(count, 0), numbers.width)", "tl.maximum(count, 0)", (10, 40)),
}


@interpreted
@pytest.mark.parametrize("name", BOUNDS)
def test_a_reader_beside_the_list_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, wrong, span = BOUNDS[name]
    mutate(monkeypatch, tmp_path, "attention", right, wrong)

    assert error_of(*misread(span, "ragged", 0)) > 1


# what is compiled


def test_attention_is_announced_on_ragged_rows_alone() -> None:
    bounds = WarmupSpec.of(FLASH, problems()[0].limits)
    forms = [v for v in RocmBackend().kernel_variants(bounds, DeviceFacts.named("gfx942")) if v.name == "attention"]

    assert {dict(variant.constants)["ROW"].ragged for variant in forms} == {True}
    assert {dict(variant.types)["window_keys"] for variant in forms} == {"*u8", "*bf16"}, "pages, and gathered rows"


# which lists are made


@interpreted
@all_kinds
def test_a_decode_makes_only_the_lists_that_its_kind_of_layer_needs(kind: LayerKind) -> None:
    recorded = Engine(RocmBackend(), FLASH, LIMITS, kind, META).recorded_step([(300, 1), (999, 2), (0, 1)])

    lists = {LayerKind.SWA: ["pack_kernel"], LayerKind.CSA: ["pack_kernel", "ragged_translate_kernel"]}
    launched = [name for name in recorded.launched if name in {"pack_kernel", "ragged_translate_kernel"}]
    assert launched == lists.get(kind, ["pack_kernel"] * 2)
    assert recorded.launched.count("attention") == 1


@interpreted
@all_kinds
def test_a_prefill_is_gathered_and_combined(kind: LayerKind) -> None:
    recorded = Engine(RocmBackend(), FLASH, LIMITS, kind, META).recorded_step([(0, 30), (500, 40)])

    assert {"fill_kernel", "combine_kernel", "attention"} <= {*recorded.launched}
