"""Likely causes of a wrong answer: patterns that one kind of bug leaves. Where no pattern is clear, nothing is said."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]

OFFSETS = "likely the offsets of gathered rows: the step is right in one chunk, and wrong in several"
_DIALECT = "likely the dialect of fp8 codes: what was stored as codes is {} as large as expected"
_FEWEST = 3
"""Wrong rows, or values, that are a pattern."""
_CLOSE = 0.02
"""How far, relative to their size, values may be from a multiple of the expected ones. bf16 rounds by up to 2^-9."""


def likely_cause(
    out: F64, expected: F64, wrong: Flags, *, lse_is_right: bool, starts: Collection[int] = (), coded_dims: int = 0
) -> str:
    """Which bug leaves these errors, in words; "" if no pattern is clear.

    out, expected: [T, H, D] attention, and what it should be; rows without keys are zeros.
    wrong: [T, H], whether a row and head differ by more than the budget.
    lse_is_right: whether an lse was given, and none is wrong.
    starts: rows at which a request or a phase begins; errors from there on say nothing about a bound.
    coded_dims: leading dims that keys store as fp8 codes, where the others are stored as they are; 0 without such keys.
    """
    rows, seen = wrong.sum(axis=1) > 0, np.abs(expected).sum(axis=(1, 2)) > 0
    if rows.sum() < _FEWEST:
        return ""
    fitted = wrong & expected.any(2)  # an infinite sink leaves zeros, of which nothing is a multiple
    values, answers = out[fitted], expected[fitted]
    if len(values) >= _FEWEST and np.isfinite(values).all():
        factors, distances = _factors(values, answers)
        if lse_is_right and (distances < _CLOSE).all() and (np.abs(factors - 1) > _CLOSE).any():
            return "likely the sink: lse is right, and out is a multiple of the expected one in each row and head"
        if coded_dims and (said := _dialect(values, answers, coded_dims)):
            return said
    first = int(rows.argmax())
    if first not in starts and seen[:first].any() and rows[first:][seen[first:]].all():
        return f"likely a bound: every row from {first} on is wrong, and none before"
    return ""


def _factors(values: F64, answers: F64) -> tuple[F64, F64]:
    """Factor [n] that brings each answer closest to the values, and their distance then, relative to the values."""
    tiny = np.finfo(np.float64).tiny
    factors = (values * answers).sum(1) / np.maximum((answers**2).sum(1), tiny)
    distances = np.linalg.norm(values - factors[:, None] * answers, axis=1)
    return factors, distances / np.maximum(np.linalg.norm(values, axis=1), tiny)


def _dialect(values: F64, answers: F64, coded_dims: int) -> str:
    """Rows that see one key are multiples of it: codes of the other dialect change one part of it by a factor of 2."""
    coded, coded_off = _factors(values[:, :coded_dims], answers[:, :coded_dims])
    plain, plain_off = _factors(values[:, coded_dims:], answers[:, coded_dims:])
    lone = (coded_off < _CLOSE) & (plain_off < _CLOSE) & (np.abs(plain) > _CLOSE)
    ratios = coded[lone] / plain[lone]
    for factor, said in ((2.0, "twice"), (0.5, "half")):
        if lone.sum() >= _FEWEST and (np.abs(ratios / factor - 1) < _CLOSE).all():
            return _DIALECT.format(said)
    return ""


def factor_of_two(values: F64, expected: F64) -> str:
    """The same of values that must equal the expected ones: those that differ are twice, or half, as large.

    The code of -0 is NaN in the other dialect, and a code of NaN is a number there.
    """
    differ = (values != expected) & np.isfinite(values) & np.isfinite(expected)
    if differ.sum() >= _FEWEST:
        for factor, said in ((2.0, "twice"), (0.5, "half")):
            if (values[differ] == factor * expected[differ]).all():
                return _DIALECT.format(said)
    return ""
