"""How a kernel is launched, and what a launch compiles: one description, `Variant`, serves `warm` and `aot` too.

Run-time integers are annotated with their width and never specialised, so that their values compile nothing. What
does compile is told by the constants of a launch, the dtypes of its pointers, whether those are aligned, and which
optional ones are None. On AMD every form exists twice: `FAR_FORMS`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from attrs import field, frozen
from torch import Tensor

from dsv4attn.backends._triton import ready
from dsv4attn.backends._triton.answers import INTERPRETER_CURE, require_release
from dsv4attn.backends._triton.ready import ALIGNMENT, Constants
from dsv4attn.core.device import DeviceFacts
from dsv4attn.errors import ArgumentError

__all__ = [
    "ALIGNMENT",
    "FAR_FORMS",
    "INTERPRETED",
    "Constants",
    "StandIn",
    "Variant",
    "architecture",
    "device_context",
    "launch",
    "multiprocessors",
    "observed",
    "pointer_type",
    "require_driven",
    "stable_gluon",
    "stable_kernel",
]

require_release()

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Kernels run in Triton's interpreter. Read once: Triton decides when a kernel is defined."""

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*u1",
}
_DTYPES = {name: dtype for dtype, name in _POINTERS.items()}
_VALUES = {"none": None, "int": 1, "fp32": 1.0}
FAR_FORMS: bool = torch.version.hip is not None
"""Triton for AMD compiles loads from a tensor below 2 GB without branches, with offsets of 32 bits, and decides this
for each tensor of each launch. Here it is all of them or none: two forms of a kernel, which a warm-up can foresee."""
_FAR = 2**31


@frozen
class StandIn:
    """Stands for a tensor where nothing but its type, its alignment and its size matter.

    far: its memory does not end within 2 GB. address: where its first element stands.
    """

    dtype: torch.dtype
    address: int = 0
    far: bool = False

    def data_ptr(self) -> int:
        """What Triton takes for the address."""
        return self.address

    def ptr_range(self) -> int:
        """What Triton takes for the size, in bytes, on AMD."""
        return 2**32 if self.far else 0


def _freeze(items: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(dict(items).items(), key=lambda item: item[0]))


@frozen
class Variant:
    """One compiled form of a kernel. Two are equal when the compiler cannot tell them apart.

    types: of the parameters that are not constants: "*bf16", "int" of whatever width, "fp32", "none" for an optional
    pointer that is not given; ":1" behind a pointer that is not aligned to 16 bytes, where the kernel minds. extra:
    further options of the compiler, such as maxnreg.
    """

    kernel: Any
    types: tuple[tuple[str, str], ...] = field(converter=_freeze)
    constants: tuple[tuple[str, Any], ...] = field(converter=_freeze)
    num_warps: int = 4
    num_stages: int = 1
    fp_fusion: bool = True
    extra: tuple[tuple[str, Any], ...] = field(default=(), converter=_freeze)

    def __attrs_post_init__(self) -> None:
        """Put the types into the order of the parameters, and forget what compiles nothing."""
        given, careless = dict(self.types), _careless(self.kernel)
        names = [name for name in self.kernel.arg_names if name in given]
        types = tuple((name, _canonical(given[name], careless=name in careless)) for name in names)
        object.__setattr__(self, "types", types)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.fn.__name__)

    @property
    def options(self) -> dict[str, Any]:
        """What a launch passes to the compiler beside the arguments."""
        return options(self.num_warps, self.num_stages, fp_fusion=self.fp_fusion, **dict(self.extra))

    def stand_ins(self, *, far: bool = False) -> list[Any]:
        """Arguments that compile to this form, in order: no memory is touched.

        far: pointers may reach beyond 2 GB, which makes a difference on AMD.
        """
        return [_stand_in(text, far=far) for _, text in self.types]

    @classmethod
    def of(
        cls,
        kernel: Any,
        args: Sequence[Any],
        constants: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
        *,
        fp_fusion: bool = True,
        **extra: Any,
    ) -> Variant:
        """What a launch with these arguments compiles."""
        names = [name for name in kernel.arg_names if name not in constants]
        types = zip(names, map(_type_of, args), strict=True)
        return cls(kernel, types, constants, num_warps, num_stages, fp_fusion, extra)

    @classmethod
    def told(
        cls,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any],
        *,
        num_warps: int = 4,
        num_stages: int = 1,
        fp_fusion: bool = True,
        **extra: Any,
    ) -> Variant:
        """The form of a kernel with parameters of these types; those that are not named are integers."""
        names = [name for name in kernel.arg_names if name not in constants]
        named = [(name, types.get(name, "int")) for name in names]
        return cls(kernel, named, constants, num_warps, num_stages, fp_fusion, extra)


def options(num_warps: int, num_stages: int, *, fp_fusion: bool = True, **extra: Any) -> dict[str, Any]:
    """Compiler options of every launch. Fusion is said aloud: releases of Triton differ in their default."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion, **extra}


def _careless(kernel: Any) -> set[str]:
    """Parameters whose alignment a kernel does not want to know."""
    given = getattr(kernel, "kwargs", None) or vars(kernel)
    listed = [*(given.get("do_not_specialize") or ()), *(given.get("do_not_specialize_on_alignment") or ())]
    return {kernel.arg_names[name] if isinstance(name, int) else name for name in listed}


def _canonical(text: str, *, careless: bool) -> str:
    if re.fullmatch(r"[iu]\d+", text):
        return "int"
    return text.removesuffix(":1") if careless else text


def _stand_in(text: str, *, far: bool) -> Any:
    if text in _VALUES:
        return _VALUES[text]
    dtype, _, unaligned = text.partition(":")
    return StandIn(_DTYPES[dtype], 1 if unaligned else 0, far)


def _type_of(arg: Any) -> str:
    if arg is None:
        return "none"
    if isinstance(arg, Tensor):
        return _POINTERS[arg.dtype] + ("" if arg.data_ptr() % ALIGNMENT == 0 else ":1")
    return "fp32" if isinstance(arg, float) else "int"


def pointer_type(dtype: torch.dtype) -> str:
    """How `Variant.types` calls a pointer to this dtype."""
    return _POINTERS[dtype]


def stable_kernel(function: Any) -> Any:
    """`triton.jit` that compiles one form whatever the numbers and the alignment of pointers.

    Parameters annotated as numbers are never specialised. Those without annotation are pointers; a kernel that wants
    wide accesses is told by a constant that they are possible.
    """
    return triton.jit(function, **_unspecialised(function))


def stable_gluon(function: Any) -> Any:
    """The same of a kernel in Gluon, which no interpreter runs."""
    from triton.experimental import gluon

    return gluon.jit(function, **_unspecialised(function))


def _unspecialised(function: Any) -> dict[str, list[str]]:
    parameters = inspect.signature(function).parameters.values()
    return {
        "do_not_specialize": [p.name for p in parameters if p.annotation in {"tl.int32", "tl.int64", "tl.float32"}],
        "do_not_specialize_on_alignment": [p.name for p in parameters if p.annotation is p.empty],
    }


_observers: list[Callable[[Variant], None]] = []


@contextmanager
def observed() -> Iterator[list[Variant]]:
    """Collect what is launched meanwhile, for tests and for whoever wonders."""
    seen: list[Variant] = []
    _observers.append(seen.append)
    try:
        yield seen
    finally:
        _observers.remove(seen.append)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    args: Sequence[Any],
    constants: Mapping[str, Any],
    *,
    num_warps: int = 4,
    num_stages: int = 1,
    fp_fusion: bool = True,
    **extra: Any,
) -> None:
    """Run a kernel on the device of its first argument, a tensor; nothing happens when the grid is empty.

    args: tensors, numbers and None, in the order of the parameters that are not in `constants`. fp_fusion: whether a
    product may be added before it is rounded, which is faster, and rounds unlike torch does. extra: further options of
    the compiler, such as maxnreg. What Triton's environment says of compilation is read at a form's first launch.
    Raises ArgumentError for a CPU tensor unless kernels are interpreted.
    """
    if 0 in grid:
        return
    device = args[0].device
    index = device.index
    if index is None:
        require_driven(device)
    for observe in _observers:
        observe(Variant.of(kernel, args, constants, num_warps, num_stages, fp_fusion=fp_fusion, **extra))
    far = FAR_FORMS and any(isinstance(arg, Tensor) and arg.untyped_storage().nbytes() >= _FAR for arg in args)
    with device_context(device):
        form = ready.form_of(kernel, args, constants, index or 0, far, num_warps, num_stages, fp_fusion, **extra)
        if ready.launched(form, grid, args):
            return
        given = args
        if far:
            given = [StandIn(arg.dtype, arg.data_ptr(), far=True) if isinstance(arg, Tensor) else arg for arg in args]
        compiled = kernel[grid](*given, **constants, **options(num_warps, num_stages, fp_fusion=fp_fusion, **extra))
        ready.remember(form, compiled, constants)


def require_driven(device: torch.device) -> None:
    """Raise ArgumentError for the CPU unless kernels are interpreted."""
    if device.type == "cpu" and not INTERPRETED:
        raise ArgumentError(
            "device",
            expected="a device that Triton drives",
            actual="the CPU",
            hint=INTERPRETER_CURE,
        )


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Where Triton launches and compiles: on this device, of several."""
    index: int | None = device.index
    if index is None or device.type == "cpu" or _devices() <= 1:
        return _HERE
    context: AbstractContextManager[object] = torch.get_device_module(device).device(index)
    return context


_HERE = nullcontext()
_devices = cache(torch.accelerator.device_count)


@cache
def architecture() -> str:
    """Architecture of the first accelerator, as `DeviceFacts.arch` has it; "cpu" where there is none."""
    return DeviceFacts.here().arch


@cache
def multiprocessors() -> int:
    """Units of the first accelerator that run programs; a few where there is none, so that rows are cut there too."""
    if not torch.accelerator.is_available():
        return 4
    device = torch.accelerator.current_accelerator()
    properties = torch.get_device_module(device).get_device_properties(0)
    for name in ("multi_processor_count", "gpu_subslice_count", "max_compute_units"):
        if count := getattr(properties, name, 0):
            return int(count)
    return 64
