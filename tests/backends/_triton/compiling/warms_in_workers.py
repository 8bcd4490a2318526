"""Facts about a warm-up whose kernels two worker processes compile, as JSON. A program: it interprets no kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

import torch
from triton.runtime.driver import driver

from dsv4attn.backends._triton.compiling import processes
from dsv4attn.backends._triton.compiling.aot import compile_for_gpu, is_cached
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching import warmup
from tests.backends._triton.compiling.compiles import logged
from tests.backends._triton.launching.fake_drivers import FakeDriver, rows_of
from tests.backends._triton.launching.kernels_small import broken

GPU = TARGETS["sm_90"].gpu
POINTERS = ("*bf16", "*fp16", "*fp32", "*u8")
VARIANTS = [rows_of(x=x, out=out) for x, out in product(POINTERS, POINTERS)]


def counts(seen: list[tuple[str, bool]]) -> dict[str, int]:
    """Kernels that this process compiled, and those that it found in the cache."""
    return {"looked up": sum(hit for _, hit in seen), "compiled here": sum(not hit for _, hit in seen)}


def main() -> dict[str, Any]:
    """All facts."""
    # this machine may have one core, or a hundred
    vars(processes)["threads"] = lambda: 2
    driver.set_active(FakeDriver(GPU))
    facts: dict[str, Any] = {}
    missing = sum(not is_cached(variant, GPU) for variant in VARIANTS)
    with warmup.compiled() as seen, logged() as facts["log"]:
        count = warmup.warm(VARIANTS, torch.device("xpu"), name="acme")
    cached = sum(is_cached(variant, GPU) for variant in VARIANTS)
    facts["warm"] = {"count": count, "missing": missing, **counts(seen), "cached": cached}
    with warmup.compiled() as seen:
        for variant in VARIANTS:
            compile_for_gpu(variant, GPU)
    facts["cross-compiled"] = counts(seen)
    variants = [Variant(broken, {"out": "*i32", "n": "int"}, {"B": 3}, warps) for warps in (1, 2, 4, 8)]
    try:
        processes.FEWEST_FORMS, processes._FORMS_PER_WORKER = 4, 2
        warmup.warm(variants, torch.device("xpu"))
    except Exception as error:  # noqa: BLE001 - the test reads it
        facts["error"] = str(error.__cause__ or error)
    orphan = [sys.executable, "-c", processes._START, json.dumps(sys.path)]
    facts["without input"] = subprocess.run(orphan, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode
    return facts


if __name__ == "__main__":
    print(json.dumps(main()))
