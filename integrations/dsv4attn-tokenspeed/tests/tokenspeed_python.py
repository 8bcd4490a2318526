"""TokenSpeed's ops of DeepSeek-V4 on a CPU, from its own files. `tokenspeed_kernel/__init__.py` imports all of its ops.

Faked: empty packages on the way to the ops, but for their paths; a platform, sm_80 of NVIDIA, on which its compiled
parts are not used; and Triton under the name of TokenSpeed's fork of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = (
    *("tokenspeed_kernel", "tokenspeed_kernel.ops", "tokenspeed_kernel.ops.attention"),
    *("tokenspeed_kernel.ops.attention.dsa", "tokenspeed_kernel.ops.attention.mla"),
)
_FORK = "tokenspeed_triton"


class _Fork(MetaPathFinder, Loader):
    """Finds a module of Triton under the name of TokenSpeed's fork."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name.partition(".")[0] == _FORK else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(spec.name.replace(_FORK, "triton", 1))

    def exec_module(self, module: ModuleType) -> None:
        pass


def load() -> Any:
    """TokenSpeed's module of V4's ops, with the platform set and its Triton kernels registered."""
    if "tokenspeed_kernel" not in sys.modules:
        sys.meta_path.insert(0, _Fork())
        spec = find_spec("tokenspeed_kernel")
        assert spec is not None, "TokenSpeed's Python is not on the path: see `test-engines` in the Makefile"
        assert spec.origin is not None
        for package in _PACKAGES:
            module = ModuleType(package)
            module.__path__ = [str(Path(spec.origin).parent.joinpath(*package.split(".")[1:]))]
            sys.modules[package] = module
        platform = import_module("tokenspeed_kernel.platform")
        numbers = {"device_count": 1, "total_memory": 2**36, "memory_bandwidth": 1.0, "sm_count": 108}
        numbers |= {"max_threads_per_sm": 2048, "max_shared_memory_per_sm": 2**17}
        arch = platform.ArchVersion(8, 0)
        platform.Platform.override(
            platform.PlatformInfo(vendor="nvidia", arch_version=arch, device_name="fake", **numbers)
        )
    return import_module("tokenspeed_kernel.ops.attention.dsv4")
