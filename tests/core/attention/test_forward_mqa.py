"""`forward_mqa` on the reference against the float64 oracle: every kind of layer, layout, dtype and form."""

from __future__ import annotations

import math
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
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.random_step import StepFixture
from tests.harness import FORM_NAMES, KINDS, REFERENCE_FORMS, all_forms, all_kinds, assert_same_bits

GEOMETRY = tiny_geometry()
REAL_WINDOW = tiny_geometry(num_heads=2, head_dim=16, rope_dim=4, window=128, topk=20, ratios=(4, 128))
LAYOUTS = layouts(GEOMETRY)
MIXED = [(100, 1), (0, 1), (33, 1, 1), (17, 20), (0, 9, 2), (3, 2)]
"""Decodes, one of them padding, then prefills, one with padding at its end."""

POSITIONS = [0, 1, 2, 3, 4, 5, 63, 64, 65, 79, 80, 81, 126, 127, 128, 129, 255, 256, 511, 512, 1000, 2047, 2048, 2049]
"""Around the edges of a page, of the window, of both ratios, of the 20 entries of the top-k, and of blocks of 128."""


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=["q_bf16", "q_fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixed_batch_equals_the_oracle(layout: str, q_dtype: torch.dtype, kind: LayerKind, form: str) -> None:
    scenario = StepFixture(kind=kind, requests=MIXED, layout=LAYOUTS[layout], q_dtype=q_dtype, extra_rows=3, seed=1)

    out, lse = scenario.check(REFERENCE_FORMS[form])

    assert out.dtype == q_dtype
    padding = [i for i, token in enumerate(scenario.tokens) if not token.valid] + [-3, -2, -1]
    assert not out[padding].any(), "padding rows are exactly zero"
    assert (lse[padding] == -math.inf).all()


@pytest.mark.in_turn
@all_forms
@all_kinds
def test_each_position_is_the_same_row_as_decode_and_as_prefill(kind: LayerKind, form: str) -> None:
    base = StepFixture(
        kind=kind,
        requests=[(0, 1), *((p, 1) for p in POSITIONS)],
        geometry=REAL_WINDOW,
        layout=layouts(REAL_WINDOW)["fp32"],
        q_dtype=torch.float32,
        swa_block_size=64,
        compressed_block_tokens=256,
        short_prefills=True,
    )
    prefill = attrs.evolve(base, requests=[(0, 2), *base.requests[1:]])
    assert base.problem(REFERENCE_FORMS[form]).metadata.swa.num_prefills == 0
    assert prefill.problem(REFERENCE_FORMS[form]).metadata.swa.num_decodes == 0

    decoded, decoded_lse = base.check(REFERENCE_FORMS[form])
    prefilled, prefilled_lse = prefill.check(REFERENCE_FORMS[form])

    torch.testing.assert_close(decoded[1:], prefilled[2:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(decoded_lse[1:], prefilled_lse[2:], rtol=1e-5, atol=1e-5)


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("prefix", [0, 1, 126, 127, 128, 1000])
def test_a_verify_step_of_1_to_4_tokens_equals_the_oracle(prefix: int, kind: LayerKind, form: str) -> None:
    scenario = StepFixture(
        kind=kind,
        requests=[(prefix, n) for n in (1, 2, 3, 4)],
        geometry=REAL_WINDOW,
        num_speculative_tokens=3,
        swa_block_size=64,
        compressed_block_tokens=256,
    )
    assert scenario.problem(REFERENCE_FORMS[form]).metadata.swa.num_prefills == 0

    scenario.check(REFERENCE_FORMS[form])


@all_kinds
def test_real_flash_geometry_equals_the_oracle(kind: LayerKind) -> None:
    flash = ModelGeometry.preset("flash")
    scenario = StepFixture(
        kind=kind,
        requests=[(2300, 1), (700, 2)],
        geometry=flash,
        layout=layouts(flash, group_size=64)["ocp"],
        swa_block_size=64,
        compressed_block_tokens=256,
        outliers=True,
        poison=0xFF,
    )

    scenario.check(REFERENCE_FORMS["gathered-dense"])


@pytest.mark.in_turn
@all_forms
@all_kinds
def test_keys_with_large_outlier_channels_equal_the_oracle(kind: LayerKind, form: str) -> None:
    for layout in LAYOUTS.values():
        StepFixture(kind=kind, requests=MIXED[:5], layout=layout, outliers=True, seed=3).check(REFERENCE_FORMS[form])


@pytest.mark.parametrize("heads", [1, 3, 24])
@all_kinds
def test_any_number_of_heads_is_served(kind: LayerKind, heads: int) -> None:
    geometry = tiny_geometry(num_heads=heads, head_dim=20, rope_dim=6, window=5, topk=3, ratios=(2, 8))
    scenario = StepFixture(kind=kind, requests=[(9, 1), (3, 7)], geometry=geometry, layout=layouts(geometry, 7)["ocp"])

    for backend in REFERENCE_FORMS.values():
        scenario.check(backend)


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
