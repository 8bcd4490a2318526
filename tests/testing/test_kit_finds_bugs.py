"""The kit on trial: every mutant must fail it, in the clauses that speak of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.backend import AttentionCall, Products
from dsv4attn.core.model.quantized_weight import dense_weight
from tests.testing import mutants, mutants_ranks, mutants_shared, mutants_sizes, mutants_weights
from tests.testing.mutants import (
    GATHER,
    INSERT,
    PROJECT,
    QUANTISE,
    Scratch,
    dense,
    paged,
    positions_of_16_bits,
    rows_required,
    with_attention,
    with_caches,
    with_dense,
    with_op,
    with_rows,
    with_top,
)
from tests.testing.mutants_sizes import Direct, Hasty
from tests.testing.verdicts import all_fail, breaks, certificate_of, none_fail


def said_to_be_deterministic() -> ReferenceBackend:
    """A backend that gathers keys in prefill, in another order than decode reads them, and says that bits are equal."""
    backend = ReferenceBackend()
    backend.deterministic = True
    return backend


# a mutant, the cases it is tried on, the clauses that must fail, and those that must still pass.
MUTANTS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "sink ignored in decode": (with_attention(mutants.without_sink, "decode"), "S", "S1", "S2"),
    "sink ignored in prefill": (with_attention(mutants.without_sink, "prefill"), "S", "S2", "S1"),
    "sink applied twice": (with_attention(mutants.sink_twice), "S", "S1 S2", ""),
    "sink scaled": (with_attention(mutants.sink_scaled), "S", "S1 S2", ""),
    "lengths ignored": (with_attention(with_rows(mutants.every_column)), "A3,A5", "A3", "A5"),
    "lengths ignored on pages": (with_attention(with_rows(mutants.every_column), of=paged), "A3", "A3", ""),
    "index rows taken to be packed": (with_attention(with_rows(mutants.stride_is_width)), "A6", "A6", ""),
    "-1 attended as a key of zeros": (
        with_attention(mutants.zero_keys),
        "A1,A2,A3,A6,call-empty-*",
        "A1 A2 B1",
        "A3 A6",
    ),
    "tail unwritten": (with_attention(mutants.tail_unwritten), "decode-swa,call-plain-*", "F1 F6 M1", ""),
    "fp8 dialect always OCP": (with_attention(with_caches(mutants.always_ocp), of=paged), "C2,C3", "C2 C3", ""),
    "page stride assumed": (
        with_attention(with_caches(mutants.packed_pages), "decode"),
        "moved-*,pages-*",
        "C4 C7",
        "A4",
    ),
    "another request's row read": (mutants.NeighbourRow, "A1,A2,F1", "A1", "F1"),
    "int32 offsets": (mutants.Overflow, "far-decode,far-prefill,moved-swa-*", "A5", "C4"),
    "decode and prefill have other bits": (said_to_be_deterministic, "any-cut-*", "D2", ""),
    "stale workspace": (lambda: Scratch(clears=False), "W2", "W2 D1", ""),
    "scratch beyond its bound": (lambda: Scratch(bound=0.9), "W1", "W1", ""),
    "writes behind its scratch": (lambda: Scratch(past=3), "W3", "W3", ""),
    "sums that lose with each key": (with_attention(mutants.biased_sums), "alike-*,decode-c4a,prefill-c4a", "M4", "M1"),
    "lse in base 2": (with_attention(mutants.base_two), "L1,gather-*", "L1 L4", "R1"),
    "sink in the lse": (with_attention(mutants.lse_with_sink), "L", "L2", ""),
    "absent columns in the largest logit": (with_attention(with_top(mutants.top_with_absent)), "L", "L5", "L1"),
    "largest logit in base 2": (with_attention(with_top(lambda _, top: top / mutants.LN2)), "L", "L5", "L1"),
    "largest logit unscaled": (with_attention(with_top(lambda c, top: top / c.layer.scale)), "L", "L5", "L1"),
    "sink in the largest logit": (with_attention(with_top(mutants.top_with_sink)), "L", "L5", "L1"),
    "no largest logit is 0": (with_attention(with_top(lambda _, top: top.nan_to_num(neginf=0))), "L", "L5", "L1"),
    "asking for the largest logit moves out": (with_attention(with_top(mutants.top_moves_out)), "L", "L5", "L1"),
    "lse of empty rows not as asked": (with_attention(mutants.empty_lse_ignored), "L", "L6", "L1 L5"),
    "parts with lse in base 2": (with_attention(mutants.base_two), "L7", "L7", ""),
    "parts without a sink have one of 0": (with_attention(mutants_ranks.no_sink_is_zero), "L1,L7", "L7", ""),
    "parts have a sink of 0 in the lse": (with_attention(mutants_ranks.zero_sink_in_lse), "L2,L3,L7", "L7", "L3"),
    "parts without keys have lse 0": (with_attention(mutants_ranks.empty_lse(0.0)), "L3,L7", "L7", "L3"),
    "parts without keys have a finite lse": (with_attention(mutants_ranks.empty_lse(-1e30)), "L3,L7", "L7", "L3"),
    "windows seen on every rank": (mutants_ranks.WindowsKept, "L1,L7,decode-c4a", "L7", "L1 F1"),
    "entries of one rank on all": (mutants_ranks.OneRanksSlots, "L1,L7,decode-c4a", "L7", "L1 F1"),
    "RoPE on the leading dims": (mutants.LeadingRope, "I,decode-swa", "I1 I2 F1", "I4"),
    "empty rows not zero": (with_attention(mutants.mean_of_nothing), "B2,lse-*", "B1 B2 B3", ""),
    "absent columns read slot 0": (with_attention(mutants.reads_slot_zero, "decode"), "C6", "C6", ""),
    "angles of another position": (
        with_op(INSERT, cos_sin_cache=lambda a: a["cos_sin_cache"].roll(1, 0)),
        "I",
        "I1 I5",
        "I4",
    ),
    "kv rotated in place": (with_op(INSERT, after=mutants.keys_rotated_in_place), "I,C1", "I2", "I4"),
    "q normalised without eps": (with_op(INSERT, eps=lambda _: 1e-6), "I,decode-swa", "I6", "I1 I4 F1"),
    "padding inserted": (with_op(INSERT, slot_mapping=mutants.slots_of_all_rows), "I", "I3", "I4"),
    "scales of a neighbouring group": (mutants.NeighbourScales, "pair-v41-*,decode-swa", "C3", "M1"),
    "floor of the scale": (with_op(QUANTISE, patched=(KVCacheLayout, "amax_floor", 1.0)), "C1,R", "C1", "R1"),
    "negative slot wraps": (with_op(QUANTISE, slot_mapping=mutants.slots_from_the_end), "I", "I3", "I4"),
    "block table taken to be packed": (with_dense(GATHER, "block_table"), "R", "R2", ""),
    "gather clears what is not its own": (with_op(GATHER, after=mutants.rest_cleared), "R", "R3", ""),
    "projection rotates forward": (with_op(PROJECT, cos_sin_cache=mutants.angles_forward), "P,R1", "P1", "R1"),
    "temporaries denied": (with_op("transient_bytes", after=lambda *_: 1000), "temporaries-swa,W2", "W5", "W2"),
    "no temporaries at all": (with_op("transient_bytes", after=lambda *_: 0), "temporaries-swa,W2", "W5", "W2"),
}

# mutants that serve some sizes in part or assume strides, and the cases of which each must fail.
UNSEEN: dict[str, tuple[Callable[[], Any], str]] = {
    "strided q of attention": (
        with_attention(mutants_sizes.assumed_dense("q")),
        "apart-call-decode,apart-call-prefill",
    ),
    "strided q of attention, heads": (
        with_attention(mutants_sizes.heads_follow),
        "apart-call-decode,apart-step-prefill",
    ),
    "strided out": (with_attention(mutants_sizes.assumed_dense("out")), "apart-call-decode,apart-call-prefill"),
    "strided lse": (with_attention(mutants_sizes.assumed_dense("lse")), "apart-call-decode,apart-call-prefill"),
    "strided q of insert": (with_dense(INSERT, "q"), "apart-insert,apart-step-decode"),
    "strided kv of insert": (with_dense(INSERT, "kv"), "apart-insert,apart-step-prefill"),
    "strided k of insert": (with_dense(QUANTISE, "k"), "apart-quantise"),
    "strided o of projection": (with_dense(PROJECT, "o"), "apart-project"),
    "strided weights of projection": (with_dense(PROJECT, "wo_a"), "apart-project"),
    "strided table of angles": (
        with_dense(PROJECT, "cos_sin_cache", of=with_dense(INSERT, "cos_sin_cache")),
        "apart-insert,apart-project",
    ),
    "strided topk_indices": (
        lambda: mutants_sizes.with_arguments(dense, "topk_indices"),
        "apart-step-decode,apart-step-prefill",
    ),
    "strided block tables": (
        lambda: mutants_sizes.with_arguments(dense, "block_table"),
        "apart-step-decode,apart-c128a-decode",
    ),
    "strided block table of a gather": (with_dense(GATHER, "block_table"), "apart-step-prefill,apart-c128a-prefill"),
    "512 rows of a call": (with_attention(mutants_sizes.only_rows(512)), "requests-decode,requests-prefill"),
    "1024 rows of a call": (with_attention(mutants_sizes.only_rows(1024)), "requests-decode,requests-prefill"),
    "2048 keys of a row": (
        with_attention(mutants_sizes.only_keys(2048)),
        "keys-8320-decode,keys-8320-prefill,million-c128a",
    ),
    "8192 keys of a row": (with_attention(mutants_sizes.only_keys(8192)), "keys-8320-decode,keys-8320-prefill"),
    "512 rows of an insert": (
        with_op(INSERT, of=with_op(QUANTISE, slot_mapping=mutants.first_slots), slot_mapping=mutants.first_slots),
        "quantise-1031,insert-1031",
    ),
    "512 rows of a projection": (with_op(PROJECT, o=mutants.first_outputs), "project-1031"),
    "32 requests of a gather": (
        with_op(GATHER, gather_lens=mutants.first_requests),
        "gather-requests,requests-prefill",
    ),
    "1024 records of a gather": (
        with_op(GATHER, seq_lens=mutants.ends_of_first_records, gather_lens=mutants.first_records),
        "gather-long",
    ),
    "1024 blocks of a gather": (
        with_op(GATHER, seq_lens=mutants.records_of_first_blocks, block_table=mutants.first_blocks),
        "gather-long",
    ),
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
    "heads in another order": (with_attention(mutants.heads_swapped), "decode-c4a,prefill-c4a"),
    "wrong for 32 heads": (with_attention(mutants_sizes.last_heads_zero_of(32)), "heads-32-decode,heads-32-prefill"),
    "heads above a multiple of 64": (
        with_attention(mutants_sizes.whole_blocks_of_heads),
        "heads-80-decode,heads-80-prefill",
    ),
    "groups from the eighth on": (
        with_op(PROJECT, after=mutants_sizes.zero_groups(lambda groups: slice(8, groups))),
        "project-16-bf16,project-16-fp32",
    ),
    "wrong for 4 groups": (
        with_op(PROJECT, after=mutants_sizes.zero_groups(lambda groups: slice(0, groups == 4))),
        "project-4-bf16,project-4-fp32",
    ),
    "8 bits for a record of a page": (
        with_attention(mutants_sizes.records_of_8_bits, of=paged),
        "pages-512-512-decode,pages-512-512-prefill",
    ),
    "8 bits for a record of a page, written": (
        with_op(
            INSERT,
            of=with_op(QUANTISE, slot_mapping=mutants_sizes.slots_of_8_bits),
            slot_mapping=mutants_sizes.slots_of_8_bits,
        ),
        "quantise-ocp-512,insert-ocp-512,pages-512-512-decode",
    ),
    "256 records of a page of a gather": (
        with_op(GATHER, after=mutants_sizes.later_records_absent),
        "gather-ocp-512,fill-bf16-512,pages-512-512-prefill",
    ),
    "eps fixed at 1e-6": (with_op(INSERT, eps=lambda a: a["eps"] and 1e-6), "qnorm-eps-other"),
    "no eps": (with_op(INSERT, eps=lambda a: a["eps"] and 0.0), "qnorm-eps-default,qnorm-eps-other"),
    "an insert of no rows raises": (
        with_op(INSERT, of=with_op(QUANTISE, k=rows_required("k")), kv=rows_required("kv")),
        "quantise-none,insert-none",
    ),
    "without slots, slot 0 is written": (with_op(INSERT, slot_mapping=mutants.slot_0_for_want_of_slots), "insert-none"),
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
    "-7 wraps around in the fused insert": (with_op(INSERT, slot_mapping=mutants.slots_from_the_end), "insert-padding"),
    "slots past the last become the last": (with_op(INSERT, slot_mapping=mutants.last_slot), "insert-padding"),
    "slots past the last are written": (with_op(INSERT, cache=mutants.unbounded_pages), "insert-padding"),
    "slots of 32 bits in the fused insert": (
        with_op(INSERT, slot_mapping=lambda a: a["slot_mapping"].int().long()),
        "insert-padding",
    ),
    "int32 addresses in the fused insert": (
        with_op(INSERT, cache=lambda a: mutants.int32_offsets(a["cache"])),
        "far-insert-fused",
    ),
    "int32 addresses of the compressed cache": (
        with_attention(mutants_shared.near_compressed, of=paged),
        "far-compressed-decode,far-compressed-prefill",
    ),
    "positions of 16 bits": (
        with_op(PROJECT, of=with_op(INSERT, positions=positions_of_16_bits), positions=positions_of_16_bits),
        "insert-positions,project-positions",
    ),
    "fp32 weights read as bf16": (with_op(PROJECT, wo_a=mutants.weights_of_the_outputs_type), "project-mixed"),
    "no running maximum": (
        with_attention(mutants_shared.without_maximum),
        "logits-swa-decode,logits-c4a-decode,logits-swa-prefill,logits-c4a-prefill",
    ),
    "the softmax scale of the dims": (
        with_attention(mutants_shared.own_scale),
        "softmax-scale-decode,softmax-scale-prefill",
    ),
    "bf16 pages taken to be packed": (
        with_attention(mutants.with_caches(mutants.packed_pages), of=paged),
        "gaps-bf16-decode,gaps-bf16-prefill",
    ),
    "a window has W columns": (
        with_attention(mutants_sizes.clipped_windows, of=paged),
        "call-wide-swa-decode,call-wide-c4a-decode,call-wide-swa-prefill,call-wide-c4a-prefill,block-swa,ahead-c4a",
    ),
    "a draft block is causal": (lambda: mutants_sizes.with_arguments(lambda _: True, "causal"), "block-swa"),
    "windows reach back to position 0": (
        lambda: mutants_sizes.with_arguments(torch.zeros_like, "replay_start"),
        "bounded-swa,bounded-c4a",
    ),
    "gathered windows reach before the gathered rows": (mutants_sizes.Unbounded, "bounded-swa"),
    "a slot listed twice counts once": (
        with_attention(mutants_shared.once),
        "call-twice-swa-decode,call-twice-c4a-decode,call-twice-swa-prefill,call-twice-c4a-prefill",
    ),
}


@pytest.mark.matrix
def test_g22_the_kit_calls_the_fused_insert_as_the_contract_has_it() -> None:
    none_fail(with_op(INSERT, after=mutants.types_asserted), "I,dtype-*,layout-*,layers-*,dims-swa-*")


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", UNSEEN)
def test_g22_what_is_served_in_part_or_misread_fails_the_cases_that_are_about_it(mutant: str) -> None:
    all_fail(*UNSEEN[mutant])


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", mutants_weights.SLIPS)
def test_a_wrong_conversion_in_core_fails_the_cases_that_are_about_it(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, wrong, names = mutants_weights.SLIPS[mutant]
    monkeypatch.setattr(f"dsv4attn.core.{target}", wrong)

    all_fail(ReferenceBackend, names)


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails_the_kit_where_its_clause_is(mutant: str) -> None:
    breaks(*MUTANTS[mutant])


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("made", "clauses"),
    [
        (Scratch, "W1,W2,W3"),
        (paged, "A3,A7"),
        (with_op(GATHER, of=with_op(INSERT)), "I,R3"),
        (with_attention(mutants.attend), "A3,L1,L5,P1"),
    ],
)
def test_what_mutants_are_made_of_passes(made: Callable[[], Any], clauses: str) -> None:
    none_fail(made, clauses)


class Fp8Queries(ReferenceBackend):
    """A backend that rounds the queries of decodes to fp8."""

    def decode(self, call: AttentionCall) -> None:
        super().decode(attrs.evolve(call, q=call.q.to(torch.float8_e4m3fn).to(call.q.dtype)))


def power_of_two(least: Tensor) -> Tensor:
    """The smallest powers of two that are as large."""
    fraction, exponent = torch.frexp(least)
    return torch.exp2((exponent - (fraction == 0.5).int()).float())


class Fp8Outputs(ReferenceBackend):
    """A backend that rounds outputs to codes. scale_of: the scale of runs whose largest code needs at least as much."""

    projects_fp8 = True

    def __init__(self, scale_of: Callable[[Tensor], Tensor] = power_of_two, *, rounds: bool = True) -> None:
        super().__init__()
        self.scale_of, self.rounds = scale_of, rounds

    def inv_rope_o_proj(
        self, o: Tensor, positions: Tensor, cos_sin_cache: Tensor, wo_a: Any, num_groups: int
    ) -> Tensor:
        fp8 = wo_a.weight.dtype
        turned = kernels.rotated(o.float(), positions, cos_sin_cache, inverse=True)
        runs = turned.unflatten(-1, (-1, wo_a.block_size[1]))
        scale = self.scale_of(runs.abs().amax(-1, keepdim=True) / torch.finfo(fp8).max)
        x = ((runs / scale).to(fp8).float() * scale if self.rounds else runs).reshape(len(o), num_groups, -1)
        z = torch.einsum("tgk,grk->tgr", x, dense_weight(wo_a).float().unflatten(0, (num_groups, -1)))
        return z.to(o.dtype)


@pytest.mark.parametrize(
    ("backend", "judge"),
    [
        (Fp8Outputs(), none_fail),
        (Fp8Outputs(rounds=False), all_fail),
        (Fp8Outputs(lambda least: least), all_fail),
        (Fp8Outputs(lambda least: power_of_two(least) / 4), all_fail),
        (Fp8Outputs(lambda least: power_of_two(least) * 2**12), all_fail),
    ],
    ids=["as it is", "not rounded", "no power of two", "too small", "too large"],
)
def test_outputs_that_a_backend_rounds_to_fp8_are_judged_as_such(
    backend: Fp8Outputs, judge: Callable[[Callable[[], Any], str], object]
) -> None:
    judge(lambda: backend, "project-fp8-ocp-bytes,project-fp8-fnuz-e8m0,project-fp8-blocks-32")


@pytest.mark.parametrize(("products", "judge"), [(Products.BF16, all_fail), (Products.FP8, none_fail)])
def test_budgets_are_those_of_the_products_that_a_backend_declares(
    products: Products, judge: Callable[[Callable[[], Any], str], object]
) -> None:
    backend = Fp8Queries()
    backend.capabilities = attrs.evolve(backend.capabilities, products=products)

    judge(lambda: backend, "decode-swa,call-plain-c4a-decode")


def test_largest_logits_are_asked_only_of_backends_that_have_them() -> None:
    backend = ReferenceBackend()
    backend.capabilities = attrs.evolve(backend.capabilities, max_logits=False)

    certificate = certificate_of(lambda: backend, "L5,lse-decode")

    states = {outcome.case.name: outcome.state for outcome in certificate.outcomes}
    assert states == {"lse-decode": "passed", "max-logits-decode": "skipped", "max-logits-prefill": "skipped"}
