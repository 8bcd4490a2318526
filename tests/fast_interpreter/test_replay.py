"""Replayed recordings give what Triton's own interpreter gives, whatever a function is called with next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.fast_interpreter import kernels, replay

pytestmark = pytest.mark.skipif(
    replay.RECORDINGS is None, reason="kernels are not interpreted here, or this Triton's interpreter is another one"
)


@pytest.fixture
def fresh() -> Iterator[replay.Recordings]:
    """No recordings from an earlier test."""
    assert replay.RECORDINGS is not None
    replay.RECORDINGS.forget()
    yield replay.RECORDINGS
    replay.RECORDINGS.disabled = False


def both(run: object, *args: object) -> Tensor:
    """Return what Triton's interpreter computes, checked against one recorded and two replayed runs."""
    assert replay.RECORDINGS is not None
    assert callable(run)
    replay.RECORDINGS.disabled = True
    expected: Tensor = run(*args)
    replay.RECORDINGS.disabled = False
    for _ in range(3):
        torch.testing.assert_close(run(*args), expected, rtol=0, atol=0, equal_nan=True)
    return expected


@pytest.mark.parametrize("counts", [(3, 8), (8, 1), (0, 5), (2, 2)])
def test_branches_loops_and_programs_follow_the_numbers(fresh: replay.Recordings, counts: tuple[int, int]) -> None:
    for order in (counts, counts[::-1], (1, 7)):
        totals = both(kernels.sums, order)

        assert totals.tolist() == [float(sum(range(n))) for n in order]


def test_arguments_that_are_one_tensor_are_two_at_the_next_call(fresh: replay.Recordings) -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])

    assert both(kernels.differences, first, second, True).tolist() == [0.0, 0.0]
    assert both(kernels.differences, first, second, False).tolist() == [-9.0, -18.0]


def test_a_store_before_a_question_happens_once(fresh: replay.Recordings) -> None:
    for flag in (0, 1, 0, 1, 1):
        assert both(kernels.counted, flag).tolist() == [1.0, float(flag)]


def test_a_name_that_means_something_else_is_noticed(fresh: replay.Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1.0, 2.0])

    assert both(kernels.changed, x).tolist() == [2.0, 4.0]
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "change", kernels.another_change)

        assert both(kernels.changed, x).tolist() == [-1.0, -2.0]
    assert both(kernels.changed, x).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_reductions_scans_and_products_are_the_interpreter_s(
    fresh: replay.Recordings, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        both(kernels.mixed, torch.randn(8, 8, generator=generator).to(dtype))


def test_a_second_launch_is_replayed(fresh: replay.Recordings) -> None:
    kernels.sums((2, 3))
    replayed_before = fresh.replayed
    kernels.sums((2, 3))

    assert fresh.replayed - replayed_before == 2  # one recording per program
