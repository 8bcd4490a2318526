"""Launching kernels. `Variant` describes what a launch compiles, also for `warmup` and `aot`.

Run-time integers are annotated with their width and never specialised, so that no value of an integer compiles another
variant. The variant of a launch is determined by its constants, the dtypes and alignment of its pointers, and which
optional pointers are None. On AMD every variant exists in two forms, see `FAR_FORMS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import local
from typing import Any

import torch
import triton
from attrs import evolve, field, frozen
from torch import Tensor
from triton.runtime.driver import driver

from dsv4attn.backends._triton.compiling.number_tuples import fix_number_types, number_types
from dsv4attn.backends._triton.compiling.variant import StandIn, Variant, launch_options, options, type_of
from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.backends._triton.launching import launch_cache
from dsv4attn.backends._triton.launching.launch_cache import CachedLaunch, Constants, typed
from dsv4attn.backends._triton.support import INTERPRETER_CURE
from dsv4attn.backends._triton.untyped import Kernel
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.errors import ArgumentError

FAR_FORMS: bool = torch.version.hip is not None
"""Triton for AMD compiles loads from a tensor below 2 GB without branches, with offsets of 32 bits, and decides this
for each tensor of each launch. Here one decision holds for all tensors of a launch, so that a warm-up compiles only
two forms of a variant."""
_FAR = 2**31


def stable_kernel(function: Callable[..., object]) -> Kernel:
    """`triton.jit` that compiles one variant for all numbers and all alignments of pointers.

    Parameters annotated as numbers, or as named tuples of numbers (`number_tuples`), are never specialised, and
    parameters without annotation are pointers. A kernel with wide accesses has a constant for whether wide accesses are
    possible.
    """
    return _with_number_types(triton.jit(function, **_jit_options(function)), function)


def stable_gluon(function: Callable[..., object]) -> Kernel:
    """`stable_kernel` for Gluon, which Triton's interpreter does not run."""
    from triton.experimental import gluon

    return _with_number_types(gluon.jit(function, **_jit_options(function)), function)


def _with_number_types(kernel: Kernel, function: Callable[..., object]) -> Kernel:
    types = number_types(function)
    if types and isinstance(kernel, triton.JITFunction):
        fix_number_types(kernel, types)
    return kernel


def _jit_options(function: Callable[..., object]) -> dict[str, list[str]]:
    parameters = inspect.signature(function).parameters.values()
    return {
        "do_not_specialize": [p.name for p in parameters if p.annotation in {"tl.int32", "tl.int64", "tl.float32"}],
        "do_not_specialize_on_alignment": [p.name for p in parameters if p.annotation is p.empty],
    }


_observers: list[Callable[[Variant], None]] = []


@contextmanager
def observed() -> Iterator[list[Variant]]:
    """Collect the variants that are launched inside a `with` block."""
    seen: list[Variant] = []
    _observers.append(seen.append)
    try:
        yield seen
    finally:
        _observers.remove(seen.append)


@frozen(eq=False)
class _Recording:
    """Launches that are recorded instead of run.

    arch, cores: architecture and multiprocessors of the device that launchers choose for.
    variants: what the launches compile.
    made: the variants of this recording and of those around it, by what is read off a launch; making one takes time.
    """

    arch: str
    cores: int = 132
    variants: dict[Variant, None] = field(factory=dict)
    made: dict[tuple[Any, ...], Variant] = field(factory=dict)

    def add(self, kernel: Kernel, args: Sequence[Any], constants: Mapping[str, Any], **options: Any) -> None:  # noqa: ANN401 - of any type
        """Record a launch. options: the other arguments of `Variant.of`."""
        key = (id(kernel), typed(constants), typed(options), *map(type_of, args))
        if key not in self.made:
            self.made[key] = Variant.of(kernel, args, constants, **options)
        self.variants.setdefault(self.made[key])


class _Recordings(local):
    """Recordings of a thread; of nested ones the innermost is the last."""

    def __init__(self) -> None:
        self.stack: list[_Recording] = []


_recordings = _Recordings()
"""Each thread has its own: while one thread compiles, others launch and plan for the device that is here."""


@contextmanager
def recording(arch: str | None = None, *, cores: int | None = None) -> Iterator[dict[Variant, None]]:
    """Record what launches on tensors of torch's meta device compile inside a `with` block. They run nothing.

    Launches on other tensors run as ever, and so do launches of other threads. Recordings may be nested, and an outer
    one has the variants of an inner one too.
    arch: architecture that launchers choose for; by default that of an outer recording, or of this machine.
    cores: its multiprocessors; by default those of an outer recording, or of this machine if it has the architecture,
        or 132. What is recorded does not depend on it, but launchers need a number.
    """
    stack, here = _recordings.stack, _architecture_here()
    outer = stack[-1] if stack else _Recording(here)
    arch = arch or outer.arch
    if cores is None:
        cores = outer.cores if stack or arch != here else _multiprocessors_here()
    inner = evolve(outer, arch=arch, cores=cores, variants={})
    stack.append(inner)
    try:
        yield inner.variants
    finally:
        stack.pop()
        for variant in inner.variants if stack else ():
            stack[-1].variants.setdefault(variant)


def launch(
    kernel: Kernel,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 1,
    fp_fusion: bool = True,
    spills: int = 0,
    **extra: object,
) -> CachedLaunch | None:
    """Run a kernel on the device of its first argument, a tensor. An empty grid launches nothing.

    args: tensors, None, numbers and named tuples of numbers, in the order of the parameters that are not in
        `constants`.
    fp_fusion: whether a product may be added before it is rounded, which is faster, and rounds unlike torch does.
    spills: as of `Variant`; a launch does not depend on it.
    extra: further options of the compiler, such as maxnreg.
    Triton's environment variables are read at a form's first launch.
    Returns the cached launch if later launches can skip Triton's launcher, otherwise None. Raises ArgumentError for a
    CPU or meta tensor unless kernels are interpreted, or the launch is recorded.
    """
    if 0 in grid:
        return None
    device = args[0].device
    index = device.index
    if index is None:
        if _recordings.stack and device.type == "meta":
            sizes = {"num_warps": num_warps, "num_stages": num_stages}
            _recordings.stack[-1].add(kernel, args, constants, **sizes, fp_fusion=fp_fusion, spills=spills, **extra)
            return None
        require_driven(device)
    for observe in _observers:
        observe(Variant.of(kernel, args, constants, num_warps, num_stages, fp_fusion=fp_fusion, spills=spills, **extra))
    far = FAR_FORMS and any(isinstance(arg, Tensor) and arg.untyped_storage().nbytes() >= _FAR for arg in args)
    with device_context(device):
        key = launch_cache.launch_key(
            kernel, args, constants, index or 0, far, num_warps, num_stages, fp_fusion, **extra
        )
        cached = launch_cache.find_launch(key)
        if cached is not None:
            x, y, z = (*grid, 1, 1)[:3]
            cached.launch((x, y, z), index or 0, args)
            return cached
        passed = args
        if far:
            passed = [StandIn(arg.dtype, arg.data_ptr(), far=True) if isinstance(arg, Tensor) else arg for arg in args]
        extra |= launch_options(constants)
        built = kernel[grid](*passed, **constants, **options(num_warps, num_stages, fp_fusion=fp_fusion, **extra))
        return launch_cache.store_launch(key, built, constants)


class Launch:
    """A kernel with constants and numbers bound, for repeated launches: `launch(programs, pointers)`.

    Device, dtypes and types of the pointers, and which of them are None, must be the same in each launch, and so must
    the alignment of those whose alignment compiles to another form. Each launch checks hooks, observers, tracing, the
    driver and the current device.
    """

    __slots__ = ("_compiled", "_index", "_tail", "constants", "kernel", "numbers", "spills", "warps")

    def __init__(
        self, kernel: Kernel, constants: Constants, numbers: Sequence[Any], warps: int = 4, *, spills: int = 0
    ) -> None:
        """numbers: all arguments between the pointers and the constants. warps: of a program. spills: of `launch`."""
        self.kernel, self.constants, self.numbers, self.warps, self.spills = kernel, constants, numbers, warps, spills
        self._compiled: CachedLaunch | None = None
        self._index, self._tail = 0, tuple(numbers)

    def __call__(self, programs: int, pointers: Sequence[Any]) -> None:
        """Launch programs on the device of the first pointer; 0 programs launch nothing."""
        if INTERPRETED and programs and not _observers and not _recordings.stack:
            self.kernel[(programs,)](*pointers, *self.numbers, **self.constants)
            return
        cached, kernel, index = self._compiled, self.kernel, self._index
        if (
            cached is None
            or not programs
            or cached.home is not kernel.device_caches.get(index)
            or _observers
            or launch_cache.hooked(kernel)
            or torch.compiler.is_dynamo_compiling()
            or (_devices() > 1 and driver.active.get_current_device() != index)
        ):
            self._launch_and_cache(programs, pointers)
            return
        call, head, middle, together, *_ = cached
        stream = driver.active.get_current_stream(index)
        # inlined `CachedLaunch.launch`, which saves a call
        if together:
            call(*head, programs, 1, 1, stream, *middle, (*pointers, *self._tail))
        else:
            call(*head, programs, 1, 1, stream, *middle, *pointers, *self._tail)

    def once(self, programs: int, pointers: Sequence[Any]) -> None:
        """Launch with pointers of any dtypes."""
        launch(self.kernel, (programs,), (*pointers, *self.numbers), self.constants, num_warps=self.warps)

    def _launch_and_cache(self, programs: int, pointers: Sequence[Any]) -> None:
        """Launch, and cache the launch unless the next one may need the far form."""
        args = (*pointers, *self.numbers)
        cached = launch(self.kernel, (programs,), args, self.constants, num_warps=self.warps, spills=self.spills)
        if cached is not None and not FAR_FORMS:
            self._index, self._compiled = pointers[0].device.index or 0, cached
            # Triton's launchers copy a named tuple in each launch, and no plain one
            numbers = [tuple(number) if isinstance(number, tuple) else number for number in self.numbers]
            self._tail = (*numbers, *cached.tail)


def require_driven(device: torch.device) -> None:
    """Raise ArgumentError for the CPU, and for tensors without memory, unless kernels are interpreted."""
    if device.type in {"cpu", "meta"} and not INTERPRETED:
        actual = "the CPU" if device.type == "cpu" else "the meta device"
        raise ArgumentError("device", expected="a device that Triton drives", actual=actual, hint=INTERPRETER_CURE)


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """A context in which Triton launches and compiles for this device."""
    index: int | None = device.index
    if index is None or device.type == "cpu" or _devices() <= 1:
        return _HERE
    context: AbstractContextManager[object] = torch.get_device_module(device).device(index)
    return context


_HERE = nullcontext()
_devices = cache(torch.accelerator.device_count)


def architecture() -> str:
    """Architecture of the first accelerator, as `DeviceFacts.arch` has it; "cpu" where there is none.

    Inside a recording: the architecture that it is for.
    """
    return _recordings.stack[-1].arch if _recordings.stack else _architecture_here()


@cache
def _architecture_here() -> str:
    return DeviceFacts.here().arch


def multiprocessors() -> int:
    """Multiprocessors, or their like, of the first accelerator; 4 without one, so that rows are split there too.

    Inside a recording: those of its device.
    """
    return _recordings.stack[-1].cores if _recordings.stack else _multiprocessors_here()


@cache
def _multiprocessors_here() -> int:
    if not torch.accelerator.is_available():
        return 4
    device = torch.accelerator.current_accelerator()
    properties = torch.get_device_module(device).get_device_properties(0)
    for name in ("multi_processor_count", "gpu_subslice_count", "max_compute_units"):
        if count := getattr(properties, name, 0):
            return int(count)
    return 64
