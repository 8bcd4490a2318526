"""The cases of `cases_nan` and `beyond` on trial: backends that hide a NaN, spread it, or trust lengths, fail them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall
from dsv4attn.testing.case import chosen
from dsv4attn.testing.cases import CASES
from dsv4attn.testing.conform import Subject, conform
from tests.testing.mutants import attend, calls, paged


def with_codes(cache: PagedKVCache) -> PagedKVCache:
    """NaN codes read as the largest number."""
    if not cache.layout.is_quantised:
        return cache
    copy = PagedKVCache(cache.tensor.clone(), cache.layout)
    for name, nan, instead in (("nope", 0x7F, 0x7E), ("nope", 0xFF, 0xFE)):
        region = copy.region(name)
        region[region == nan] = instead
    return copy


def codes_are_numbers(call: AttentionCall) -> None:
    assert not isinstance(call.keys, GatheredKeys)
    attend(attrs.evolve(call, keys=[PagedKeys(with_codes(s.cache), s.rows) for s in call.keys]))


def scales_are_numbers(call: AttentionCall) -> None:
    assert not isinstance(call.keys, GatheredKeys)
    keys = []
    for segment in call.keys:
        cache = PagedKVCache(segment.cache.tensor.clone(), segment.cache.layout)
        if cache.layout.is_quantised:
            cache.region("scale")[cache.region("scale") == 255] = 127
        keys.append(PagedKeys(cache, segment.rows))
    attend(attrs.evolve(call, keys=keys))


def scrubbed(call: AttentionCall) -> None:
    attend(call)
    call.out.nan_to_num_()


def only_in_out(call: AttentionCall) -> None:
    attend(call)
    if call.lse is not None:
        call.lse.nan_to_num_()


def one_dim(call: AttentionCall) -> None:
    attend(call)
    call.out[..., 1:].nan_to_num_()


def spread(call: AttentionCall) -> None:
    attend(call)
    if bool(call.out.isnan().any()):
        call.out.fill_(torch.nan)


class HidingInsert(ReferenceBackend):
    """Writes zeros for NaN."""

    def quantize_and_insert_k_cache(self, k: Tensor, cache: PagedKVCache, slot_mapping: Tensor) -> None:
        super().quantize_and_insert_k_cache(k.nan_to_num(), cache, slot_mapping)


class TrustingGather(ReferenceBackend):
    """Writes a row for each record that lengths ask for, or counts positions from the end of the table."""

    def __init__(self, slip: str) -> None:
        super().__init__()
        self.slip = slip

    def dequantize_and_gather_k_cache(
        self, out: Tensor, cache: PagedKVCache, seq_lens: Tensor, gather_lens: Tensor | None, block_table: Tensor,
        offset: int,
    ) -> None:  # fmt: skip
        true = super().dequantize_and_gather_k_cache
        if self.slip == "columns behind the table are read":
            stride = block_table.stride(0)
            block_table = block_table.as_strided((block_table.shape[0], stride), (stride, 1))
            true(out, cache, seq_lens, gather_lens, block_table, offset)
        elif self.slip == "rows behind the output are written" and out.stride(0) > out.stride(1) * out.shape[1]:
            longer = out.as_strided((out.shape[0], out.shape[1] + 1, out.shape[2]), out.stride(), out.storage_offset())
            true(longer, cache, seq_lens, gather_lens, block_table, offset)
        else:
            true(out, cache, seq_lens, gather_lens, block_table, offset)
            if self.slip == "absent records are zeros":
                out[:, offset:][(seq_lens <= 0)] = 0


PLANTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "NaN codes read as numbers": (lambda: calls(codes_are_numbers, made=paged()), "nan-ocp-decode", "C8"),
    "NaN scales read as 1": (lambda: calls(scales_are_numbers, made=paged()), "nan-ocp-prefill", "C8"),
    "NaN scrubbed": (lambda: calls(scrubbed), "nan-fnuz-decode", "C8"),
    "NaN in out alone": (lambda: calls(only_in_out), "nan-bf16-decode", "C8"),
    "NaN in one dim alone": (lambda: calls(one_dim), "nan-bf16-decode", "C8"),
    "NaN in every row": (lambda: calls(spread), "nan-interleaved-prefill", "C8"),
    "NaN written as 0": (HidingInsert, "nan-*-quantise", "C8"),
    **{
        slip: (partial(TrustingGather, slip), "beyond-gather", "R4")
        for slip in (
            "columns behind the table are read",
            "rows behind the output are written",
            "absent records are zeros",
        )
    },
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_fails_its_case(plant: str) -> None:
    make, patterns, clause = PLANTS[plant]

    certificate = conform(Subject.of(make()), chosen(CASES, patterns))

    assert certificate.by_clause()[clause]["failed"]
    assert {outcome.state for outcome in certificate.outcomes} == {"failed"}
    assert all(outcome.message for outcome in certificate.of("failed"))


@pytest.mark.parametrize(
    "made", [ReferenceBackend, paged, lambda: TrustingGather("none"), lambda: calls(attend, made=paged())]
)
def test_what_the_plants_are_grafted_on_passes(made: Callable[[], Any]) -> None:
    certificate = conform(Subject.of(made()), chosen(CASES, "nan-*,beyond-gather"))

    assert [(outcome.case.name, outcome.message) for outcome in certificate.of("failed")] == []
    assert certificate.ok
