"""Ragged lists under the field's names: what plain Python says, and errors before anything is copied."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.compat.vllm_rocm_ragged import (
    build_ragged_indices_from_dense,
    combine_topk_swa_indices_ragged,
    compute_global_topk_ragged_indices_and_indptr,
    copy_ragged_to_graph_buffers,
)
from dsv4attn.core import tensorspec
from dsv4attn.errors import ArgumentError
from tests.backends._triton.cache.caches import DEVICE

INT = torch.int32
ODD = [-1, -1, -7, 2**31 - 1, 0x7FC00000, -(2**31)]


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT, device=DEVICE)


def rows_of(flat: Tensor, indptr: Tensor) -> list[list[int]]:
    bounds, values = indptr.tolist(), flat.tolist()
    assert bounds[0] == 0
    assert bounds[-1] <= len(values)
    return [values[a:b] for a, b in pairwise(bounds)]


@pytest.mark.parametrize("seed", range(8))
def test_dense_rows_keep_their_places(seed: int) -> None:
    rng = Random(seed)
    rows, width, most = rng.randint(0, 5), rng.randint(0, 6), rng.choice([-1, 0, 9])
    dense = [[rng.choice([*ODD, *range(12)]) for _ in range(width)] for _ in range(rows)]
    lens = [rng.randint(-2, width + 2) for _ in range(rows)]
    bound = 2**31 if most < 0 else most
    expected = [[v if 0 <= v < bound else -1 for v in row[: max(n, 0)]] for row, n in zip(dense, lens, strict=True)]
    flat, indptr = build_ragged_indices_from_dense(ints(dense).view(rows, width), ints(lens), most)

    assert flat.shape == (rows * width,)
    assert rows_of(flat, indptr) == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("deep", [False, True])
def test_entries_become_slots_of_their_own_request(seed: int, *, deep: bool) -> None:
    rng = Random(seed)
    rows, width, requests, columns, size = rng.randint(0, 5), rng.randint(1, 6), 3, 2, 3
    table = [[rng.choice([-1, *range(9)]) for _ in range(columns)] for _ in range(requests)]
    entries = [[rng.choice([*ODD, *range(columns * size + 2)]) for _ in range(width)] for _ in range(rows)]
    entries = [[v for i, v in enumerate(row) if v not in row[:i]] + [-1] * (width - len({*row})) for row in entries]
    for row in entries:
        rng.shuffle(row)
    of, valid = [rng.choice([0, 1, 2, 2, 5]) for _ in range(rows)], [rng.random() < 0.8 for _ in range(rows)]
    seen = [rng.randint(0, 7) for _ in range(rows)] if rng.random() < 0.5 else None
    expected = []
    for t, row in enumerate(entries):
        counted = sum(0 <= v < columns * size for v in row)
        places = (counted if seen is None else min(width, seen[t], columns * size)) if valid[t] else 0
        limit = columns * size if seen is None else seen[t]
        known = [v for v in row if 0 <= v < min(limit, columns * size)] if of[t] < requests else []
        slots = [table[of[t]][v // size] * size + v % size for v in known if table[of[t]][v // size] >= 0]
        expected.append([*slots, *[-1] * places][:places])
    topk = ints(entries).view(rows, 1, width) if deep else ints(entries).view(rows, width)
    flat, indptr, lens = compute_global_topk_ragged_indices_and_indptr(
        topk, ints([*of, 0]), ints(table), size, torch.tensor([*valid, True], device=DEVICE),
        None if seen is None else ints(seen),
    )  # fmt: skip

    assert flat.shape == (rows * width,)
    assert rows_of(flat, indptr) == expected
    assert lens.tolist() == [len(row) for row in expected]


@pytest.mark.parametrize("seed", range(8))
def test_entries_and_windows_become_rows_of_the_gathered_keys(seed: int) -> None:
    rng = Random(seed)
    window, ratio, topk = rng.choice([1, 3, 8]), rng.choice([1, 4]), rng.choice([0, 3, 5])
    counts = [rng.choice([0, 1, 2, 4]) for _ in range(rng.randint(1, 3))]
    lens = [n + rng.randint(0, 20) for n in counts]
    gathered = [min(total, n + window - 1) for n, total in zip(counts, lens, strict=True)]
    m, n, base = 60, 30, rng.choice([0, 7])
    entries = [rng.sample([*range(12), -1, -7, 100], max(topk, 1)) for _ in range(sum(counts))]
    starts = [base + sum(counts[:i]) for i in range(len(counts) + 1)]
    expected: list[list[int]] = []
    for request, count in enumerate(counts):
        for j in range(count):
            position = lens[request] - count + j
            row, first = entries[len(expected)], max(position - window + 1, 0)
            picked = [m * request + v for v in row if 0 <= v < (position + 1) // ratio] if topk else []
            start = m * request + n - (lens[request] - gathered[request])
            expected.append([*picked, *(start + p for p in range(first, position + 1))])
    flat, indptr, actual_lens = combine_topk_swa_indices_ragged(
        ints(entries).view(-1, max(topk, 1)), ints(starts), ints(lens), ints(gathered), window, ratio, topk, m, n
    )

    assert flat.shape == (sum(counts) * (topk + window),)
    assert rows_of(flat, indptr) == expected
    assert actual_lens.tolist() == [len(row) for row in expected]


def test_views_for_a_graph_follow_from_the_number_of_rows_alone() -> None:
    flat, indptr = torch.full((40,), 77, dtype=INT, device=DEVICE), torch.full((9,), 77, dtype=INT, device=DEVICE)
    seen = set()
    for source, ends in (
        ([], [0, 0, 0]),
        ([5], [0, 1, 1]),
        ([5, 6, 7, 8, 9], [0, 2, 5]),
        (list(range(16)), [0, 8, 16]),
    ):
        out, rows = copy_ragged_to_graph_buffers(ints(source), ints(ends), flat, indptr, 2, 8)
        seen.add((out.data_ptr(), out.shape, rows.data_ptr(), rows.shape))
        assert out[: len(source)].tolist() == source
        assert rows.tolist() == ends

    assert seen == {(flat.data_ptr(), (16,), indptr.data_ptr(), (3,))}
    assert flat[16:].tolist() == [77] * 24
    assert indptr[3:].tolist() == [77] * 6
    assert copy_ragged_to_graph_buffers(ints([]), ints([0]), flat, indptr, 0, 8)[0].shape == (1,)


LIST, ENDS, BUFFER = ints([1, 2, 3]), ints([0, 1, 3]), torch.zeros(16, dtype=INT, device=DEVICE)
BAD: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "indptr that begins late": ((LIST, ints([1, 1, 3]), BUFFER, BUFFER, 2, 8), "ragged_indptr[0]"),
    "indptr that goes back": ((LIST, ints([0, 3, 2]), BUFFER, BUFFER, 2, 8), "ragged_indptr[2]"),
    "indptr past the list": ((LIST, ints([0, 3, 4]), BUFFER, BUFFER, 2, 8), "ragged_indptr[2]"),
    "indptr of other rows": ((LIST, ENDS, BUFFER, BUFFER, 3, 4), "ragged_indptr"),
    "indptr in int64": ((LIST, ENDS.long(), BUFFER, BUFFER, 2, 8), "ragged_indptr"),
    "too few places": ((LIST, ENDS, BUFFER[:15], BUFFER, 2, 8), "indices_buffer"),
    "a list longer than the buffer": ((BUFFER, ENDS, BUFFER[:15], BUFFER, 2, 4), "indices_buffer"),
    "too few ends": ((LIST, ENDS, BUFFER, BUFFER[:2], 2, 8), "indptr_buffer"),
    "a negative number of rows": ((LIST, ENDS, BUFFER, BUFFER, -1, 8), "num_rows"),
    "a negative number of entries": ((LIST, ENDS, BUFFER, BUFFER, 2, -8), "max_entries_per_row"),
    "a buffer elsewhere": ((LIST, ENDS, BUFFER, BUFFER.to("meta"), 2, 8), "indptr_buffer"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_bad_lists_are_not_copied(case: tuple[tuple[Any, ...], str]) -> None:
    arguments, name = case
    if DEVICE.type != "cpu" and "[" in name:
        pytest.skip("what indptr holds is not read from a device")
    with pytest.raises(ArgumentError) as raised:
        copy_ragged_to_graph_buffers(*arguments)

    assert raised.value.argument == name
    assert not BUFFER.any()


TOPK, OF, TABLE, VALID = ints([[0, 1]]), ints([0]), ints([[3]]), torch.ones(1, dtype=torch.bool, device=DEVICE)
WRONG: Mapping[str, tuple[Any, tuple[Any, ...], str]] = {
    "lengths of other rows": (build_ragged_indices_from_dense, (TOPK, ints([1, 2])), "lengths"),
    "indices in int64": (build_ragged_indices_from_dense, (TOPK.long(), OF), "indices"),
    "requests of fewer tokens": (
        compute_global_topk_ragged_indices_and_indptr,
        (TOPK, OF[:0], TABLE, 4, VALID),
        "token_to_req",
    ),
    "validity in int32": (compute_global_topk_ragged_indices_and_indptr, (TOPK, OF, TABLE, 4, OF), "is_valid"),
    "blocks of no size": (compute_global_topk_ragged_indices_and_indptr, (TOPK, OF, TABLE, 0, VALID), "block_size"),
    "a table elsewhere": (
        compute_global_topk_ragged_indices_and_indptr,
        (TOPK, OF, TABLE.to("meta"), 4, VALID),
        "block_table",
    ),
    "more entries than columns": (combine_topk_swa_indices_ragged, (TOPK, ints([0, 1]), OF, OF, 8, 4, 3, 9, 9), "topk"),
    "starts of other requests": (combine_topk_swa_indices_ragged, (TOPK, OF, OF, OF, 8, 4, 2, 9, 9), "query_start_loc"),
    "no ratio": (combine_topk_swa_indices_ragged, (TOPK, ints([0, 1]), OF, OF, 8, 0, 2, 9, 9), "compress_ratio"),
    "no window": (combine_topk_swa_indices_ragged, (TOPK, ints([0, 1]), OF, OF, 0, 4, 2, 9, 9), "window_size"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_a_bad_argument_is_named(case: tuple[Any, tuple[Any, ...], str]) -> None:
    step, arguments, name = case
    with pytest.raises(ArgumentError) as raised:
        step(*arguments)

    assert raised.value.argument == name


def test_checks_of_shapes_have_one_form_whatever_the_tokens() -> None:
    """The table of `check_tensor` holds the shapes that are written in the code."""
    tensorspec._dims.cache_clear()
    for rows in range(1, 50):
        indptr, buffer = torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(600, dtype=torch.int32)
        copy_ragged_to_graph_buffers(buffer[:1].clone(), indptr, buffer, buffer.clone(), rows, 2)

    assert tensorspec._dims.cache_info().currsize < 5
