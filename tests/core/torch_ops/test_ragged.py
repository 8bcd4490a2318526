"""Ragged lists against plain Python: where each row begins, and what stands in it."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4attn.core.torch_ops import index_ops as indices
from tests.core.attention.strategies import searched

INT = torch.int32
LENGTHS = st.one_of(st.integers(-2, 8), st.sampled_from([2**31 - 1, -(2**31)]))


def rows_of(flat: Tensor, indptr: Tensor) -> list[list[int]]:
    """Ragged rows, as lists."""
    bounds = indptr.tolist()
    assert bounds[0] == 0
    return [flat[a:b].tolist() for a, b in pairwise(bounds)]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=INT)


@searched(150, data=st.data())
def test_packing_keeps_the_leading_columns_in_their_places(data: st.DataObject) -> None:
    draw = data.draw
    rows, width, slots = draw(st.integers(0, 5)), draw(st.integers(0, 6)), draw(st.sampled_from([0, 1, 5, 9, 2**31]))
    numbers = st.one_of(st.integers(-2, 10), st.sampled_from([2**31 - 1, 0x7FC00000, -(2**31)]))
    dense = [[draw(numbers) for _ in range(width)] for _ in range(rows)]
    lens = [draw(LENGTHS) for _ in range(rows)]
    expected = [[v if 0 <= v < slots else -1 for v in row[: max(n, 0)]] for row, n in zip(dense, lens, strict=True)]
    flat, indptr = torch.full((rows * width + 2,), 99, dtype=INT), torch.full((rows + 1,), 99, dtype=INT)

    table = torch.tensor(dense, dtype=INT).view(rows, width)
    indices.build_ragged_indices_from_dense(table, int32(lens), slots, out=(flat, indptr))

    assert rows_of(flat, indptr) == expected
    assert flat[rows * width :].tolist() == [99, 99], "nothing is written past the last place there is"


@searched(150, data=st.data())
def test_ragged_translation_equals_the_formula(data: st.DataObject) -> None:
    """As many places as entries are visible, or as are given, at most K: visible ones that exist, then -1."""
    draw = data.draw
    rows, width, size = draw(st.integers(0, 5)), draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 8]))
    blocks = st.one_of(st.integers(0, 13), st.sampled_from([-1, 2**31 - 1, 2**30]))
    table = [[draw(blocks) for _ in range(4)] for _ in range(3)]
    request = [draw(st.sampled_from([0, 1, 2, -1, 3, 2**31 - 1])) for _ in range(rows)]
    visible = [draw(LENGTHS) for _ in range(rows)]
    row_lens = [draw(LENGTHS) for _ in range(rows)] if draw(st.booleans()) else None
    absent = st.sampled_from([-1, -7, 2**31 - 1, 0x7FC00000, 40])
    topk = [[draw(st.one_of(st.integers(0, 9), absent)) for _ in range(width)] for _ in range(rows)]
    expected = []
    for r, seen, long, chosen in zip(request, visible, row_lens or visible, topk, strict=True):
        visible_entries = [
            e for e in chosen if 0 <= e < seen and 0 <= r < 3 and e // size < 4 and table[r][e // size] >= 0
        ]
        slots = [table[r][e // size] * size + e % size for e in visible_entries]
        slots, places = [s for s in slots if s < 2**31], min(max(long, 0), width)
        expected.append((slots + [-1] * width)[:places])
    wide = torch.full((rows, width + 3), 1, dtype=INT)  # any row stride
    wide[:, :width] = torch.tensor(topk, dtype=INT).view(rows, width)
    flat, indptr = torch.full((rows * width + 2,), 99, dtype=INT), torch.full((rows + 1,), 99, dtype=INT)

    indices.compute_global_topk_ragged_indices_and_indptr(
        wide[:, :width],
        int32(visible),
        int32(request),
        torch.tensor(table, dtype=INT),
        size,
        out=(flat, indptr),
        row_lens=None if row_lens is None else int32(row_lens),
    )

    assert rows_of(flat, indptr) == expected
    assert flat[rows * width :].tolist() == [99, 99]
