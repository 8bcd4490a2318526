"""Window rows with more columns than the window, as an engine makes them for a draft block (engine metadata only)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends.triton.launch import GenericBackend
from dsv4attn.core.geometry import LayerKind
from dsv4attn.core.metadata import AttentionMetadata
from dsv4attn.core.workspace import WorkspaceManager
from dsv4attn.core.workspace_plan import plan_workspace
from dsv4attn.errors import ArgumentError
from dsv4attn.testing.scenario import Problem, Scenario
from tests.core.forms import BACKENDS, NAMES

MORE = 24
SUBJECTS: dict[str, Any] = {**{name: BACKENDS[name] for name in NAMES}, "triton": GenericBackend()}
SCENE = Scenario(kind=LayerKind.C4A, requests=[(60, 1), (3, 1), (30, 1), (9, 7)], poison=0xFF)


def widened(problem: Problem) -> Problem:
    """The same step, its decode windows scattered over MORE further columns, with lengths of all columns."""
    swa, columns = problem.metadata.swa, problem.metadata.swa.window_size + MORE
    rows = torch.full((swa.num_decode_tokens, 1, columns), -1, dtype=torch.int32)
    places = torch.randperm(columns, generator=torch.Generator().manual_seed(3))[: swa.window_size]
    rows[..., places] = swa.decode_swa_indices
    lens = torch.full_like(swa.decode_swa_lens, columns)
    wide = evolve(swa, decode_swa_indices=rows, decode_swa_lens=lens)
    limits = evolve(problem.limits, decode_window_columns=columns)
    return evolve(problem, metadata=AttentionMetadata(wide, problem.metadata.compressed), limits=limits)


@pytest.mark.parametrize("name", SUBJECTS)
def test_keys_in_further_columns_are_attended_to_within_the_planned_memory(name: str) -> None:
    backend = SUBJECTS[name]
    problem = widened(SCENE.problem(backend))
    workspace = WorkspaceManager()
    workspace.reserve(plan_workspace(problem.layer, problem.limits, backend, problem.caches.swa.layout))
    workspace.lock()

    SCENE.compare(*problem.run(backend, workspace))


def test_more_columns_than_the_limits_name_are_refused_with_the_limit() -> None:
    backend = BACKENDS["paged-dense"]
    problem = SCENE.problem(backend)
    wide = evolve(problem, metadata=widened(problem).metadata)
    with pytest.raises(ArgumentError, match=r"window columns: expected at most \d+ \(decode_window_columns\), got"):
        wide.run(backend)


def test_fewer_columns_than_the_window_are_refused() -> None:
    swa = SCENE.problem(BACKENDS["paged-dense"]).metadata.swa
    with pytest.raises(ArgumentError, match=r"decode_swa_indices: expected at least the \d+ columns of the window"):
        evolve(swa, decode_swa_indices=swa.decode_swa_indices[..., :1])
