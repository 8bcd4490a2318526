"""LMDeploy's attention of DeepSeek-V4, from its own files, without its engine, which `lmdeploy/__init__.py` imports."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = (
    *("lmdeploy", "lmdeploy.pytorch", "lmdeploy.pytorch.backends", "lmdeploy.pytorch.backends.cuda"),
    *("lmdeploy.pytorch.backends.cuda.attention", "lmdeploy.pytorch.configurations"),
    *("lmdeploy.pytorch.kernels", "lmdeploy.pytorch.kernels.cuda"),
)


def loaded(name: str) -> Any:
    """A module of LMDeploy. Packages on the way to it are empty, but for their paths."""
    if "lmdeploy" not in sys.modules:
        spec = find_spec("lmdeploy")
        assert spec is not None, "LMDeploy's Python is not on the path: see `test-engines` in the Makefile"
        assert spec.origin is not None
        for package in _PACKAGES:
            module = ModuleType(package)
            module.__path__ = [str(Path(spec.origin).parent.joinpath(*package.split(".")[1:]))]
            sys.modules[package] = module
    return import_module(f"lmdeploy.pytorch.{name}")
