"""Random arrays, and comparisons of float64 arrays by their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings

quick = settings(max_examples=150, deadline=None, derandomize=True)


def rng(seed: int = 0) -> np.random.Generator:
    """Return a generator that gives the same numbers in every run."""
    return np.random.default_rng(seed)


def same_bits(left: Any, right: Any) -> bool:
    """Compare float64 arrays by their bytes, so that 0 and -0 differ."""
    return np.asarray(left, dtype=np.float64).tobytes() == np.asarray(right, dtype=np.float64).tobytes()
