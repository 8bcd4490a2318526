"""One or two kernels for each target, compiled; what they need, as JSON. Run as a program, outside the interpreter.

Of each target: the form of the attention kernel that needs most (both segments, lse, parts where rows are cut, or none
where whole rows need more), and the steps whose numbers are the target's own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from attrs import frozen

from dsv4attn.backends._triton.compiling.aot import compile_near
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.selection import load_backend
from dsv4attn.tools.cli.common import geometry_of
from dsv4attn.tools.cli.compile import bounds_of


@frozen
class Case:
    """backend, model, dtype: as `dsv4attn compile` takes them. cut: the attention form of rows that are cut.

    gathered: the form over gathered rows too. others: kernels besides `attention`, all their forms.
    """

    backend: str = "triton"
    model: str = "flash"
    dtype: str = "e4m3fn"
    cut: bool = True
    gathered: bool = False
    others: tuple[str, ...] = ()

    def wants(self, variant: Variant) -> bool:
        """Whether a form is one of this case's."""
        types, constants = dict(variant.types), dict(variant.constants)
        if variant.name == "project_kernel" and constants["BLOCK_M"] == 16:
            # five seconds for registers that the other tiles need too: 188 of 256 on gfx1100, theirs 183 to 232
            return False
        if variant.name != "attention":
            return variant.name in self.others
        rows = types["window_keys"] != "*u8"
        fullest = constants["ROW"].segments == (1 if rows else 2) and types["lse"] != "none" and types["sink"] != "none"
        return fullest and (types["part"] != "none") is self.cut and (self.gathered or not rows)


CASES = {
    "sm_80": Case(model="pro", dtype="e4m3fnuz"),
    "sm_86": Case(others=("window_kernel",)),
    "sm_89": Case(model="pro", dtype="e4m3fnuz", others=("window_kernel",)),
    "sm_90": Case(model="pro", cut=False),
    "sm_100": Case(dtype="e4m3fnuz", cut=False),
    "sm_103": Case(model="pro"),
    "sm_120": Case("sm120", cut=False),
    "sm_121": Case("sm120", model="pro", dtype="e4m3fnuz"),
    "gfx90a": Case("rocm", dtype="e4m3fnuz"),
    "gfx942": Case("rocm", model="pro", dtype="e4m3fnuz"),
    "gfx950": Case("rocm", others=("fill_kernel",)),
    "gfx1100": Case("rocm", cut=False, gathered=True, others=("project_kernel",)),
    "gfx1151": Case("triton", model="pro"),
    "gfx1201": Case("rocm", model="pro", others=("project_kernel",)),
}
"""By target: presets, dialects and backends in turn. All of them for each target: `test_gates`, with `-m slow`."""
TWINS = {"sm_89": "sm_86", "sm_103": "sm_100", "sm_121": "sm_120", "gfx1151": "gfx1100"}
"""Targets compiled with `-m slow` only: the attention of each case took as many registers, or less, as on the other
target, and spilled as much, with Triton 3.6 and 3.9 (compiled 2026-11-22)."""


def outcomes(target: str, case: Case) -> list[dict[str, Any]]:
    """Name, verdict and reasons of each form of a case."""
    bounds, facts = bounds_of(geometry_of(case.model), case.dtype), DeviceFacts.named(target)
    backend: Any = load_backend(case.backend)
    variants = [v for v in dict.fromkeys(backend.kernel_variants(bounds, facts)) if case.wants(v)]
    outcomes = [compile_near(variant, TARGETS[target]) for variant in variants]
    return [{"kernel": o.variant.name, "verdict": o.verdict, "reasons": [*map(str, o.reasons)]} for o in outcomes]


if __name__ == "__main__":
    print(json.dumps({target: outcomes(target, CASES[target]) for target in sys.argv[1:] or CASES}))
