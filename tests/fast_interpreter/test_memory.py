"""Loads by numpy give the bits, shapes and types of the interpreter's own loads, and read nothing that is masked."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.fast_interpreter import memory

pytestmark = pytest.mark.skipif(not memory.ORIGINAL, reason="kernels are not interpreted here")
KINDS = ("bool", "uint8", "int8", "uint16", "float16", "int32", "float32", "int64", "float64")
SHAPES = ((1,), (4, 3), (256,), (7, 64), (2, 16, 32), (64, 512))
ABSENT = np.uint64(2**47 + 1)
"""An address that no process has; to read there ends it."""


def loads() -> tuple[Any, Any]:
    from triton.runtime import interpreter

    return interpreter._interpreter.load, memory.ORIGINAL[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_load_by_numpy_is_the_interpreter_s(kind: str, shape: tuple[int, ...]) -> None:
    ours, theirs = loads()
    rng, dtype, count = np.random.default_rng(0), np.dtype(kind), int(np.prod(shape))
    held = rng.integers(0, 2 if kind == "bool" else 256, 8 * count + 8, dtype=np.uint8)
    other = rng.integers(0, 2, shape).astype(dtype)
    for visible, start, order in product((0, 0.3, 1), (0, 1, dtype.itemsize), ("in a row", "anywhere")):
        numbers = np.arange(count) if order == "in a row" else rng.integers(0, count, count)
        offsets = (start + dtype.itemsize * numbers).astype(np.uint64).reshape(shape)
        mask = rng.random(shape) < visible
        addresses = np.where(mask, np.uint64(held.ctypes.data) + offsets, ABSENT)

        loaded, expected = (load(addresses, mask, other, dtype) for load in (ours, theirs))

        assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_a_value_of_another_type_in_the_place_of_what_is_masked_is_left_to_the_interpreter() -> None:
    ours, theirs = loads()
    addresses, mask = np.full(512, ABSENT), np.zeros(512, dtype=bool)
    answers = []
    for load in (ours, theirs):
        try:
            answers.append(load(addresses, mask, np.ones(512, np.float32), np.dtype("int16")).tobytes())
        except (TypeError, ValueError) as error:
            answers.append(type(error))

    assert answers[0] == answers[1]
