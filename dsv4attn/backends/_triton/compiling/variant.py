"""One compiled form of a kernel, as launches, warm-up and cross-compilation describe it."""

from __future__ import annotations

import importlib
import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4attn.backends._triton.compiling.kernel_keys import settle_key
from dsv4attn.backends._triton.untyped import Kernel

WIDE = 16
"""Bytes of the widest access. A pointer that is aligned to 16 bytes compiles to wider loads than another pointer."""

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
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]>")
"""The type of a descriptor."""
_VALUES: Mapping[str, float | tuple[()] | None] = {"none": None, "int": 1, "fp32": 1.0, "numbers": ()}
"""Stand-ins by type. What a tuple of numbers compiles to is in its kernel, see `number_tuples`."""


@frozen
class StandIn:
    """An argument in the place of a tensor, where only type, alignment and size matter.

    address: of the first element. far: whether the tensor's storage may be larger than 2 GB.
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
    """One compiled form of a kernel. Two are equal when they compile to the same code.

    types: of the parameters that are not constants: "*bf16"; "int" of any width; "fp32"; "numbers" of a named tuple of
    them; "none" for an optional pointer that is not given; ":1" after a pointer that is not aligned to 16 bytes, if the
    kernel is specialised on that.
    extra: further options of the compiler, such as maxnreg. spills: bytes that a thread may store and load because
    there are too few registers, where the kernel was measured to be faster so.
    """

    kernel: Kernel
    types: tuple[tuple[str, str], ...] = field(converter=_freeze)
    constants: tuple[tuple[str, Any], ...] = field(converter=_freeze)
    num_warps: int = 4
    num_stages: int = 1
    fp_fusion: bool = True
    extra: tuple[tuple[str, Any], ...] = field(default=(), converter=_freeze)
    spills: int = field(default=0, eq=False)

    def __attrs_post_init__(self) -> None:
        """Put the types into the order of the parameters, without what compiles nothing; settle the kernel's key."""
        settle_key(self.kernel)
        by_name, generic = dict(self.types), _unspecialised(self.kernel)
        names = [name for name in self.kernel.arg_names if name in by_name]
        types = tuple((name, _canonical(by_name[name], specialised=name not in generic)) for name in names)
        object.__setattr__(self, "types", types)

    def __reduce__(self) -> tuple[Callable[..., Variant], tuple[object, ...]]:
        """Pickle the variant with the kernel's module and name in the place of the kernel.

        Raises PicklingError for a kernel that another process could not import.
        """
        module, name = self.kernel.fn.__module__, self.kernel.fn.__qualname__
        try:
            importable = module != "__main__" and _kernel_named(module, name) is self.kernel
        except (ImportError, AttributeError):
            importable = False
        if not importable:
            raise pickle.PicklingError(f"kernel {name} of module {module} cannot be imported by its name")
        rest = self.types, self.constants, self.num_warps, self.num_stages, self.fp_fusion, self.extra, self.spills
        return _with_kernel_named, (module, name, *rest)

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.fn.__name__)

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options of a launch."""
        extra = {**dict(self.extra), **launch_options(dict(self.constants))}
        return options(self.num_warps, self.num_stages, fp_fusion=self.fp_fusion, **extra)

    def stand_ins(self, *, far: bool = False) -> list[Any]:
        """Arguments that compile to this form, in order. far: as of `StandIn`, which makes a difference on AMD."""
        return [_stand_in(text, far=far) for _, text in self.types]

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        args: Sequence[Any],
        constants: Mapping[str, Any],
        num_warps: int,
        num_stages: int,
        *,
        fp_fusion: bool = True,
        spills: int = 0,
        **extra: object,
    ) -> Variant:
        """What a launch with these arguments compiles. spills: as of the class."""
        names = [name for name in kernel.arg_names if name not in constants]
        types = zip(names, map(type_of, args), strict=True)
        return cls(kernel, types, constants, num_warps, num_stages, fp_fusion, extra, spills)


def _kernel_named(module: str, name: str) -> Kernel:
    return attrgetter(name)(importlib.import_module(module))


def _with_kernel_named(module: str, name: str, *rest: Any) -> Variant:  # noqa: ANN401 - the other fields
    return Variant(_kernel_named(module, name), *rest)


def options(num_warps: int, num_stages: int, *, fp_fusion: bool = True, **extra: object) -> dict[str, Any]:
    """Compiler options of every launch. Fusion is always given: its default differs between releases of Triton."""
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion, **extra}


def launch_options(constants: Mapping[str, Any]) -> dict[str, bool]:
    """Options of Triton for launches of a kernel with these constants."""
    return {"launch_pdl": True} if constants.get("PDL") else {}


def _unspecialised(kernel: Kernel) -> set[str]:
    """Parameters whose alignment compiles nothing."""
    options = getattr(kernel, "kwargs", None) or vars(kernel)
    listed = [*(options.get("do_not_specialize") or ()), *(options.get("do_not_specialize_on_alignment") or ())]
    return {kernel.arg_names[name] if isinstance(name, int) else name for name in listed}


def _canonical(text: str, *, specialised: bool) -> str:
    if text[0] in "iu":
        return "int"
    return text if specialised else text.removesuffix(":1")


def _stand_in(text: str, *, far: bool) -> Any:  # noqa: ANN401 - of any type
    if text in _VALUES:
        return _VALUES[text]
    described = _DESCRIPTOR.fullmatch(text)
    if described is not None:
        block = [int(size) for size in described[2].split(", ")]
        base = StandIn(_DTYPES[f"*{described[1]}"])
        return TensorDescriptor(base, block, [*block[1:], 1], block)
    dtype, _, unaligned = text.partition(":")
    return StandIn(_DTYPES[dtype], 1 if unaligned else 0, far)


def type_of(arg: object) -> str:
    """The text in `Variant.types` of an argument of a launch."""
    if isinstance(arg, int):
        return "int"
    if arg is None:
        return "none"
    if isinstance(arg, Tensor):
        return _POINTERS[arg.dtype] + ("" if arg.data_ptr() % WIDE == 0 else ":1")
    if isinstance(arg, tuple):
        return "numbers"
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{_POINTERS[arg.base.dtype].removeprefix('*')}{list(arg.block_shape)}>"
    return "fp32"
