"""The kit on trial: every planted bug must fail it, in the clauses that speak of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.testing import mutants, mutants_ranks, mutants_shared, mutants_sizes, mutants_weights
from tests.testing.mutants import Careless, Scratch, calls, paged, with_caches, with_rows, with_top
from tests.testing.mutants_shared import Slots
from tests.testing.mutants_sizes import Direct, Hasty, Partial

# a plant, the cases it is tried on, the clauses that must fail, and those that must still pass.
PLANTS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "sink ignored in decode": (lambda: calls(mutants.without_sink, "decode"), "S", "S1", "S2"),
    "sink ignored in prefill": (lambda: calls(mutants.without_sink, "prefill"), "S", "S2", "S1"),
    "sink applied twice": (lambda: calls(mutants.sink_twice), "S", "S1 S2", ""),
    "sink scaled": (lambda: calls(mutants.sink_scaled), "S", "S1 S2", ""),
    "lengths ignored": (lambda: calls(with_rows(mutants.every_column)), "A3,A5", "A3", "A5"),
    "lengths ignored on pages": (lambda: calls(with_rows(mutants.every_column), made=paged()), "A3", "A3", ""),
    "index rows taken to be packed": (lambda: calls(with_rows(mutants.stride_is_width)), "A6", "A6", ""),
    "-1 attended as a key of zeros": (
        lambda: calls(mutants.zero_keys),
        "A1,A2,A3,A6,call-empty-*",
        "A1 A2 B1",
        "A3 A6",
    ),
    "tail unwritten": (lambda: calls(mutants.tail_unwritten), "decode-swa,call-plain-*", "F1 F6 M1", ""),
    "fp8 dialect always OCP": (lambda: calls(with_caches(mutants.always_ocp), made=paged()), "C2,C3", "C2 C3", ""),
    "page stride assumed": (
        lambda: calls(with_caches(mutants.packed_pages), "decode"),
        "moved-*,pages-*",
        "C4 C7",
        "A4",
    ),
    "another request's row read": (mutants.NeighbourRow, "A1,A2,F1", "A1", "F1"),
    "int32 offsets": (mutants.Overflow, "far-decode,far-prefill,moved-swa-*", "A5", "C4"),
    "stale workspace": (lambda: Scratch(clears=False), "W2", "W2 D1", ""),
    "scratch beyond its bound": (lambda: Scratch(room=0.9), "W1", "W1", ""),
    "writes behind its scratch": (lambda: Scratch(over=3), "W3", "W3", ""),
    "lse in base 2": (lambda: calls(mutants.base_two), "L1,gather-*", "L1 L4", "R1"),
    "sink in the lse": (lambda: calls(mutants.lse_with_sink), "L", "L2", ""),
    "absent columns in the largest logit": (lambda: calls(with_top(mutants.top_with_absent)), "L", "L5", "L1"),
    "largest logit in base 2": (lambda: calls(with_top(lambda _, top: top / mutants.LN2)), "L", "L5", "L1"),
    "largest logit unscaled": (lambda: calls(with_top(lambda c, top: top / c.layer.scale)), "L", "L5", "L1"),
    "sink in the largest logit": (lambda: calls(with_top(mutants.top_with_sink)), "L", "L5", "L1"),
    "no largest logit is 0": (lambda: calls(with_top(lambda _, top: top.nan_to_num(neginf=0))), "L", "L5", "L1"),
    "asking for the largest logit moves out": (lambda: calls(with_top(mutants.top_moves_out)), "L", "L5", "L1"),
    "lse of empty rows not as told": (lambda: calls(mutants.empty_lse_ignored), "L", "L6", "L1 L5"),
    "parts with lse in base 2": (lambda: calls(mutants.base_two), "L7", "L7", ""),
    "parts without a sink have one of 0": (lambda: calls(mutants_ranks.no_sink_is_zero), "L1,L7", "L7", ""),
    "parts have a sink of 0 in the lse": (lambda: calls(mutants_ranks.zero_sink_in_lse), "L2,L3,L7", "L7", "L3"),
    "parts without keys have lse 0": (lambda: calls(mutants_ranks.empty_lse(0.0)), "L3,L7", "L7", "L3"),
    "parts without keys have a finite lse": (lambda: calls(mutants_ranks.empty_lse(-1e30)), "L3,L7", "L7", "L3"),
    "windows seen on every rank": (mutants_ranks.WindowsKept, "L1,L7,decode-c4a", "L7", "L1 F1"),
    "entries of one rank on all": (mutants_ranks.OneRanksSlots, "L1,L7,decode-c4a", "L7", "L1 F1"),
    "RoPE on the leading dims": (mutants.LeadingRope, "I,decode-swa", "I1 I2 F1", "I4"),
    "empty rows not zero": (lambda: calls(mutants.mean_of_nothing), "B2,lse-*", "B1 B2 B3", ""),
    "absent columns read slot 0": (lambda: calls(mutants.reads_slot_zero, "decode"), "C6", "C6", ""),
    "angles of another position": (lambda: Careless("next position"), "I", "I1 I5", "I4"),
    "kv rotated in place": (lambda: Careless("kv rotated in place"), "I,C1", "I2", "I4"),
    "q normalised without eps": (lambda: Careless("norm without eps"), "I,decode-swa", "I6", "I1 I4 F1"),
    "padding inserted": (lambda: Careless("all rows inserted"), "I", "I3", "I4"),
    "scales of a neighbouring group": (mutants.NeighbourScales, "pair-v41-*,decode-swa", "C3", "M1"),
    "floor of the scale": (lambda: Careless("floor of a group at 1"), "C1,R", "C1", "R1"),
    "negative slot wraps": (lambda: Careless("-7 wraps around"), "I", "I3", "I4"),
    "block table taken to be packed": (lambda: Careless("table packed"), "R", "R2", ""),
    "gather clears what is not its own": (lambda: Careless("gather clears the rest"), "R", "R3", ""),
    "projection rotates forward": (lambda: Careless("rotated forward"), "P,R1", "P1", "R1"),
    "temporaries denied": (lambda: Careless("temporaries denied"), "temporaries-swa,W2", "W5", "W2"),
    "no temporaries at all": (lambda: Careless("no temporaries at all"), "temporaries-swa,W2", "W5", "W2"),
}

# what a backend serves in part, or reads by strides that it assumes: a plant, and the cases of which each must fail.
UNSEEN: dict[str, tuple[Callable[[], Any], str]] = {
    "strided q of attention": (lambda: calls(mutants_sizes.assumed_dense("q")), "apart-call-decode,apart-call-prefill"),
    "strided q of attention, heads": (
        lambda: calls(mutants_sizes.heads_follow),
        "apart-call-decode,apart-step-prefill",
    ),
    "strided out": (lambda: calls(mutants_sizes.assumed_dense("out")), "apart-call-decode,apart-call-prefill"),
    "strided lse": (lambda: calls(mutants_sizes.assumed_dense("lse")), "apart-call-decode,apart-call-prefill"),
    "strided q of insert": (lambda: Partial("q"), "apart-insert,apart-step-decode"),
    "strided kv of insert": (lambda: Partial("kv"), "apart-insert,apart-step-prefill"),
    "strided k of insert": (lambda: Partial("k"), "apart-quantise"),
    "strided o of projection": (lambda: Partial("o"), "apart-project"),
    "strided weights of projection": (lambda: Partial("weights"), "apart-project"),
    "strided table of angles": (lambda: Partial("angles"), "apart-insert,apart-project"),
    "strided topk_indices": (
        lambda: mutants_sizes.with_arguments(mutants_sizes.dense, "topk_indices"),
        "apart-step-decode,apart-step-prefill",
    ),
    "strided block tables": (
        lambda: mutants_sizes.with_arguments(mutants_sizes.dense, "block_table"),
        "apart-step-decode,apart-c128a-decode",
    ),
    "strided block table of a gather": (lambda: Partial("block table"), "apart-step-prefill,apart-c128a-prefill"),
    "512 rows of a call": (lambda: calls(mutants_sizes.only_rows(512)), "requests-decode,requests-prefill"),
    "1024 rows of a call": (lambda: calls(mutants_sizes.only_rows(1024)), "requests-decode,requests-prefill"),
    "2048 keys of a row": (
        lambda: calls(mutants_sizes.only_keys(2048)),
        "keys-8320-decode,keys-8320-prefill,million-c128a",
    ),
    "8192 keys of a row": (lambda: calls(mutants_sizes.only_keys(8192)), "keys-8320-decode,keys-8320-prefill"),
    "512 rows of an insert": (lambda: Partial("512 rows of an insert"), "quantise-1031,insert-1031"),
    "512 rows of a projection": (lambda: Partial("512 rows of a projection"), "project-1031"),
    "32 requests of a gather": (lambda: Partial("32 requests of a gather"), "gather-requests,requests-prefill"),
    "1024 records of a gather": (lambda: Partial("1024 records of a gather"), "gather-long"),
    "1024 blocks of a gather": (lambda: Partial("1024 blocks of a gather"), "gather-long"),
    "a part is whole": (lambda: Hasty("a part is whole"), "fill-ocp-16,fill-fp32-2,fill-v41-fp4-4"),
    "entries of the whole request": (lambda: Hasty("entries of the whole request"), "fill-ocp-16,fill-v41-fp4-4"),
    "no blocks of entries": (lambda: Hasty("no blocks of entries"), "fill-fp32-2"),
    "no ragged lists": (lambda: Hasty("no ragged lists"), "fill-ocp-16"),
    "the first layer's entries": (lambda: Hasty("the first layer's entries"), "fill-ocp-16"),
    "entries beyond what a token sees": (lambda: Direct("all are seen"), "indexer-garbage-decode"),
    "-1 is an entry": (lambda: Direct("-1 is an entry"), "indexer-holes-decode,layers-c4a"),
    "entries of the first request": (lambda: Direct("the first request"), "indexer-holes-decode,layers-c4a"),
    "a table without gaps": (lambda: Direct("a dense table"), "apart-step-decode"),
    "entries of the first layer": (lambda: Direct("the first layer"), "layers-c4a"),
    "1024 blocks of a table": (
        lambda: mutants_sizes.with_arguments(lambda table: table[:, :1024], "block_table"),
        "million-c4a,million-c128a",
    ),
    "eps fixed at 1e-6": (lambda: Partial("eps fixed"), "qnorm-eps-other"),
    "no eps": (lambda: Partial("no eps"), "qnorm-eps-default,qnorm-eps-other"),
    "an insert of no rows raises": (lambda: Partial("no rows"), "quantise-none,insert-none"),
    "without slots, slot 0 is written": (lambda: Partial("slot 0 for want of slots"), "insert-none"),
    "the first layer's sink serves all": (
        lambda: mutants_shared.FirstLayers("attn_sink"),
        "layers-swa,layers-c4a,layers-c128a,layers-mixed",
    ),
    "the first layer's q serves all": (
        lambda: mutants_shared.FirstLayers("q", phase="decode"),
        "layers-swa,layers-c4a,layers-c128a",
    ),
    "the first layer's caches serve all": (
        lambda: mutants_shared.FirstLayers("window", "compressed", phase="decode"),
        "layers-swa,layers-c4a,layers-c128a",
    ),
    "the first layer's slots are replayed": (mutants_shared.replaying, "layers-c4a,layers-mixed"),
    "-7 wraps around in the fused insert": (lambda: Slots(mutants_shared.wrapped), "insert-padding"),
    "slots past the last become the last": (lambda: Slots(mutants_shared.last), "insert-padding"),
    "slots past the last are written": (lambda: Slots(mutants_shared.unbounded), "insert-padding"),
    "slots of 32 bits in the fused insert": (lambda: Slots(mutants_shared.of_32_bits), "insert-padding"),
    "int32 addresses in the fused insert": (lambda: Slots(mutants_shared.near_pages), "far-insert-fused"),
    "int32 addresses of the compressed cache": (
        lambda: calls(mutants_shared.near_compressed, made=mutants.paged()),
        "far-compressed-decode,far-compressed-prefill",
    ),
    "positions of 16 bits": (mutants_shared.Positions, "insert-positions,project-positions"),
    "fp32 weights read as bf16": (mutants_shared.OneType, "project-mixed"),
    "no running maximum": (
        lambda: calls(mutants_shared.without_maximum),
        "logits-swa-decode,logits-c4a-decode,logits-swa-prefill,logits-c4a-prefill",
    ),
    "the softmax scale of the dims": (
        lambda: calls(mutants_shared.own_scale),
        "softmax-scale-decode,softmax-scale-prefill",
    ),
    "bf16 pages taken to be packed": (
        lambda: calls(mutants.with_caches(mutants.packed_pages), made=mutants.paged()),
        "gaps-bf16-decode,gaps-bf16-prefill",
    ),
    "a window has W columns": (
        lambda: calls(mutants_sizes.clipped_windows, made=mutants.paged()),
        "call-wide-swa-decode,call-wide-c4a-decode,call-wide-swa-prefill,call-wide-c4a-prefill,block-swa,ahead-c4a",
    ),
    "a draft block is causal": (lambda: mutants_sizes.with_arguments(lambda _: True, "causal"), "block-swa"),
    "windows reach back to position 0": (
        lambda: mutants_sizes.with_arguments(torch.zeros_like, "replay_start"),
        "bounded-swa,bounded-c4a",
    ),
    "gathered windows reach before the gathered rows": (mutants_sizes.Unbounded, "bounded-swa"),
    "a slot listed twice counts once": (
        lambda: calls(mutants_shared.once),
        "call-twice-swa-decode,call-twice-c4a-decode,call-twice-swa-prefill,call-twice-c4a-prefill",
    ),
}


def test_g22_the_kit_calls_the_fused_insert_as_the_contract_has_it() -> None:
    certificate = conform(Subject.of(mutants_shared.Strict()), chosen(CASES, "I,dtype-*,layout-*,layers-*,dims-swa-*"))

    assert [(o.case.name, o.message) for o in certificate.of("failed")] == []


@pytest.mark.parametrize("plant", UNSEEN)
def test_g22_what_is_served_in_part_or_misread_fails_the_cases_that_are_about_it(plant: str) -> None:
    make, names = UNSEEN[plant]

    certificate = conform(Subject.of(make()), chosen(CASES, names))

    assert [o.case.name for o in certificate.outcomes if o.state != "failed"] == []
    assert {o.case.name for o in certificate.outcomes} == {*names.split(",")}


@pytest.mark.parametrize("plant", mutants_weights.SLIPS)
def test_a_wrong_conversion_of_weights_in_core_fails_the_cases_that_are_about_it(
    plant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, wrong, names = mutants_weights.SLIPS[plant]
    monkeypatch.setattr(f"dsv4attn.core.{target}", wrong)

    certificate = conform(Subject.of(ReferenceBackend()), chosen(CASES, names))

    assert [o.case.name for o in certificate.outcomes if o.state != "failed"] == []
    assert {o.case.name for o in certificate.outcomes} == {*names.split(",")}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_fails_the_kit_where_its_clause_is(plant: str) -> None:
    make, patterns, must_fail, must_pass = PLANTS[plant]

    certificate = conform(Subject.of(make()), chosen(CASES, patterns))

    clauses = certificate.by_clause()
    assert not certificate.ok
    assert {clause for clause in must_fail.split() if not clauses[clause]["failed"]} == set()
    assert {clause for clause in must_pass.split() if not clauses[clause]["passed"]} == set()
    assert all(outcome.message for outcome in certificate.of("failed"))


@pytest.mark.parametrize(
    "made", [Scratch, paged, lambda: Careless("none"), lambda: calls(mutants.attend), lambda: Partial("none")]
)
def test_what_the_plants_are_grafted_on_passes(made: Callable[[], Any]) -> None:
    certificate = conform(Subject.of(made()), chosen(CASES, "I,W3,A3,A7,L1,L5,R3,P1"))

    assert [(o.case.name, o.message) for o in certificate.of("failed")] == []
    assert certificate.ok


def test_largest_logits_are_asked_only_of_backends_that_have_them() -> None:
    backend = ReferenceBackend()
    backend.capabilities = attrs.evolve(backend.capabilities, max_logits=False)

    certificate = conform(Subject.of(backend), chosen(CASES, "L5,lse-decode"))

    states = {outcome.case.name: outcome.state for outcome in certificate.outcomes}
    assert states == {"lse-decode": "passed", "max-logits-decode": "skipped", "max-logits-prefill": "skipped"}
