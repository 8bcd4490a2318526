"""DeepSeek-V4 attention with one device-neutral core and one thin room of kernels per accelerator.

The public names are loaded on first use: importing this package imports neither torch nor triton nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4attn.core.context import set_forward_context
    from dsv4attn.core.forward import forward_mqa
    from dsv4attn.core.geometry import ModelGeometry
    from dsv4attn.core.layer import DeepseekV4MLAAttention
    from dsv4attn.core.layout import KVCacheLayout, PagedKVCache
    from dsv4attn.core.workspace import WorkspaceManager, current_workspace_manager
    from dsv4attn.errors import (
        ArgumentError,
        CanaryError,
        Dsv4AttnError,
        GeometryError,
        LayoutMismatchError,
        NoForwardContextError,
        OutOfPagesError,
        TraceError,
        UnknownNameError,
        UnsupportedError,
        WorkspaceError,
    )
    from dsv4attn.selection import load_backend

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CanaryError",
    "DeepseekV4MLAAttention",
    "Dsv4AttnError",
    "GeometryError",
    "KVCacheLayout",
    "LayoutMismatchError",
    "ModelGeometry",
    "NoForwardContextError",
    "OutOfPagesError",
    "PagedKVCache",
    "TraceError",
    "UnknownNameError",
    "UnsupportedError",
    "WorkspaceError",
    "WorkspaceManager",
    "__version__",
    "current_workspace_manager",
    "forward_mqa",
    "load_backend",
    "set_forward_context",
]

# where each name lives. `__all__` and the block above say the same to readers and type checkers; a test compares them.
_MODULE_OF = {
    "ArgumentError": "errors",
    "CanaryError": "errors",
    "DeepseekV4MLAAttention": "core.layer",
    "Dsv4AttnError": "errors",
    "GeometryError": "errors",
    "KVCacheLayout": "core.layout",
    "LayoutMismatchError": "errors",
    "ModelGeometry": "core.geometry",
    "NoForwardContextError": "errors",
    "OutOfPagesError": "errors",
    "PagedKVCache": "core.layout",
    "TraceError": "errors",
    "UnknownNameError": "errors",
    "UnsupportedError": "errors",
    "WorkspaceError": "errors",
    "WorkspaceManager": "core.workspace",
    "current_workspace_manager": "core.workspace",
    "forward_mqa": "core.forward",
    "load_backend": "selection",
    "set_forward_context": "core.context",
}


if not TYPE_CHECKING:
    # hidden from type checkers, which would take it to mean that every name exists.
    def __getattr__(name: str) -> object:
        """Import the module a public name lives in, and keep the value for the next time."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not, besides what is here already."""
    return sorted({*globals(), *__all__})
