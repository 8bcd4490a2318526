"""Real gates on real backends: what of a backend's kernels breaks a limit of a device that is not here.

About a second for each kernel and target; name few targets in a test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tests.programs import run_compiling

MULTIPLYING = ("attention", "project_kernel", "project_turned_kernel", "few_rows_kernel")
"""Kernels whose products belong on the matrix unit, unless caches or matrices are fp32."""


def broken_limits(backend: str, targets: Sequence[str], *options: str, cache: Path | None = None) -> list[str]:
    """One line for each limit that a variant breaks on one of the targets; empty is good.

    options: more of `dsv4attn compile`. cache: folder for compiled kernels instead of Triton's own.
    """
    named = [word for target in targets for word in ("--target", target)]
    command = ["-m", "dsv4attn", "compile", "--backend", backend, *named, *options, "--json"]
    done = run_compiling(*command, cache=cache)

    assert done.returncode in (0, 1), done.stdout + done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    assert [job["target"] for job in jobs] == list(targets)
    assert all(job["kernels"] for job in jobs), "nothing was compiled"
    broken = []
    for job in jobs:
        for kernel in job["kernels"]:
            said = [f"{r['code']} {r['text']}" for r in kernel["reasons"]]
            exact = "float32" in options or "*fp32" in kernel["variant"]
            if kernel["kernel"] in MULTIPLYING and not exact and not kernel.get("matrix"):
                said.append("no matrix instructions")
            broken += [f"{job['target']} {kernel['kernel']} [{kernel['variant']}] {line}" for line in said]
    return broken
