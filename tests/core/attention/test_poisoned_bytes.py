"""Promise G4: NaN in masked columns, padding rows and unused bytes never reaches an output."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.core.cache.selected_keys import DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.oracle_cache import body
from dsv4attn.testing.kit.random_step import ForwardArgs, StepFixture
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms, all_kinds, assert_same_bits

LAYOUTS = layouts(tiny_geometry())
MIXED = [(100, 1), (0, 1), (33, 1, 1), (17, 20), (0, 9, 2), (3, 2)]
HUGE = [2**31 - 1, 0x7FC00000, 10**6, -2, -(2**31)]
REFERENCE = REFERENCE_FORMS["gathered-dense"]


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_g4_poison_in_every_byte_that_no_query_names_changes_no_bit(layout: str, kind: LayerKind, form: str) -> None:
    clean = StepFixture(
        kind=kind, requests=MIXED, layout=LAYOUTS[layout], extra_rows=4, page_padding=64, topk="holes", seed=7
    )
    result = clean.check(REFERENCE_FORMS[form])

    for byte in (0xFF, 0x80, 0x7F, 0x00):
        assert_same_bits(attrs.evolve(clean, poison=byte).run(REFERENCE_FORMS[form]), result)


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
def test_g4_slot_zero_may_hold_anything_when_no_request_owns_it(kind: LayerKind, form: str) -> None:
    """Kernels that load slot 0 for an absent key multiply its NaN by zero, which is NaN."""
    scenario = StepFixture(kind=kind, requests=MIXED, topk="holes", spare_pages=40, poison=0xFF, pages_seed=11)
    problem = scenario.problem(REFERENCE_FORMS[form])
    for cache, pages in zip(problem.caches.segments(problem.layer), scenario.pages, strict=False):
        assert not (pages.table == 0).any(), "choose another pages_seed"
        assert (body(cache)[0] == 0xFF).all()

    scenario.compare(*problem.run(REFERENCE_FORMS[form]))


@all_forms
def test_g4_numbers_that_name_nothing_are_like_minus_one(form: str) -> None:
    """Top-k rows full of -7, 2^31-1, the bits of a NaN, and entries that are not complete yet."""
    holes = StepFixture(kind="c4a", requests=[(60, 1), (5, 1), (40, 30), (0, 9)], topk="holes", seed=3)
    garbage = attrs.evolve(holes, topk="garbage")
    named = [
        [e for e in row if 0 <= e < (t.position + 1) // 4]
        for row, t in zip(garbage.topk_rows, garbage.tokens, strict=True)
    ]
    assert named == [[e for e in row if e >= 0] for row in holes.topk_rows], "only the absent ones differ"
    assert (garbage.topk_rows != holes.topk_rows).any()

    assert_same_bits(garbage.check(REFERENCE_FORMS[form]), holes.check(REFERENCE_FORMS[form]))


def with_stale_columns(problem: ForwardArgs, value: int) -> ForwardArgs:
    """Fill all index columns at or past their length, as buffers that are never cleared hold them."""
    swa, compressed = problem.metadata.swa, problem.metadata.compressed
    tables = [(swa.decode_swa_indices, swa.decode_swa_lens), (swa.prefill_swa_indices, swa.prefill_swa_lens)]
    if compressed is not None and compressed.c128a_global_decode_topk_indices is not None:
        assert compressed.c128a_decode_topk_lens is not None
        tables.append((compressed.c128a_global_decode_topk_indices, compressed.c128a_decode_topk_lens))
    for indices, lens in tables:
        indices[:, 0].masked_fill_(torch.arange(indices.shape[2]) >= lens[:, None], value)
    return problem


@pytest.mark.in_turn
@all_forms
@all_kinds
def test_g4_lanes_past_the_length_are_never_looked_at(kind: LayerKind, form: str) -> None:
    scenario = StepFixture(kind=kind, requests=MIXED, poison=0xFF)
    clean = scenario.check(REFERENCE_FORMS[form])

    for value in [0, 1, 5, *HUGE]:
        assert_same_bits(
            with_stale_columns(scenario.problem(REFERENCE_FORMS[form]), value).run(REFERENCE_FORMS[form]), clean
        )


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xFF])
def test_g4_old_contents_of_the_workspace_never_show(byte: int, kind: LayerKind, form: str) -> None:
    problem = StepFixture(kind=kind, requests=MIXED, topk="garbage").problem(REFERENCE_FORMS[form])
    workspace = problem.workspace(REFERENCE_FORMS[form], debug=False)
    for arena in ("decode", "prefill"):
        workspace.get_simultaneous(((workspace.size(arena),), torch.uint8), arena=arena)[0].fill_(byte)

    assert_same_bits(problem.run(REFERENCE_FORMS[form], workspace), problem.run(REFERENCE_FORMS[form]))


@all_forms
@all_kinds
def test_a_forward_reads_its_inputs_and_writes_only_its_outputs(kind: LayerKind, form: str) -> None:
    problem = StepFixture(kind=kind, requests=MIXED, extra_rows=2).problem(REFERENCE_FORMS[form])
    caches = problem.caches.segments(problem.layer)
    inputs: list[Tensor] = [problem.q, *(body(cache) for cache in caches), problem.metadata.swa.block_table]
    copies = [t.clone() for t in inputs]

    problem.run(REFERENCE_FORMS[form])

    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


EMPTY_SINKS = {"none": None, "minus_inf": -math.inf, "zero": 0.0, "ten": 10.0, "plus_inf": math.inf}


@pytest.mark.parametrize("sink", EMPTY_SINKS)
@pytest.mark.parametrize("absent", [-1, -5, 16, 17, 2**31 - 1, 0x7FC00000])
def test_g4_a_row_without_keys_is_zero_with_an_lse_of_minus_infinity(sink: str, absent: int) -> None:
    """Slots -1, beyond the cache, or after the length: in pages and in rows, dense and ragged, all NaN."""
    scenario = StepFixture(requests=[(0, 1)], swa_block_size=4, spare_pages=3)
    problem = scenario.problem(REFERENCE)
    cache = problem.caches.swa
    assert cache.capacity == 16
    body(cache).fill_(0xFF)
    value = EMPTY_SINKS[sink]
    attn_sink = None if value is None else torch.full((4,), value)
    q = problem.q.expand(3, -1, -1)
    slots = torch.full((3, 5), absent, dtype=torch.int32)
    dense: list[DenseIndices | RaggedIndices] = [
        DenseIndices(slots, torch.tensor([5, 3, 9], dtype=torch.int32)),
        DenseIndices(slots * 0, torch.zeros(3, dtype=torch.int32)),
    ]
    ragged: list[DenseIndices | RaggedIndices] = [
        RaggedIndices(slots.flatten(), torch.tensor([0, 5, 8, 15], dtype=torch.int32), 7),
        RaggedIndices(slots.flatten() * 0, torch.zeros(4, dtype=torch.int32), 5),
        RaggedIndices(slots.flatten()[:0], torch.zeros(4, dtype=torch.int32), 5),
    ]

    for rows in [*dense, *ragged]:
        for keys in ((PagedKeys(cache, rows),), GatheredKeys(torch.full((16, 32), math.nan), rows)):
            out, lse = torch.full((3, 4, 32), math.nan), torch.full((3, 4), math.nan)
            REFERENCE.decode(AttentionCall(problem.layer, q, keys, attn_sink, out, lse))
            assert not out.any()
            assert (lse == -math.inf).all()


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("sink", EMPTY_SINKS)
def test_g4_a_batch_of_padding_is_zero(sink: str, kind: LayerKind, form: str) -> None:
    value = EMPTY_SINKS[sink]
    scenario = StepFixture(
        kind=kind,
        requests=[(40, 1, 1), (0, 1, 1), (0, 9, 9), (50, 5, 5)],
        sinks=None if value is None else [value] * 4,
        poison=0xFF,
        extra_rows=2,
    )

    out, lse = scenario.check(REFERENCE_FORMS[form])

    assert not out.any()
    assert (lse == -math.inf).all()


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
