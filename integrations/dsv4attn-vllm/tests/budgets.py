"""How far the results of `measure_layers.py` may be from vLLM's: the verdict on its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

BUDGETS: Mapping[str, float] = {"records": 1e-5, "q": 4e-3, "attention": 4e-3, "output": 6e-2, "layer": 6e-2}
"""Largest distance by part of a layer, in norms; of records, the share of their bytes that may differ.

bf16 rounds attention and q by 2^-9 on either side. vLLM rounds attention to fp8 before the output projection, 2^-4 of a
value at most; dsv4attn does so only with fp8 weights.
"""
_RECORD = 583
"""Bytes of a record that are compared."""


def excesses(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each distance of these rows, as `measure_layers.py` makes them, beyond its budget or no number."""
    results = []
    for row in rows:
        for name, value in row["apart"].items():
            part = name.rpartition(", ")[2]
            share = value / (row["tokens"] * _RECORD) if part == "records" else value
            # a NaN is beyond every budget
            if not share <= BUDGETS[part]:
                where = f"{row['phase']} {row['tokens']} {row['kind']}"
                results.append(f"{where}: {name} is {share:.3g} from vLLM's, more than {BUDGETS[part]:g}")
    return results
