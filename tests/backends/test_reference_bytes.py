"""What the reference writes into a cache and reads back, byte for byte, judged by the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache import key_codecs
from dsv4attn.core.cache.layout import Arrangement, Fp8Format, KVCacheLayout, PagedKVCache
from dsv4attn.testing.oracle import attention as oracle

I32 = torch.int32
OCP, FNUZ = Fp8Format.OCP, Fp8Format.FNUZ
FLASH = KVCacheLayout.fp8_ds_mla()
LAYOUTS = [
    FLASH,
    KVCacheLayout.fp8_ds_mla(fp8_format=FNUZ),
    KVCacheLayout.fp8_ds_mla(arrangement=Arrangement.INTERLEAVED),
    KVCacheLayout.fp8_ds_mla(24, 8, group_size=8),
    KVCacheLayout.fp8_ds_mla(32, 16, group_size=16, fp8_format=FNUZ),
    KVCacheLayout.fp8_ds_mla(100, 6, group_size=64),
    KVCacheLayout.fp8_ds_mla(22, 6, group_size=8, arrangement=Arrangement.INTERLEAVED),
    KVCacheLayout.fp8_ds_mla(90, 10, group_size=8),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.fingerprint)
each_dialect = pytest.mark.parametrize("dialect", [OCP, FNUZ], ids=lambda dialect: dialect.value)


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator that gives the same numbers in every run."""
    return torch.Generator().manual_seed(seed)


def judged(row: Tensor, layout: KVCacheLayout) -> oracle.U8:
    """Return the record the oracle makes of a row."""
    return oracle.quantize_record(
        row.double().numpy(),
        nope_dim=layout.nope_dim,
        rope_dim=layout.rope_dim,
        group_size=layout.group_size,
        fnuz=layout.fp8_format is FNUZ,
        scale_bytes=layout.scale_bytes,
    )


def record_at(cache: PagedKVCache, slot: int) -> oracle.U8:
    """Return the bytes of one record: codes, RoPE, scales."""
    place = slot // cache.block_size, slot % cache.block_size
    parts = [cache.region(name)[place].contiguous().view(torch.uint8) for name in ("nope", "rope", "scale")]
    return torch.cat(parts).numpy()


def write(rows: Tensor, layout: KVCacheLayout, block_size: int = 4) -> PagedKVCache:
    """Insert rows into slots 0, 1, 2, ... of a cache of their own whose bytes were 0xFF."""
    cache = PagedKVCache.allocate(layout, -(-rows.shape[0] // block_size), block_size)
    cache.tensor.fill_(0xFF)
    ReferenceBackend().quantize_and_insert_k_cache(rows, cache, torch.arange(rows.shape[0]))
    return cache


def gather(
    cache: PagedKVCache, table: list[list[int]], seq: list[int], lens: list[int] | None, out: Tensor, at: int
) -> Tensor:
    """Call the gather step with plain lists, and return `out`."""
    ReferenceBackend().dequantize_and_gather_k_cache(
        out,
        cache,
        torch.tensor(seq, dtype=I32),
        None if lens is None else torch.tensor(lens, dtype=I32),
        torch.tensor(table, dtype=I32).view(len(seq), len(table[0]) if table else 1),
        at,
    )
    return out


MAGNITUDES: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "tiny": lambda x: x * 1e-6,
    "below the floor": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-39,
    "huge": lambda x: x * 1e30,
    "largest": lambda x: x.sign() * 3.3e38,
    "spread over 60 octaves": lambda x: x * torch.exp2(torch.linspace(-30, 30, x.shape[-1])),
    "zero": torch.zeros_like,
    "negative zero": lambda x: -torch.zeros_like(x),
    "mostly zero": lambda x: x * (x > 2),
    "infinite": lambda x: torch.where(x > 2, torch.inf, x),
    "negative infinite": lambda x: torch.where(x > 2, -torch.inf, x * 1e30),
}


@each_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_record_is_the_oracle_s_record_byte_for_byte(layout: KVCacheLayout, dtype: torch.dtype) -> None:
    x = torch.randn(12, layout.head_dim, generator=seeded())
    rows = torch.stack([change(x).to(dtype) for change in MAGNITUDES.values()])
    cache = write(rows.flatten(0, 1), layout)

    for slot, row in enumerate(rows.flatten(0, 1)):
        where = f"row {slot % 12}, {[*MAGNITUDES][slot // 12]}"
        np.testing.assert_array_equal(record_at(cache, slot), judged(row, layout), err_msg=where)


@each_layout
def test_the_largest_of_a_group_may_be_exactly_the_limit_or_just_above(layout: KVCacheLayout) -> None:
    limit = layout.fp8_max
    tops = [limit * 2.0**k for k in (-21, -3, 0, 5)]
    tops += [top * (1 + 2**-7) for top in tops] + [top * (1 - 2**-8) for top in tops]
    rows = torch.rand(len(tops), layout.head_dim, generator=seeded()) - 0.5
    rows = rows * torch.tensor(tops)[:, None]
    rows[:, :: layout.group_size] = -torch.tensor(tops)[:, None]
    cache = write(rows.bfloat16(), layout)

    for slot, row in enumerate(rows.bfloat16()):
        np.testing.assert_array_equal(record_at(cache, slot), judged(row, layout), err_msg=f"amax {tops[slot]}")
    scales = cache.region("scale").flatten(0, 1)[:12, 0].tolist()
    assert scales == [106, 124, 127, 132, 107, 125, 128, 133, 106, 124, 127, 132]


def test_a_scale_byte_is_at_least_105_and_at_most_254() -> None:
    rows = torch.zeros(3, 512)
    rows[1] = 1e-30
    rows[2] = torch.inf
    scales = write(rows, FLASH).region("scale").flatten(0, 1)[:3]

    assert scales.tolist() == [[105] * 7 + [0], [105] * 7 + [0], [254] * 7 + [0]]
    assert not write(rows[:2], FLASH).region("nope").flatten(0, 1)[:2].any()


def all_amax() -> Tensor:
    """Return every positive finite bf16 from 1e-4 on."""
    values = torch.arange(0x7F80, dtype=torch.int32).bitwise_left_shift(16).view(torch.float32)
    return values[values >= 1e-4]


@pytest.mark.parametrize(("dialect", "limit"), [(OCP, 448), (FNUZ, 240), (FNUZ, 224)])
def test_the_exponent_of_every_bf16_maximum_is_exact(dialect: Fp8Format, limit: int) -> None:
    amax = all_amax()
    layout = KVCacheLayout.fp8_ds_mla(4, 2, group_size=4, fp8_format=dialect, fp8_max=limit)
    codes, scales = key_codecs.quantize_keys(amax[:, None] * torch.tensor([[1.0, 0, 0, -0.5]]), layout)

    assert len(amax) == 18_094
    for value, byte in zip(amax.tolist(), scales[:, 0].tolist(), strict=True):
        # the smallest e with amax <= limit * 2^e, that is ceil(log2(amax / limit)), in exact arithmetic
        scale = Fraction(2) ** (byte - 127)
        assert Fraction(value) <= limit * scale, value
        assert Fraction(value) > limit * scale / 2, value
    largest = oracle.decode_e4m3(codes[:, 0].numpy(), dialect is FNUZ)
    assert largest.min() >= limit / 2
    assert largest.max() == limit


def test_fnuz_writes_up_to_240_or_to_the_224_of_vllm() -> None:
    rows = torch.linspace(-480, 480, 64).expand(2, 64).bfloat16()
    for limit in (240.0, 224.0):
        layout = KVCacheLayout.fp8_ds_mla(48, 16, group_size=16, fp8_format=FNUZ, fp8_max=limit)
        codes, scales = key_codecs.quantize_keys(rows[:, :48].float(), layout)
        for g in range(3):
            group = rows[0, 16 * g : 16 * g + 16].double().numpy()
            exponent = oracle.scale_exponent(float(np.abs(group).max()), limit)
            expected = oracle.encode_e4m3(np.clip(np.ldexp(group, -exponent), -limit, limit), fnuz=True)
            assert scales[0, g] == exponent + 127
            np.testing.assert_array_equal(codes[0, 16 * g : 16 * g + 16].numpy(), expected)
        assert np.nanmax(np.abs(oracle.decode_e4m3(codes.numpy(), fnuz=True))) <= limit


def test_fnuz_has_no_negative_zero_to_write() -> None:
    layout = KVCacheLayout.fp8_ds_mla(64, 2, fp8_format=FNUZ)
    rows = torch.full((1, 66), -1e-9)
    rows[:, ::2] = -0.0
    rows[:, 1] = 1.0
    codes = write(rows, layout).region("nope")[0, 0]

    assert not (codes == 0x80).any(), "0x80 is NaN in FNUZ"


@each_dialect
def test_g5_every_code_at_every_scale_reads_as_the_oracle_says(dialect: Fp8Format) -> None:
    """256 records, one per scale byte, each holding all 256 codes."""
    layout = KVCacheLayout.fp8_ds_mla(256, 2, group_size=256, fp8_format=dialect)
    cache = PagedKVCache.allocate(layout, 16, 16)
    cache.region("nope").copy_(torch.arange(256, dtype=torch.uint8))
    cache.region("scale")[..., 0] = torch.arange(256, dtype=torch.uint8).view(16, 16)
    cache.region("scale")[..., 1:] = 0xFF
    fnuz, nan_codes = dialect is FNUZ, [0x80] if dialect is FNUZ else [0x7F, 0xFF]
    expected = np.stack(
        [
            oracle.dequantize_record(
                record_at(cache, slot), nope_dim=256, rope_dim=2, group_size=256, fnuz=fnuz, scale_bytes=8
            )
            for slot in range(256)
        ]
    )
    got = gather(cache, [list(range(16))], [256], None, torch.zeros(1, 256, 258).bfloat16(), 0)[0]
    exact = kernels.read_records(cache, torch.arange(256))

    assert np.isnan(expected[:, nan_codes]).all()
    assert np.isnan(expected[255, :256]).all()
    assert np.isnan(expected).sum() == 255 * len(nan_codes) + 256
    # NaN counts as equal to NaN here, and 0 as equal to -0, hence the signs
    values = got.double().numpy()
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values) & ~np.isnan(values), np.signbit(expected) & ~np.isnan(expected))
    np.testing.assert_array_equal(oracle.round_bf16(exact.double().numpy()), expected)


@pytest.mark.parametrize("slots", [[], [-1, -1, -1], [99, 12, 2**62]])
def test_insert_without_a_slot_is_a_no_op(slots: list[int]) -> None:
    cache = PagedKVCache.allocate(FLASH, 3, 4)
    ReferenceBackend().quantize_and_insert_k_cache(torch.ones(3, 512), cache, torch.tensor(slots, dtype=torch.int64))

    assert not cache.tensor.any()


def test_gather_without_lengths_takes_all_records_into_rows_of_any_stride() -> None:
    cache = write(torch.randn(8, 32, generator=seeded()), KVCacheLayout.fp8_ds_mla(24, 8, group_size=8))
    wide = torch.zeros(2, 12, 48)
    out = gather(cache, [[1, 0], [0, 1]], [7, 2], None, wide[:, ::2, 8:40], 0)

    every = kernels.read_records(cache, torch.arange(8))
    assert torch.equal(out[0, :4], every[4:])
    assert torch.equal(out[1, :2], every[:2])
    assert not wide[:, 1::2].any()
    assert not wide[..., :8].any()


def test_gather_of_nothing_is_a_no_op() -> None:
    cache = write(torch.ones(4, 512), FLASH)
    for requests, rows, at in ((0, 4, 0), (2, 4, 4), (2, 0, 0), (2, 4, 2)):
        out = torch.full((requests, rows, 512), 7.0).bfloat16()
        gather(cache, [[0]] * requests, [0] * requests, None, out, at)
        gather(cache, [[0]] * requests, [4] * requests, [0] * requests, out, at)
        assert bool(out.eq(7).all())


def test_a_scale_is_a_power_of_two_made_of_bits() -> None:
    scales = key_codecs.power_of_two(torch.arange(256, dtype=I32)).tolist()

    assert scales[:255] == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert math.isnan(scales[255])
