"""The interpreter that plays tapes does what Triton's own does, whatever a function is called with next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests import kernels_tapes, tapes

pytestmark = pytest.mark.skipif(
    tapes.PLAYING is None, reason="kernels are not interpreted here, or this Triton's interpreter is another one"
)


@pytest.fixture
def fresh() -> Iterator[tapes.Tapes]:
    """Tapes without any of an earlier test."""
    assert tapes.PLAYING is not None
    tapes.PLAYING.forget()
    yield tapes.PLAYING
    tapes.PLAYING.off = False


def both(run: object, *args: object) -> Tensor:
    """What Triton's interpreter makes, which a recorded run and two played ones must make too."""
    assert tapes.PLAYING is not None
    assert callable(run)
    tapes.PLAYING.off = True
    expected: Tensor = run(*args)
    tapes.PLAYING.off = False
    for _ in range(3):
        torch.testing.assert_close(run(*args), expected, rtol=0, atol=0, equal_nan=True)
    return expected


@pytest.mark.parametrize("counts", [(3, 8), (8, 1), (0, 5), (2, 2)])
def test_branches_loops_and_programs_follow_the_numbers(fresh: tapes.Tapes, counts: tuple[int, int]) -> None:
    for order in (counts, counts[::-1], (1, 7)):
        made = both(kernels_tapes.sums, order)

        assert made.tolist() == [float(sum(range(n))) for n in order]


def test_arguments_that_are_one_tensor_are_two_at_the_next_call(fresh: tapes.Tapes) -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])

    assert both(kernels_tapes.differences, first, second, True).tolist() == [0.0, 0.0]
    assert both(kernels_tapes.differences, first, second, False).tolist() == [-9.0, -18.0]


def test_a_store_before_a_question_happens_once(fresh: tapes.Tapes) -> None:
    for flag in (0, 1, 0, 1, 1):
        assert both(kernels_tapes.counted, flag).tolist() == [1.0, float(flag)]


def test_a_name_that_means_something_else_is_noticed(fresh: tapes.Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1.0, 2.0])

    assert both(kernels_tapes.changed, x).tolist() == [2.0, 4.0]
    with monkeypatch.context() as patch:
        patch.setattr(kernels_tapes, "change", kernels_tapes.another_change)

        assert both(kernels_tapes.changed, x).tolist() == [-1.0, -2.0]
    assert both(kernels_tapes.changed, x).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_reductions_scans_and_products_are_the_interpreter_s(fresh: tapes.Tapes, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        both(kernels_tapes.mixed, torch.randn(8, 8, generator=generator).to(dtype))


def test_most_of_what_is_launched_again_is_played(fresh: tapes.Tapes) -> None:
    kernels_tapes.sums((2, 3))
    before = fresh.played
    kernels_tapes.sums((2, 3))

    assert fresh.played - before == 2  # programs, each as a whole
