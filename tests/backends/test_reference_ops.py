"""The reference's ops around attention: q-norm + RoPE + KV insert, and inverse RoPE + output projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference import kernels
from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.model.geometry import Rope, Yarn
from dsv4attn.core.model.rope import cos_sin_cache
from dsv4attn.testing.oracle import attention as oracle

BF16 = torch.bfloat16
ROPE = Rope(8, 160000.0, Yarn(16.0, 256))
TABLE = cos_sin_cache(ROPE, 512)
LAYOUT = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
EPS = 1e-6
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (BF16, 2**-8)])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(position: int) -> tuple[oracle.F64, oracle.F64]:
    """Return the oracle's cos and sin at a position, of the table's own frequencies."""
    inv = oracle.rope_inv_freq(ROPE.dim, ROPE.theta, oracle.Yarn(16.0, 256))
    return oracle.rope_cos_sin(position, inv)


def insert(q: Tensor, kv: Tensor, slots: list[int], positions: Tensor, eps: float = EPS) -> PagedKVCache:
    """Run the step on a fresh cache of 4 pages of 4 records whose bytes are 0xFF, and return the cache."""
    cache = PagedKVCache.allocate(LAYOUT, 4, 4)
    cache.tensor.fill_(0xFF)
    mapping = torch.tensor(slots, dtype=torch.int64)
    ReferenceBackend().qnorm_rope_kv_insert(q, kv, cache, mapping, positions, TABLE, eps)
    return cache


@DTYPES
def test_q_is_normalised_and_rotated_in_place_and_rounded_once(dtype: torch.dtype, tolerance: float) -> None:
    q, positions = random(6, 4, 32, dtype=dtype) * 3, torch.tensor([0, 1, 127, 128, 300, 511])
    original, where = q.double().numpy(), q.data_ptr()
    insert(q, random(6, 32), [-1] * 6, positions)

    assert q.data_ptr() == where
    for row, position, got in zip(original, positions.tolist(), q.double().numpy(), strict=True):
        expected = oracle.q_norm_rope(row, *angles(position), ROPE.dim, EPS)
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance / 8)
    if dtype is BF16:
        # one rounding: nearly every element is the bf16 next to the exact value
        exact = np.stack(
            [oracle.q_norm_rope(r, *angles(p), 8, EPS) for r, p in zip(original, positions.tolist(), strict=True)]
        )
        assert (oracle.round_bf16(exact) == q.double().numpy()).mean() > 0.99


def test_the_norm_has_no_weight_and_epsilon_counts() -> None:
    q = torch.full((1, 2, 32), 1e-3)
    insert(q, random(1, 32), [-1], torch.tensor([0]), eps=1e-6)
    zero = torch.zeros(1, 2, 32)
    insert(zero, random(1, 32), [-1], torch.tensor([0]))

    torch.testing.assert_close(q, torch.full((1, 2, 32), 0.5**0.5), rtol=1e-6, atol=0)
    assert not zero.any()
    for eps in (1e-6, 1e-2, 3.0):
        q = random(3, 2, 32)
        expected = [oracle.q_norm_rope(row, *angles(9), ROPE.dim, eps) for row in q.double().numpy()]
        insert(q, random(3, 32), [-1] * 3, torch.full((3,), 9), eps=eps)
        np.testing.assert_allclose(q.double().numpy(), np.stack(expected), rtol=2e-6, atol=2e-6)


def test_only_the_trailing_dims_are_rotated() -> None:
    q, still = random(2, 3, 32), random(2, 3, 32)
    insert(q, random(2, 32), [-1, -1], torch.tensor([40, 7]))
    insert(still, random(2, 32), [-1, -1], torch.tensor([0, 0]))

    assert torch.equal(q[..., :24], still[..., :24])
    assert not torch.equal(q[..., 24:], still[..., 24:])


@DTYPES
def test_a_rotated_copy_of_kv_is_inserted_and_kv_stays(dtype: torch.dtype, tolerance: float) -> None:
    kv, positions, slots = random(5, 32, dtype=dtype), torch.tensor([3, 4, 99, 100, 0]), [15, 2, -1, 7, 0]
    original = kv.clone()
    cache = insert(random(5, 4, 32), kv, slots, positions)

    assert torch.equal(kv, original)
    for row, position, slot in zip(kv.double().numpy(), positions.tolist(), slots, strict=True):
        if slot < 0:
            continue
        turned = oracle.apply_rope(row, *angles(position), ROPE.dim)
        page = cache.tensor[slot // 4].flatten().numpy()
        got = oracle.read_record(
            page, slot % 4, block_size=4, nope_dim=24, rope_dim=8, group_size=8, fnuz=False, scale_bytes=8, split=True
        )
        record = oracle.quantize_record(turned, nope_dim=24, rope_dim=8, group_size=8, fnuz=False, scale_bytes=8)
        expected = oracle.dequantize_record(record, nope_dim=24, rope_dim=8, group_size=8, fnuz=False, scale_bytes=8)
        np.testing.assert_array_equal(got[:24], expected[:24])  # what is not rotated is byte-exact
        np.testing.assert_allclose(got[24:], expected[24:], rtol=2**-7, atol=2**-7)
    untouched = [slot for slot in range(16) if slot not in slots]
    assert bool((cache.region("nope").flatten(0, 1)[untouched] == 0xFF).all())
    assert bool((cache.region("scale").flatten(0, 1)[untouched] == 0xFF).all())


def test_rows_past_the_slot_mapping_have_their_q_processed_and_nothing_inserted() -> None:
    q, kv, positions = random(5, 4, 32), random(5, 32), torch.tensor([5, 6, 7, 8, 9])
    whole = q.clone()
    cache = insert(q, kv, [3, 9], positions)
    insert(whole, kv, [3, 9, 0, 1, 2], positions)

    assert torch.equal(q, whole)
    written = (cache.region("scale").flatten(0, 1) != 0xFF).any(1)
    assert written.nonzero().flatten().tolist() == [3, 9]


def test_slots_that_do_not_exist_are_skipped() -> None:
    cache = insert(random(3, 4, 32), random(3, 32), [-7, 16, 2**40], torch.tensor([0, 1, 2]))

    assert bool((cache.tensor == 0xFF).all())


def test_no_token_is_a_no_op() -> None:
    cache = insert(random(0, 4, 32), random(0, 32), [], torch.empty(0, dtype=torch.int64))

    assert bool((cache.tensor == 0xFF).all())
    out = ReferenceBackend().inv_rope_o_proj(
        random(0, 4, 32), torch.empty(0, dtype=torch.int64), TABLE, random(6, 64), num_groups=2
    )
    assert out.shape == (0, 2, 3)


def test_q_and_kv_of_any_stride_are_read_and_written_in_their_own_memory() -> None:
    wide, fused = random(6, 8, 64), random(6, 48)
    q, kv = wide[1:4, ::2, 16:48], fused[1:4, 8:40]
    plain, original = q.clone(), wide.clone()
    positions = torch.tensor([10, 11, 12])
    strided = insert(q, kv, [0, 1, 2], positions)
    packed = insert(plain, kv.clone(), [0, 1, 2], positions)

    assert not q.is_contiguous()
    assert torch.equal(q, plain)
    assert torch.equal(strided.tensor, packed.tensor)
    wide[1:4, ::2, 16:48] = original[1:4, ::2, 16:48]
    assert torch.equal(wide, original)


def test_positions_are_int64_and_may_repeat() -> None:
    positions = torch.tensor([511, 3, 3], dtype=torch.int64)
    q = random(1, 4, 32).expand(3, 4, 32).clone()
    insert(q, random(3, 32), [-1] * 3, positions)

    assert torch.equal(q[1], q[2])
    assert not torch.equal(q[0], q[1])


def test_many_rows_are_cut_into_tiles_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = random(50, 4, 32), random(50, 32), list(range(16)) + [-1] * 34, torch.arange(50)
    whole_q, tiled_q = arguments[0].clone(), arguments[0].clone()
    whole = insert(whole_q, *arguments[1:])
    monkeypatch.setattr(kernels, "TILE_BYTES", 3 * 16 * 4 * 32)
    tiled = insert(tiled_q, *arguments[1:])

    assert torch.equal(whole_q, tiled_q)
    assert torch.equal(whole.tensor, tiled.tensor)


@pytest.mark.parametrize(
    ("n", "row_bytes", "sizes"), [(0, 9, []), (5, 0, [5]), (5, 10**12, [1] * 5), (7, 2**25, [2, 2, 2, 1])]
)
def test_tiles_cover_every_row_once(n: int, row_bytes: int, sizes: list[int]) -> None:
    parts = list(kernels.tiles(n, row_bytes))

    assert [part.stop - part.start for part in parts] == sizes
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))


@DTYPES
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_output_projection_turns_back_and_projects_each_group_by_its_own_matrix(
    dtype: torch.dtype, tolerance: float, groups: int
) -> None:
    o, positions = random(5, 4, 32, dtype=dtype), torch.tensor([0, 1, 200, 511, 4])
    wo_a = random(groups * 3, 4 // groups * 32, dtype=dtype, seed=1)
    original = o.clone()
    out = ReferenceBackend().inv_rope_o_proj(o, positions, TABLE, wo_a, num_groups=groups)

    assert out.shape == (5, groups, 3)
    assert out.dtype == dtype
    assert torch.equal(o, original)
    weights = wo_a.double().numpy().reshape(groups, 3, -1)
    for row, position, got in zip(o.double().numpy(), positions.tolist(), out.double().numpy(), strict=True):
        expected = oracle.inverse_rope_project(row, *angles(position), ROPE.dim, weights, None)
        # sums of 4 / groups * 32 products of size 1
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * 16)


def test_the_output_projection_undoes_the_rotation_of_the_keys() -> None:
    keys, position = random(1, 1, 32), torch.tensor([77])
    turned = kernels.rotated(keys, position, TABLE)
    out = ReferenceBackend().inv_rope_o_proj(turned, position, TABLE, torch.eye(32), num_groups=1)

    torch.testing.assert_close(out, keys, rtol=0, atol=1e-6)


def test_the_output_projection_takes_outputs_of_any_stride() -> None:
    wide, positions, wo_a = random(3, 8, 64), torch.tensor([1, 2, 3]), random(6, 64, seed=1)
    view = wide[:, ::2, 16:48]
    backend = ReferenceBackend()

    strided = backend.inv_rope_o_proj(view, positions, TABLE, wo_a, num_groups=2)
    assert torch.equal(strided, backend.inv_rope_o_proj(view.clone(), positions, TABLE, wo_a, num_groups=2))
