"""Every mutant of a step of DeepSeek-V4.1 fails the cases that are about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract import op_names
from dsv4attn.core.torch_ops.arguments import StatePages
from dsv4attn.errors import ArgumentError
from tests.testing import mutants_v41 as wrong
from tests.testing.mutants import dense
from tests.testing.mutants_layer import last_position, slip, with_, with_field, with_weights
from tests.testing.verdicts import all_fail, certificate_of, none_fail

DELAYED = "mhc_pre_delayed"
WITHIN = "select_topk_of_candidates"
LATENTS, STORE = "compress_latents", "norm_rope_store"

MUTANTS: dict[str, tuple[Callable[[], Any], str]] = {
    # delayed hyper-connections
    "own pre at once": (
        slip(DELAYED, with_(previous_pre=wrong.own_pre)),
        "delayed-pre-bf16,delayed-pre-fp32,delayed-fused-bf16,delayed-norm-fp32,delayed-eps",
    ),
    "the first sublayer by its own pre": (
        slip(
            DELAYED,
            with_(previous_pre=wrong.own_pre_at_first),
        ),
        "delayed-first-bf16,delayed-first-fp32,delayed-first-n2",
    ),
    "the first sublayer by a mean": (
        slip(DELAYED, with_(previous_pre=wrong.mean_at_first)),
        "delayed-first-bf16,delayed-first-fp32",
    ),
    "the given pre goes on": (
        slip(DELAYED, behind=wrong.given_pre),
        "delayed-pre-bf16,delayed-pre-fp32,delayed-fused-fp32",
    ),
    "pre without its eps": (
        slip(DELAYED, behind=lambda made, a: (made[0] - a["weights"].hc_pre_eps, *made[1:])),
        "delayed-eps",
    ),
    "eps of 1e-6 in the norm": (
        slip(DELAYED, with_weights(norm_eps=lambda _: 1e-6, rms_eps=lambda _: 1e-6)),
        "delayed-norm-fp32",
    ),
    "strided streams": (slip("mhc_collapse", with_(streams=lambda a: dense(a["streams"]))), "delayed-apart"),
    "a mean at the end": (
        slip("mhc_collapse", with_(pre=lambda a: a["pre"] * 0 + 0.25)),
        "delayed-collapse-bf16,delayed-collapse-flash",
    ),
    # candidates
    "the newest block not forced": (
        slip("select_candidates", behind=wrong.not_forced),
        "candidates-fp8,candidates-random,candidates-of-1",
    ),
    "a block twice": (slip("select_candidates", behind=wrong.cut_to_one), "candidates-fp8,candidates-random"),
    "blocks of half the size": (
        slip("select_candidates", with_(block_size=lambda a: a["block_size"] // 2)),
        "candidates-fp8,candidates-random",
    ),
    "candidates ignored": (
        slip(WITHIN, with_(candidates=lambda a: torch.arange(2000).expand(len(a["candidates"]), -1))),
        "within-fp8,within-random,within-published,within-of-32",
    ),
    "candidates by one": (slip(WITHIN, with_(candidates=wrong.shifted)), "within-fp8,within-published"),
    # latents
    "no states": (slip(LATENTS, wrong.without_states), "latents-2,latents-ring,latents-drafts"),
    "eps of 1e-6": (slip(LATENTS, with_(eps=lambda _: 1e-6)), "latents-eps"),
    "a mean of both tokens": (slip(LATENTS, with_(score=lambda a: a["score"] * 0)), "latents-2,latents-ring"),
    "the first request's ring": (
        slip(LATENTS, with_(token_to_req=lambda a: a["token_to_req"] * 0)),
        "latents-2,latents-ring",
    ),
    "padding takes the first request's ring": (
        slip(LATENTS, with_(token_to_req=lambda a: a["token_to_req"].clamp(min=0))),
        "no-token-latents-1,no-token-latents-2",
    ),
    "padding has latents": (
        slip(LATENTS, behind=lambda made, a: made.masked_fill((a["token_to_req"] < 0)[:, None], 1)),
        "no-token-latents-1,no-token-latents-2",
    ),
    "padding has entries and index keys": (
        slip(STORE, with_(slot_mapping=lambda a: a["slot_mapping"].clamp(min=0))),
        "no-token-keys-1,no-token-keys-2,no-token-index-1,no-token-index-2",
    ),
    "RoPE at the last position": (
        slip(STORE, with_field("norm", cos_sin_cache=last_position)),
        "latent-keys-ocp-2,latent-index-fp8-2",
    ),
    "RoPE at the entry's number": (
        slip(STORE, with_field("norm", cos_sin_cache=wrong.number_of_the_entry)),
        "latent-keys-ocp-2,latent-index-mxfp4-2",
    ),
    "index keys without a norm": (
        slip(STORE, with_field("norm", weight=lambda _: None)),
        "latent-index-fp8-1,latent-index-mxfp4-2",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_g23_a_wrong_step_of_v41_fails_the_cases_that_are_about_it(mutant: str) -> None:
    certificate = all_fail(*MUTANTS[mutant])

    assert [o.trace for o in certificate.outcomes if o.trace] == [], "a wrong answer, not an exception"


@pytest.mark.matrix
def test_the_reference_passes_all_cases_of_v41() -> None:
    none_fail(ReferenceBackend, "V")


@pytest.mark.parametrize("size", [0, -8, 12, 1024])
def test_a_block_size_that_is_no_power_of_two_is_refused_before_anything_is_written(size: int) -> None:
    steps: Any = ReferenceBackend().layer_ops
    out = torch.full((1, 4), 7, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="block_size"):
        steps.select_candidates(None, None, None, out, size, 100)
    with pytest.raises(ArgumentError, match="block_size"):
        steps.select_topk_of_candidates(None, None, None, None, size, out, 100)
    assert (out == 7).all()


def test_a_ratio_of_two_needs_scores_and_a_ring_and_a_ratio_of_one_takes_none() -> None:
    steps: Any = ReferenceBackend().layer_ops
    kv, numbers = torch.ones(2, 512), torch.arange(2)
    given = numbers, numbers.int() * 0, torch.ones(512), 1e-20
    cache = PagedKVCache.allocate(KVCacheLayout.compressor_state(512), 1, 1, "cpu")
    with pytest.raises(ArgumentError, match="score"):
        steps.compress_latents(kv, None, *given, 2)
    with pytest.raises(ArgumentError, match="states"):
        steps.compress_latents(kv, kv, *given, 2)
    with pytest.raises(ArgumentError, match="at least 2 tokens"):
        steps.compress_latents(kv, kv, *given, 2, StatePages(cache, torch.zeros(1, 1, dtype=torch.int32)))
    with pytest.raises(ArgumentError, match="score"):
        steps.compress_latents(kv, kv, *given, 1)


def test_a_certificate_says_who_runs_each_step_of_v41() -> None:
    backend: Any = ReferenceBackend()
    backend.name = "own"
    torchs = backend.layer_ops.compress_latents

    def own(*args: Any, **options: Any) -> Any:
        return torchs(*args, **options)

    backend.layer_ops = attrs.evolve(backend.layer_ops, compress_latents=own)
    certificate = certificate_of(lambda: backend, "latents-1")
    names = (*op_names.LATENTS, *op_names.CANDIDATES, *op_names.DELAYED)

    assert certificate.as_json()["v41_ops"] == {**dict.fromkeys(names, "reference"), "compress_latents": "own"}
