"""What `dsv4attn doctor` tries: imports in a process of their own, and the device nodes next to the build of torch."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from dsv4attn.core.contract.device import TRITON_SOURCES
from dsv4attn.tools.cli.threads import usable_cores

_DEV, _SYS, _PROC = Path("/dev"), Path("/sys"), Path("/proc")
_SECONDS = 120
_SCRIPTS = {
    "torch": """
import json, torch
found = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
kind = torch.accelerator.current_accelerator().type if found and hasattr(torch, "accelerator") else "cuda"
part = getattr(torch, kind, None)
sizes = []
if found and hasattr(part, "get_device_properties"):
    sizes = [part.get_device_properties(i).total_memory for i in range(part.device_count())]
builds = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
print(json.dumps({"found": found, "memory": sizes, "version": torch.__version__, **builds}))
""",
    "triton": "import triton.language",
}
"""The import of each package, and facts that only the package knows, as one line of JSON."""
_BUILDS = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}
"""Kinds of devices that torch is built for, in the words of its versions."""
_MAKERS = {"0x10de": "cuda", "0x1002": "hip", "0x8086": "xpu"}
"""Makers of graphics devices, by their PCI number."""
_GET_TORCH = "install the build of torch for this device: https://pytorch.org/get-started/locally"


@frozen
class Attempt:
    """The import of a package in a process of its own.

    package: its name. installed: whether it is.
    error: last line of what a failed import printed, or "". trace: all of that.
    facts: of torch: versions of "cuda", "hip" and "xpu" that it is built for, memory of its devices, whether it found
    one.
    """

    package: str
    installed: bool = True
    error: str = ""
    trace: str = ""
    facts: Mapping[str, Any] = field(factory=dict)

    @property
    def works(self) -> bool:
        """Whether the package was imported."""
        return self.installed and not self.error

    @property
    def build(self) -> str:
        """The kind of device that this torch is built for: "cuda", "hip", "xpu" or "cpu"."""
        return next((kind for kind in _BUILDS if self.facts.get(kind)), "cpu")

    @property
    def cure(self) -> str:
        """What to do about a package that cannot be imported."""
        if self.package == "torch" and not self.installed:
            return _GET_TORCH
        known = TRITON_SOURCES["cpu"] if self.package == "triton" else _GET_TORCH
        return f"reinstall {self.package}, or what its last line names: {known}"


def tried(package: str) -> Attempt:
    """Import a package in another process, as a library that it lacks may end the process."""
    try:
        if importlib.util.find_spec(package) is None:
            return Attempt(package, installed=False)
    except (ImportError, ValueError):
        return Attempt(package, installed=False)
    command = [sys.executable, "-c", _SCRIPTS[package]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)  # noqa: S603 - our own
    except subprocess.TimeoutExpired:
        return Attempt(package, error=f"its import has not ended within {_SECONDS} s")
    printed = done.stdout.strip().splitlines()
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its import ended with exit code {done.returncode}"]
        return Attempt(package, error=lines[-1].strip(), trace=done.stderr.strip())
    return Attempt(package, facts=json.loads(printed[-1]) if printed else {})


def nodes() -> dict[str, str]:
    """Device nodes of this machine that torch has a build for, with the kind of device."""
    found = {str(node): "cuda" for node in sorted(_DEV.glob("nvidia[0-9]*"))}
    found |= {str(node): "hip" for node in sorted(_DEV.glob("kfd"))}
    for node in sorted(_DEV.glob("dri/render*")):
        kind = _MAKERS.get(_text(_SYS / "class" / "drm" / node.name / "device" / "vendor"))
        # NVIDIA's driver and ROCm need the nodes above, which a container may lack; Intel's needs this one
        if kind == "xpu":
            found[str(node)] = kind
    return found


def devices_without_use(torch: Attempt, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Problems and cures: nodes of devices that this torch is not built for, or that it cannot use."""
    present = nodes()
    if not torch.works or not torch.facts or not present:
        return
    built = torch.build
    if built not in present.values():
        shown, kinds = ", ".join(present), " or ".join(_BUILDS[kind] for kind in dict.fromkeys(present.values()))
        version = torch.facts.get("version", "")
        build = "the CPU alone" if built == "cpu" else f"{_BUILDS[built]} {torch.facts[built]}"
        yield f"{shown}: there is a device for {kinds}, but torch {version} is built for {build}", _GET_TORCH
    elif not torch.facts["found"] and not any(environ.get(name, "1") in ("", "-1") for name in _HIDING[built]):
        node = next(name for name, kind in present.items() if kind == built)
        cure = f"`{_TOOLS[built]}` says whether the driver works and fits; update it, or the permissions of {node}"
        yield f"{node}: torch for {_BUILDS[built]} {torch.facts[built]} finds no device", cure


_HIDING = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
}
"""Variables that hide all devices of a kind if they are empty."""
_TOOLS = {"cuda": "nvidia-smi", "hip": "rocminfo", "xpu": "clinfo"}


def system(torch: Attempt) -> dict[str, str]:
    """Operating system, CPU, drivers, the build of torch, and memory of its devices; what is not known is left out."""
    model = next((line.partition(":")[2].strip() for line in _lines(_PROC / "cpuinfo") if "model name" in line), "")
    memory = [f"{size / 2**30:.0f} GiB" for size in torch.facts.get("memory", ())]
    facts = {
        "os": platform.platform(),
        "cpu": f"{model or platform.machine()}, {usable_cores()} cores",
        "driver": ", ".join(_drivers()),
        "torch build": f"{_BUILDS[torch.build]} {torch.facts[torch.build]}" if torch.build != "cpu" else "",
        "gpu memory": ", ".join(memory),
    }
    if torch.facts and torch.build == "cpu":
        facts["torch build"] = "CPU"
    return {name: text for name, text in facts.items() if text}


def _drivers() -> Iterator[str]:
    for module in ("nvidia", "amdgpu", "xe", "i915"):
        if (_SYS / "module" / module).exists():
            yield f"{module} {_text(_SYS / 'module' / module / 'version')}".strip()


def _text(path: Path) -> str:
    return " ".join(_lines(path)).strip()


def _lines(path: Path) -> Sequence[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
