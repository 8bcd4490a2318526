"""Records written and read here are, byte for byte, those of the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.testing import oracle
from dsv4attn.testing.oracle_records import read_fp4, read_fp8, record_fp4, record_fp8
from dsv4attn.tools.bench.records import fill, read, write

LAYOUTS = [
    KVCacheLayout.fp8_ds_mla(),
    KVCacheLayout.fp8_ds_mla(fp8_format=Fp8Format.FNUZ),
    KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED),
]


def rows() -> torch.Tensor:
    """[11, 512] bf16: sizes over many powers of two, zeros, and groups whose largest value is the range's end."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, 512, generator=generator) * torch.logspace(-4, 4, 11)[:, None]
    x[3, :64], x[4, 64:128] = 0.0, 1e-9
    x[5, 0], x[6, 64], x[7, 128] = 448.0, 1.75 * 2.0**9, 1.8125 * 2.0**12
    return x.bfloat16()


@pytest.mark.parametrize("layout", LAYOUTS, ids=["split", "fnuz", "interleaved"])
def test_bytes_are_those_of_the_oracle(layout: KVCacheLayout) -> None:
    given, slots = rows(), torch.tensor([9, 0, 5, 2, 11, 7, 1, 8, 3, 10, 4])
    cache = PagedKVCache.allocate(layout, 3, 4)
    write(cache, slots, given)

    sizes = {"nope_dim": 448, "rope_dim": 64, "group_size": 64, "fnuz": layout.fp8_format is Fp8Format.FNUZ}
    found = read(cache, slots)
    for i, slot in enumerate(slots.tolist()):
        place = slot // 4, slot % 4
        parts = [cache.region(name)[place].contiguous().view(torch.uint8) for name in ("nope", "rope", "scale")]
        record = oracle.quantize_record(given[i].double().numpy(), scale_bytes=8, **sizes)  # type: ignore[arg-type]
        assert np.array_equal(torch.cat(parts).numpy(), record)
        wanted = oracle.dequantize_record(record, scale_bytes=8, **sizes)  # type: ignore[arg-type]
        assert np.array_equal(found[i].double().numpy(), wanted)


@pytest.mark.parametrize("arrangement", Arrangement)
@pytest.mark.parametrize("name", ["v41_fp8", "v41_fp4"])
def test_bytes_of_v41_records_are_those_of_the_oracle(name: str, arrangement: Arrangement) -> None:
    fp8, given = name == "v41_fp8", rows()
    given[8, :32] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(4) * torch.tensor([1, -1] * 16)
    given[9, 500:] = -0.0
    layout = KVCacheLayout.v41_fp8(arrangement=arrangement) if fp8 else KVCacheLayout.v41_fp4(arrangement=arrangement)
    slots = torch.tensor([9, 0, 5, 2, 11, 7, 1, 8, 3, 10, 4])
    cache = PagedKVCache.allocate(layout, 3, 4)
    write(cache, slots, given)

    pack, unpack = (record_fp8, read_fp8) if fp8 else (record_fp4, read_fp4)
    found = read(cache, slots)
    for i, slot in enumerate(slots.tolist()):
        place = slot // 4, slot % 4
        record = pack(given[i].double().numpy())
        assert np.array_equal(torch.cat([cache.region(part)[place] for part in ("nope", "scale")]).numpy(), record)
        assert np.array_equal(found[i].double().numpy(), unpack(record, 512))


def test_filling_leaves_no_slot_out() -> None:
    cache = PagedKVCache.allocate(KVCacheLayout.fp8_ds_mla(), 5, 3)
    fill(cache, torch.Generator().manual_seed(0))

    found = read(cache, torch.arange(15))
    assert bool((found.abs().amax(1) > 1).all())
    assert found.unique(dim=0).shape[0] == 15


def test_rows_are_read_as_they_are() -> None:
    cache = PagedKVCache.allocate(KVCacheLayout.rows(), 2, 3)
    cache.tensor.copy_(torch.arange(6).view(2, 3, 1).expand(2, 3, 512))

    assert read(cache, torch.tensor([4, 1]))[:, 0].tolist() == [4.0, 1.0]
