"""Every mutant of a layer step fails the cases that are about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from dsv4attn.backends.reference import kernels as reference_kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache import key_codecs
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.op_names import LAYER_OPS
from dsv4attn.core.torch_ops import indexer, latents, selection
from tests.layer_ops import TorchOps
from tests.testing import mutants_layer as wrong
from tests.testing import mutants_sizes
from tests.testing.mutants import dense, packed_pages
from tests.testing.mutants_layer import compress_with, slip, with_, with_field, with_weights
from tests.testing.verdicts import all_fail, certificate_of, none_fail

SAVE, COMPRESS, QUERY, SELECT = (
    "save_partial_states",
    "compress_norm_rope_store",
    "indexer_q_rope_quant",
    "select_topk",
)
ALL_ENTRIES = "compress-c4a-fp32,compress-c128a-ocp,compress-index-fp8"
ONE_EPS = with_weights(hc_pre_eps=lambda w: w.rms_eps, hc_sinkhorn_eps=lambda w: w.rms_eps)
"""Every eps is that under the root."""

# a mutant, and the cases of which each must fail.
MUTANTS: dict[str, tuple[Callable[[], Any], str]] = {
    # norms
    "keys normed without their weight": (
        slip("norm_q_kv", with_(kv_weight=lambda a: a["kv_weight"] * 0 + 1)),
        "norms-bf16,norms-mixed,norms-fp32,norms-1031,apart-norms",
    ),
    "an eps of the norms that is 1e-6": (slip("norm_q_kv", with_(eps=lambda _: 1e-6)), "norms-eps"),
    "products rounded before the norm": (
        slip("norm_q_kv", with_(q=lambda a: a["q"].bfloat16(), kv=lambda a: a["kv"].bfloat16())),
        "norms-mixed,norms-fp32",
    ),
    "results of the norms that are products": (
        slip("norm_q_kv", behind=lambda result, a: (a["q"].to(a["dtype"]), result[1])),
        "norms-bf16,norms-fp32",
    ),
    "results of the norms of another type": (
        slip("norm_q_kv", behind=lambda result, _: tuple(part.float() for part in result)),
        "norms-bf16,norms-mixed",
    ),
    # compressor
    "no overlap": (compress_with(alone=True), "compress-c4a-ocp,compress-index-fp8,cuts-c4a"),
    "halves of the channels swapped": (compress_with(swapped=1), "compress-c4a-ocp,compress-index-mxfp4"),
    "ape added twice": (
        slip(SAVE, with_(score=lambda a: a["score"] + a["ape"][a["positions"] % len(a["ape"])])),
        "states-c4a,states-c128a,states-index,cuts-c4a",
    ),
    "padding has states": (
        slip(SAVE, with_(slot_mapping=lambda a: a["slot_mapping"].clamp(min=0))),
        "no-token-compress-c4a,no-token-compress-c128a,no-token-compress-index",
    ),
    "padding has entries": (
        slip(COMPRESS, with_(slot_mapping=wrong.slots_of_padding)),
        "no-token-compress-c4a,no-token-compress-index",
    ),
    "ape not added": (slip(SAVE, with_(ape=lambda a: a["ape"] * 0)), "states-c4a,states-c128a,states-index"),
    "ape by the position itself": (
        slip(SAVE, with_(positions=lambda a: a["positions"].clamp(max=len(a["ape"]) - 1))),
        "states-c4a,states-c128a,states-positions",
    ),
    "states by token number": (
        slip(SAVE, with_(slot_mapping=wrong.by_token_number)),
        "states-c4a,cuts-index,replay-c4a",
    ),
    "slots of states of 32 bits": (
        slip(SAVE, with_(slot_mapping=lambda a: a["slot_mapping"].int().long())),
        "states-skips",
    ),
    "entries before all states": (wrong.late_saving, "cuts-c4a,cuts-c128a,replay-index,compress-1031"),
    "RoPE at the last position": (slip(COMPRESS, with_field("norm", cos_sin_cache=wrong.last_position)), ALL_ENTRIES),
    "RoPE at positions of 16 bits": (
        slip(COMPRESS, with_field("norm", cos_sin_cache=wrong.wrapped_at_16_bits)),
        "compress-positions-c4a,compress-positions-index",
    ),
    "states at positions of 16 bits": (
        slip(COMPRESS, with_(positions=wrong.of_16_bits)),
        "compress-positions-c4a,compress-positions-index",
    ),
    "entry 0 reads before it": (compress_with(clamped=True), "compress-first,compress-c4a-ocp,dims-compress"),
    "absent states have only their weights masked": (
        compress_with(unmasked=True),
        "compress-first,compress-unused-c4a",
    ),
    "NaN counts as 0": (
        compress_with(swallowed=True),
        "compress-nan-c4a-ocp,compress-nan-index-fp8,compress-nan-index-mxfp4",
    ),
    "norm before the softmax": (compress_with(normed=True), ALL_ENTRIES),
    "no running maximum": (compress_with(raw=True), ALL_ENTRIES),
    "no norm weight": (slip(COMPRESS, with_field("norm", weight=lambda a: a["norm"].weight * 0 + 1)), ALL_ENTRIES),
    "a norm weight in bf16 ignored": (
        slip(
            COMPRESS,
            with_field(
                "norm",
                weight=lambda a: a["norm"].weight if a["norm"].weight.element_size() == 4 else a["norm"].weight * 0 + 1,
            ),
        ),
        "compress-norm-bf16",
    ),
    "no eps": (
        slip(COMPRESS, with_field("norm", eps=lambda _: 0.0)),
        "compress-eps,compress-c4a-fp32,compress-index-fp8",
    ),
    "eps fixed": (slip(COMPRESS, with_field("norm", eps=lambda _: 1e-6)), "compress-eps"),
    "pages of states taken to be packed": (
        slip(COMPRESS, with_field("states", cache=lambda a: packed_pages(a["states"].cache))),
        "compress-gaps-c4a,compress-gaps-index",
    ),
    "slots of entries of 32 bits": (
        slip(COMPRESS, with_(slot_mapping=lambda a: a["slot_mapping"].int().long())),
        "compress-skips",
    ),
    "index pages by token * 132": (
        slip(COMPRESS, with_(cache=wrong.interleaved)),
        "compress-index-fp8,compress-index-mxfp4",
    ),
    "no floor of the scale": (
        slip(COMPRESS, patched=((KVCacheLayout, "amax_floor", 0.0),)),
        "compress-index-fp8,compress-index-mxfp4",
    ),
    "nibbles swapped": (
        slip(COMPRESS, patched=((key_codecs, "_packed", wrong.swapped_nibbles),)),
        "compress-index-mxfp4",
    ),
    "ties of e2m1 away from zero": (
        slip(COMPRESS, patched=((key_codecs, "_packed", wrong.half_up),)),
        "compress-index-mxfp4",
    ),
    # queries
    "scale of q not in the weights": (slip(QUERY, behind=wrong.without_scale), "query-fp8,query-fnuz"),
    "no floor of the scale of q": (slip(QUERY, patched=((KVCacheLayout, "amax_floor", 0.0),)), "query-fp8,query-mxfp4"),
    "nibbles of q swapped": (slip(QUERY, patched=((key_codecs, "_packed", wrong.swapped_nibbles),)), "query-mxfp4"),
    "ties of q away from zero": (slip(QUERY, patched=((key_codecs, "_packed", wrong.half_up),)), "query-mxfp4"),
    "RoPE on the leading dims": (slip(QUERY, with_(q=wrong.rolled), behind=wrong.leading), "query-fp8,query-bf16"),
    "q rotated at positions of 16 bits": (slip(QUERY, with_(positions=wrong.of_16_bits)), "query-positions"),
    "no 1 / sqrt of the heads": (
        slip(QUERY, with_(weights=lambda a: a["weights"].float() * a["q"].shape[1] ** 0.5)),
        "query-fp8,query-bf16",
    ),
    "strided q of the indexer": (slip(QUERY, with_(q=lambda a: dense(a["q"]))), "apart-query"),
    "strided weights of the indexer": (slip(QUERY, with_(weights=lambda a: dense(a["weights"]))), "apart-query"),
    "fp32 q rounded first": (slip(QUERY, with_(q=lambda a: a["q"].bfloat16())), "query-fp8-64,query-mxfp4-64"),
    # selection
    "no relu": (
        slip(SELECT, patched=((selection, "scores", wrong.without_relu),)),
        "select-fp8,scores-fp8,select-zeros",
    ),
    "scores rounded to bf16": (
        slip(SELECT, patched=((selection, "scores", wrong.rounded_scores),)),
        "select-random,scores-bf16",
    ),
    "one visible count a request": (
        slip(SELECT, with_field("token_map", visible_lens=wrong.of_the_request)),
        "select-verify,select-1031",
    ),
    "ties to the higher entry": (
        slip(SELECT, patched=((selection, "better", wrong.higher_first),)),
        "select-fp8,select-zeros,select-ranks-fp8",
    ),
    "-0 below 0": (slip(SELECT, patched=((selection, "scores", wrong.bits_ordered),)), "select-zeros"),
    "NaN selected": (
        slip(SELECT, patched=((selection, "scores", wrong.relu_drops_nan),)),
        "select-nan-fp8,select-nan-mxfp4,select-nan-bf16",
    ),
    "entries behind the visible ones": (
        slip(SELECT, wrong.nine_more_entries),
        "select-fp8,select-verify,select-few,select-unused-zero,select-unused-large",
    ),
    "visible counts ignored": (
        slip(SELECT, with_field("token_map", visible_lens=wrong.all_entries)),
        "select-fp8,select-verify,select-few,select-bound",
    ),
    "512 entries looked at": (
        slip(SELECT, with_(max_entries=lambda a: min(a["max_entries"], 512))),
        "select-fp8,select-512,select-1024,scores-fp8",
    ),
    "selected by numbers of whole sequences": (
        slip(SELECT, with_field("token_map", visible_lens=lambda a: a["token_map"].visible_lens * 2)),
        "select-ranks-fp8,select-ranks-few",
    ),
    "1,024 entries looked at": (
        slip(SELECT, with_(max_entries=lambda a: min(a["max_entries"], 1024))),
        "select-512,select-1024",
    ),
    "absent first": (slip(SELECT, behind=wrong.absent_first), "select-few,select-verify"),
    "not in ascending order": (slip(SELECT, behind=wrong.in_order_of_scores), "select-fp8,select-random"),
    "the rest not written": (slip(SELECT, behind=wrong.never_written), "select-few,select-verify"),
    "the rest not written of 1,024 among at most 512": (
        slip(SELECT, behind=wrong.rest_of_1024_never_written),
        "select-few-1024",
    ),
    "the rest not written of 1,024, in rows of at most 512": (
        slip(SELECT, behind=wrong.rest_of_short_rows_never_written),
        "select-few-1024",
    ),
    "256 keys of a page": (slip(SELECT, behind=wrong.later_keys_absent), "select-pages-512"),
    "wrong for 32 heads of the indexer": (
        slip(SELECT, with_field("query", weights=lambda a: wrong.zero_of_32_heads(a["query"].weights))),
        "select-heads-32",
    ),
    "wrong for queries of 32 heads": (
        slip(QUERY, with_(weights=lambda a: wrong.zero_of_32_heads(a["weights"]))),
        "query-heads-32",
    ),
    "256 entries of a page": (
        slip(COMPRESS, with_(slot_mapping=mutants_sizes.slots_of_8_bits)),
        "compress-c4a-pages-512,compress-index-pages-512",
    ),
    "keys by token * 132": (slip(SELECT, with_(cache=wrong.interleaved)), "select-fp8,select-mxfp4"),
    "pages of keys taken to be packed": (slip(SELECT, with_(cache=lambda a: packed_pages(a["cache"]))), "select-gaps"),
    "blocks not checked": (
        slip(SELECT, with_field("token_map", block_table=wrong.blocks_of_the_cache)),
        "select-blocks",
    ),
    "the first request's blocks": (
        slip(SELECT, with_field("token_map", token_to_req=lambda a: a["token_map"].token_to_req * 0)),
        "select-fp8,select-requests",
    ),
    "strided out": (slip(SELECT, with_(out=lambda a: dense(a["out"]))), "apart-select"),
    "strided block table": (
        slip(SELECT, with_field("token_map", block_table=lambda a: dense(a["token_map"].block_table))),
        "apart-select",
    ),
    # hyper-connections
    "strided streams": (slip("mhc_post", with_(residual=lambda a: dense(a["residual"]))), "apart-mhc"),
    "fp32 streams rounded": (
        slip("mhc_pre", with_(residual=lambda a: a["residual"].bfloat16().float())),
        "mhc-pre-fp32,mhc-norm-fp32",
    ),
    "temporaries denied": (wrong.no_temporaries, "temporaries-compressor,temporaries-indexer,temporaries-mhc"),
    "comb transposed": (
        slip("mhc_post", with_(comb=lambda a: a["comb"].mT)),
        "mhc-post-bf16,mhc-post-n2,mhc-fused-fp32",
    ),
    "one iteration short": (
        slip("mhc_pre", with_weights(sinkhorn_repeat=lambda w: w.sinkhorn_repeat - 1)),
        "mhc-sinkhorn-1,mhc-sinkhorn-2,mhc-sinkhorn-3,mhc-eps",
    ),
    "norm_weight ignored": (
        slip("mhc_pre", with_weights(norm_weight=lambda _: None)),
        "mhc-norm-bf16,mhc-norm-fp32,mhc-fused-norm-bf16,mhc-fused-norm-fp32",
    ),
    "norm_eps ignored": (slip("mhc_pre", with_weights(norm_eps=lambda _: 1e-6)), "mhc-norm-fp32,mhc-fused-norm-fp32"),
    "factor of post is 1": (
        slip("mhc_pre", with_weights(hc_post_mult_value=lambda _: 1.0)),
        "mhc-pre-bf16,mhc-fused-bf16",
    ),
    "factor of post is always 2": (
        slip("mhc_pre", with_weights(hc_post_mult_value=lambda _: 2.0)),
        "mhc-eps,mhc-fused-eps",
    ),
    "one eps for all": (slip("mhc_pre", ONE_EPS), "mhc-eps,mhc-fused-eps"),
    "no eps under the root": (slip("mhc_pre", with_weights(rms_eps=lambda _: 0.0)), "mhc-eps,mhc-fused-eps"),
    "eps of the head merged": (slip("hc_head", with_(hc_eps=lambda a: a["rms_eps"])), "hc-head-eps"),
    "fused mixes of the old streams": (wrong.old_streams, "mhc-fused-bf16,mhc-fused-fp32,mhc-fused-norm-bf16"),
    "mixes in bf16": (
        slip("mhc_pre", with_weights(fn=lambda w: w.fn.bfloat16().float())),
        "mhc-pre-bf16,mhc-pre-flash,mhc-fused-bf16",
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS)
def test_g23_a_wrong_layer_step_fails_the_cases_that_are_about_it(mutant: str) -> None:
    certificate = all_fail(*MUTANTS[mutant])

    assert [o.trace for o in certificate.outcomes if o.trace] == [], "a wrong answer, not an exception"


def unchecked(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of a table at positions of any rows, those of padding too."""
    return table[positions]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (indexer, "no-token-query"),
        (latents, "no-token-keys-1,no-token-index-2"),
        (reference_kernels, "no-token-insert,no-token-project"),
    ],
)
def test_g23_a_step_that_looks_up_positions_of_padding_fails(module: Any, names: str) -> None:
    with mock.patch.object(module, "angles_at", unchecked):
        certificate = certificate_of(ReferenceBackend, names)

    assert {o.case.name for o in certificate.of("failed")} == {*names.split(",")}


def test_what_mutants_are_made_of_passes() -> None:
    for make in (slip(SAVE), slip(COMPRESS), compress_with(), slip(QUERY), slip(SELECT), slip("mhc_pre")):
        none_fail(make, f"{ALL_ENTRIES},query-fp8,select-fp8,mhc-pre-bf16")


# whose steps they are


class Own(TorchOps):
    def select_topk(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError


def test_a_certificate_says_whose_layer_parts_were_judged() -> None:
    backend: Any = ReferenceBackend()
    backend.name, backend.layer_ops = "own", Own().table()

    certificate = certificate_of(lambda: backend, "select-fp8")

    wanted = {**dict.fromkeys(LAYER_OPS, "reference"), "selection": "own"}
    assert certificate.as_json()["layer_parts"] == backend.layer_ops.sources("own") == wanted
    assert certificate.outcomes[0].message.startswith("raised NotImplementedError")


def test_steps_that_cannot_be_made_fail_their_cases_and_leave_a_certificate() -> None:
    class Broken(ReferenceBackend):
        @property
        def layer_ops(self) -> Any:
            raise RuntimeError("no library")

    certificate = certificate_of(Broken, "select-fp8,lse-decode")

    assert [o.state for o in certificate.outcomes] == ["passed", "failed"]
    assert certificate.as_json()["layer_parts"] == dict.fromkeys(LAYER_OPS, "raised RuntimeError")
