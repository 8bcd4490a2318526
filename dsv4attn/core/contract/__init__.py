"""The contract between core and a backend.

A vendor's wheel imports it as `from dsv4attn.core.contract import Backend, BackendInfo, LayerOps`. A module is loaded
when one of its names is asked for: descriptors load where torch is not installed, and tables of ops need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_TABLES = {"LayerOps": "layer_ops", "BuilderOps": "builder_ops"}
"""The tables of ops, and the modules that have them. Every other public name is one of `contract.backend`."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of a package
    """A public name of the contract."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_TABLES.get(name, 'backend')}"), name)
