"""The cases of `cases_nan` and `beyond` on trial: backends that hide a NaN, spread it, or trust lengths, fail them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import PagedKVCache
from dsv4attn.core.cache.selected_keys import GatheredKeys, PagedKeys
from dsv4attn.core.contract.backend import AttentionCall
from tests.testing import mutants
from tests.testing.mutants import GATHER, QUANTISE, attend, paged, with_attention, with_op
from tests.testing.verdicts import all_fail, none_fail


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


MUTANTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "NaN codes read as numbers": (with_attention(codes_are_numbers, of=paged), "nan-ocp-decode", "C8"),
    "NaN scales read as 1": (with_attention(scales_are_numbers, of=paged), "nan-ocp-prefill", "C8"),
    "NaN scrubbed": (with_attention(scrubbed), "nan-fnuz-decode", "C8"),
    "NaN in out alone": (with_attention(only_in_out), "nan-bf16-decode", "C8"),
    "NaN in one dim alone": (with_attention(one_dim), "nan-bf16-decode", "C8"),
    "NaN in every row": (with_attention(spread), "nan-interleaved-prefill", "C8"),
    "NaN written as 0": (with_op(QUANTISE, k=lambda a: a["k"].nan_to_num()), "nan-*-quantise", "C8"),
    "columns behind the table are read": (
        with_op(GATHER, block_table=mutants.columns_behind_the_table),
        "beyond-gather",
        "R4",
    ),
    "rows behind the output are written": (with_op(GATHER, out=mutants.rows_behind_the_output), "beyond-gather", "R4"),
    "absent records are zeros": (with_op(GATHER, after=mutants.absent_records_are_zeros), "beyond-gather", "R4"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails_its_case(mutant: str) -> None:
    make, patterns, clause = MUTANTS[mutant]

    assert clause in all_fail(make, patterns).by_clause()


@pytest.mark.matrix
@pytest.mark.parametrize("made", [ReferenceBackend, paged, with_op(GATHER), with_attention(attend, of=paged)])
def test_what_mutants_are_made_of_passes(made: Callable[[], Any]) -> None:
    none_fail(made, "nan-*,beyond-gather")
