"""How far rounding may take stored keys from the truth: what the oracle stores is within the bound, and barely."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsv4attn.core.cache.index_records import store_index_keys
from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.testing.oracle import attention as oracle
from dsv4attn.testing.oracle.attention import F64
from dsv4attn.tools.replay.read_back import KeyReader, rounding_bound, share_of_bound

DIMS = {"nope_dim": 48, "rope_dim": 16, "group_size": 16}


def rows(count: int, dim: int) -> F64:
    random = np.random.default_rng(0)
    return np.asarray(random.standard_normal((count, dim)) * np.exp(random.standard_normal((count, 1)) * 3))


@pytest.mark.parametrize("dialect", list(Fp8Format))
def test_what_the_oracle_stores_is_within_the_bound_and_a_wrong_scale_is_not(dialect: Fp8Format) -> None:
    layout = KVCacheLayout.fp8_ds_mla(48, 16, fp8_format=dialect, group_size=16)
    record: Any = {**DIMS, "fnuz": dialect is Fp8Format.FNUZ, "scale_bytes": 8}
    worst = 0.0
    for row in rows(200, 64):
        bound = rounding_bound(row, layout, 16)
        stored = oracle.quantize_record(oracle.round_bf16(row), **record)
        worst = max(worst, share_of_bound(oracle.dequantize_record(stored, **record), row, bound))
        stored[48 + 32] += 1
        assert share_of_bound(oracle.dequantize_record(stored, **record), row, bound) > 1

    assert 0.8 < worst <= 1


def test_a_rounding_to_bf16_is_half_of_the_bound_and_an_error_of_two_steps_is_beyond_it() -> None:
    layout = KVCacheLayout.rows(48, 16)
    for row in rows(50, 64):
        bound = rounding_bound(row, layout, 16)
        assert share_of_bound(oracle.round_bf16(row), row, bound) <= 0.5 + 1e-6
        assert share_of_bound(row * (1 + 2.0**-6), row, bound) > 1


def test_a_value_that_is_not_a_number_is_beyond_every_bound() -> None:
    row = rows(1, 64)[0]
    bound = rounding_bound(row, KVCacheLayout.rows(48, 16), 16)
    assert share_of_bound(np.full(64, np.nan), row, bound) == np.inf


@pytest.mark.parametrize(
    "layout",
    [KVCacheLayout.index_fp8(32), KVCacheLayout.index_fp8(32, fp8_format=Fp8Format.FNUZ), KVCacheLayout.rows(24, 8)],
    ids=lambda layout: layout.fingerprint,
)
def test_index_keys_are_read_from_the_bytes_of_their_pages(layout: KVCacheLayout) -> None:
    cache, keys = PagedKVCache.allocate(layout, 4, 4), rows(6, 32)
    slots = torch.tensor([12, 13, 14, 15, 4, 5])
    store_index_keys(torch.from_numpy(keys).float(), cache, slots)
    read = KeyReader(cache).read([3, 1], range(6))

    assert read.shape == (6, 32)
    assert KeyReader(cache).read([3, 1], ()).shape == (0, 32)
    for stored, key in zip(read, keys, strict=True):
        assert 0.1 < share_of_bound(stored, key, rounding_bound(key, layout, 8)) <= 1


def test_keys_are_read_from_pages_with_padding_between_them() -> None:
    layout = KVCacheLayout.fp8_ds_mla(48, 16, group_size=16)
    whole = PagedKVCache.allocate(layout, 4, 3)
    assert whole.page_stride > layout.page_bytes(3)
    record: Any = {**DIMS, "fnuz": False, "scale_bytes": 8}
    stored = oracle.quantize_record(rows(1, 64)[0], **record)
    for name, part in (("nope", slice(48)), ("rope", slice(48, 80)), ("scale", slice(80, 88))):
        whole.region(name)[2, 1] = torch.from_numpy(stored[part].copy()).view(whole.region(name).dtype)
    read = KeyReader(whole).read([0, 2], [4])

    assert np.array_equal(read[0], oracle.dequantize_record(stored, **record))
