"""V4's record of 4 bits: sizes, places, bytes, every code under every scale, conversions, refusals; codes of MXFP4."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.gather import dequantize_and_gather_k_cache
from dsv4attn.backends._triton.cache.insert import quantize_and_insert_k_cache
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.convert import check_compatible
from dsv4attn.core.cache.key_codecs import dequantize_keys, quantize_keys
from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.contract.problem import KEY_LAYOUTS, CacheFacts, Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, LayoutMismatchError, UnknownNameError
from tests.backends._triton.cache.caches import DEVICE
from tests.core.cache.v41_packer import F64, U8, bf16, mxfp4_group, pack_nvfp4, power, unpack_nvfp4
from tests.harness import same_memory_on

NVFP4 = KVCacheLayout.of_record("v4_nvfp4")
OTHERS = [layout for layout in map(KVCacheLayout.of_record, KEY_RECORDS) if layout != NVFP4]


def packed(row: F64, layout: KVCacheLayout) -> U8:
    return pack_nvfp4(row.tolist(), layout.nope_dim)


def unpacked(record: U8) -> F64:
    return unpack_nvfp4(record, 448, 64)


def places(layout: KVCacheLayout, i: int, size: int) -> U8:
    """Offsets in a page of the bytes of record i, in the packer's order, from the published rules alone."""
    codes, plain, scales = layout.nope_dim // 2, 2 * layout.rope_dim, -(-layout.num_groups // 8) * 8
    data, scale = i * (codes + plain), size * (codes + plain) + i * scales
    return np.concatenate([data + np.arange(codes + plain), scale + np.arange(scales)])


def held(layout: KVCacheLayout, records: list[U8], size: int) -> PagedKVCache:
    """A cache of these records, 0xFF elsewhere, and in the padding after scales too."""
    blocks, stride = -(-len(records) // size), layout.page_stride(size) + 32
    memory = np.full((blocks, stride), 0xFF, dtype=np.uint8)
    for i, record in enumerate(records):
        place = places(layout, i % size, size)
        memory[i // size, place] = record
        memory[i // size, place[layout.data_bytes + layout.num_groups :]] = 0xFF
    cache = PagedKVCache(torch.from_numpy(memory)[:, : layout.page_bytes(size)], layout, block_size=size)
    return PagedKVCache(same_memory_on(cache.tensor, DEVICE), layout, block_size=size)


def gathered(cache: PagedKVCache, count: int, *, kernel: bool) -> F64:
    """[count, D] the first keys of a cache."""
    gather = dequantize_and_gather_k_cache if kernel else ReferenceBackend().dequantize_and_gather_k_cache
    out = torch.zeros(1, count, cache.layout.head_dim, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(cache.num_blocks, dtype=torch.int32, device=DEVICE)[None]
    gather(out, cache, torch.tensor([count], dtype=torch.int32, device=DEVICE), None, table, 0)
    return out[0].double().cpu().numpy()


def draws(layout: KVCacheLayout) -> F64:
    """[9, D] rows of many sizes: random, tiny, huge, zeros of both signs, ties, and of groups of all sizes."""
    rng, dim = np.random.default_rng(3), layout.head_dim
    rows = rng.normal(size=(9, dim))
    rows[1] *= 1e-3
    rows[2] *= 1e30
    rows[3] = 0
    rows[4] = -0.0
    rows[5] *= np.exp2(np.linspace(-20, 12, dim))
    rows[6] = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dim) * rng.choice([-1, 1], dim)
    rows[7] = rng.choice([6.0, 6.03125, 5.96875, 12.0, 12.0625, 1.5, 8.5], dim)
    # the interpreter loses subnormal numbers of bf16
    rows[8] = np.sign(rows[8]) * np.maximum(np.abs(rows[8]), 0.01) * 1e-35
    return bf16(rows)


def test_records_have_the_published_sizes_places_and_names() -> None:
    assert (NVFP4.record_bytes, NVFP4.page_stride(64)) == (384, 64 * 384)
    assert (NVFP4.code_bytes, NVFP4.num_groups, NVFP4.scale_bytes) == (224, 28, 32)
    regions = [(r.name, r.offset, r.stride, r.count) for r in NVFP4.regions(4)]
    assert regions == [("nope", 0, 352, 224), ("rope", 224, 352, 64), ("scale", 4 * 352, 32, 32)]
    # engines store this string
    assert NVFP4.fingerprint == "v4_nvfp4/1:e2m1:nope448:rope64:bf16:e4m3fnx16:scales32:split"
    assert CacheFacts.of(NVFP4, 64) == CacheFacts("v4_nvfp4", "e2m1", 64, "split", 16)
    assert [*KEY_LAYOUTS] == [*KEY_RECORDS, "rows"]


@pytest.mark.parametrize("layout", [NVFP4, KVCacheLayout.of_record("v4_nvfp4", 36, 6)], ids=lambda x: str(x.head_dim))
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_records_are_those_of_the_packer_and_no_other_byte_is_written(layout: KVCacheLayout, kernel: bool) -> None:
    rows, size = draws(layout), 4
    records = [packed(row, layout) for row in rows]
    for dtype in (torch.bfloat16, torch.float32):
        storage = torch.full((3, layout.page_stride(size) + 32), 0xFF, dtype=torch.uint8, device=DEVICE)
        cache = PagedKVCache(storage[:, : layout.page_bytes(size)], layout, block_size=size)
        insert = quantize_and_insert_k_cache if kernel else ReferenceBackend().quantize_and_insert_k_cache

        insert(torch.from_numpy(rows).to(DEVICE, dtype), cache, torch.arange(9, device=DEVICE))

        expected = np.full(tuple(storage.shape), 0xFF, dtype=np.uint8)
        for i, record in enumerate(records):
            expected[i // size, places(layout, i % size, size)] = record
        np.testing.assert_array_equal(storage.cpu().numpy(), expected)


def test_bytes_of_a_record_never_change() -> None:
    # our definition of the writers, pinned: see `core.cache.key_codecs`
    row = bf16(np.random.default_rng(0).normal(size=512) * np.exp2(np.arange(512) % 9 - 4))
    assert hashlib.sha256(packed(row, NVFP4).tobytes()).hexdigest()[:16] == "f5b41e48a7e05d30"


def test_index_keys_of_mxfp4_have_the_packers_codes_and_every_code_is_exact_under_every_scale() -> None:
    # 6 fits the scale 1, and the step above it does not; -0 loses its sign, and a tiny negative value keeps it
    assert mxfp4_group([6.0, -0.0, -1e-9, 5.0, 0.25]) == ([7, 0, 8, 6, 0], 127)
    assert mxfp4_group([6.03125, -3.0])[1] == 128
    assert mxfp4_group([0.0])[1] == 1
    layout = KVCacheLayout.index_mxfp4(448)
    rows = draws(NVFP4)[:, :448]

    codes, scales = quantize_keys(torch.from_numpy(rows).float(), layout)

    groups = [[mxfp4_group(row[i : i + 32].tolist()) for i in range(0, 448, 32)] for row in rows]
    wanted = np.array([[code for codes, _ in row for code in codes] for row in groups])
    np.testing.assert_array_equal(codes.numpy(), wanted[:, ::2] | wanted[:, 1::2] << 4)
    np.testing.assert_array_equal(scales.numpy()[:, :14], [[byte for _, byte in row] for row in groups])

    everything = torch.arange(256, dtype=torch.uint8)
    values = dequantize_keys(everything[:, None].expand(256, 16), everything[:, None], KVCacheLayout.index_mxfp4(32))

    halves = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    pair = torch.tensor([[sign * half for sign in (1, -1) for half in halves]], dtype=torch.float64)
    exact = torch.stack([pair[0, everything.int() % 16], pair[0, everything.int() // 16]], dim=1).repeat(1, 16)
    scale = torch.tensor([*(float(power(byte - 127)) for byte in range(255)), torch.nan], dtype=torch.float64)
    torch.testing.assert_close(
        values.double(), (exact * scale[:, None]).float().double(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_every_code_is_exact_under_every_scale_and_padding_is_not_read(kernel: bool) -> None:
    rng, groups = np.random.default_rng(1), NVFP4.num_groups
    count = -(-256 // groups)
    scales = np.resize(np.arange(256), count * groups).reshape(count, groups)
    records = []
    for row in scales:
        codes = np.concatenate([rng.permutation(16) for _ in row])
        rope = rng.integers(0, 0x7F80, 64).astype("<u2").view(np.uint8)
        pads = np.zeros(NVFP4.scale_bytes - groups, dtype=np.uint8)
        records.append(np.concatenate([codes[::2] | codes[1::2] << 4, rope, row, pads]).astype(np.uint8))
    with np.errstate(over="ignore"):
        expected = bf16(np.stack([unpacked(record) for record in records]))

    values = gathered(held(NVFP4, records, 3), count, kernel=kernel)

    np.testing.assert_array_equal(values, expected)
    assert np.isnan(values).any()


def test_records_of_other_sizes_and_arrangements_are_refused_by_name() -> None:
    for other in OTHERS:
        memory = torch.zeros(2, 4, other.record_bytes, dtype=torch.uint8)
        with pytest.raises(ArgumentError, match=r"^cache tensor: expected shape .* 384\] for layout"):
            PagedKVCache(memory, NVFP4)
        with pytest.raises(LayoutMismatchError):
            check_layout(other, NVFP4, "cache")
        with pytest.raises(LayoutMismatchError):
            check_compatible(other, NVFP4)
    short = torch.zeros(2, 4 * 384 - 1, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="at least 1536 bytes in a page, got 1535"):
        PagedKVCache(short, NVFP4, block_size=4)
    with pytest.raises(ArgumentError, match=r"^arrangement: expected split, as v4_nvfp4 has it, got interleaved"):
        KVCacheLayout.of_record("v4_nvfp4", arrangement=Arrangement.INTERLEAVED)
    with pytest.raises(ArgumentError, match=r"^nope_dim: expected a multiple of 4, so that the bf16 part is aligned"):
        KVCacheLayout.of_record("v4_nvfp4", 446, 64)
    with pytest.raises(UnknownNameError, match="v4_mxfp4"):
        KVCacheLayout.of_record("v4_mxfp4")


def test_windows_may_have_them_and_problems_name_them() -> None:
    problem = Problem.of(ModelGeometry.preset("flash"))
    facts: Tensor | CacheFacts = CacheFacts.of(NVFP4, 64)
    assert isinstance(facts, CacheFacts)
    shown = str(Problem("decode", problem.layer, facts, facts, 512))
    assert "(448 e2m1 + 64 bf16)" in shown
    assert "kv=v4_nvfp4 e2m1" in shown


def flashinfer_group(values: F64) -> tuple[list[int], int]:
    """Codes and scale byte of FlashInfer's writer, 0.7.2.post1: e4m3 of amax / 6, and the value times 1 / scale."""
    x = values.astype(np.float32)
    byte = torch.tensor(np.abs(x).max() / np.float32(6)).to(torch.float8_e4m3fn)
    scale = np.float32(byte.float().item())
    scaled = x * (np.float32(0) if scale == 0 else np.float32(1) / scale)
    ends = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = [int(sum(s > e if i % 2 == 0 else s >= e for i, e in enumerate(ends))) for s in np.abs(scaled)]
    return [c | 8 * bool(np.signbit(v)) for c, v in zip(codes, x, strict=True)], int(byte.view(torch.uint8))


def test_flashinfers_writer_differs_in_ties_and_tiny_groups_alone() -> None:
    rows = draws(NVFP4)[[0, 1, 6, 7]]
    for row, size in zip(rows, ("any", "tiny", "ties", "ties"), strict=True):
        for start in range(0, 448, 16):
            group = row[start : start + 16]
            record = pack_nvfp4(group.tolist(), 16)
            ours = [int(code) for pair in record[:8] for code in (pair & 15, pair >> 4)]
            theirs, byte = flashinfer_group(group)
            if int(record[8]) != byte:
                assert (size, byte, int(record[8])) == ("tiny", 0, 1)
                continue
            scale = float(torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
            for mine, other, value in zip(ours, theirs, group, strict=True):
                tie = abs(value) / scale in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
                assert mine == other or (tie and abs(mine - other) == 1)
