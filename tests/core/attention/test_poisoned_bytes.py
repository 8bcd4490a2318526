"""Promise G4: NaN in masked columns, padding rows and unused bytes never reaches an output."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.oracle_cache import body
from dsv4attn.testing.kit.random_step import StepFixture
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms, all_kinds, assert_same_bits

LAYOUTS = layouts(tiny_geometry())
MIXED = [(100, 1), (0, 1), (33, 1, 1), (17, 20), (0, 9, 2), (3, 2)]
REFERENCE = REFERENCE_FORMS["gathered-dense"]


@all_kinds
@pytest.mark.parametrize("layout", ["bf16", "fp32"])
def test_g4_infinities_are_poison_too(layout: str, kind: LayerKind) -> None:
    clean = StepFixture(kind=kind, requests=MIXED, layout=LAYOUTS[layout], topk="garbage")
    poisoned = attrs.evolve(clean, poison=0xFF)

    for backend in REFERENCE_FORMS.values():
        problem = poisoned.problem(backend)
        for cache in problem.caches.segments(problem.layer):
            rows = cache.region("row")
            assert rows.isnan().any()
            rows.nan_to_num_(nan=math.inf)
        assert_same_bits(problem.run(backend), clean.run(backend))


@all_forms
@all_kinds
def test_a_forward_reads_its_inputs_and_writes_only_its_outputs(kind: LayerKind, form: str) -> None:
    problem = StepFixture(kind=kind, requests=MIXED, extra_rows=2).problem(REFERENCE_FORMS[form])
    caches = problem.caches.segments(problem.layer)
    inputs: list[Tensor] = [problem.q, *(body(cache) for cache in caches), problem.metadata.swa.block_table]
    copies = [t.clone() for t in inputs]

    problem.run(REFERENCE_FORMS[form])

    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_the_poison_is_really_there() -> None:
    scenario = StepFixture(
        kind="c4a", requests=MIXED, layout=LAYOUTS["ocp"], page_padding=64, poison=0xFF, extra_rows=1
    )
    problem = scenario.problem(REFERENCE)

    assert problem.q[-1].isnan().all()
    for cache in problem.caches.segments(problem.layer):
        raw, layout = body(cache, 64), cache.layout
        assert (raw[:, -64:] == 0xFF).all(), "the gap after a page"
        assert (cache.region("scale")[..., layout.num_groups :] == 0xFF).all(), "pad bytes of every record"
        dead = (cache.region("nope") == 0xFF).all(-1)
        assert dead.any()
        assert not dead.all()
    assert isinstance(problem.workspace(REFERENCE), WorkspaceManager)
    assert len(FORM_NAMES) == 4
