"""What a failed comparison says: the place, what was there, what was expected, and the error in budgets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import Fp8Format, PagedKVCache
from dsv4attn.core.cache.selected_keys import GatheredKeys
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases.table import CASES
from dsv4attn.testing.conform import Subject, conform
from dsv4attn.testing.kit.causes import factor_of_two, likely_cause


def larger(call: AttentionCall) -> None:
    call.out[2, 3, 17] += 9


def not_a_number(call: AttentionCall) -> None:
    call.out[2, 3, 17] = float("nan")


def other_lse(call: AttentionCall) -> None:
    assert call.lse is not None
    call.lse[2, 3] += 1


def lse_is_no_number(call: AttentionCall) -> None:
    assert call.lse is not None
    call.lse[2, 3] = float("nan")


@pytest.mark.parametrize("case", ["call-plain-c4a-decode", "decode-c4a"])
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (
            larger,
            r"row 2\b.*, head 3: error of [\d.e+]+ budgets; out of dim 17 is [\d.]+, expected -?0\.\d+; lse \S+, ",
        ),
        (not_a_number, r"row 2\b.*, head 3: 1 of 512 values of out are NaN; out of dim 17 is NaN, expected -?0\.\d+; "),
        (other_lse, r"row 2\b.*, head 3: error of [\d.e+]+ budgets in lse; out of dim \d+ is "),
        (lse_is_no_number, r"row 2\b.*, head 3: lse is NaN; .*; lse NaN, expected \d"),
    ],
)
def test_a_wrong_output_is_named_with_its_row_head_and_dim(
    case: str, plant: Callable[[AttentionCall], None], said: str
) -> None:
    class Planted(ReferenceBackend):
        def decode(self, call: AttentionCall) -> None:
            super().decode(call)
            plant(call)

    (outcome,) = conform(Subject.of(Planted()), [c for c in chosen(CASES, None) if c.name == case]).outcomes

    assert outcome.state == "failed"
    assert re.search(said, outcome.message), outcome.message
    assert "tolerances" not in outcome.message
    assert "1 of " in outcome.message


class SignOfSink(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        super().decode(attrs.evolve(call, attn_sink=None if call.attn_sink is None else -call.attn_sink))


class FirstRows(ReferenceBackend):
    def decode(self, call: AttentionCall) -> None:
        super().decode(call)
        call.out[3:] = torch.nan  # rows that a grid of blocks does not reach


class FirstChunk(ReferenceBackend):
    def prefill(self, call: AttentionCall) -> None:
        if isinstance(call.keys, GatheredKeys) and call.q.shape[0] == 1:  # a chunk of a small workspace
            kv = torch.cat([call.keys.kv[:1], call.keys.kv[:-1]])  # rows begin one too early
            call = attrs.evolve(call, keys=attrs.evolve(call.keys, kv=kv))
        super().prefill(call)


class GatherOfOtherDialect(ReferenceBackend):
    def dequantize_and_gather_k_cache(self, out: Tensor, cache: PagedKVCache, *rest: Any) -> None:
        super().dequantize_and_gather_k_cache(out, cache.with_layout(fp8_format=Fp8Format.FNUZ), *rest)


CAUSES: list[tuple[type[ReferenceBackend], str, str]] = [
    (SignOfSink, "call-plain-c4a-decode", "likely the sink: lse is right, and out is a multiple of the expected one"),
    (FirstRows, "call-plain-c4a-decode", "likely a bound: every row from 3 on is wrong, and none before"),
    (FirstChunk, "capped-swa", "likely the offsets of gathered rows: the step is right in one chunk, and wrong"),
    (GatherOfOtherDialect, "gather-ocp-64", "likely the dialect of fp8 codes: what was stored as codes is half as"),
]


@pytest.mark.parametrize(("planted", "case", "said"), CAUSES)
def test_a_clear_pattern_of_errors_is_given_its_likely_cause(
    planted: type[ReferenceBackend], case: str, said: str
) -> None:
    (outcome,) = conform(Subject.of(planted()), [c for c in CASES if c.name == case]).outcomes

    assert outcome.state == "failed"
    assert said in outcome.message, outcome.message
    assert outcome.message.count("likely") == 1


def test_errors_without_a_pattern_have_no_likely_cause() -> None:
    rng = np.random.default_rng(0)
    expected = rng.normal(size=(24, 4, 512))
    for share in (0.02, 0.3, 1.0):
        wrong = rng.random((24, 4)) < share
        out = expected + wrong[..., None] * rng.normal(size=expected.shape)
        assert likely_cause(out, expected, wrong, lse_is_right=True, coded_dims=448) == ""
        assert factor_of_two(out, expected) == ""
    # keys of one row that are twice as large in their codes; the sink changes both parts alike
    out = 0.3 * expected * np.where(np.arange(512) < 448, 2.0, 1.0)
    every = np.ones((24, 4), dtype=np.bool_)
    assert "dialect of fp8" in likely_cause(out, expected, every, lse_is_right=False, coded_dims=448)
    assert likely_cause(out, expected, every, lse_is_right=False) == ""
    # a whole request that is wrong is no bound, nor is its last row
    for first in (16, 23):
        out = np.where(np.arange(24)[:, None, None] < first, expected, 0.0)
        wrong = np.broadcast_to(np.arange(24)[:, None] >= first, (24, 4))
        assert likely_cause(out, expected, wrong, lse_is_right=False, starts={0, 16}) == ""
