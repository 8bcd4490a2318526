"""Long windows, which several programs pool: entries have the bits of those that one program makes."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.launching.runtime import observed
from dsv4attn.backends._triton.layer.compressor import launch as compress
from dsv4attn.core.cache.layout import KVCacheLayout
from tests.backends._triton.cache.caches import DEVICE, LAYOUTS, memory
from tests.backends._triton.layer.test_compress import INDEX_LAYOUTS, Entries, values_of

ROWS, RECORDS = LAYOUTS[11], LAYOUTS[3]
ALONE = 10**6
each_layout = pytest.mark.parametrize(
    "layout", [ROWS, RECORDS, KVCacheLayout.fp8_ds_mla(448, 64), INDEX_LAYOUTS[2], INDEX_LAYOUTS[3]], ids=str
)


@pytest.fixture(autouse=True)
def fresh_constants() -> None:
    """Constants are made once for a ratio; these tests change what they follow from."""
    compress._compress_constants.cache_clear()


def alone(step: Entries, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Bytes that one program per entry writes."""
    with monkeypatch.context() as patch, observed() as seen:
        patch.setattr(compress, "MOST_ALONE", ALONE)
        compress._compress_constants.cache_clear()
        actual = memory(step.run())
    compress._compress_constants.cache_clear()
    assert [variant.name for variant in seen] == ["compress_kernel"]
    return actual


def together(step: Entries) -> Tensor:
    """Bytes that two launches write."""
    with observed() as seen:
        actual = memory(step.run())
    assert [variant.name for variant in seen] == ["pool_kernel", "compress_kernel"]
    return actual


@each_layout
@pytest.mark.parametrize(
    ("ratio", "overlap"),
    [
        (128, False),
        pytest.param(33, False, marks=pytest.mark.matrix),
        (17, True),
        pytest.param(70, True, marks=pytest.mark.matrix),
    ],
)
def test_bits_are_those_of_one_program(
    layout: KVCacheLayout, ratio: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are in step with 16 bytes here: out of step, one program adds the rows in another order."""
    step = Entries(layout, ratio, overlap, 2, requests=3)

    assert (step.slots >= 0).any()
    assert torch.equal(together(step), alone(step, monkeypatch))


@pytest.mark.parametrize("ratio", [32, 16])
def test_windows_that_one_program_reads_at_once_are_not_split(ratio: int) -> None:
    with observed() as seen:
        Entries(ROWS, ratio, ratio == 16, requests=1).check()

    assert [variant.name for variant in seen] == ["compress_kernel"]


def test_bits_depend_on_no_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Entries(RECORDS, 40, False, 4, requests=7)
    usual = together(step)
    for programs in (1, 3, 50):
        monkeypatch.setattr(compress, "POOL_PROGRAMS", programs)
        assert torch.equal(together(step), usual)


def test_bits_of_an_entry_do_not_depend_on_the_alignment_of_states() -> None:
    """Of the same states, in a cache whose rows begin anywhere."""
    step = Entries(ROWS, 64, False, 2, requests=2)
    usual, states = together(step), step.states
    size = states.tensor.numel()
    moved = torch.full((size + 1,), nan, device=DEVICE)[1:]
    moved.copy_(states.tensor.flatten())
    step.states = type(states)(moved.view(states.tensor.shape), states.layout)

    assert torch.equal(together(step), usual)


@pytest.mark.matrix
def test_slices_and_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Entries(RECORDS, 70, True, 6, requests=2)
    usual = together(step)
    for dims, tiles in ((8, 1), (16, 2), (64, 8)):
        monkeypatch.setattr(compress, "POOL_DIMS", dims)
        monkeypatch.setattr(compress, "POOL_TILES", tiles)
        compress._pool_constants.cache_clear()
        actual = together(step)
        compress._pool_constants.cache_clear()
        assert torch.equal(actual, usual)


def test_many_tokens_are_pooled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Entries(RECORDS, 35, False, 8, requests=4)
    usual = together(step)
    monkeypatch.setattr(compress, "MOST_POOLED", 16)
    with observed() as seen:
        actual = memory(step.run())

    parts = -(-len(step.slots) // 16)
    assert parts > 3
    assert [variant.name for variant in seen] == ["pool_kernel", "compress_kernel"] * parts
    assert torch.equal(actual, usual)
    # fewer slots than positions, and an end inside of a part
    step.slots = step.slots[: 16 * (parts - 1) + 3]
    monkeypatch.undo()
    usual = together(step)
    monkeypatch.setattr(compress, "MOST_POOLED", 16)
    assert torch.equal(memory(step.run()), usual)


def test_only_rows_of_tokens_that_complete_an_entry_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other row of pooled entries is read, as every row that is not written is NaN."""
    buffers: list[Tensor] = []
    pool = compress._pool

    def noted(*arguments: Any, **options: Any) -> None:
        buffers.append(arguments[4].fill_(nan))
        pool(*arguments, **options)

    monkeypatch.setattr(compress, "_pool", noted)
    step = Entries(ROWS, 40, False, 2, requests=5)
    step.check()

    assert torch.equal(buffers[0].isnan().any(-1), step.slots < 0)
    assert torch.equal(buffers[0].isnan().all(-1), step.slots < 0)


def test_states_that_do_not_exist_do_not_count() -> None:
    step = Entries(ROWS, 40, False, 4, requests=5)
    step.table[:, ::3] = torch.tensor([-1, step.states.num_blocks, 2**31 - 1, -(2**31), -7], device=DEVICE).int()[
        : len(step.table), None
    ]
    step.request[step.request == 1] = -1
    step.request[step.request == 3] = 5
    step.check()
    step.table = step.table[:, :0]
    step.check()
    step.positions[step.slots >= 0] += 40 * 2**30  # beyond every column
    step.table = torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)

    assert (values_of(step.run())[step.slots[step.slots >= 0].cpu()] == 0).all()


def test_no_tokens_write_nothing() -> None:
    step = Entries(RECORDS, 128, False, requests=1)
    step.slots = step.slots[:0]

    assert (memory(step.run()) == 0xFF).all()
