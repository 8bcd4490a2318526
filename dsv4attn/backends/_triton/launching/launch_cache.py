"""The launch cache of the process: compiled kernels, and their launches without Triton's launcher.

Triton's `JITFunction.run` examines every argument of every launch, and its launchers (`CudaLauncher.__call__` and
`HIPLauncher.__call__` of releases 3.6 to 3.9, in triton/backends/nvidia/driver.py and amd/driver.py) pass them to a
function of the driver. The first launch of a variant uses Triton's launcher. Later launches call the driver's
function with the same arguments. Kernels, hooks, tensors and releases that this file does not support always use
Triton's launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from dsv4attn.backends._triton.compiling.variant import WIDE
from dsv4attn.backends._triton.untyped import CompiledKernel, Kernel

_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None)})
"""Types of pointers in cache keys. Launches with other types, such as subclasses of Tensor, use Triton's launcher."""
_MAX_LAUNCHES = 1024
"""Largest number of cached launches of one kernel."""


class Constants(dict[str, Any]):
    """Constants of a kernel, compared by identity and never changed. A plain dict is compared by its items."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__, __ne__ = object.__eq__, object.__ne__


class CachedLaunch(NamedTuple):
    """A compiled variant, and the arguments of its launches.

    call: the driver's function.
    head: arguments of the function before the grid.
    middle: arguments of the function between the stream and the kernel's arguments.
    together: whether the kernel's arguments are one tuple.
    tail: the constants after the kernel's arguments, which the driver skips.
    home: Triton's cache entry of the kernel on its device. Another driver has another entry.
    owner: a reference that prevents the code from being unloaded.
    """

    call: Callable[..., None]
    head: tuple[Any, ...]
    middle: tuple[Any, ...]
    together: bool
    tail: tuple[Any, ...]
    home: Any
    owner: Any

    def launch(self, grid: tuple[int, int, int], index: int, args: Sequence[Any]) -> None:
        stream = driver.active.get_current_stream(index)
        if self.together:
            self.call(*self.head, *grid, stream, *self.middle, (*args, *self.tail))
        else:
            self.call(*self.head, *grid, stream, *self.middle, *args, *self.tail)


class _KernelLaunches:
    """The cached launches of a kernel whose variants are determined by dtypes of pointers and by constants.

    count: number of arguments that are not constants.
    pointers: number of pointers among the arguments, which come first.
    aligned: indices of the pointers whose alignment compiles another variant.
    """

    def __init__(self, kernel: Kernel, count: int, pointers: int, aligned: Sequence[int]) -> None:
        self.kernel, self.count, self.pointers, self.aligned = kernel, count, pointers, aligned
        self.launches: dict[tuple[Any, ...], CachedLaunch] = {}


LaunchKey: TypeAlias = tuple[_KernelLaunches, int, tuple[Any, ...]]
"""The cache key of a launch: its kernel, the number of its device, and the key of its variant."""

_kernels: dict[int, _KernelLaunches] = {}
"""By the identity of the kernel, because Triton's hash of a kernel takes microseconds. A value refers to its kernel."""


def launch_key(
    kernel: Kernel, args: Sequence[Any], constants: Mapping[str, Any], index: int, *options: object, **extra: object
) -> LaunchKey | None:
    """The cache key of a launch on device `index`; None if the launch is not cached.

    args: in the order of the parameters that are not in `constants`. options, extra: of the compiler.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    entry = _kernels.get(id(kernel)) or _entry(kernel)
    if entry is None or len(args) != entry.count:
        return None
    pointers = args[: entry.pointers]
    if not _PLAIN.issuperset(map(type, pointers)):
        return None
    items = constants if type(constants) is Constants else typed(constants)
    key = items, index, options, *[None if pointer is None else pointer.dtype for pointer in pointers]
    if extra:
        key = *key, *typed(extra)
    if entry.aligned:
        key = *key, *[pointers[i] is not None and pointers[i].data_ptr() % WIDE == 0 for i in entry.aligned]
    return entry, index, key


def typed(items: Mapping[str, Any]) -> tuple[Any, ...]:
    """Names, values, and types of values, as a key: 1 and True are equal, and compile to different code."""
    return (*items.items(), *map(type, items.values()))


def _entry(kernel: Kernel) -> _KernelLaunches | None:
    """The entry of a kernel.

    None if values of numbers compile other variants, or if the parameters are not in the order pointers, numbers,
    constants.
    """
    if not isinstance(kernel, triton.JITFunction):
        return None
    order, aligned, number_tuples = [], [], getattr(kernel, "number_types", ())
    for i, parameter in enumerate(kernel.params):
        number = parameter.annotation_type
        if parameter.is_constexpr:
            order.append(2)
        elif i in number_tuples:
            order.append(1)
        elif not number:
            order.append(0)
            aligned += [] if parameter.do_not_specialize_on_alignment else [i]
        elif parameter.do_not_specialize or number.startswith("fp"):
            order.append(1)
        else:
            return None
    if order != sorted(order):
        return None
    first = order.count(0)
    entry = _kernels[id(kernel)] = _KernelLaunches(kernel, first + order.count(1), first, aligned)
    return entry


def find_launch(key: LaunchKey | None) -> CachedLaunch | None:
    """The cached launch of a key on the active driver; None if Triton's launcher has to be used."""
    if key is None:
        return None
    entry, index, variant_key = key
    compiled = entry.launches.get(variant_key)
    if compiled is None or compiled.home is not entry.kernel.device_caches.get(index) or hooked(entry.kernel):
        return None
    return compiled


def store_launch(key: LaunchKey | None, compiled: CompiledKernel, constants: Mapping[str, Any]) -> CachedLaunch | None:
    """Cache a kernel that Triton has compiled and launched. Returns None if only Triton's launcher can launch it."""
    if key is None or not _is_supported(compiled) or hooked(key[0].kernel):
        return None
    entry, index, variant_key = key
    kernel = entry.kernel
    tail = tuple(constants[name] for name in kernel.arg_names[entry.count :])
    if len(entry.launches) >= _MAX_LAUNCHES:
        entry.launches.clear()
    passed = _driver_call(compiled, len(kernel.arg_names))
    cached = entry.launches[variant_key] = CachedLaunch(*passed, tail, kernel.device_caches[index], compiled)
    return cached


def _driver_call(
    compiled: CompiledKernel, count: int
) -> tuple[Callable[..., None], tuple[Any, ...], tuple[Any, ...], bool]:
    """`call`, `head`, `middle` and `together` of `CachedLaunch`, for a kernel of `count` arguments.

    A copy of Triton's launcher is called with marks in the place of grid, stream and arguments, and with a function
    that records instead of the driver's. A launcher that reads a mark, say to allocate memory for each program, fails.
    Then, and where a launcher has other attributes, every launch calls the launcher itself.
    """
    launcher, kernel_arguments = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    recorded: list[tuple[Any, ...]] = []
    marks, args = tuple(object() for _ in range(4)), tuple(object() for _ in range(count))
    try:
        function, recorder = launcher.launch, copy(launcher)
        recorder.launch = lambda *passed: recorded.append(passed)
        recorder(*marks, *kernel_arguments, *args)
        (passed,) = recorded
        first = passed.index(marks[0])
    except (AttributeError, LookupError, TypeError, ValueError):
        return launcher, (), kernel_arguments, False
    head, rest = passed[:first], passed[first + 4 :]
    if passed[first : first + 4] == marks and rest[-1:] == (args,):
        return function, head, rest[:-1], True
    if passed[first : first + 4] == marks and rest[-count:] == args:
        return function, head, rest[:-count], False
    return launcher, (), kernel_arguments, False


def _is_supported(compiled: CompiledKernel) -> bool:
    """Whether this file supports the launcher of this release and this kind of device."""
    if not isinstance(compiled, triton.compiler.CompiledKernel):
        return False
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    return (3, 6) <= version <= (3, 9) and driver.active.get_current_target().backend in ("cuda", "hip")


def hooked(kernel: Kernel) -> bool:
    """Whether a profiler, or another user of Triton's hooks, must be called in each launch of a kernel."""
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return bool(
        kernel.pre_run_hooks
        or (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or getattr(knobs, "add_stages_inspection_hook", None) is not None
    )
