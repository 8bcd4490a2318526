"""Window rows with more columns than the window, as engines make them, in both phases and every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st

from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.contract.backend import Phase
from dsv4attn.core.contract.phased import PhasedBackend
from dsv4attn.core.memory.plan import plan_workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.metadata import AttentionMetadata, CompressedMetadata, WindowMetadata
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.errors import ArgumentError, WorkspaceError
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from tests.backends.built_in import forms
from tests.core.attention.strategies import other_windows, searched
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_kinds

MORE = 24
TRITON = {name: make() for name, make in forms().items()}
PAIR = PhasedBackend(REFERENCE_FORMS["paged-ragged"], REFERENCE_FORMS["gathered-dense"])
SUBJECTS: dict[str, Any] = {**{name: REFERENCE_FORMS[name] for name in FORM_NAMES}, **TRITON, "pair": PAIR}


def scene_of(kind: LayerKind) -> StepFixture:
    return StepFixture(kind=kind, requests=[(60, 1), (3, 1), (30, 1), (9, 7), (33, 4)], poison=0xFF)


def scattered(rows: torch.Tensor, columns: int) -> torch.Tensor:
    """The same slots among -1, in rows of more columns that lie apart."""
    wide = torch.full((rows.shape[0], 1, columns + 3), -1, dtype=torch.int32)[..., :columns]
    wide[..., torch.randperm(columns, generator=torch.Generator().manual_seed(3))[: rows.shape[2]]] = rows
    return wide


def changed(metadata: Any, name: str) -> Any:
    """Metadata with None in a field."""
    return evolve(metadata, **{name: None})


def widened(problem: ForwardArgs, columns_added: int = MORE) -> ForwardArgs:
    """The same step, its windows scattered over further columns, with lengths of all columns."""
    swa = problem.metadata.swa
    columns = swa.window_size + columns_added
    wide = evolve(
        swa,
        decode_swa_indices=scattered(swa.decode_swa_indices, columns),
        decode_swa_lens=torch.full_like(swa.decode_swa_lens, columns),
        prefill_swa_indices=scattered(swa.prefill_swa_indices, columns),
        prefill_swa_lens=torch.full_like(swa.prefill_swa_lens, columns),
    )
    limits = evolve(problem.limits, decode_window_columns=columns, prefill_window_columns=columns)
    return evolve(problem, metadata=AttentionMetadata(wide, problem.metadata.compressed), limits=limits)


@pytest.mark.in_turn
@all_kinds
@pytest.mark.parametrize("name", SUBJECTS)
def test_keys_in_further_columns_are_attended_to_within_the_planned_memory(name: str, kind: LayerKind) -> None:
    backend, scene = SUBJECTS[name], scene_of(kind)
    problem = widened(scene.problem(backend))
    workspace = WorkspaceManager()
    workspace.reserve(plan_workspace(problem.layer, problem.limits, backend, problem.caches.swa.layout))
    workspace.lock()

    scene.compare(*problem.run(backend, workspace))


@searched(100, scenario=other_windows(), form=st.sampled_from(FORM_NAMES))
def test_blocks_bounds_and_later_tokens_equal_the_oracle_in_every_form(scenario: StepFixture, form: str) -> None:
    scenario.check(REFERENCE_FORMS[form])


@pytest.mark.parametrize("elements", [1, 40, 400])
def test_a_slice_of_a_request_gathers_nothing_before_its_first_position(elements: int) -> None:
    """A request is cut along its query tokens; the first slice begins at the bound, later ones after it."""
    scene = StepFixture(kind=LayerKind.CSA, requests=[(50, 40), (7, 9)], replay=(49, 2), poison=0xFF)
    backend = REFERENCE_FORMS["gathered-dense"]
    problem = scene.problem(backend, limits=evolve(scene.limits, max_index_elements=elements))

    scene.compare(*problem.run(backend))


def test_on_a_backend_that_gathers_wide_rows_are_decode_calls_of_the_planned_size() -> None:
    backend = REFERENCE_FORMS["gathered-ragged"]
    problem = widened(scene_of(LayerKind.HCA).problem(backend))
    arguments = problem.q, problem.caches, problem.metadata, backend, WorkspaceManager(), torch.empty_like(problem.q)
    call = ForwardCall(*arguments, problem.layer, problem.limits, None)

    assert call.prefill_phase is Phase.DECODE
    counts = [chunk.num_tokens for chunk in call.chunks()]
    assert sum(counts) == problem.metadata.swa.num_prefill_tokens
    assert max(counts) <= problem.limits.max_decode_tokens


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["paged-dense", "gathered-dense"])
def test_more_columns_than_the_limits_name_are_refused_with_the_limit(phase: str, name: str) -> None:
    backend = REFERENCE_FORMS[name]
    problem = widened(scene_of(LayerKind.SWA).problem(backend))
    fewer: dict[str, Any] = {f"{phase}_window_columns": 8 + MORE - 1}
    limits = evolve(problem.limits, **fewer)
    said = rf"{phase} window columns: expected at most 31 \({phase}_window_columns\), got 32"
    with pytest.raises(ArgumentError, match=said):
        evolve(problem, limits=limits).run(backend)


@pytest.mark.parametrize("name", ["gathered-ragged", "paged-ragged", "rocm"])
def test_a_plan_without_the_columns_is_too_small(name: str) -> None:
    backend = SUBJECTS[name]
    problem = scene_of(LayerKind.CSA).problem(backend)
    workspace = WorkspaceManager()
    workspace.reserve(plan_workspace(problem.layer, problem.limits, backend, problem.caches.swa.layout))
    workspace.lock()
    with pytest.raises(WorkspaceError):
        widened(problem, 20_000).run(backend, workspace)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_fewer_columns_than_the_window_are_refused(phase: str) -> None:
    swa, name = scene_of(LayerKind.SWA).problem(REFERENCE_FORMS["paged-dense"]).metadata.swa, f"{phase}_swa_indices"
    with pytest.raises(ArgumentError, match=rf"{name}: expected at least the \d+ columns of the window"):
        evolve(swa, **{name: getattr(swa, name)[..., :1]})


def test_tensors_of_a_phase_without_requests_may_be_none() -> None:
    for requests, phase in (([(9, 1)], "prefill"), ([(9, 7)], "decode")):
        scene = StepFixture(kind=LayerKind.HCA, requests=requests)
        problem = scene.problem(REFERENCE_FORMS["gathered-dense"])
        names = [f"decode_swa_{part}" for part in ("indices", "lens")]
        if phase == "prefill":
            parts = "swa_indices", "swa_lens", "seq_lens", "gather_lens", "seq_lens_cpu", "query_lens_cpu"
            names = [f"prefill_{part}" for part in parts]
        nothing: dict[str, Any] = dict.fromkeys(names)
        swa = evolve(problem.metadata.swa, **nothing)

        assert all(getattr(swa, name).shape[0] == 0 for name in names)
        assert all(getattr(swa, name).dtype == torch.int32 for name in names)
        metadata = AttentionMetadata(swa, problem.metadata.compressed)
        scene.compare(*evolve(problem, metadata=metadata).run(REFERENCE_FORMS["gathered-dense"]))


@pytest.mark.parametrize("name", ["decode_swa_lens", "prefill_swa_indices", "prefill_seq_lens_cpu"])
def test_tensors_of_a_phase_with_requests_may_not(name: str) -> None:
    swa = scene_of(LayerKind.SWA).problem(REFERENCE_FORMS["paged-dense"]).metadata.swa
    with pytest.raises(ArgumentError, match=rf"{name}: expected a tensor \[.*, got NoneType"):
        changed(swa, name)


@pytest.mark.parametrize(
    "name", ["c128a_global_decode_topk_indices", "c128a_decode_topk_lens", "c128a_prefill_topk_indices"]
)
def test_tables_of_c128a_layers_may_be_none_only_without_tokens(name: str) -> None:
    problem = scene_of(LayerKind.HCA).problem(REFERENCE_FORMS["paged-dense"])
    swa, compressed = problem.metadata.swa, problem.metadata.compressed
    assert isinstance(swa, WindowMetadata)
    assert isinstance(compressed, CompressedMetadata)
    without = AttentionMetadata(swa, changed(compressed, name))
    with pytest.raises(ArgumentError, match=rf"metadata.compressed.{name}: expected rows for \d+ tokens, got None"):
        evolve(problem, metadata=without).run(REFERENCE_FORMS["paged-dense"])
