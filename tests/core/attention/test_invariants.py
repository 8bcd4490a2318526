"""Properties of random batches: places of pages and other requests of the batch change no result."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4attn.core.model.geometry import LayerKind
from dsv4attn.testing.kit.factories import layouts, tiny_geometry
from dsv4attn.testing.kit.oracle_cache import body
from dsv4attn.testing.kit.random_step import StepFixture
from tests.core.attention.strategies import examples, scenarios, searched
from tests.harness import FORM_NAMES, REFERENCE_FORMS, all_forms, all_kinds, assert_same_bits

DENSE = REFERENCE_FORMS["gathered-dense"]
REAL_WINDOW = tiny_geometry(num_heads=2, head_dim=16, rope_dim=4, window=128, topk=20, ratios=(4, 128))


@searched(150, scenario=scenarios())
def test_every_form_equals_the_oracle(scenario: StepFixture) -> None:
    results = {name: scenario.check(REFERENCE_FORMS[name]) for name in FORM_NAMES}

    # ragged rows are compact, and so are gathered ones; a hole between paged dense ones moves the terms of a sum
    if scenario.kind is not LayerKind.CSA or scenario.topk == "clean":
        for keys in ("gathered", "paged"):
            assert_same_bits(results[f"{keys}-ragged"], results[f"{keys}-dense"])


@searched(60, scenario=scenarios(poison=None), seed=st.integers(1, 99), padding=st.sampled_from([0, 32, 256]))
def test_pages_may_stand_anywhere(scenario: StepFixture, seed: int, padding: int) -> None:
    """Shuffled differently, more of them, further apart, in blocks of another size: the same bits."""
    other = attrs.evolve(scenario, pages_seed=seed, page_padding=padding, spare_pages=9, swa_block_size=8)

    for name in ("gathered-dense", "paged-ragged"):
        assert_same_bits(other.run(REFERENCE_FORMS[name]), scenario.run(REFERENCE_FORMS[name]))


@searched(60, scenario=scenarios(num_speculative_tokens=0, poison=None), data=st.data())
def test_a_row_does_not_depend_on_what_else_is_in_the_batch(scenario: StepFixture, data: st.DataObject) -> None:
    alone = data.draw(st.sampled_from(range(len(scenario.requests))))
    solo = scenario.at(*((b, n if i == alone else 0, *p) for i, (b, n, *p) in enumerate(scenario.requests)))
    rows = [i for i, token in enumerate(scenario.tokens) if token.request == alone]
    rtol, atol = (1e-5, 1e-5) if scenario.q_dtype == torch.float32 else (2**-7, 2**-8)

    for name in ("gathered-dense", "paged-ragged"):
        whole, part = scenario.run(REFERENCE_FORMS[name]), solo.check(REFERENCE_FORMS[name])
        torch.testing.assert_close(part[1][: len(rows)], whole[1][rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(part[0][: len(rows)], whole[0][rows], rtol=rtol, atol=atol)


@pytest.mark.pairwise
@all_forms
@all_kinds
@pytest.mark.parametrize("prefix", [0, 1, 126, 127, 128, 1000])
def test_a_verify_step_equals_its_tokens_one_by_one(prefix: int, kind: LayerKind, form: str) -> None:
    base = StepFixture(
        kind=kind,
        requests=[(prefix, 4), (prefix + 1, 2), (5, 3)],
        geometry=REAL_WINDOW,
        layout=layouts(REAL_WINDOW)["fp32"],
        q_dtype=torch.float32,
        num_speculative_tokens=3,
        swa_block_size=64,
        compressed_block_tokens=256,
    )
    whole = base.run(REFERENCE_FORMS[form])

    for row, token in enumerate(base.tokens):
        steps = [(token.position, 1) if i == token.request else (0, 0) for i in range(3)]
        single = attrs.evolve(base, requests=steps).run(REFERENCE_FORMS[form])
        for got, expected in zip(single, whole, strict=True):
            torch.testing.assert_close(got[0], expected[row], rtol=1e-6, atol=2e-6)


@all_kinds
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 18, 31, 33])
def test_a_length_that_no_ratio_divides_leaves_its_rest_to_the_window(kind: LayerKind, length: int) -> None:
    scenario = StepFixture(kind=kind, requests=[(0, length)], sinks=None)
    ratio = scenario.layer.compress_ratio
    seen = [len(scenario.visible(row)[1]) for row in range(length)]

    for backend in REFERENCE_FORMS.values():
        scenario.check(backend)

    if kind is LayerKind.HCA:
        assert seen == [(p + 1) // ratio for p in range(length)]
    assert max(seen) <= length // ratio
    assert not any(seen[: ratio - 1]), "before the first entry is complete there is only the window"


@all_forms
def test_c128a_below_its_first_entry_is_a_window_only_layer(form: str) -> None:
    heavy = StepFixture(kind="c128a", requests=[(100, 1), (0, 127)], geometry=REAL_WINDOW, compressed_block_tokens=256)

    compressed = heavy.problem(REFERENCE_FORMS[form]).metadata.compressed
    assert compressed is not None
    assert not compressed.compressed_lens.any()
    out, _ = heavy.check(REFERENCE_FORMS[form])

    assert out.isfinite().all()
    assert out.any(-1).all(), "the window is there from the first token on"


@all_forms
@all_kinds
def test_rows_of_q_after_the_slot_mapping_are_processed_and_not_inserted(kind: LayerKind, form: str) -> None:
    short = StepFixture(kind=kind, requests=[(20, 1), (0, 6)], seed=2)
    padded = attrs.evolve(short, extra_rows=7)
    problems = [s.problem(REFERENCE_FORMS[form]) for s in (short, padded)]

    assert problems[1].q.shape[0] == 7 + 7
    assert problems[1].metadata.swa.slot_mapping.shape[0] == 7 + 3
    q = problems[1].q[7:].float()
    torch.testing.assert_close(q.square().mean(-1), torch.ones(7, 4), rtol=1e-2, atol=0.0)  # ones, normalised
    for cache, other in zip(*(p.caches.segments(short.layer) for p in problems), strict=True):
        assert torch.equal(body(cache), body(other)), "padding rows write nothing"
    out, lse = padded.check(REFERENCE_FORMS[form])
    assert_same_bits((out[:7], lse[:7]), problems[0].run(REFERENCE_FORMS[form]))


@pytest.mark.matrix
@given(scenario=scenarios(layout=layouts(tiny_geometry())["ocp"], geometry=tiny_geometry(), compressed_block_tokens=32))
@examples(30)
def test_fnuz_and_interleaved_caches_read_like_the_standard_one(scenario: StepFixture) -> None:
    """Where a scale stands, and a dialect whose codes and scales shift together, are nothing a query can see."""
    standard = scenario.run(DENSE)

    for name in ("fnuz", "interleaved"):
        other = attrs.evolve(scenario, layout=layouts(tiny_geometry())[name])
        if name == "fnuz":  # its largest value is 240, not 448: some groups take a coarser scale
            other.check(DENSE)
        else:
            assert_same_bits(other.run(DENSE), standard)


def test_the_worlds_numbers_do_not_depend_on_the_batch() -> None:
    whole = StepFixture(kind="c4a", requests=[(0, 40)], topk="holes", seed=5)
    part = StepFixture(kind="c4a", requests=[(30, 10)], topk="holes", seed=5)

    assert (whole.q_rows(0, range(40))[30:] == part.q_rows(0, range(30, 40))).all()
    assert (whole.topk_rows[30:] == part.topk_rows).all()
    assert (whole.expected()[0][30:] == part.expected()[0]).all()
