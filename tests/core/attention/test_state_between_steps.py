"""State that is kept for the next step or for other layers changes no result."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.selected_keys import GatheredKeys
from dsv4attn.core.contract.backend import AttentionCall, Phase
from dsv4attn.core.memory import workspace
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind
from dsv4attn.core.tensorspec import BufferSpec
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms, assert_same_bits

BATCHES = [
    [(20, 1)],
    [(21, 1)],
    [(60, 1), (3, 1), (0, 1)],
    [(9, 1), (30, 1), (5, 1)],
    [(9, 1), (30, 1), (5, 1), (0, 7)],
    [(0, 7), (12, 5)],
    [(300, 1), (200, 1), (1, 1)],
]


class Particular(ReferenceBackend):
    """Its scratch shapes encode the call and the backend; a call with scratch of other shapes fails."""

    def __init__(self, mark: int, **options: Any) -> None:
        super().__init__(**options)
        self.mark = mark

    def scratch(self, phase: Phase, layer: LayerGeometry, tokens: int, width: int) -> Sequence[BufferSpec]:
        return [((tokens, width), torch.uint8), ((self.mark, round(layer.eps), len(phase.value)), torch.int16)]

    def scratch_bound(self, phase: Phase, layer: LayerGeometry, max_tokens: int, max_width: int) -> int:
        return 2**20

    def check(self, phase: Phase, call: AttentionCall) -> None:
        keys = [call.keys] if isinstance(call.keys, GatheredKeys) else call.keys
        width = sum(segment.rows.width for segment in keys)
        requested = self.scratch(phase, call.layer, call.q.shape[0], width)
        assert [(tuple(view.shape), view.dtype) for view in call.scratch] == requested
        for view in call.scratch:
            view.fill_(0x55)

    def decode(self, call: AttentionCall) -> None:
        self.check(Phase.DECODE, call)
        super().decode(call)

    def prefill(self, call: AttentionCall) -> None:
        self.check(Phase.PREFILL, call)
        super().decode(call)  # which is the reference's prefill too


LAYERS: dict[Any, LayerGeometry] = {}


def problems(backend: ReferenceBackend) -> list[ForwardArgs]:
    """Steps of two layers of every kind, which differ only in `eps`, a number that attention does not read."""
    result = []
    for kind in LayerKind:
        forwards = [StepFixture(kind=kind, requests=batch).problem(backend) for batch in BATCHES]
        for eps in (1.0, 2.0):
            layer = LAYERS.setdefault((kind, eps), evolve(forwards[0].layer, eps=eps))
            result += [evolve(problem, layer=layer) for problem in forwards]
            # an indexer may leave fewer columns than the layer takes
            for full_problem in result[-len(forwards) :]:
                if kind is LayerKind.CSA and full_problem.topk_indices is not None:
                    result.append(evolve(full_problem, topk_indices=full_problem.topk_indices[:, :3]))
    return result


@pytest.mark.matrix
@all_forms
def test_steps_of_any_layers_in_one_workspace_give_what_each_gives_in_its_own(form: str) -> None:
    keys, indices = form.split("-")
    options = {"prefill_keys": keys, "prefill_indices": indices, "decode_indices": indices}
    shared, rng = WorkspaceManager(), Random(form)
    backends = REFERENCE_FORMS[form], Particular(3, **options), Particular(5, **options)
    steps = [(problem, backend, problem.run(backend)) for backend in backends for problem in problems(backend)]
    # each runs twice, some of them at once
    again = [*steps, *steps]
    rng.shuffle(again)
    for problem, backend, alone in again:
        assert_same_bits(problem.run(backend, shared), alone)
    problem, backend, alone = again[-1]
    assert_same_bits(problem.run(backend, shared), alone)


@pytest.mark.parametrize("form", FORM_NAMES)
def test_what_a_step_is_made_of_may_change_its_place(form: str) -> None:
    """The next step's metadata stands elsewhere, and the indexer's buffer too, and they hold other numbers."""
    for kind in LayerKind:
        first, second = (
            StepFixture(kind=kind, requests=BATCHES[3], seed=seed).problem(REFERENCE_FORMS[form]) for seed in (1, 2)
        )
        second, shared = evolve(second, layer=first.layer), WorkspaceManager()
        for problem in (first, second, first):
            assert_same_bits(problem.run(REFERENCE_FORMS[form], shared), problem.run(REFERENCE_FORMS[form]))


@all_forms
def test_more_tokens_read_more_rows_of_the_indexer_s_one_buffer(form: str) -> None:
    forwards = [StepFixture(kind=LayerKind.CSA, requests=batch).problem(REFERENCE_FORMS[form]) for batch in BATCHES]
    shared, buffer = WorkspaceManager(), torch.empty(16, forwards[0].layer.topk, dtype=torch.int32)
    for problem in [*forwards, *forwards[::-1]]:
        assert problem.topk_indices is not None
        rows = problem.topk_indices.shape[0]
        buffer[:rows, : problem.topk_indices.shape[1]].copy_(problem.topk_indices)
        same = evolve(problem, topk_indices=buffer, layer=forwards[0].layer)
        assert_same_bits(same.run(REFERENCE_FORMS[form], shared), problem.run(REFERENCE_FORMS[form]))


@pytest.mark.usefixtures("few_objects")
def test_a_backend_lives_as_long_as_metadata_that_it_is_prepared_for_and_no_longer() -> None:
    backend, shared = Particular(7), WorkspaceManager()
    alive, forwards = weakref.ref(backend), problems(backend)
    for problem in forwards:
        problem.run(backend, shared)
    del backend
    gc.collect()
    assert alive() is not None, "another one could have its place, and be taken for it"
    del problem, forwards
    gc.collect()
    assert alive() is None


def test_views_are_remembered_for_so_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MOST_MADE", 3)
    manager = WorkspaceManager()
    for n in range(10):
        (view,) = manager.get_simultaneous(((n + 1,), torch.float32), arena="decode")
        assert manager.get_simultaneous(((n + 1,), torch.float32), arena="decode")[0] is view
        assert len(manager._made["decode"]) <= 3
