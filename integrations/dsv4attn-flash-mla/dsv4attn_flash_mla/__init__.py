"""Finds the module `flash_mla` in this package: where no other distribution has one, or everywhere if it is asked for.

The wheel has a `.pth` file, so that Python calls `provide` at every start. No file of the wheel is named `flash_mla`,
so pip never overwrites FlashMLA. `provide` imports neither torch nor dsv4attn.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

__all__ = ["VARIABLE", "__version__", "other_flash_mla", "provide"]

__version__ = "0.1.0"
VARIABLE = "DSV4ATTN_FLASH_MLA"
"""1: this module, even where FlashMLA is installed. 0: never this module. Not set: where there is no other."""
_NAME = "flash_mla"


class _Finder:
    """Finds one module: `front.py` under FlashMLA's name."""

    @staticmethod
    def find_spec(name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """The module of this package, for `flash_mla` alone."""
        if name != _NAME:
            return None
        return importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("front.py"))


def provide() -> None:
    """Offer the module to this process. Called again, it follows the variable's new value."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}: expected 0, 1 or nothing, got {choice!r}")
    if choice != "0":
        # at the end, Python looks on its path first
        sys.meta_path.insert(0 if choice == "1" else len(sys.meta_path), _Finder)


def other_flash_mla() -> str | None:
    """The file of the `flash_mla` on Python's path, which is not this package's; None if there is none."""
    spec = PathFinder.find_spec(_NAME)
    return None if spec is None else spec.origin
