"""Rows and runs out of thin air."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4attn.tools.bench.result import Machine, Run
from dsv4attn.tools.bench.roofline import Roofline
from dsv4attn.tools.bench.runner import MEASURED, BenchRow

ROOF = Roofline(bytes_s=1e12, flops_s=1e14, dtype="bfloat16")
HERE = Machine("Toy", "sm_90", "2.11", "3.6", "3.12", "0.1.0", 1)


def row(case: str = "decode flash_c4 b=8", by: str = "ours", us: float | None = 100.0, **facts: Any) -> BenchRow:
    """A row whose time spans one percent to either side."""
    times = {} if us is None else {"median": us * 1e-6, "p10": us * 0.99e-6, "p90": us * 1.01e-6}
    defaults: dict[str, Any] = {
        "state": MEASURED,
        "error": 2e-3,
        "worst_row": 3e-3,
        "flops": 10**9,
        "bytes": 10**6,
        "least": 1e-5,
    }
    return BenchRow(kernel=case.split(maxsplit=1)[0], case=case, by=by, **{**defaults, **times, **facts})


def run(rows: Sequence[BenchRow], machine: Machine = HERE, **facts: Any) -> Run:
    """A run of these rows."""
    defaults = {"date": "2026-11-20 12:00", "rounds": 20, "roofline": ROOF, **facts}
    return Run(machine=machine, rows=tuple(rows), **defaults)
