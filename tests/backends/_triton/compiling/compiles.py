"""Facts about compiled kernels, as JSON. Run as a program: a process that interprets kernels cannot compile them."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from attrs import asdict
from triton.runtime.driver import driver

from dsv4attn.backends._triton.compiling.aot import Resources, compile_all, compile_near, cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import Variant
from dsv4attn.backends._triton.launching import runtime, warmup
from dsv4attn.backends._triton.launching.runtime import launch
from dsv4attn.errors import ArgumentError
from tests.backends._triton.launching.fake_drivers import FakeDriver, attend_of, cpu_args, rows_of
from tests.backends._triton.launching.kernels_small import broken, careless, rows

DEVICE = torch.device("xpu")
"""Any that is not the CPU: the driver is a fake one."""


def every_target() -> dict[str, Any]:
    """What `rows` needs everywhere."""
    return {name: asdict(Resources.of(cross_compile(rows_of(), t), t)) for name, t in TARGETS.items()}


def too_much() -> dict[str, Any]:
    """Codes of the limits that a large kernel breaks, by target, heads, and warps."""
    sizes = {"sm_90": (64, 4), "sm_120": (64, 8), "gfx942": (64, 1), "gfx950": (16, 4)}
    facts = {}
    for name, (heads, warps) in sizes.items():
        outcome = compile_near(attend_of(heads, 32, warps), TARGETS[name])
        needed = asdict(outcome.resources) if outcome.resources else {}
        facts[name] = {**needed, "codes": [reason.code for reason in outcome.reasons]}
    return facts


def second_opinion() -> dict[str, Any]:
    """Registers and stack as another tool reads them off the binary, next to ours."""
    facts = {}
    for name in ("sm_80", "sm_90", "sm_120"):
        kernel = cross_compile(attend_of(16, 16, 4, dims=256), TARGETS[name])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(kernel.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ours = Resources.of(kernel, TARGETS[name])
        theirs = [int(number) for number in re.findall(r"(?:REG|STACK):(\d+)", text)]
        facts[name] = {"ours": [ours.registers, ours.stack], "theirs": theirs}
    for name in ("gfx90a", "gfx942", "gfx950", "gfx1201"):
        target = TARGETS[name]
        kernel = cross_compile(attend_of(16, 16, 1, dims=256), target)
        waves = int(re.findall(r"; Occupancy: (\d+)", kernel.asm["amdgcn"])[-1])
        registers = Resources.of(kernel, target).registers
        facts[name] = {"ours": [target.occupancy(registers, 0, 1)], "theirs": [min(4 * waves, target.blocks_per_unit)]}
    return facts


def attributes() -> dict[str, Any]:
    """How often the first stage of the compiler sees attributes of alignment and of 32-bit offsets."""

    def counts(variant: Variant, name: str, *, far: bool = False) -> list[int]:
        text = cross_compile(variant, TARGETS[name], far=far).asm["ttir"]
        return [text.count("tt.divisibility = 16"), text.count("tt.pointer_range = 32")]

    facts = {
        "aligned": (rows_of(), "sm_90"),
        "unaligned": (rows_of(x="*bf16:1"), "sm_90"),
        "near": (rows_of(), "gfx942"),
    }
    counted = {name: counts(*arguments) for name, arguments in facts.items()}
    return {**counted, "far": counts(rows_of(), "gfx942", far=True)}


def _engine_compiles(_: object) -> None:
    """An engine compiles a kernel of its own meanwhile, and launches one of those that are being warmed."""
    for name in ("kernel_of_an_engine", "rows"):
        triton.knobs.compilation.listener(src=SimpleNamespace(name=name), cache_hit=False)


def warmed() -> dict[str, Any]:
    """Warm-up and launches on fake devices, with the keys of Triton's cache."""
    facts = {}
    variants = [rows_of(), rows_of(scale="*fp32"), rows_of(stride="int")]
    for name in ("sm_90", "gfx942"):
        target = TARGETS[name]
        fake = FakeDriver(target.gpu)
        driver.set_active(fake)
        rows.device_caches.clear()
        runtime.FAR_FORMS = not target.is_cuda
        with warmup.compiled() as first, logged() as lines:
            count = warmup.warm(variants, DEVICE, name="acme")
        with warmup.compiled() as again:
            warmup.warm(variants, DEVICE)
        with logged() as beside, patch.object(warmup, "_load", _engine_compiles):
            warmup.warm(variants, DEVICE)
        with warmup.compiled() as inside:
            _launch()
            if runtime.FAR_FORMS:
                _launch(far=True)
        with warmup.compiled() as outside:
            _launch(unaligned=True)
        keys = {kernel.hash for kernel in rows.device_caches[0][0].values()}
        ahead = [
            cross_compile(v, target, far=far).hash for v in variants for far in (False, True)[: 2 - target.is_cuda]
        ]
        counts = {"count": count, "loaded": len(fake.loaded), "launched": len(fake.launched)}
        lists = {"first": first, "again": again, "inside": inside, "outside": outside, "log": lines, "beside": beside}
        facts[name] = {**counts, **lists, "unforeseen": len(keys - {*ahead}), "unused": len({*ahead} - keys)}
    return facts


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the package logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dsv4attn")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def _launch(*, unaligned: bool = False, far: bool = False) -> None:
    """What `launch` does on a device; tensors of the CPU stand for others, and any is far if a byte is too much."""
    limit = 1 if far else runtime._FAR
    # so that it takes the CPU's tensors; no kernel is interpreted
    with patch.object(runtime, "INTERPRETED", new=True), patch.object(runtime, "_FAR", limit):
        launch(rows, (1,), cpu_args(unaligned=unaligned), dict(rows_of().constants))


def errors() -> dict[str, Any]:
    """What is refused, and what does not stop others."""
    facts: dict[str, Any] = {}
    variant = Variant(careless, {"out": "*i32", "n": "int", "m": "int"}, {})
    try:
        cross_compile(variant, TARGETS["sm_90"])
    except ArgumentError as error:
        facts["specialised"] = str(error)
    outcomes = compile_all([Variant(broken, {"out": "*i32", "n": "int"}, {"B": 3}), rows_of()], TARGETS["sm_90"])
    facts["outcomes"] = [[str(reason) for reason in outcome.reasons] for outcome in outcomes]
    try:
        launch(rows, (1,), cpu_args(), dict(rows_of().constants))
    except ArgumentError as error:
        facts["cpu"] = str(error)
    return facts


FACTS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (every_target, too_much, second_opinion, attributes, warmed, errors)
}

if __name__ == "__main__":
    print(json.dumps({name: FACTS[name]() for name in sys.argv[1:] or FACTS}))
