"""The checks of a replay on trial: what they must find, and what they must not mind."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.tools.replay.check_attention import choose_rows, selecting_tokens, tolerance_of
from dsv4attn.tools.replay.report import as_json
from dsv4attn.tools.replay.results import SHOWN_FAILURES, CheckResult, Errors
from dsv4attn.tools.replay.workload import Tokens, Workload
from tests.testing.mutants_sizes import Direct
from tests.tools.replay import bugs
from tests.tools.replay.small import FORMS, GEOMETRY, requests_of, run, verdicts

ALL = set(LayerKind)
COMPRESSED = {LayerKind.CSA, LayerKind.HCA}


# what passes


@pytest.mark.pairwise
@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: "-".join(forms.values()))
@pytest.mark.parametrize("cache", ["fp8_ds_mla", "bf16", "fp32"])
def test_every_form_of_the_reference_passes_in_every_cache(cache: str, forms: dict[str, Any]) -> None:
    report = run(ReferenceBackend(**forms), cache=cache)

    assert report.ok
    assert [(layer.kind, layer.tokens) for layer in report.layers] == [("swa", 212), ("c4a", 212), ("c128a", 212)]
    assert all(layer.check is not None and layer.check.rows >= 40 for layer in report.layers)


def test_a_decode_that_reads_entries_itself_is_checked_as_any() -> None:
    assert run(Direct("nothing")).ok
    assert not run(Direct("the first request")).ok


def test_fp32_rows_leave_nothing_but_the_order_of_sums() -> None:
    for layer in run(cache="fp32").layers:
        assert layer.check is not None
        assert max(error or 0.0 for error in layer.check.worst) < 2e-6


def test_the_tolerances_of_the_released_models_are_what_the_formats_explain() -> None:
    layer = ModelGeometry.preset("flash").layer_of_kind("c4a")

    assert tolerance_of(layer, torch.bfloat16).out == pytest.approx(3.8e-3, abs=5e-5)
    assert tolerance_of(layer, torch.bfloat16).lse == pytest.approx(8.3e-3, abs=5e-5)
    assert tolerance_of(layer, torch.bfloat16).projection == pytest.approx(7.6e-3, abs=1e-4)
    assert set(tolerance_of(layer, torch.float32)) == {1e-5, None}


# what fails

BUGS = [
    (bugs.WithoutSink, {}, ALL),
    (bugs.WithoutSinkInPrefill, {}, ALL),
    (bugs.LogOfBaseTwo, {}, ALL),
    (bugs.LastRowNotWritten, {}, ALL),
    (bugs.NeighboursKeys, {}, ALL),
    (bugs.NeighboursKeys, {"prefill_keys": "paged"}, ALL),
    (bugs.AbsentIsSlotZero, {}, ALL),
    (bugs.AbsentIsSlotZero, {"prefill_keys": "paged"}, ALL),
    (bugs.NarrowWindow, {}, ALL),
    (bugs.NarrowWindow, {"prefill_keys": "paged"}, ALL),
    (bugs.NeighboursTable, {}, ALL),
    (bugs.EntriesNotStored, {}, COMPRESSED),
    (bugs.ScalesOfTheNextRecord, {}, ALL),
    (bugs.KeysNotRotated, {}, ALL),
    (bugs.NormOfAllHeads, {}, ALL),
    (bugs.ProjectsRotated, {}, ALL),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("bug", "options", "found_in"), BUGS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bug_fails_the_checks(bug: type[ReferenceBackend], options: dict[str, Any], found_in: set[LayerKind]) -> None:
    report = run(bug(**options))

    assert {kind for kind, ok in verdicts(report).items() if not ok} == found_in
    assert not report.ok
    json.dumps(as_json(report), allow_nan=False)


def test_a_failure_says_which_row_and_by_how_much() -> None:
    (layer,) = run(bugs.WithoutSink(), kinds=[LayerKind.SWA]).layers

    assert layer.check is not None
    assert layer.check.failed > len(layer.check.failures) == SHOWN_FAILURES
    assert layer.check.failures[0].startswith("step 1, request ")
    assert ": out " in layer.check.failures[0]


@pytest.mark.parametrize("error", [math.inf, math.nan])
def test_what_is_not_a_number_is_beyond_every_limit(error: float) -> None:
    result = CheckResult(Errors(1.0, 1.0, 1.0))
    result.add(Errors(0.5, error, 0.5), "here")

    assert not result.ok
    assert result.failures == [f"here: lse {error:.2g}"]


# which rows


def tokens_of(*chunks: tuple[int, int]) -> Tokens:
    """Chunks of (first position, tokens), each of another request."""
    rows = np.repeat(np.arange(len(chunks)), [count for _, count in chunks])
    positions = np.concatenate([np.arange(first, first + count) for first, count in chunks])
    return Workload(GEOMETRY, requests_of(*[(99, 99)] * len(chunks)), 0, torch.float32).tokens(rows, positions)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(0, 12),
    st.sampled_from(list(LayerKind)),
    st.integers(0, 99),
)
def test_rows_are_different_and_as_many_as_asked_for(
    chunks: list[tuple[int, int]], count: int, kind: LayerKind, seed: int
) -> None:
    tokens = tokens_of(*chunks)
    chosen = choose_rows(tokens, GEOMETRY.layer_of_kind(kind), count, np.random.default_rng(seed))

    assert len(chosen) == min(count, len(tokens)) == len(set(chosen.tolist()))
    assert all(0 <= row < len(tokens) for row in chosen.tolist())


def test_the_first_row_that_leaves_an_entry_out_is_an_edge() -> None:
    layer = GEOMETRY.layer_of_kind("c4a")
    first = selecting_tokens(layer) - 1
    for seed in range(20):
        chosen = choose_rows(tokens_of((first - 3, 9)), layer, 2, np.random.default_rng(seed))
        assert chosen[0] == 3


def test_half_of_the_rows_stand_at_the_most_telling_edges() -> None:
    tokens, layer = tokens_of((0, 30), (50, 30)), GEOMETRY.layer_of_kind("swa")
    for seed in range(20):
        chosen = choose_rows(tokens, layer, 6, np.random.default_rng(seed))
        assert set(chosen[:3].tolist()) == {0, 7, 8}
        first = choose_rows(tokens, layer, 10, np.random.default_rng(seed))[:5]
        assert {0, 7, 8} < set(first.tolist()) <= {0, 7, 8, 29, 30, 59}
