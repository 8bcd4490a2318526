"""`forward_mqa` on the reference against the float64 oracle: every kind of layer, layout, dtype and form."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention import forward_mqa as forward
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.builder import MetadataBuilder
from dsv4attn.core.model.geometry import LayerKind, Rope
from dsv4attn.testing.kit import random_step
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.core.attention.strategies import scenarios, searched
from tests.harness import FORM_NAMES, KINDS, REFERENCE_FORMS, all_kinds, assert_same_bits

MIXED = [(100, 1), (0, 1), (33, 1, 1), (17, 20), (0, 9, 2), (3, 2)]
"""Decodes, one of them padding, then prefills, one with padding at its end."""


@searched(150, scenario=scenarios())
def test_every_form_equals_the_oracle(scenario: StepFixture) -> None:
    results = {name: scenario.check(REFERENCE_FORMS[name]) for name in FORM_NAMES}

    # ragged rows are compact, and so are gathered ones; a hole between paged dense ones moves the terms of a sum
    if scenario.kind is not LayerKind.CSA or scenario.topk == "clean":
        for keys in ("gathered", "paged"):
            assert_same_bits(results[f"{keys}-ragged"], results[f"{keys}-dense"])


@all_kinds
@pytest.mark.parametrize("requests", [[], [(9, 0)], [(9, 1), (4, 0), (5, 0)]], ids=["empty", "idle", "idle_behind"])
def test_batches_without_work_are_legal(requests: list[tuple[int, int]], kind: LayerKind) -> None:
    for backend in REFERENCE_FORMS.values():
        StepFixture(kind=kind, requests=requests, extra_rows=2).check(backend)


@all_kinds
def test_whether_prefill_or_decode_runs_first_does_not_matter(kind: LayerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = StepFixture(kind=kind, requests=MIXED[:5], poison=0xFF)
    problems = {name: scenario.problem(backend) for name, backend in REFERENCE_FORMS.items()}
    right = {name: problems[name].run(REFERENCE_FORMS[name]) for name in FORM_NAMES}
    prepare = forward._prepare
    monkeypatch.setattr(forward, "_prepare", lambda step: [*prepare(step)][::-1])

    for name in FORM_NAMES:
        assert_same_bits(problems[name].run(REFERENCE_FORMS[name], WorkspaceManager()), right[name])


@all_kinds
def test_a_window_only_layer_ignores_compressed_metadata_and_caches(kind: LayerKind) -> None:
    """Graph capture hands synthetic compressed metadata to every layer; the layer's kind decides."""
    scenario = StepFixture(kind=kind, requests=[(40, 1), (7, 9)])
    window_only = attrs.evolve(scenario, kind=LayerKind.SWA)

    for backend in REFERENCE_FORMS.values():
        problem, other = window_only.problem(backend), scenario.problem(backend)
        mixed = attrs.evolve(
            problem,
            caches=attrs.evolve(problem.caches, compressed=other.caches.compressed),
            metadata=attrs.evolve(problem.metadata, compressed=other.metadata.compressed),
            topk_indices=other.topk_indices,
        )
        assert_same_bits(mixed.run(backend), problem.run(backend))


def test_g16_angles_near_a_million_are_float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """An angle computed in float64 turns a key of the last positions visibly further than every engine does."""
    geometry = tiny_geometry()
    scenario = StepFixture(
        requests=[(2**20 - 1, 1)], geometry=geometry, layout=layouts(geometry)["fp32"], q_dtype=torch.float32
    )
    scenario.check(REFERENCE_FORMS["paged-dense"])

    def exact(rope: Rope, rows: int, device: str) -> Tensor:
        """The table with angles in float64."""
        inverse = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * inverse
        return torch.cat([angles.cos(), angles.sin()], dim=-1).float()

    monkeypatch.setattr(random_step, "cos_sin_cache", exact)
    with pytest.raises(AssertionError, match="budgets"):
        attrs.evolve(scenario).check(REFERENCE_FORMS["paged-dense"])


class CarefulBackend(ReferenceBackend):
    """Refuses to gather from before the first token, where a kernel would read another request's block table."""

    def dequantize_and_gather_k_cache(
        self,
        out: Tensor,
        cache: PagedKVCache,
        seq_lens: Tensor,
        gather_lens: Tensor | None,
        block_table: Tensor,
        offset: int,
    ) -> None:
        assert gather_lens is None or (gather_lens <= seq_lens).all()
        assert (seq_lens <= block_table.shape[1] * cache.block_size).all()
        super().dequantize_and_gather_k_cache(out, cache, seq_lens, gather_lens, block_table, offset)


@pytest.mark.in_turn
@all_kinds
@pytest.mark.parametrize("elements", [1, 100, 2**21])
def test_lengths_on_the_host_may_be_upper_bounds(elements: int, kind: LayerKind) -> None:
    """Under asynchronous speculation the host knows only the most a request can have; it sizes things, no more."""
    scenario = StepFixture(kind=kind, requests=[(20, 1), (3, 17), (0, 9), (30, 5)], seed=2, poison=0xFF)
    limits = attrs.evolve(scenario.limits, max_model_len=128, max_index_elements=elements)
    batch, wide = scenario.batch(), torch.full((4, 30), -1, dtype=torch.int32)
    tables = [t for t in (batch.block_table, batch.compressed_block_table) if t is not None]
    wider = [torch.cat([table, wide], dim=1) for table in tables]
    late = attrs.evolve(
        batch,
        seq_lens_cpu=batch.seq_lens_cpu + 9,
        block_table=wider[0],
        compressed_block_table=wider[1] if len(wider) > 1 else None,
    )
    builder = MetadataBuilder(scenario.geometry, limits, swa_block_size=4, compressed_block_tokens=32, validate=False)
    metadata = builder.build_for(late, [kind])[kind]

    for backend in (CarefulBackend(), CarefulBackend(prefill_indices="ragged"), *REFERENCE_FORMS.values()):
        problem = attrs.evolve(scenario.problem(backend, limits=limits), metadata=metadata)
        scenario.compare(*problem.run(backend))


class NotingBackend(ReferenceBackend):
    """Keeps the q of every attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Tensor] = []

    def decode(self, call: AttentionCall) -> None:
        assert call.q.shape == call.out.shape
        assert call.lse is not None
        assert call.lse.shape == call.q.shape[:2]
        self.seen.append(call.q)
        super().decode(call)


@all_kinds
@pytest.mark.parametrize("keys", ["gathered", "paged"])
@pytest.mark.parametrize(
    "requests", [[(40, 1), (7, 1)], [(0, 9)], [(40, 1), (7, 9)]], ids=["decode", "prefill", "both"]
)
def test_a_backend_sees_every_row_of_a_phase_and_no_padding(
    requests: list[tuple[int, int]], keys: str, kind: LayerKind
) -> None:
    tokens = sum(count for _, count in requests)
    for extra_rows in (0, 3):
        backend = NotingBackend(prefill_keys=keys)
        scenario = StepFixture(kind=kind, requests=requests, extra_rows=extra_rows)
        problem = scenario.problem(backend)
        scenario.compare(*problem.run(backend))

        assert sum(q.shape[0] for q in backend.seen) == tokens
        if len(backend.seen) == 1 and not extra_rows:
            assert backend.seen[0] is problem.q, "a slice of all rows costs and gives nothing"


@all_kinds
def test_both_phases_show_up_in_a_profile_by_name_and_kind(kind: LayerKind) -> None:
    backend = REFERENCE_FORMS["gathered-dense"]
    problem = StepFixture(kind=kind, requests=[(40, 1), (7, 9)]).problem(backend)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        problem.run(backend)

    names = {event.name for event in profile.events()}
    assert {f"dsv4attn::prefill[{kind.value}]", f"dsv4attn::decode[{kind.value}]"} <= names


def test_the_forms_cover_every_choice_of_a_backend() -> None:
    forms = [backend.capabilities for backend in REFERENCE_FORMS.values()]

    assert len({(f.prefill_keys, f.prefill_indices) for f in forms}) == 4
    assert len({f.decode_indices for f in forms}) == 2
    assert len(KINDS) == 3


def test_the_worlds_numbers_do_not_depend_on_the_batch() -> None:
    whole = StepFixture(kind="c4a", requests=[(0, 40)], topk="holes", seed=5)
    part = StepFixture(kind="c4a", requests=[(30, 10)], topk="holes", seed=5)

    assert (whole.q_rows(0, range(40))[30:] == part.q_rows(0, range(30, 40))).all()
    assert (whole.topk_rows[30:] == part.topk_rows).all()
    assert (whole.expected()[0][30:] == part.expected()[0]).all()
