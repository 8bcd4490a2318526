"""Cases of DeepSeek-V4.1: one for each pair of records, with speeds relative to V4's records."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from dsv4attn.selection import load_backend
from dsv4attn.tools.bench.attend import problem_of
from dsv4attn.tools.bench.cases import RECORDS, V41, Case, cases_of, sizes
from dsv4attn.tools.bench.inputs import make_inputs
from dsv4attn.tools.bench.pairs import pair_means, with_pairs
from dsv4attn.tools.bench.runner import MEASURED, Row, Runner
from tests.tools.bench.rows import ROOF

CPU = torch.device("cpu")


def test_a_layer_has_a_case_for_each_pair_in_decode_and_prefill_alone() -> None:
    found = cases_of(("decode", "insert", "gather", "prefill"), ["v41_r1"], sizes("cpu"))
    assert [case.name for case in found] == [
        *(f"decode v41_r1 {pair} b={batch}" for pair in RECORDS for batch in (1, 4)),
        *(f"prefill v41_r1 {pair} t=32" for pair in RECORDS),
    ]


@pytest.mark.parametrize("ratio", ["v41_r1", "v41_r2"])
def test_inputs_of_all_pairs_differ_in_their_caches_alone(ratio: str) -> None:
    made = [make_inputs(Case("decode", preset, "", ((999, 1),) * 2, seed=3), CPU) for preset in V41[ratio]]
    for one, preset in zip(made, V41[ratio], strict=True):
        assert [segment.cache.layout for segment in one.segments] == [*preset.layouts]
        assert not one.layer.q_norm
        assert one.keys == made[0].keys == 2 * (128 + min(512, 1000 // preset.ratio))
        for segment, first in zip(one.segments, made[0].segments, strict=True):
            assert torch.equal(segment.slots.lens, first.slots.lens)
    window, entries = 2 * 128, made[0].keys - 2 * 128
    sizes_of = [
        sum(n * int(size) for n, size in zip((window, entries), pair.split("/"), strict=True)) for pair in RECORDS
    ]
    assert [one.record_bytes for one in made] == sizes_of


def test_the_support_question_names_the_records() -> None:
    asked = [problem_of(Case("decode", preset, "", ((999, 1),))) for preset in V41["v41_r1"]]
    pairs = [(one.swa.layout, one.compressed and one.compressed.layout) for one in asked]
    assert pairs == [("fp8_ds_mla", "fp8_ds_mla"), ("v41_fp8", "v41_fp8"), ("v41_fp8", "v41_fp4")]


def test_speeds_are_relative_to_v4_s_records_of_the_same_backend() -> None:
    def row(pair: str, by: str, batch: int, median: float | None) -> Row:
        state = MEASURED if median else "refused"
        return Row("decode", f"decode v41_r1 {pair} b={batch}", by, state, median=median, p10=median, p90=median)

    rows = [
        row("584/584", "a", 1, 2.0), row("584/584", "b", 1, 8.0), row("584/584", "a", 4, 4.0),
        row("528/528", "a", 1, 1.0), row("528/528", "b", 1, 8.0), row("528/528", "a", 4, 8.0),
        row("528/288", "a", 1, 4.0), row("528/288", "b", 1, None), row("528/288", "a", 8, 1.0),
    ]  # fmt: skip
    peer = evolve(rows[0], case="decode flash_c4 b=1", vs={"flash_mla": 1.5})
    found = with_pairs([*rows, peer])

    assert [dict(one.vs) for one in found] == [
        {}, {}, {}, {"584/584": 2.0}, {"584/584": 1.0}, {"584/584": 0.5}, {"584/584": 0.5}, {}, {}, {"flash_mla": 1.5}
    ]  # fmt: skip
    assert pair_means(found) == {
        ("decode", "a", "528/528"): (1.0, 2), ("decode", "b", "528/528"): (1.0, 1), ("decode", "a", "528/288"): (0.5, 1)
    }  # fmt: skip


def test_results_on_every_pair_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4attn.tools.bench.runner.Roofline.measure", lambda _: ROOF)
    runner = Runner(CPU, {"reference": load_backend("reference")}, [], 1)
    for preset in V41["v41_r2"]:
        (row,) = runner.run(Case("decode", preset, "b=1", ((999, 1),)))
        assert row.state == MEASURED
        assert 0 < (row.error or 0) < 3e-3
