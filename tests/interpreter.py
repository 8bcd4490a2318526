"""Triton's interpreter, several times faster.

It replaces the functions of the language whenever a device function is called, by a search through all of them, and
most of its time goes there. Once per launch is enough. Releases that have changed these internals run as they are.
"""

from __future__ import annotations

import inspect
from typing import Any


def patch_once_a_launch() -> None:
    """Make calls of device functions reuse what the launch, or an earlier call in it, has replaced."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is None or not hasattr(scope, "restore"):
        return
    done: set[Any] = set()

    class Once(scope):  # type: ignore[misc]
        def restore(self) -> None:
            done.clear()
            super().restore()

    def once(function: Any) -> Any:
        modules = {m for m in function.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)}
        if modules <= done and done:
            return Once()
        done.update(modules)
        return patch(function)

    interpreter._LangPatchScope = Once  # type: ignore[attr-defined]
    interpreter._patch_lang = once  # type: ignore[attr-defined]
