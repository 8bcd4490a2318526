"""`DeviceFacts`: the properties of a device that selection and support questions depend on.

Facts are read off this machine (`DeviceFacts.here`) or described by name (`DeviceFacts.named("sm_120")`), so that
decisions about any device can be made, and tested, anywhere. No other file of core names a vendor's part of torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from dsv4attn.core.contract.devices import device_named
from dsv4attn.errors import ArgumentError, UnknownNameError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceFacts", "may_have_accelerator", "release_of", "version_of"]

_DEV = Path("/dev")
_NODES = ("nvidia*", "kfd", "dri/render*", "dxg", "accel/*", "davinci*", "hl*")
"""Nodes of accelerators under /dev: NVIDIA, AMD, Intel and others, WSL, compute accelerators, Ascend, Gaudi."""
_YES = ("1", "true", "on", "yes", "y")
"""Values of TRITON_INTERPRET that Triton reads as true."""
_BUILDS = ("pytorch-triton-rocm", "pytorch-triton-xpu", "triton-rocm", "triton-xpu", "pytorch-triton", "triton-windows")
"""Distributions other than triton that provide Triton: builds of torch for ROCm and XPU bring their own."""


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


@cache
def _torch_version() -> str | None:
    return version_of("torch")


@cache
def _triton_version() -> str | None:
    return next((version for name in ("triton", *_BUILDS) if (version := version_of(name))), None)


TRITON_SOURCES = {
    "cuda": "pip install triton; torch for CUDA brings it along",
    "hip": "reinstall torch for ROCm, which brings its own build of Triton",
    "xpu": "reinstall torch for XPU, which brings its own build of Triton",
    "cpu": "pip install triton",
}
"""How to install Triton, for each kind of device."""

NEWER_TRITON = {
    "cuda": "pip install 'torch>=2.10', which brings Triton 3.6",
    "hip": "install a newer torch for ROCm, which brings a newer build of Triton",
    "xpu": "install a newer torch for XPU, which brings a newer build of Triton",
    "cpu": "pip install 'triton>=3.6'",
}
"""How to install a newer Triton, for each kind of device."""


@cache
def release_of(version: str | None) -> tuple[int, int] | None:
    """(3, 6) for "3.6.0+git1b2c"; None for text that does not begin with two numbers, such as "any"."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else None


@frozen
class DeviceFacts:
    """A device and its software. Read the facts off this machine with `here`, or describe a device with `named`.

    kind: "cuda", "hip", "xpu", "cpu", or a third party's torch device type.
    arch: "sm_90", "gfx942", "xpu", ...
    name: the vendor's name of the product.
    torch_version: of the installed torch; None without one.
    triton_version: of the installed Triton; None without one.
    interpreted: whether Triton kernels run in its interpreter on the CPU (TRITON_INTERPRET=1).
    present: False for facts described by name.
    """

    kind: str
    arch: str
    name: str
    torch_version: str | None = None
    triton_version: str | None = None
    interpreted: bool = False
    present: bool = True

    @classmethod
    def here(cls, device: torch.device | str | None = None) -> DeviceFacts:
        """Facts of a device of this machine; by default its first accelerator, or the CPU.

        torch is imported only if the machine may have an accelerator. Reading the facts of an accelerator starts its
        runtime, which does not survive a fork: fork before, or spawn.
        device: a torch device or its name; None: the first accelerator, or the CPU.
        """
        if device == "cpu" or (device is None and not may_have_accelerator()):
            return cls._of("cpu", "cpu", "CPU")
        import torch

        try:
            device = _first_device() if device is None else torch.device(device)
            return cls._of(*_identity(device))
        except (AssertionError, RuntimeError, TypeError) as error:
            raise _absent(device, error) from error

    @classmethod
    def all_here(cls) -> list[DeviceFacts]:
        """Facts of every device of this machine: accelerators, then the CPU."""
        return [cls.here(device) for device in _devices_here()]

    @classmethod
    def _of(cls, kind: str, arch: str, name: str) -> DeviceFacts:
        interpreted = os.environ.get("TRITON_INTERPRET", "").strip().lower() in _YES
        return cls(kind, arch, name, _torch_version(), _triton_version(), interpreted)

    @classmethod
    def named(cls, name: str) -> DeviceFacts:
        """Facts of a device that need not be here, by architecture or product: "cpu", "sm_120", "h200", "gfx942".

         On an accelerator Triton is assumed to be installed.
        name: an architecture or a product, see `devices.device_named`.
        """
        device = device_named(name)
        triton = _triton_version() or (None if device.kind == "cpu" else "any")
        return cls(device.kind, device.arch, device.text, _torch_version(), triton, present=False)

    @classmethod
    def here_or_named(cls, name: str) -> DeviceFacts:
        """Facts of a device by name: read off this machine if it has such a device, else those of `named`.

        "cuda", "hip" and "rocm" name this machine's first device of that kind, whatever its architecture.
        """
        named = cls.named(name)
        kind = {"rocm": "hip"}.get(name.strip().lower(), name.strip().lower())
        return next((facts for facts in cls.all_here() if kind == facts.kind or named.arch == facts.arch), named)

    def matches(self, patterns: tuple[str, ...]) -> bool:
        """Whether kind or arch matches one of the shell patterns, such as "sm_12*" or "cpu".

        patterns: shell patterns, as in `BackendInfo.native`.
        """
        return any(fnmatchcase(name, pattern) for name in (self.arch, self.kind) for pattern in patterns)

    def __str__(self) -> str:
        versions = f"torch {self.torch_version or 'missing'}  triton {self.triton_version or 'missing'}"
        notes = f"{'  interpreted' if self.interpreted else ''}{'' if self.present else '  described, not here'}"
        return f'{self.arch} "{self.name}"  {versions}{notes}'


def _absent(device: torch.device | str | None, error: Exception) -> ArgumentError:
    """The error for a device that this machine lacks: it names the devices that the machine has.

    device: a torch device that cannot be used, or a name that torch does not know; None: the first accelerator.
    error: what torch said.
    """
    actual, hint = repr(str(device)), ""
    # about an unknown name torch says all types of devices that it was ever built for
    if not isinstance(device, str):
        actual += f" ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
    if device is not None:
        hint = f"give a name of torch; this machine has {', '.join(_devices_here())}{_described(str(device))}"
    return ArgumentError("device", expected="a device of this machine", actual=actual, hint=hint)


def _described(name: str) -> str:
    """How to name a device that is not here, if a name is that of a product or an architecture, or close to one."""
    if name.partition(":")[0] in ("cpu", "cuda", "hip", "xpu", "npu"):
        return ""
    try:
        device_named(name)
    except UnknownNameError as error:
        near = str(error).partition("; did you mean ")[2].partition("?")[0]
        return f"; did you mean DeviceFacts.named({near})?" if near else ""
    return f"; DeviceFacts.named({name!r}) describes a device that need not be here"


def _devices_here() -> list[str]:
    """Torch's names of all devices of this machine: accelerators, then the CPU."""
    if not may_have_accelerator():
        return ["cpu"]
    import torch

    kind = _first_device().type
    count = torch.accelerator.device_count() if kind != "cpu" else 0
    return [*(f"{kind}:{index}" for index in range(count)), "cpu"]


def may_have_accelerator() -> bool:
    """Whether this machine may have an accelerator that torch can use. False is certain, True is not."""
    if not sys.platform.startswith("linux"):
        # elsewhere only torch can find out, except that macOS has no other GPU than Apple's
        return sys.platform != "darwin"
    return _has_torch_plugins() or any(next(_DEV.glob(pattern), None) is not None for pattern in _NODES)


@cache
def _has_torch_plugins() -> bool:
    """Whether distributions may add devices to torch, which looks for them once in a process."""
    try:
        return bool(importlib.metadata.entry_points(group="torch.backends"))
    except Exception:  # noqa: BLE001 - the metadata of an installed distribution cannot be read
        return True


def _first_device() -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)


def _identity(device: torch.device) -> tuple[str, str, str]:
    """(kind, arch, name) of a device; asking an accelerator starts its runtime."""
    import torch

    if device.type == "cpu":
        return "cpu", "cpu", "CPU"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return "hip", properties.gcnArchName.partition(":")[0], properties.name
        return "cuda", f"sm_{properties.major}{properties.minor}", properties.name
    if device.type == "xpu":
        return "xpu", "xpu", torch.xpu.get_device_name(device)
    if device.type != _first_device().type:
        raise RuntimeError("torch knows the name, but no such device")
    return device.type, device.type, device.type
