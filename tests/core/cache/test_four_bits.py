"""V4's records of 4 bits: sizes, places, bytes, every code under every scale, conversions and refusals."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.cache.gather import dequantize_and_gather_k_cache
from dsv4attn.backends._triton.cache.insert import quantize_and_insert_k_cache
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.convert import check_compatible, convert_cache
from dsv4attn.core.cache.key_records import KEY_RECORDS
from dsv4attn.core.cache.layout import Arrangement, KVCacheLayout, PagedKVCache, check_layout
from dsv4attn.core.contract.problem import KEY_LAYOUTS, CacheFacts, Problem
from dsv4attn.core.model.geometry import ModelGeometry
from dsv4attn.errors import ArgumentError, LayoutMismatchError, UnknownNameError
from tests.backends._triton.cache.caches import DEVICE
from tests.core.cache.v41_packer import F64, U8, bf16, mxfp4_group, pack_four_bits, unpack_mxfp4, unpack_nvfp4
from tests.harness import same_memory_on

NVFP4, MXFP4 = KVCacheLayout.of_record("v4_nvfp4"), KVCacheLayout.of_record("v4_mxfp4")
LAYOUTS = [NVFP4, MXFP4, KVCacheLayout.of_record("v4_nvfp4", 36, 6), KVCacheLayout.of_record("v4_mxfp4", 36, 6)]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.head_dim}")
both = pytest.mark.parametrize("layout", LAYOUTS[:2], ids=lambda layout: layout.name)
OTHERS = [KVCacheLayout.of_record(name) for name in KEY_RECORDS]


def packed(row: F64, layout: KVCacheLayout) -> U8:
    return pack_four_bits(row.tolist(), layout.nope_dim, nvfp4=layout.name == "v4_nvfp4")


def unpacked(record: U8, layout: KVCacheLayout) -> F64:
    unpack = unpack_nvfp4 if layout.name == "v4_nvfp4" else unpack_mxfp4
    return unpack(record, layout.nope_dim, layout.rope_dim)


def places(layout: KVCacheLayout, i: int, size: int) -> U8:
    """Offsets in a page of the bytes of record i, in the packer's order, from the published rules alone."""
    codes, plain, scales = layout.nope_dim // 2, 2 * layout.rope_dim, -(-layout.num_groups // 8) * 8
    if layout.name == "v4_nvfp4":
        data, scale = i * (codes + plain), size * (codes + plain) + i * scales
        return np.concatenate([data + np.arange(codes + plain), scale + np.arange(scales)])
    first = i * (codes + plain + scales)
    return first + np.concatenate([np.arange(codes), codes + scales + np.arange(plain), codes + np.arange(scales)])


def held(layout: KVCacheLayout, records: list[U8], size: int, gap: int = 32, *, pads: int = 0xFF) -> PagedKVCache:
    """A cache of these records, 0xFF elsewhere, and in the padding after scales too."""
    blocks, stride = -(-len(records) // size), layout.page_stride(size) + gap
    memory = np.full((blocks, stride), 0xFF, dtype=np.uint8)
    for i, record in enumerate(records):
        place = places(layout, i % size, size)
        memory[i // size, place] = record
        memory[i // size, place[layout.data_bytes + layout.num_groups :]] = pads
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
    assert [layout.record_bytes for layout in (NVFP4, MXFP4)] == [384, 368]
    assert [(x.code_bytes, x.num_groups, x.scale_bytes) for x in (NVFP4, MXFP4)] == [(224, 28, 32), (224, 14, 16)]
    assert [layout.page_stride(64) for layout in (NVFP4, MXFP4)] == [64 * 384, 64 * 368]
    regions = [(r.name, r.offset, r.stride, r.count) for x in (NVFP4, MXFP4) for r in x.regions(4)]
    assert regions == [
        ("nope", 0, 352, 224),
        ("rope", 224, 352, 64),
        ("scale", 4 * 352, 32, 32),
        ("nope", 0, 368, 224),
        ("rope", 240, 368, 64),
        ("scale", 224, 368, 16),
    ]
    # engines store these strings
    assert [layout.fingerprint for layout in (NVFP4, MXFP4)] == [
        "v4_nvfp4/1:e2m1:nope448:rope64:bf16:e4m3fnx16:scales32:split",
        "v4_mxfp4/1:e2m1:nope448:rope64:bf16:ue8m0x32:scales16:inline",
    ]
    assert CacheFacts.of(MXFP4, 64) == CacheFacts("v4_mxfp4", "e2m1", 64, "inline", 32)
    assert [*KEY_LAYOUTS] == [*KEY_RECORDS, "rows"]


@each_layout
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
    digests = [hashlib.sha256(packed(row, layout).tobytes()).hexdigest()[:16] for layout in (NVFP4, MXFP4)]
    assert digests == ["f5b41e48a7e05d30", "08116643dd78f935"]
    # 6 fits the scale 1, and the step above it does not; -0 loses its sign, and a tiny negative value keeps it
    assert mxfp4_group([6.0, -0.0, -1e-9, 5.0, 0.25]) == ([7, 0, 8, 6, 0], 127)
    assert mxfp4_group([6.03125, -3.0])[1] == 128
    assert mxfp4_group([0.0])[1] == 1


@both
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_every_code_is_exact_under_every_scale_and_padding_is_not_read(layout: KVCacheLayout, kernel: bool) -> None:
    rng, groups = np.random.default_rng(1), layout.num_groups
    count = -(-256 // groups)
    scales = np.resize(np.arange(256), count * groups).reshape(count, groups)
    records = []
    for row in scales:
        codes = np.concatenate([rng.permutation(np.arange(layout.group_size) % 16) for _ in row])
        rope = rng.integers(0, 0x7F80, 64).astype("<u2").view(np.uint8)
        pads = np.zeros(layout.scale_bytes - groups, dtype=np.uint8)
        records.append(np.concatenate([codes[::2] | codes[1::2] << 4, rope, row, pads]).astype(np.uint8))
    with np.errstate(over="ignore"):
        expected = bf16(np.stack([unpacked(record, layout) for record in records]))

    values = gathered(held(layout, records, 3), count, kernel=kernel)

    # 6 * 2^126 and more are beyond bf16
    np.testing.assert_array_equal(values, expected)
    assert np.isnan(values).any()


@both
def test_records_become_rows_without_loss_and_nothing_becomes_records(layout: KVCacheLayout) -> None:
    rows = draws(layout)[[0, 1, 5, 6, 7]]
    records = [packed(row, layout) for row in rows]
    cache = held(layout, records, 3)
    for dtype in (torch.bfloat16, torch.float32):
        target = PagedKVCache.allocate(KVCacheLayout.rows(dtype=dtype), 2, 3, DEVICE)
        convert_cache(cache, target, torch.arange(5))
        got = target.tensor.double().cpu().numpy().reshape(6, 512)[:5]
        np.testing.assert_array_equal(got, np.stack([unpacked(record, layout) for record in records]))
    other = PagedKVCache.allocate(layout, 3, 2, DEVICE)
    convert_cache(cache, other, torch.arange(5))
    np.testing.assert_array_equal(gathered(other, 5, kernel=False), gathered(cache, 5, kernel=False))
    for source in (KVCacheLayout.rows(), *(x for x in OTHERS if x != layout)):
        with pytest.raises(LayoutMismatchError, match=r"^target: expected a layout that holds keys of"):
            convert_cache(PagedKVCache.allocate(source, 1, 4), PagedKVCache.allocate(layout, 1, 4))


def test_a_key_beyond_fp32_is_not_converted() -> None:
    record = np.zeros(368, dtype=np.uint8)
    record[0], record[352:] = 0x77, 254
    rows = PagedKVCache.allocate(KVCacheLayout.rows(dtype=torch.float32), 1, 1, DEVICE)
    with pytest.raises(LayoutMismatchError, match="which cannot hold slot 0"):
        convert_cache(held(MXFP4, [record], 1), rows)


def test_records_of_other_sizes_and_arrangements_are_refused_by_name() -> None:
    for layout, other in ((NVFP4, MXFP4), (MXFP4, NVFP4), (NVFP4, KVCacheLayout.fp8_ds_mla())):
        memory = torch.zeros(2, 4, other.record_bytes, dtype=torch.uint8)
        with pytest.raises(
            ArgumentError, match=rf"^cache tensor: expected shape .* {layout.record_bytes}\] for layout"
        ):
            PagedKVCache(memory, layout)
        with pytest.raises(LayoutMismatchError):
            check_layout(other, layout, "cache")
        with pytest.raises(LayoutMismatchError):
            check_compatible(other, layout)
    short = torch.zeros(2, 4 * 384 - 1, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="at least 1536 bytes in a page, got 1535"):
        PagedKVCache(short, NVFP4, block_size=4)
    for name, wrong in (
        ("v4_nvfp4", Arrangement.INTERLEAVED),
        ("v4_mxfp4", Arrangement.SPLIT),
        ("fp8_ds_mla", Arrangement.INLINE),
    ):
        with pytest.raises(ArgumentError, match=rf"^arrangement: expected .*, as {name} has it, got {wrong.value}"):
            KVCacheLayout.of_record(name, arrangement=wrong)
    with pytest.raises(ArgumentError, match=r"^nope_dim: expected a multiple of 4, so that the bf16 part is aligned"):
        KVCacheLayout.of_record("v4_mxfp4", 446, 64)
    with pytest.raises(UnknownNameError, match="v4_mxfp5"):
        KVCacheLayout.of_record("v4_mxfp5")


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
            record = pack_four_bits(group.tolist(), 16, nvfp4=True)
            ours = [int(code) for pair in record[:8] for code in (pair & 15, pair >> 4)]
            theirs, byte = flashinfer_group(group)
            if int(record[8]) != byte:
                assert (size, byte, int(record[8])) == ("tiny", 0, 1)
                continue
            scale = float(torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float())
            for mine, other, value in zip(ours, theirs, group, strict=True):
                tie = abs(value) / scale in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
                assert mine == other or (tie and abs(mine - other) == 1)
