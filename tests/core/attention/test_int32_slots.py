"""Caches of 2^31 - 64, 2^31 and 2^31 + 64 slots, the limit of int32 slots. A sparse file is their memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.kernels import listed
from dsv4attn.compat import vllm_rocm_ragged
from dsv4attn.compat.direct import largest_logits
from dsv4attn.core.cache.layout import KVCacheLayout, PagedKVCache
from dsv4attn.core.contract.backend import AttentionCall, DenseIndices, GatheredKeys, PagedKeys, RaggedIndices
from dsv4attn.core.metadata.batch_checks import outside
from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, Rope
from dsv4attn.core.torch_ops import index_ops
from dsv4attn.selection import load_backend
from tests.backends.built_in import EVERYWHERE

DIM, PAGE, LAST = 3, 64, 2**31 - 1
LAYER = LayerGeometry(LayerKind.SWA, 1, 1, DIM, Rope(2, 1e4), 4, 0)
ROWS = [[1, 2, 3, -1], [LAST, 2, 1, LAST], [-1, LAST - 64, 0, 3]]
LENS = [3, 3, 4]


def expected(rows: dict[int, list[float]], slots: int) -> list[list[float]]:
    """Outputs for q of ones and softmax scale DIM ** -0.5, in float64."""
    outs = []
    for row, count in zip(ROWS, LENS, strict=True):
        keys = np.array([rows.get(slot, [0.0] * DIM) for slot in row[:count] if 0 <= slot < slots])
        weights = np.exp(keys.sum(1) * DIM**-0.5)
        outs.append((weights[:, None] * keys).sum(0) / weights.sum())
    return [out.tolist() for out in outs]


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("slots", [2**31 - PAGE, 2**31, 2**31 + PAGE])
def test_keys_of_the_last_slots_that_an_int32_can_name_are_attended(tmp_path: Path, slots: int, backend: str) -> None:
    path = tmp_path / "cache"
    with path.open("wb") as file:
        file.truncate(2 * slots * DIM)
    memory = torch.from_file(str(path), shared=True, size=slots * DIM, dtype=torch.bfloat16).view(slots, DIM)
    rows = {slot: [0.25 * (i + 1), -0.5, 0.125 * i] for i, slot in enumerate([1, 2, 3, LAST - 64, LAST, 0])}
    for slot, values in rows.items():
        if slot < slots:
            memory[slot] = torch.tensor(values)
    cache = PagedKVCache(memory.view(slots // PAGE, PAGE, DIM), KVCacheLayout.rows(1, 2))
    for form in ("dense", "ragged") if backend == "reference" else ("dense",):
        loaded = load_backend(backend, **({"decode_indices": form} if backend == "reference" else {}))
        table, lens = torch.tensor(ROWS, dtype=torch.int32), torch.tensor(LENS, dtype=torch.int32)
        keys: DenseIndices | RaggedIndices = DenseIndices(table, lens)
        if form == "ragged":
            packed = torch.empty(12, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
            index_ops.build_ragged_indices_from_dense(table, lens, cache.capacity, out=packed)
            keys = RaggedIndices(*packed, 4)
        out = torch.empty(3, 1, DIM, dtype=torch.float32)
        q = torch.ones(3, 1, DIM)
        scratch = [torch.empty(shape, dtype=dtype) for shape, dtype in loaded.scratch("decode", LAYER, 3, 4)]  # type: ignore[arg-type]
        loaded.decode(AttentionCall(LAYER, q, [PagedKeys(cache, keys)], None, out, None, scratch))
        torch.testing.assert_close(out[:, 0], torch.tensor(expected(rows, slots)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("count", [2**31, 2**31 + 1])
def test_gathered_rows_may_be_as_many(count: int, backend: str) -> None:
    kv = torch.tensor([[1.0, 2.0, 3.0]]).expand(count, DIM)
    rows = DenseIndices(torch.tensor([[LAST, 5, -1]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32))
    out, loaded = torch.empty(1, 1, DIM), load_backend(backend)
    scratch = [torch.empty(shape, dtype=dtype) for shape, dtype in loaded.scratch("prefill", LAYER, 1, 3)]  # type: ignore[arg-type]
    loaded.prefill(AttentionCall(LAYER, torch.ones(1, 1, DIM), GatheredKeys(kv, rows), None, out, None, scratch))

    torch.testing.assert_close(out[0, 0], kv[0])
    assert largest_logits(torch.ones(1, 1, DIM), kv, rows, 0.5).item() == 3.0


def values(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("capacity", [1, 4, LAST - 1, LAST, 2**31, 2**31 + 1, 2**32, 2**32 + 2, 2**40])
def test_an_int32_is_compared_with_all_of_a_capacity(capacity: int) -> None:
    slots = values(-1, 0, 3, 4, LAST - 1, LAST, -(2**31))
    exists = [0 <= slot < capacity for slot in slots.tolist()]
    rows = DenseIndices(slots[None], values(7))

    assert listed(rows, slice(0, 1), capacity)[1].tolist() == [exists]
    assert outside(slots, capacity).tolist() == [not flag for flag in exists]
    expected = [slot if flag else -1 for slot, flag in zip(slots.tolist(), exists, strict=True)]
    for ops in (index_ops, load_backend("rocm").index_ops):
        flat, indptr = torch.empty(7, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        ops.build_ragged_indices_from_dense(slots[None], values(7), capacity, out=(flat, indptr))
        assert flat.tolist() == expected


def test_a_list_of_any_slots_keeps_the_last_one() -> None:
    flat, indptr = vllm_rocm_ragged.build_ragged_indices_from_dense(values(LAST, -1, 5)[None], values(3))

    assert flat.tolist() == [LAST, -1, 5]
    assert indptr.tolist() == [0, 3]
