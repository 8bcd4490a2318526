"""Finds the module `flash_mla` in this package: where no other distribution has one, or everywhere if it is asked for.

The wheel has a `.pth` file, so that Python calls `provide` at every start. No file of the wheel is named `flash_mla`,
so pip never overwrites FlashMLA. `provide` imports neither torch nor dsv4attn.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

__all__ = ["VARIABLE", "__version__", "other_flash_mla", "provide"]

__version__ = "0.1.0"
VARIABLE = "DSV4ATTN_FLASH_MLA"
"""1: this module, even where FlashMLA is installed. 0: never this module. Not set: where there is no other."""
_NAME = "flash_mla"


class _Finder:
    """Finds one module: `front.py` under FlashMLA's name. always: even where there is another one."""

    def __init__(self, *, always: bool) -> None:
        self._always = always

    def find_spec(self, name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """The module of this package, for `flash_mla` alone."""
        if name != _NAME or not (self._always or other_flash_mla() is None):
            return None
        return importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("front.py"))


def provide() -> None:
    """Offer the module to this process. Called again, it follows the variable's new value."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0, 1 or nothing, got {choice!r}")
    if choice != "0":
        # first: on its path Python takes any folder flash_mla, also one that is no package
        sys.meta_path.insert(0, _Finder(always=choice == "1"))


def other_flash_mla() -> str | None:
    """The file of the `flash_mla` that Python finds without this package; None if there is none.

    A folder without `__init__.py` is none: on a path, too, every module comes before it.
    """
    others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder) and hasattr(finder, "find_spec"))
    specs = (finder.find_spec(_NAME, None) for finder in others)
    return next((spec.origin for spec in specs if spec is not None and spec.origin is not None), None)
