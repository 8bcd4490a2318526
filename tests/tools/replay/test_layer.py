"""The checks of a replay: what passes, what each stage must find, which rows are chosen, and what the report says."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.projection import output_projection
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer import attention_layer as attention
from dsv4attn.core.layer.indexer import Indexer
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.core.torch_ops import norms
from dsv4attn.core.torch_ops.compressor import rms_norm
from dsv4attn.serving.cache_manager import CacheManager
from dsv4attn.tools.replay.check_layer import choose_rows, selecting_tokens
from dsv4attn.tools.replay.report import as_json
from dsv4attn.tools.replay.results import LAYER_OPERATIONS, SHOWN_FAILURES, CheckResult, Errors, LayerReport
from dsv4attn.tools.replay.trace import selecting_trace
from dsv4attn.tools.replay.workload import Tokens, Workload
from tests.testing.mutants_sizes import Direct
from tests.tools.replay import bugs, layer_bugs
from tests.tools.replay.small import FORMS, GEOMETRY, TOKENS, requests_of, run, verdicts

ATTENDING = {"out", "lse", "projection"}
STAGES = {"key", "query", "entry", "index_key", "index_query", "selection", "out", "lse", "projection"}


def stages_beyond(layer: LayerReport) -> set[str]:
    """Stages of a layer type whose worst error is beyond its limit."""
    assert layer.check is not None
    return set(layer.check.worst.beyond(layer.check.tolerance))


# what passes


@pytest.mark.pairwise
@pytest.mark.parametrize("forms", FORMS, ids=lambda forms: "-".join(forms.values()))
def test_every_form_of_the_reference_passes(forms: dict[str, Any]) -> None:
    assert run(ReferenceBackend(**forms)).ok


@pytest.mark.parametrize("cache", ["fp8_ds_mla", "bf16", "fp32"])
def test_every_cache_passes_and_every_stage_is_compared(cache: str) -> None:
    report = run(cache=cache)

    assert report.ok
    assert [(layer.kind, layer.tokens) for layer in report.layers] == [(x, TOKENS) for x in ("swa", "c4a", "c128a")]
    swa, c4a, c128a = (dict(values["check"]["worst"]) for values in as_json(report)["layers"])
    assert {name for name, worst in c4a.items() if worst is not None} == STAGES
    assert {name for name, worst in c128a.items() if worst is None} == {"index_key", "index_query", "selection"}
    assert {name for name, worst in swa.items() if worst is None} == STAGES - {"key", "query", *ATTENDING}


@pytest.mark.matrix
def test_fp32_rows_leave_nothing_but_the_order_of_sums() -> None:
    for layer in run(cache="fp32", check_rows=32).layers:
        assert layer.check is not None
        worst = layer.check.worst
        assert max(worst.out, worst.lse, worst.projection) < 5e-6
        assert max(error for error in worst if error is not None) < 0.25


def test_a_decode_that_reads_entries_itself_is_checked_as_any() -> None:
    assert run(Direct("nothing")).ok
    assert not run(Direct("the first request")).ok


def test_layers_of_a_deterministic_backend_run_prompts_and_decodes() -> None:
    assert run(ReferenceBackend(deterministic=True), requests_of((40, 3), (9, 2)), check_rows=2).ok


def test_the_built_in_trace_makes_the_indexer_leave_entries_out() -> None:
    layer = GEOMETRY.layer_of_kind("c4a")
    requests = selecting_trace(0, layer.compress_ratio * (layer.topk + 1))
    report = run(None, requests, kinds=[LayerKind.CSA], max_num_batched_tokens=20)

    assert report.ok
    assert report.layers[0].check is not None
    assert report.layers[0].check.worst.index_query is not None


@pytest.mark.parametrize(("prompt", "scored"), [(27, False), (28, True)])
def test_selection_counts_as_exercised_from_the_first_prompt_that_leaves_an_entry_out(
    prompt: int, *, scored: bool
) -> None:
    (layer,) = run(None, requests_of((prompt, 1)), kinds=[LayerKind.CSA]).layers

    assert layer.check is not None
    assert layer.check.ok
    assert (layer.topk, layer.selecting_tokens) == (6, 28)
    assert layer.selection_not_exercised is not scored
    assert (layer.check.selecting > 0) is scored
    values = as_json(run(None, requests_of((prompt, 1)), kinds=[LayerKind.CSA]))["layers"][0]["check"]["worst"]
    assert (values["selection"] is not None) is (values["index_query"] is not None) is scored


@given(st.integers(0, 2**32), st.integers(1, 5000))
def test_a_selecting_trace_has_one_long_prompt_while_others_decode(seed: int, tokens: int) -> None:
    requests = selecting_trace(seed, tokens)
    lengths = [request.input_length for request in requests]

    assert len(requests) == 4
    assert tokens + 8 <= max(lengths[1:]) <= tokens + 40 or tokens < 120
    assert {1, 127} <= set(lengths)
    assert lengths[0] <= 127
    assert all(2 <= request.output_length <= 8 for request in requests)
    assert requests == selecting_trace(seed, tokens)


# what fails, and in which stage

ENTRIES = {"c4a": {"entry", "index_key"}, "c128a": {"entry"}}
C4A = {"c4a": {"entry", "index_key"}}
BUGS = [
    (layer_bugs.BiasOfTheNextToken, ENTRIES),
    (layer_bugs.LastStateNotSaved, ENTRIES),
    (layer_bugs.TurnedToTheLastToken, ENTRIES),
    (layer_bugs.NormWithoutWeight, ENTRIES),
    (layer_bugs.NeighboursStates, ENTRIES),
    (layer_bugs.NotStored, ENTRIES),
    (layer_bugs.PreviousWindowForgotten, C4A),
    (layer_bugs.IndexKeysNotStored, {"c4a": {"index_key"}}),
    (layer_bugs.IndexScalesDoubled, {"c4a": {"index_key"}}),
    (layer_bugs.QueriesNotTurned, {"c4a": {"index_query"}}),
    (layer_bugs.WeightsOfTheNextHead, {"c4a": {"index_query"}}),
    (layer_bugs.Worst, {"c4a": {"selection"}}),
    (layer_bugs.OneHeadLess, {"c4a": {"selection"}}),
    (layer_bugs.NewestLeftOut, {"c4a": {"selection"}}),
    (layer_bugs.OneTwice, {"c4a": {"selection"}}),
    (layer_bugs.LengthsOfTheLastToken, {"c4a": {"selection"}}),
    (layer_bugs.NotSelected, {"c4a": {"selection"}}),
    (layer_bugs.ScoresWithoutKeyScales, {"c4a": {"selection"}}),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("steps", "expected"), BUGS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bug_around_attention_is_found_where_it_arises(
    steps: type[layer_bugs.Steps], expected: dict[str, set[str]]
) -> None:
    report = run(layer_bugs.backend_with(steps), check_rows=8)

    beyond = {layer.kind: stages_beyond(layer) for layer in report.layers}
    assert {kind: stages for kind, stages in beyond.items() if stages} == expected
    assert not report.ok
    json.dumps(as_json(report), allow_nan=False)


ATTENTION_BUGS = [
    (bugs.WithoutSink, {}, {"out", "projection"}),
    (bugs.WithoutSinkInPrefill, {}, {"out", "projection"}),
    (bugs.LogOfBaseTwo, {}, {"lse"}),
    (bugs.LastRowNotWritten, {}, {"out", "projection"}),
    (bugs.NeighboursKeys, {}, ATTENDING),
    (bugs.NeighboursKeys, {"prefill_keys": "paged"}, ATTENDING),
    (bugs.AbsentIsSlotZero, {}, ATTENDING),
    (bugs.AbsentIsSlotZero, {"prefill_keys": "paged"}, ATTENDING),
    (bugs.NarrowWindow, {}, ATTENDING),
    (bugs.NarrowWindow, {"prefill_keys": "paged"}, ATTENDING),
    (bugs.NeighboursTable, {}, ATTENDING),
    (bugs.ScalesOfTheNextRecord, {}, {"key"}),
    (bugs.KeysNotRotated, {}, {"key"}),
    (bugs.NormOfAllHeads, {}, {"query"}),
    (bugs.ProjectsRotated, {}, {"projection"}),
]


@pytest.mark.mutation
@pytest.mark.parametrize(("bug", "options", "expected"), ATTENTION_BUGS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_bug_of_attention_is_found_where_it_arises(
    bug: type[ReferenceBackend], options: dict[str, Any], expected: set[str]
) -> None:
    report = run(bug(**options), check_rows=8)

    assert not any(verdicts(report).values())
    for layer in report.layers:
        assert expected <= stages_beyond(layer)
        assert stages_beyond(layer) <= expected | (ATTENDING if expected & ATTENDING else set())


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


def test_a_bug_of_the_last_projection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "output_projection", lambda *a, **k: output_projection(*a, **k).roll(1, -1))

    assert [stages_beyond(layer) for layer in run().layers] == [{"projection"}] * 3


def test_a_norm_without_weight_is_found_in_keys_and_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "rms_norm", lambda x, _, *norm: rms_norm(x, None, *norm))
    for layer in run(check_rows=8).layers:
        assert stages_beyond(layer) == {"key", "query"} | ({"index_query"} if layer.kind == "c4a" else set())


def test_a_shortcut_that_is_taken_too_often_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Indexer.__init__

    def careless(self: Indexer, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self._topk = 10**9

    monkeypatch.setattr(Indexer, "__init__", careless)
    report = run(check_rows=8)

    assert [stages_beyond(layer) for layer in report.layers] == [set(), {"selection"}, set()]


def test_pages_of_states_that_are_given_back_too_soon_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a window that an entry still needs belongs to another request by then."""
    monkeypatch.setattr("dsv4attn.core.model.layer_geometry.LayerGeometry.first_state", lambda _, position: position)
    report = run(check_rows=8)

    assert stages_beyond(report.layers[1]) >= {"entry", "index_key"}
    assert stages_beyond(report.layers[2]) >= {"entry"}


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


# what the report says


def test_seconds_and_shares_are_those_of_every_operation() -> None:
    values = as_json(run())

    for layer in values["layers"]:
        seconds = layer["seconds"]
        assert set(seconds) == set(LAYER_OPERATIONS) == set(layer["operations_with_all_layers"])
        used = {"projections", "insert", "attend", "project"}
        used |= {"swa": set(), "c4a": {"compressor", "indexer"}, "c128a": {"compressor"}}[layer["kind"]]
        assert {name for name, value in seconds.items() if value > 0} == used
        assert sum(layer["operations_with_all_layers"].values()) == pytest.approx(layer["share_with_all_layers"])
    assert sum(layer["share_with_all_layers"] for layer in values["layers"]) == pytest.approx(1)


def test_bytes_are_those_of_the_caches_that_a_manager_allocates() -> None:
    swa, c4a, c128a = run(block_size=4).layers
    manager = CacheManager(GEOMETRY, Limits(4, 32, 64), KVCacheLayout.fp8_ds_mla(24, 8), swa_block_size=4)
    strides = [{name: cache.page_stride for name, cache in one.present.items()} for one in manager.caches]

    assert swa.kv_bytes_per_token == swa.state_bytes_per_sequence == 0
    assert c4a.kv_bytes_per_token == (strides[1]["compressed"] + strides[1]["index"]) / 256
    assert c128a.kv_bytes_per_token == strides[2]["compressed"] / 256
    # the states of 8 tokens lie on up to three pages of 4, those of 16 on up to three pages of 8
    assert c4a.state_bytes_per_sequence == 3 * (strides[1]["state"] + strides[1]["index_state"])
    assert c128a.state_bytes_per_sequence == 3 * strides[2]["state"]


def test_weights_do_not_depend_on_which_layer_types_run() -> None:
    outputs: list[Tensor] = []

    class Recorder(ReferenceBackend):
        def inv_rope_o_proj(self, o: Tensor, *rest: Any) -> Tensor:
            outputs.append(o.clone())
            return super().inv_rope_o_proj(o, *rest)

    request = requests_of((30, 1))
    run(Recorder(), request, kinds=[LayerKind.HCA], max_num_batched_tokens=30)
    run(Recorder(), request, max_num_batched_tokens=30)

    assert torch.equal(outputs[0], outputs[3])
