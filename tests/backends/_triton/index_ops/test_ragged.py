"""Ragged lists in Triton: where rows begin, what stands in them, and that no row leaves its own places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from dsv4attn.backends._triton.index_ops import kernels_ragged, ragged
from dsv4attn.backends._triton.index_ops.common import CONSTANTS
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.core.torch_ops import index_ops as definition
from tests.backends._triton.index_ops.index_trials import DEVICE, INT, Trial, planted, small_rounds, to_device
from tests.backends._triton.index_ops.ragged_trials import pack, translate_ragged

RAGGED = [pack, translate_ragged]
ragged_ops = pytest.mark.parametrize("make", RAGGED)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel cannot be changed from outside")


@pytest.mark.in_turn
@pytest.mark.parametrize("few", [0, -1])
@ragged_ops
def test_rows_begin_where_all_rows_before_them_end(
    make: Callable[[Random], Trial], few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough rows their lengths are added up in three rounds, as on a device: by each program, or by one.

    few: rows up to which each program does, less than there are or not.
    """
    block = 64 if INTERPRETED else CONSTANTS["BLOCK"]
    rows, width, g = 2 * block + 52, 3, torch.Generator().manual_seed(0)
    monkeypatch.setattr(ragged, "CONSTANTS", Constants({"BLOCK": block}))
    monkeypatch.setattr(ragged, "FEW", rows + few)
    lens = torch.randint(-1, width + 2, (rows,), generator=g, dtype=INT)
    chosen = torch.randint(-1, 6, (rows, width), generator=g, dtype=INT)
    table = torch.tensor([[5, 0, -1, 3], [1, 2, 7, 4]], dtype=INT)
    outs = ((rows * width,), INT), ((rows + 1,), INT)
    request = torch.randint(0, 2, (rows,), generator=g, dtype=INT)
    args = (chosen, lens, 5) if make is pack else (chosen, lens, request, table, 2)

    assert Trial(make(Random(0)).op, args, outs).agrees(ragged)


@pytest.mark.parametrize("rows", [1, 4096, 4097, 65536])
def test_a_scan_over_many_rows_says_where_each_begins(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "FEW", 0)
    lens = torch.randint(-5, 8200, (rows,), generator=torch.Generator().manual_seed(rows), dtype=INT)
    indptr = to_device(torch.full((rows + 2,), 77, dtype=INT))
    ragged._scan(indptr, to_device(lens), rows, 8192)()

    assert indptr.tolist() == [0, *lens.clamp(0, 8192).cumsum(0).tolist(), 77]


@ragged_ops
def test_every_row_keeps_to_its_own_places(make: Callable[[Random], Trial]) -> None:
    """Rows are cut off one by one: what the last one wrote too far is seen, as no row comes after it."""
    with small_rounds(ragged):
        for seed in range(12):
            whole = make(Random(seed))
            rows, width = whole.args[0].shape
            per_row = 2 if make is pack else 3
            for n in range(rows):
                args = *(arg[:n] for arg in whole.args[:per_row]), *whole.args[per_row:]
                assert Trial(whole.op, args, (((n * width + 2,), INT), ((n + 1,), INT))).agrees(ragged)


@pytest.mark.device
@pytest.mark.skipif(INTERPRETED, reason="needs a device that Triton drives")
@ragged_ops
def test_a_captured_op_follows_lengths_edited_in_place(make: Callable[[Random], Trial]) -> None:
    rows, width, g = 200, 21, torch.Generator().manual_seed(0)
    chosen = torch.randint(-1, 40, (rows, width), generator=g, dtype=INT)
    table, request = torch.randperm(40, generator=g).to(INT).view(2, 20), torch.arange(rows, dtype=INT) % 2
    lens = to_device(torch.zeros(rows, dtype=INT))
    args = [to_device(chosen), lens, *((37,) if make is pack else (to_device(request), to_device(table), 2))]
    name = make(Random(0)).op
    op: Callable[..., None] = getattr(ragged, name)
    flat, indptr = torch.zeros(rows * width, dtype=INT, device=DEVICE), torch.zeros(rows + 1, dtype=INT, device=DEVICE)
    op(*args, out=(flat, indptr))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*args, out=(flat, indptr))
    for most in (0, 1, width, width + 5, 2**31 - 1):
        lens.copy_(torch.randint(-1, most + 1, (rows,), generator=g))
        lens[most % rows :] = 0  # fewer rows than were captured
        graph.replay()
        expected = torch.zeros(rows * width, dtype=INT), torch.zeros(rows + 1, dtype=INT)
        getattr(definition, name)(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args), out=expected)
        end = int(expected[1][-1])

        assert torch.equal(indptr.cpu(), expected[1])
        assert torch.equal(flat[:end].cpu(), expected[0][:end])


# bugs that must be found

IN_RAGGED: dict[str, tuple[Callable[[Random], Trial], str, str]] = {
    "lengths before this round forgotten": (pack, "before += length_of(", "before = length_of("),
    "its own length among those before": (pack, "other < row, stride", "other <= row, stride"),
    "rows a place too late": (pack, "return begin.to(tl.int64), length", "return begin.to(tl.int64) + 1, length"),
    "ends without the last row": (pack, "row + 1, begin + length,", "row + 1, begin,"),
    "negative lengths believed": (pack, "tl.maximum(length, 0), width)", "length, width)"),
    "negative slots kept": (pack, "tl.maximum(entry, -1)", "entry"),
    "slots past the cache kept": (pack, "tl.where(entry < num_slots,", "tl.where(entry <= num_slots,"),
    "one round of columns": (pack, "for start in range(0, length, BLOCK):", "for start in range(0, 1):"),
    "repeated ones in the neighbour's row": (translate_ragged, "mask=(keep > 0) & (to < length)", "mask=keep > 0"),
    "every round begins anew": (translate_ragged, "taken += tl.sum(keep, 0)", "taken = tl.sum(keep, 0)"),
    "absent ones keep their places": (translate_ragged, "to = taken + tl.cumsum(keep, 0) - 1", "to = column"),
    "a scan without what it carries": (pack, "total += tl.sum(length, 0)", "total = tl.sum(length, 0)"),
    "a scan of the last row alone": (pack, "total + tl.cumsum(length, 0)", "total + length"),
    "one place too far": (translate_ragged, "tl.cumsum(keep, 0) - 1", "tl.cumsum(keep, 0)"),
    "only leading columns looked at": (translate_ragged, "tl.where(visible_len > 0, width, 0), B", "length, B"),
    "one more visible": (translate_ragged, "(entry < visible_len)", "(entry <= visible_len)"),
    "nothing behind the last": (translate_ragged, "tl.minimum(taken, length), length", "length, length"),
    "-1 from the second place on": (translate_ragged, "tl.minimum(taken, length), length", "taken + 1, length"),
}


@pytest.mark.mutation
@interpreted
@pytest.mark.parametrize("name", IN_RAGGED)
def test_a_bug_in_the_text_of_the_ragged_ops_is_found(name: str, tmp_path: Path) -> None:
    make, right, wrong = IN_RAGGED[name]
    changed = planted(ragged, kernels_ragged, tmp_path, right, wrong)
    with small_rounds(changed):
        assert not all(make(Random(seed)).agrees(changed) for seed in range(150))


@interpreted
@ragged_ops
def test_a_copy_without_a_bug_is_right(make: Callable[[Random], Trial], tmp_path: Path) -> None:
    copy = planted(ragged, kernels_ragged, tmp_path, "", "")
    with small_rounds(copy):
        assert all(make(Random(seed)).agrees(copy) for seed in range(60))


def test_the_inputs_of_ragged_ops_hold_what_they_should() -> None:
    """Lengths of every kind, rows of several rounds, too many visible ones, and hidden ones."""
    packs, others = ([make(Random(seed)) for seed in range(200)] for make in RAGGED)
    lens = torch.cat([trial.args[1] for trial in packs]).tolist()
    cut_rows, hidden_rows = 0, 0
    for trial in others:
        topk, seen, *_ = trial.args
        shown = (topk >= 0) & (topk < seen[:, None])
        cut_rows += int((shown.sum(1) > seen.clamp(0, topk.shape[1])).sum())
        # the first of a row stands where a reader of its leading columns never comes
        first = torch.cat([shown, torch.ones_like(seen, dtype=torch.bool)[:, None]], 1).int().argmax(1)
        hidden_rows += int((shown.any(1) & (first >= seen)).sum())

    assert {-1, -(2**31), 0, 2**31 - 1} <= {*lens}
    assert {trial.args[2] for trial in packs} == {0, 3, 9, 2**31}
    assert {trial.args[0].shape[0] for trial in (*packs, *others)} == {0, 1, 4, 9, 12, 20}
    assert cut_rows > 20
    assert hidden_rows > 20
