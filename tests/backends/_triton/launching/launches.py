"""What launches give to a driver, as JSON. Run as a program: a process that interprets kernels launches none."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.amd.driver import HIPLauncher
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsv4attn.backends import _triton, sm120, xpu
from dsv4attn.backends._triton.compiling.aot import cross_compile
from dsv4attn.backends._triton.compiling.targets import TARGETS
from dsv4attn.backends._triton.compiling.variant import options as options_of
from dsv4attn.backends._triton.launching import launch_cache, runtime
from dsv4attn.backends._triton.launching.launch_cache import Constants
from dsv4attn.backends._triton.launching.runtime import Launch, launch, observed
from dsv4attn.errors import ArgumentError
from tests.backends._triton.launching.fake_drivers import FakeDriver, cpu_args, rows_of
from tests.backends._triton.launching.kernels_gluon import single
from tests.backends._triton.launching.kernels_small import Columns, RowNumbers, careless, rows, rows_in_tuples, valued

CONSTANTS = dict(rows_of().constants)
METADATA = slice(6, 9)
"""Arguments of a launcher: the metadata of hooks, and the hooks, which are none."""


class Subclass(Tensor):
    """A tensor, to all appearances."""


class Counting:
    """How often Triton's own path was taken."""

    def __init__(self) -> None:
        self.count, self.run = 0, JITFunction.run

    def install(self) -> None:
        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            self.count += not options["warmup"]
            return self.run(kernel, *args, **options)

        JITFunction.run = run


TRITON_LAUNCHES = Counting()


def on(name: str = "sm_90") -> FakeDriver:
    """A driver of a device, and none of what was launched before."""
    fake = FakeDriver(TARGETS[name].gpu)
    driver.set_active(fake)
    for kernel in (rows, rows_in_tuples, single, careless, valued):
        kernel.device_caches.clear()
    return fake


def launch_paths(
    fake: FakeDriver, kernel: Any, args: Sequence[Any], constants: Mapping[str, Any], **options: Any
) -> list[str]:
    """Launch by us twice, then by Triton alone: both launch paths, and "same" where all three passed the same."""
    fake.launched.clear()
    took = []
    for _ in range(2):
        count = TRITON_LAUNCHES.count
        launch(kernel, (3, 2), args, constants, **options)
        took.append("triton" if TRITON_LAUNCHES.count > count else "ready")
    extra = {name: value for name, value in options.items() if name not in ("num_warps", "fp_fusion")}
    launch_options = options_of(options.get("num_warps", 4), 1, fp_fusion=options.get("fp_fusion", True), **extra)
    kernel[(3, 2)](*args, **constants, **launch_options)
    first, second, alone = (list(passed) for passed in fake.launched)
    for passed in (first, second, alone):
        del passed[METADATA]
    same = len(first) == len(second) == len(alone) and all(
        a is c and b is c if isinstance(c, Tensor) or not isinstance(c, (int, float)) else a == b == c
        for a, b, c in zip(first, second, alone, strict=True)
    )
    return [*took, "same" if same else "different"]


def forms() -> dict[str, Any]:
    """Launch paths of forms launched one after another, and how many were compiled by then."""
    fake, plain, odd = on(), cpu_args(), cpu_args(unaligned=True)
    wide, scale = [plain[0].float(), *plain[1:]], [*plain[:2], torch.ones(64), *plain[3:]]
    parameter = [torch.nn.Parameter(plain[0]), *plain[1:]]
    other = [torch.ones_like(plain[0]), plain[1] + 1, None, plain[3].clone(), 7, 2**33, 2.5]
    careless_of = [plain[0], torch.zeros(3, dtype=torch.int32)[1:], *plain[2:]]
    cases: dict[str, tuple[Any, ...]] = {
        "plain": (plain, CONSTANTS),
        "unaligned": (odd, CONSTANTS),
        "dtype": (wide, CONSTANTS),
        "given": (scale, CONSTANTS),
        "constant": (plain, {**CONSTANTS, "BLOCK": 128}),
        "type": (plain, {**CONSTANTS, "DT": tl.float32}),
        "warps": (plain, CONSTANTS, 8),
        "numbers": (other, CONSTANTS),
        "again": (plain, CONSTANTS),
        "parameter": (parameter, CONSTANTS),
        "careless": (careless_of, CONSTANTS),
    }
    paths: dict[str, Any] = {}
    with taking_cpu_tensors():
        for name, (args, constants, *warps) in cases.items():
            options = {"num_warps": warps[0]} if warps else {}
            paths[name] = [*launch_paths(fake, rows, args, constants, **options), len(fake.loaded)]
        paths["unfused"] = [*launch_paths(fake, rows, plain, CONSTANTS, fp_fusion=False), len(fake.loaded)]
        paths["registers"] = [*launch_paths(fake, rows, plain, CONSTANTS, maxnreg=64), len(fake.loaded)]
        paths["identity"] = [*launch_paths(fake, rows, plain, Constants(CONSTANTS)), len(fake.loaded)]
    return paths


def tuples() -> dict[str, Any]:
    """Launch paths of a kernel with named tuples, and how many forms were compiled, with numbers of every kind."""
    fake, out, form = on(), torch.zeros(130, dtype=torch.bfloat16), Constants({"COLUMNS": Columns(64, half=False)})
    numbers = {"plain": (7, 65, 2.5), "ones": (1, 1, 1.0), "multiples": (64, 2**20, 16.0), "wide": (7, 2**40 + 1, 0.0)}
    paths: dict[str, Any] = {}
    with taking_cpu_tensors(), observed() as seen:
        for name, values in numbers.items():
            args = [out[1:], RowNumbers(*values)]
            paths[name] = [*launch_paths(fake, rows_in_tuples, args, form), len(fake.loaded)]
    ahead = {cross_compile(variant, TARGETS["sm_90"]).hash for variant in seen}
    launched = {kernel.hash for kernel in rows_in_tuples.device_caches[0][0].values()}
    return {**paths, "foreseen": ahead == launched and len(ahead) == 1}


def other_roads() -> dict[str, Any]:
    """Launch paths where Triton has to be asked each time, and where it has not."""
    fake, args = on(), cpu_args()
    paths: dict[str, Any] = {}
    entered: list[Any] = []
    chain = triton.knobs.runtime.launch_enter_hook
    with taking_cpu_tensors():
        paths["before"] = launch_paths(fake, rows, args, CONSTANTS)
        chain.add(entered.append)
        paths["hook"] = [*launch_paths(fake, rows, args, CONSTANTS), fake.launched[-1][7] is chain]
        chain.remove(entered.append)
        rows.add_pre_run_hook(lambda *_, **__: None)
        paths["pre_run"] = launch_paths(fake, rows, args, CONSTANTS)
        rows.pre_run_hooks.clear()
        paths["after"] = launch_paths(fake, rows, args, CONSTANTS)
        paths["subclass"] = launch_paths(fake, rows, [args[0].as_subclass(Subclass), *args[1:]], CONSTANTS)
        paths["gluon"] = launch_paths(fake, single, [args[1], 3], {"B": 1}, maxnreg=32)
        paths["values"] = launch_paths(fake, careless, [args[1], 3, 4], {})
        paths["multiples"] = launch_paths(fake, valued, [args[1], 32], {})
        with observed() as seen:
            paths["observed"] = [*launch_paths(fake, rows, args, CONSTANTS), len(seen)]
        again = on("gfx942")
        runtime.FAR_FORMS = True
        paths["driver"] = launch_paths(again, rows, args, CONSTANTS)
        near = again.launched[-1][4]
        limit, runtime._FAR = runtime._FAR, 1
        launch(rows, (3, 2), args, CONSTANTS)
        launch(rows, (3, 2), args, CONSTANTS)
        runtime._FAR = limit
        functions = [passed[4] for passed in again.launched[-2:]]
        paths["far"] = [functions[0] is functions[1], functions[0] is near, again.launched[-1][9] is args[0]]
        runtime.FAR_FORMS = False
    return paths


def again() -> dict[str, Any]:
    """Launch paths of one `Launch`, and whether it passed what Triton passes; "bound" is the shortest path."""
    fake, args = on(), cpu_args()
    pointers, numbers = tuple(args[:4]), tuple(args[4:])
    place, looked = Launch(rows, Constants(CONSTANTS), numbers), list[Any]()
    paths: dict[str, Any] = {}

    def looking(*args: Any, **options: Any) -> Any:
        looked.append(args)
        return launch(*args, **options)

    vars(runtime)["launch"] = looking

    def path(*, where: FakeDriver = fake, arguments: Sequence[Any] = pointers) -> list[str]:
        where.launched.clear()
        looked.clear()
        count = TRITON_LAUNCHES.count
        place(3, arguments)
        took = "triton" if TRITON_LAUNCHES.count > count else "ready" if looked else "bound"
        rows[(3,)](*arguments, *numbers, **CONSTANTS, **options_of(4, 1))
        ours, theirs = (list(passed) for passed in where.launched)
        del ours[METADATA], theirs[METADATA]
        same = all(a is b or (isinstance(b, (int, float)) and a == b) for a, b in zip(ours, theirs, strict=True))
        return [took, "same" if same else "different"]

    with taking_cpu_tensors():
        paths["first"], paths["next"] = path(), path()
        paths["other memory"] = path(arguments=(args[0].clone(), args[1] + 1, None, args[3].clone()))
        triton.knobs.runtime.launch_enter_hook.add(a_hook)
        paths["hook"] = path()
        triton.knobs.runtime.launch_enter_hook.remove(a_hook)
        rows.add_pre_run_hook(a_hook)
        paths["pre_run"] = path()
        rows.pre_run_hooks.clear()
        with observed() as seen:
            paths["observed"] = [*path(), len(seen)]
        paths["after"] = path()
        runtime.FAR_FORMS, near = True, place
        place = Launch(rows, Constants(CONSTANTS), numbers)
        paths["far"] = [path()[0], path()[0]]
        runtime.FAR_FORMS, place = False, near
        vars(runtime)["_devices"], fake.get_current_device = lambda: 2, lambda: 1  # type: ignore[method-assign]
        paths["elsewhere"] = path()[0] == "bound"
        vars(runtime)["_devices"], fake.get_current_device = lambda: 1, lambda: 0  # type: ignore[method-assign]
        other = on()
        paths["driver"] = [path(where=other), path(where=other)]
    vars(runtime)["launch"] = launch
    return paths


def undriven() -> dict[str, Any]:
    """Errors, and numbers of launches, of a form that is compiled, with tensors that no kernel can read."""
    fake, args = on(), cpu_args()
    with taking_cpu_tensors():
        launch(rows, (3, 2), args, CONSTANTS)
    messages: dict[str, Any] = {}
    for device in ("cpu", "meta"):
        fake.launched.clear()
        moved = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
        try:
            launch(rows, (3, 2), moved, CONSTANTS)
            messages[device] = "", len(fake.launched)
        except ArgumentError as error:
            messages[device] = str(error), len(fake.launched)
    return messages


def a_hook(*_: object, **__: object) -> None:
    """A hook."""


def slow() -> list[str]:
    """Kernels of backends that are launched by Triton's launcher every time."""
    names = []
    for package in (_triton, sm120, xpu):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name.rpartition(".")[2] in ("leading_values", "flashinfer"):
                continue
            module = importlib.import_module(info.name)
            kernels = [
                value for value in vars(module).values() if isinstance(value, JITFunction) and value.do_not_specialize
            ]
            names += [kernel.fn.__name__ for kernel in kernels if launch_cache._entry(kernel) is None]
    return names


class Spread:
    """A launcher as those of Triton 3.6 are: it hands arguments over one by one."""

    def __call__(self, x: Any, y: Any, z: Any, stream: Any, function: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_pdl, None, *args)  # type: ignore[attr-defined]


def launchers() -> dict[str, Any]:
    """By launcher of Triton's and what a kernel needs: whether we go past it, and hand the driver the same then."""
    on()
    same: dict[str, Any] = {}
    for launcher in (CudaLauncher, HIPLauncher, Spread):
        for changed in ({}, {"global_scratch_size": 64}, {"profile_scratch_size": 64}):
            call_launcher, passed = launcher.__new__(launcher), list[tuple[Any, ...]]()
            sizes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
            sizes |= dict.fromkeys(("global_scratch_align", "profile_scratch_align", "num_ctas", "warp_size"), 1)
            marks = {name: object() for name in ("arg_annotations", "kernel_signature", "launch_pdl")}
            vars(call_launcher).update(
                {**sizes, **marks, "launch_cooperative_grid": object(), "gsan_enabled": False, **changed}
            )
            call_launcher.launch = lambda *args, passed=passed: passed.append(args)
            built: Any = SimpleNamespace(run=call_launcher, function=object(), packed_metadata=object())
            args = [object() for _ in range(5)]
            call, head, middle, together = launch_cache._driver_call(built, len(args) + 2)
            ours = launch_cache.CachedLaunch(call, head, middle, together, (8, 9), None, built)
            name = " ".join([launcher.__name__, *changed])
            if call is not call_launcher:
                ours.launch((2, 3, 4), 0, args)
                call_launcher(2, 3, 4, 0, built.function, built.packed_metadata, None, None, None, *args, 8, 9)
            same[name] = [call is not call_launcher, passed[:1] == passed[1:]]
    return same


@contextmanager
def taking_cpu_tensors() -> Iterator[None]:
    """Let tensors of the CPU stand for others."""
    required = runtime.require_driven
    vars(runtime)["require_driven"] = lambda _: None
    yield
    vars(runtime)["require_driven"] = required


FACTS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (forms, tuples, other_roads, again, undriven, slow, launchers)
}

if __name__ == "__main__":
    TRITON_LAUNCHES.install()
    print(json.dumps({name: FACTS[name]() for name in sys.argv[1:] or FACTS}))
