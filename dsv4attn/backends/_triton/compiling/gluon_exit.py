"""Preventing a leak report of Triton's bindings when a process that cross-compiled Gluon kernels ends.

Triton's library holds references to the classes of Gluon layouts for ever. Through the globals of their methods these
refer to the bindings' types, and at exit the bindings report every type and function as leaked. Nothing outside the
library can release the classes, so the methods are removed from them.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from functools import cache

_GLUON = "triton.experimental.gluon.language"


@cache
def release_at_exit() -> None:
    """Have `_release` called when the interpreter ends."""
    atexit.register(_release)


def _release() -> None:
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(_GLUON)]
    named = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    layouts = {
        base for layout_class in named if layout_class.__name__.endswith("Layout") for base in layout_class.__mro__
    }
    for layout in layouts:
        if layout.__module__.startswith(_GLUON):
            for name in [*vars(layout)]:
                with suppress(AttributeError, TypeError):  # what belongs to the class itself
                    delattr(layout, name)
