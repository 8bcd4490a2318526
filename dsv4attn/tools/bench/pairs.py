"""Speed on each pair of records of DeepSeek-V4.1, relative to the same layer on V4's records in the same run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log

from attrs import evolve

from dsv4attn.tools.bench.cases import RECORDS, V4_RECORDS
from dsv4attn.tools.bench.runner import Row

__all__ = ["pair_means", "with_pairs"]


def with_pairs(rows: Sequence[Row]) -> list[Row]:
    """Rows in their order; those of other pairs have their speed relative to V4's records in `Row.vs`."""
    times = {(row.by, row.case): row.median for row in rows if row.median}

    def relative(row: Row) -> Row:
        pair = _pair(row)
        before = times.get((row.by, row.case.replace(f" {pair} ", f" {V4_RECORDS} "))) if pair else None
        if pair == V4_RECORDS or not (before and row.median):
            return row
        return evolve(row, vs={**row.vs, V4_RECORDS: before / row.median})

    return [relative(row) for row in rows]


def pair_means(rows: Iterable[Row]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """By (kernel, backend, pair), the geometric mean of the speeds of `with_pairs`, and how many they are."""
    logs: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if V4_RECORDS in row.vs:
            logs.setdefault((row.kernel, row.by, _pair(row)), []).append(log(row.vs[V4_RECORDS]))
    return {key: (exp(sum(values) / len(values)), len(values)) for key, values in logs.items()}


def _pair(row: Row) -> str:
    """Pair of the case, or "" of other cases."""
    words = row.case.split()
    return next((word for word in words if word in RECORDS), "")
