"""Which decodes sm90 leaves to the shared kernel, held against measured times of both."""

from __future__ import annotations

import pytest

from dsv4attn.backends.sm90.tuning import is_small
from tests.backends.sm90.calls import measured_lines

UNITS = 132


def regrets(units: int = UNITS) -> dict[str, float]:
    """Time of the chosen kernel of each decode, relative to the faster one. units: multiprocessors."""
    losses = {}
    for name, *sizes, shared, gluon in measured_lines("small_h200.txt"):
        tokens, heads, width = map(int, sizes)
        chosen = shared if is_small(tokens, heads, width, units) else gluon
        losses[f"{name} {tokens}"] = float(chosen) / min(float(shared), float(gluon))
    return losses


def test_the_choice_is_that_of_the_measured_times() -> None:
    lost = regrets()

    assert len(lost) == 59
    assert lost.pop("flash_c4_h8 16") < 1.08
    assert max(lost.values()) < 1.04
    assert sum(loss > 1 for loss in lost.values()) == 2


@pytest.mark.parametrize("units", [0, 80, 200, 10**9])
def test_another_limit_chooses_worse(units: int) -> None:
    assert sum(loss > 1.02 for loss in regrets(units).values()) > 3
