"""The contract between core and a backend.

`from dsv4attn.core.contract import BackendInfo, Rank, LayerOps` is how a vendor's wheel imports it. Nothing is loaded
before it is asked for: descriptors must load where torch is not wanted yet.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of a package
    """A public name of `contract.backend`."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.backend"), name)
