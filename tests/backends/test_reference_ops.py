"""How the reference rounds, and cuts into tiles. That its ops are right is what the conformance kit shows."""

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

ROPE = Rope(8, 160000.0, Yarn(16.0, 256))
TABLE = cos_sin_cache(ROPE, 512)
LAYOUT = KVCacheLayout.fp8_ds_mla(24, 8, group_size=8)
EPS = 1e-6


def random(*shape: int) -> Tensor:
    """Return normal numbers that are the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def insert(q: Tensor, kv: Tensor, slots: list[int], positions: Tensor) -> PagedKVCache:
    """Run the step on a fresh cache of 4 pages of 4 records whose bytes are 0xFF, and return the cache."""
    cache = PagedKVCache.allocate(LAYOUT, 4, 4)
    cache.tensor.fill_(0xFF)
    mapping = torch.tensor(slots, dtype=torch.int64)
    ReferenceBackend().qnorm_rope_kv_insert(q, kv, cache, mapping, positions, TABLE, EPS)
    return cache


def test_q_is_rounded_once() -> None:
    """Nearly every element is the bf16 next to the exact value. The kit lets a backend round twice."""
    q, positions = (random(6, 4, 32) * 3).bfloat16(), torch.tensor([0, 1, 127, 128, 300, 511])
    inv = oracle.rope_inv_freq(ROPE.dim, ROPE.theta, oracle.Yarn(16.0, 256))
    exact = [
        oracle.q_norm_rope(row, *oracle.rope_cos_sin(position, inv), ROPE.dim, EPS)
        for row, position in zip(q.double().numpy(), positions.tolist(), strict=True)
    ]

    insert(q, random(6, 32), [-1] * 6, positions)

    assert (oracle.round_bf16(np.stack(exact)) == q.double().numpy()).mean() > 0.99


def test_no_token_has_no_projection() -> None:
    o, positions, wo_a = random(0, 4, 32), torch.empty(0, dtype=torch.int64), random(6, 64)

    assert ReferenceBackend().inv_rope_o_proj(o, positions, TABLE, wo_a, num_groups=2).shape == (0, 2, 3)


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
