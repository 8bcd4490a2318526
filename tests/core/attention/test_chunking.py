"""A prompt gives the same result in any steps (promise G16), and a prefill in any chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import attrs
import pytest
import torch
from hypothesis import strategies as st

from dsv4attn.core.argument_checks import round_up
from dsv4attn.core.cache.layer_caches import LayerCaches
from dsv4attn.core.memory.chunking import ChunkBounds, PrefillChunk, plan_prefill_chunks
from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.oracle_cache import body
from dsv4attn.testing.kit.random_step import StepFixture
from tests.core.attention.strategies import scenarios, searched
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms

TINY = tiny_geometry(num_heads=2, head_dim=12, rope_dim=4)


def assert_same_caches(left: LayerCaches, right: LayerCaches, scenario: StepFixture) -> None:
    """Assert that every byte of every page is the same."""
    for a, b in zip(left.segments(scenario.layer), right.segments(scenario.layer), strict=True):
        assert torch.equal(body(a), body(b))


def check_in_steps(whole: StepFixture, cuts: Sequence[Sequence[int]], *forms: str) -> None:
    """Run each request's prompt up to its first cut, then to its second, ...: right rows, then the same caches."""
    caches = {form: whole.allocate() for form in forms}
    for step in range(max(len(c) for c in cuts) - 1):
        spans = [(c[step], c[step + 1] - c[step]) if step + 1 < len(c) else (c[-1], 0) for c in cuts]
        part = attrs.evolve(whole.at(*spans), short_prefills=True)
        for form in forms:
            part.compare(*part.problem(REFERENCE_FORMS[form], caches[form]).run(REFERENCE_FORMS[form]))
    for form in forms:
        assert_same_caches(caches[form], whole.problem(REFERENCE_FORMS[form]).caches, whole)


@pytest.mark.matrix
@searched(
    60,
    kind=st.sampled_from(list(LayerKind)),
    layout=st.sampled_from(sorted(layouts(TINY))),
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    form=st.sampled_from(FORM_NAMES),
    data=st.data(),
)
def test_g16_any_cut_of_prompts_gives_the_same_bytes_and_the_right_rows(
    kind: LayerKind, layout: str, prompts: list[int], form: str, data: st.DataObject
) -> None:
    whole = StepFixture(
        kind=kind, requests=[(0, n) for n in prompts], geometry=TINY, layout=layouts(TINY)[layout], short_prefills=True
    )
    cuts = [[0, *sorted(data.draw(st.sets(st.integers(1, n), max_size=5)) - {n}), n] for n in prompts]
    whole.check(REFERENCE_FORMS[form])

    check_in_steps(whole, cuts, form)


@pytest.mark.pairwise
@all_forms
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("rows", ["clean", "holes", "garbage", "none"])
def test_selected_entries_of_any_ratio_are_attended_to(ratio: int, rows: Literal["clean", "holes"], form: str) -> None:
    geometry = tiny_geometry(num_heads=2, head_dim=12, rope_dim=4, topk=5, ratios=(ratio, 16))
    whole = StepFixture(
        kind="c4a",
        requests=[(33, 1), (2, 1), (0, 1), (0, 70), (41, 9)],
        geometry=geometry,
        layout=layouts(geometry)["ocp"],
        topk=rows,
        poison=0xFF,
    )
    whole.check(REFERENCE_FORMS[form])

    prompt = attrs.evolve(whole, requests=[(0, 70), (0, 23)], poison=None, short_prefills=True)
    check_in_steps(prompt, [[0, 1, 2, 33, 34, 70], [0, 22, 23]], form)


# chunks within a step


@st.composite
def prefills(draw: st.DrawFn) -> tuple[list[int], list[int], StepFixture, ChunkBounds]:
    """(seq_lens, query_lens, a scenario whose layer is used, bounds that one token at full context fits)."""
    ratios = draw(st.sampled_from([1, 2, 4])), 16
    geometry = tiny_geometry(window=draw(st.integers(1, 9)), topk=draw(st.integers(1, 9)), ratios=ratios)
    scenario = StepFixture(kind=draw(st.sampled_from(list(LayerKind))), geometry=geometry, requests=[])
    layer = scenario.layer
    pairs = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=6))
    entries = max((context + n for context, n in pairs), default=0) // layer.compress_ratio
    entries = entries if layer.kind is not LayerKind.SWA else 0
    alignment = draw(st.sampled_from([1, 4, 16]))
    widest = round_up((layer.topk or max(entries, 1)) * (layer.kind is not LayerKind.SWA) + layer.window, alignment)
    gathered = draw(st.booleans())
    rows = entries + layer.window + draw(st.integers(0, 300)) if gathered else 0
    bounds = ChunkBounds(rows, widest + draw(st.sampled_from([0, 1, 50, 500, 10**6])), alignment)
    return [context + n for context, n in pairs], [n for _, n in pairs], scenario, bounds


@searched(400, problem=prefills())
def test_chunks_cover_every_token_once_and_keep_their_bounds(
    problem: tuple[list[int], list[int], StepFixture, ChunkBounds],
) -> None:
    seq_lens, query_lens, scenario, bounds = problem
    layer = scenario.layer
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    chunks = list(plan_prefill_chunks(seq_lens, query_lens, layer, bounds))

    assert [t for c in chunks for t in range(c.token_start, c.token_end)] == list(range(sum(query_lens)))
    for chunk in chunks:
        width = round_up(chunk.topk + layer.window, bounds.alignment)
        assert chunk.num_tokens * width <= bounds.index_elements
        assert chunk.num_requests * (chunk.entries + chunk.gather) <= bounds.rows or not bounds.rows
        requests = range(chunk.request_start, chunk.request_end)
        tokens = range(starts[requests.start], starts[requests.stop])
        if chunk.is_slice:
            assert len(requests) == 1
            assert tokens.start <= chunk.token_start < chunk.token_end == tokens.stop - chunk.tail
        else:
            assert (chunk.token_start, chunk.token_end, chunk.tail) == (tokens.start, tokens.stop, 0)
        for i in requests:
            end = seq_lens[i] - chunk.tail
            count = chunk.num_tokens if chunk.is_slice else query_lens[i]
            assert chunk.gather >= count + min(end - count, layer.window - 1) or not count
            if layer.kind is not LayerKind.SWA:
                assert chunk.entries >= end // layer.compress_ratio
                assert chunk.topk >= min(end // layer.compress_ratio, layer.topk or end)


@searched(100, problem=prefills())
def test_chunks_are_as_large_as_they_may_be(problem: tuple[list[int], list[int], StepFixture, ChunkBounds]) -> None:
    """Two neighbours that hold whole requests would not have fitted into one."""
    seq_lens, query_lens, scenario, bounds = problem
    chunks = list(plan_prefill_chunks(seq_lens, query_lens, scenario.layer, bounds))

    def whole(chunk: PrefillChunk) -> bool:
        return not chunk.is_slice and chunk.num_tokens > 0

    for a, b in pairwise(chunks):
        if whole(a) and whole(b) and b.num_requests == 1:
            entries, gather, topk = (max(getattr(a, n), getattr(b, n)) for n in ("entries", "gather", "topk"))
            width = round_up(topk + scenario.layer.window, bounds.alignment)
            rows = (a.num_requests + 1) * (entries + gather)
            fits = (rows <= bounds.rows or not bounds.rows) and (
                (a.num_tokens + b.num_tokens) * width <= bounds.index_elements
            )
            assert not fits


def test_short_prompts_share_a_chunk_and_a_long_one_does_not_claim_memory_for_four() -> None:
    layer = StepFixture(kind="c4a", requests=[]).layer
    bounds = ChunkBounds(rows=200, index_elements=10**6, alignment=1)

    short = list(plan_prefill_chunks([8] * 12, [8] * 12, layer, bounds))
    long = list(plan_prefill_chunks([8, 400, 8], [8, 100, 8], layer, bounds))

    assert [c.num_requests for c in short] == [12]
    assert (long[0].num_requests, long[0].is_slice) == (1, False)
    assert sum(c.is_slice for c in long) >= 2
    assert max(c.num_requests * (c.entries + c.gather) for c in long) <= 200


@pytest.mark.matrix
@searched(60, scenario=scenarios(num_speculative_tokens=0), elements=st.sampled_from([1, 60, 300, 2000]))
def test_small_chunks_give_the_rows_of_large_ones(scenario: StepFixture, elements: int) -> None:
    limits = attrs.evolve(scenario.limits, max_index_elements=elements)

    for form in FORM_NAMES:
        scenario.compare(*scenario.problem(REFERENCE_FORMS[form], limits=limits).run(REFERENCE_FORMS[form]))
