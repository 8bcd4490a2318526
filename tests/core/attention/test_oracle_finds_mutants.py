"""The comparison with the float64 oracle finds every mutant: a bug that some implementation has shipped.

A mutant is the reference backend with one thing wrong. `flagged` runs a mutant on a step that the reference passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.attention.call import ForwardCall
from dsv4attn.core.cache.key_codecs import dequantize_keys
from dsv4attn.core.cache.layout import Fp8Format
from dsv4attn.core.cache.selected_keys import ChunkTokens
from dsv4attn.core.contract import IndexOps
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.core.torch_ops import index_ops as indices
from dsv4attn.testing.kit.random_step import StepFixture
from tests.harness import FORM_NAMES, REFERENCE_FORMS, backend_of

right: Any = indices  # the right index steps, which a mutant calls with changed arguments
BATCH = [(100, 1), (7, 1), (33, 1), (17, 20), (2, 9), (31, 5)]
GATHERED = ["gathered-dense", "gathered-ragged"]


def scenario_of(kind: str, **options: Any) -> StepFixture:
    return StepFixture(**{"kind": kind, "requests": BATCH, "topk": "holes", "poison": 0xFF, "seed": 6, **options})


def flagged(scenario: StepFixture, backend: ReferenceBackend) -> bool:
    """Whether the oracle finds the rows of this backend wrong."""
    problem = scenario.problem(backend)
    result = problem.run(backend)
    try:
        scenario.compare(*result)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("kind", ["swa", "c4a", "c128a"])
def test_the_sound_reference_passes_what_the_mutants_fail(kind: str) -> None:
    for topk in ("clean", "holes", "garbage"):
        assert not any(flagged(scenario_of(kind, topk=topk), REFERENCE_FORMS[name]) for name in FORM_NAMES)


# one thing wrong in a call


def wrong_call(form: str, phase: str, change: Callable[[AttentionCall], AttentionCall]) -> ReferenceBackend:
    """A backend that changes the calls of one phase."""
    backend = backend_of(form)

    def run(call: AttentionCall) -> None:
        kernels.attend((new := change(call)).q, new.keys, new.layer.scale, new.attn_sink, new.out, new.lse)

    setattr(backend, phase, run)
    if phase == "decode":
        backend.prefill = lambda call: ReferenceBackend.decode(backend, call)  # type: ignore[method-assign]
    return backend


CALLS: dict[str, Callable[[AttentionCall], AttentionCall]] = {
    "drops the sink": lambda call: attrs.evolve(call, attn_sink=None),
    "gives the sinks to other heads": lambda call: attrs.evolve(call, attn_sink=cast("Tensor", call.attn_sink).roll(1)),
    "scales the sink": lambda call: attrs.evolve(call, attn_sink=cast("Tensor", call.attn_sink) * call.layer.scale),
    "forgets the softmax scale": lambda call: attrs.evolve(call, q=call.q * call.layer.head_dim**0.5),
    "attends with the next token's query": lambda call: attrs.evolve(call, q=call.q.roll(1, 0)),
    "swaps heads": lambda call: attrs.evolve(call, q=call.q.flip(1)),
}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("bug", CALLS)
def test_a_phase_that_does_one_thing_wrong_is_flagged(bug: str, phase: str) -> None:
    for kind in ("swa", "c4a", "c128a"):
        scenario = scenario_of(kind, sinks=[3.0, -2.0, 5.0, 1.0])
        assert flagged(scenario, wrong_call("gathered-dense", phase, CALLS[bug]))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_backend_that_applies_the_sink_twice_is_flagged(phase: str) -> None:
    backend = backend_of("paged-dense")

    def twice(call: AttentionCall) -> None:
        lse = call.q.new_zeros(call.q.shape[:2], dtype=torch.float32)
        kernels.attend(call.q, call.keys, call.layer.scale, call.attn_sink, call.out, lse)
        call.out.mul_(torch.sigmoid(lse - cast("Tensor", call.attn_sink))[..., None])
        cast("Tensor", call.lse).copy_(lse)

    setattr(backend, phase, twice)
    assert flagged(scenario_of("swa"), backend)


def test_an_lse_in_base_two_or_with_the_sink_in_it_is_flagged() -> None:
    scenario = scenario_of("c128a")
    out, lse = scenario.run(REFERENCE_FORMS["paged-dense"])
    sink = scenario.problem(REFERENCE_FORMS["paged-dense"]).attn_sink
    assert sink is not None

    for wrong in (lse * 1.4426950408889634, torch.logaddexp(lse, sink), -lse):
        with pytest.raises(AssertionError, match="budgets"):
            scenario.compare(out, wrong)


# keys that should be absent


def test_minus_one_attended_as_a_key_of_zeros_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    read_paged = kernels.read_paged

    def all_in_length(segments: Any, part: slice) -> tuple[Tensor, Tensor]:
        k, _ = read_paged(segments, part)
        lens = [segment.rows.lens[part] for segment in segments]
        present = torch.cat([torch.arange(int(n.max())) < n[:, None] for n in lens], dim=1)
        return k, present

    monkeypatch.setattr(kernels, "read_paged", all_in_length)
    assert flagged(scenario_of("c4a"), REFERENCE_FORMS["paged-dense"])


def test_masking_the_weight_and_not_the_key_is_flagged_by_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmasked(segments: Any, part: slice) -> tuple[Tensor, Tensor]:
        slots, present = kernels.listed(segments[0].rows, part, segments[0].cache.capacity)
        return kernels.read_records(segments[0].cache, slots.flatten()).unflatten(0, slots.shape), present

    monkeypatch.setattr(kernels, "read_paged", unmasked)
    # slot 0, which absent columns are read from, is in no request's page
    poisoned = scenario_of("swa", spare_pages=40, pages_seed=3)
    assert not (poisoned.pages[0].table == 0).any()
    assert flagged(poisoned, REFERENCE_FORMS["paged-dense"])
    assert not flagged(attrs.evolve(poisoned, poison=None), REFERENCE_FORMS["paged-dense"]), "only poison finds it"


def test_ignoring_the_lengths_is_flagged_by_stale_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = kernels.listed

    def whole_width(rows: Any, part: slice, capacity: int) -> tuple[Tensor, Tensor]:
        return listed(attrs.evolve(rows, lens=torch.full_like(rows.lens, rows.indices.shape[1])), part, capacity)

    problem = scenario_of("swa").problem(REFERENCE_FORMS["paged-dense"])
    swa = problem.metadata.swa
    live = int(swa.decode_swa_indices[0, 0, 0])
    for slots, lens in ((swa.decode_swa_indices, swa.decode_swa_lens), (swa.prefill_swa_indices, swa.prefill_swa_lens)):
        slots[:, 0].masked_fill_(torch.arange(slots.shape[2]) >= lens[:, None], live)
    scenario_of("swa").compare(*problem.run(REFERENCE_FORMS["paged-dense"]))

    monkeypatch.setattr(kernels, "listed", whole_width)
    with pytest.raises(AssertionError, match="budgets"):
        scenario_of("swa").compare(*problem.run(REFERENCE_FORMS["paged-dense"]))


# one thing wrong in the index arithmetic


def with_ops(form: str, **changed: Any) -> ReferenceBackend:
    """A backend with some index ops replaced."""
    backend = backend_of(form)
    backend.index_ops = evolve(IndexOps(), **changed)
    return backend


def more_visible(by: int) -> dict[str, Callable[..., None]]:
    """Ops whose n_c is off by `by`."""

    def translate(topk: Tensor, visible: Tensor, *rest: Any, out: tuple[Tensor, Tensor]) -> None:
        right.compute_global_topk_indices_and_lens(topk, (visible + by).clamp(min=0), *rest, out=out)

    def combine(topk: Any, tokens: ChunkTokens, **others: Any) -> None:
        visible = tokens.visible_lens
        shifted = None if visible is None else (visible + by).clamp(min=0)
        right.combine_topk_swa_indices(topk, evolve(tokens, visible_lens=shifted), **others)

    return {"compute_global_topk_indices_and_lens": translate, "combine_topk_swa_indices": combine}


@pytest.mark.parametrize("form", FORM_NAMES)
@pytest.mark.parametrize("by", [-1, 1])
def test_one_visible_entry_too_few_or_too_many_is_flagged(by: int, form: str) -> None:
    assert flagged(scenario_of("c4a", topk="garbage"), with_ops(form, **more_visible(by)))


@pytest.mark.parametrize("form", GATHERED)
def test_a_neighbours_row_after_an_interior_minus_one_is_flagged(form: str) -> None:
    """Adding M * b to whatever a column holds turns -1 into row M * b - 1 of the request before."""

    def naive(topk: Any, tokens: ChunkTokens, *, out: tuple[Tensor, Tensor], **tables: Any) -> None:
        starts, visible, k, rows = tokens.query_start_loc, tokens.visible_lens, tokens.topk, tokens.rows
        right.combine_topk_swa_indices(topk, tokens, out=out, **tables)
        if topk is None or visible is None:
            return
        request = indices.token_to_req_indices(starts - starts[0], len(topk))
        count = torch.minimum(visible, torch.tensor(k))
        for t in range(len(topk)):
            window = out[0][t, out[1][t] - (out[1][t] - ((topk[t] >= 0) & (topk[t] < visible[t])).sum()) : out[1][t]]
            row = torch.cat([topk[t, : count[t]] + request[t] * rows, window.clone()])
            out[0][t, : len(row)] = row
            out[1][t] = len(row)

    assert flagged(scenario_of("c4a", topk="holes"), with_ops(form, combine_topk_swa_indices=naive))


@pytest.mark.parametrize("form", GATHERED)
def test_a_window_one_short_in_gathered_prefill_is_flagged(form: str) -> None:
    def combine(topk: Any, tokens: ChunkTokens, **others: Any) -> None:
        right.combine_topk_swa_indices(topk, evolve(tokens, window=tokens.window - 1), **others)

    for kind in ("swa", "c4a", "c128a"):
        assert flagged(scenario_of(kind), with_ops(form, combine_topk_swa_indices=combine))


@pytest.mark.parametrize("change", ["one short", "one late", "next request"])
def test_a_wrong_window_in_the_builder_is_flagged(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    window_indices = indices.window_indices

    def wrong(start: Tensor, end: Tensor, ok: Tensor, req: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        if change == "next request":
            return window_indices(start, end, ok, (req + 1) % 3, *rest)
        moved = (start + 1, end) if change == "one short" else ((start - 1).clamp(min=0), (end - 1).clamp(min=1))
        return window_indices(*moved, ok, req, *rest)

    monkeypatch.setattr(indices, "window_indices", wrong)
    scenario = scenario_of("swa", requests=[(100, 1), (99, 1), (98, 1)], dead_block=0)
    assert flagged(scenario, REFERENCE_FORMS["paged-dense"])


def test_verify_tokens_that_all_see_the_whole_context_are_flagged() -> None:
    def last(topk: Tensor, visible: Tensor, *rest: Any, out: tuple[Tensor, Tensor]) -> None:
        right.compute_global_topk_indices_and_lens(topk, visible.amax().expand_as(visible), *rest, out=out)

    scenario = scenario_of("c4a", requests=[(101, 4)], num_speculative_tokens=3, topk="garbage")
    assert not flagged(scenario, REFERENCE_FORMS["paged-dense"])
    assert flagged(scenario, with_ops("paged-dense", compute_global_topk_indices_and_lens=last))


# one thing wrong in memory


@pytest.mark.parametrize("form", FORM_NAMES)
@pytest.mark.parametrize("segment", ["swa", "compressed"])
def test_reading_one_cache_in_the_other_dialect_is_flagged(segment: str, form: str) -> None:
    scenario = scenario_of("c128a")
    problem = scenario.problem(REFERENCE_FORMS[form])
    cache = getattr(problem.caches, segment).with_layout(fp8_format=Fp8Format.FNUZ)
    mixed = attrs.evolve(problem, caches=attrs.evolve(problem.caches, **{segment: cache}))

    with pytest.raises(AssertionError, match="budgets"):
        scenario.compare(*mixed.run(REFERENCE_FORMS[form]))


@pytest.mark.parametrize("offset", [-1, 1])
def test_gathering_from_one_position_off_is_flagged(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = kernels.gather

    def off(out: Tensor, cache: Any, seq_lens: Tensor, lens: Any, table: Tensor, where: int) -> None:
        gather(out, cache, seq_lens + offset, lens, table, where)

    monkeypatch.setattr(kernels, "gather", off)
    assert flagged(scenario_of("swa"), REFERENCE_FORMS["gathered-dense"])


def test_token_addresses_that_follow_the_shape_of_a_page_are_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token i of a split page does not live at i * record_bytes, whatever the shape [B, P, 584] suggests."""

    def by_shape(cache: Any, slots: Tensor) -> Tensor:
        layout = cache.layout
        record = cache.tensor[slots // cache.block_size, slots % cache.block_size]
        codes, rest = record[:, : layout.nope_dim], record[:, layout.nope_dim :]
        rope = rest[:, : 2 * layout.rope_dim].contiguous().view(torch.bfloat16).float()
        return torch.cat([dequantize_keys(codes, rest[:, 2 * layout.rope_dim :], layout), rope], dim=-1)

    monkeypatch.setattr(kernels, "read_records", by_shape)
    assert flagged(scenario_of("swa", poison=None), REFERENCE_FORMS["paged-dense"])


def test_a_prefill_that_never_runs_leaves_nan_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForwardCall, "chunks", lambda _: ())
    assert flagged(scenario_of("swa"), REFERENCE_FORMS["gathered-dense"])
