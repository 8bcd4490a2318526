"""Kernels of the sm90 backend with one thing wrong."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import pytest

from dsv4attn.backends.sm90 import launch
from dsv4attn.backends.sm90.attention import few_heads, kernels_combine, kernels_schedule, small_decode
from dsv4attn.backends.sm90.interpreted import kernels, kernels_few_heads, kernels_small_decode
from tests.backends.sm90.attention import kernels_schedule_walk
from tests.programs import import_text

_SCHEDULE = kernels_schedule.__name__


def planted(folder: Path, old: str, new: str) -> ModuleType:
    """The walk of tests, over a schedule of whose source one piece of text is another."""
    name = _changed(folder, kernels_schedule, old, new).__name__
    return import_text(
        folder / f"walk_{folder.name}.py", inspect.getsource(kernels_schedule_walk).replace(_SCHEDULE, name)
    )


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, old: str, new: str) -> None:
    """Make the backend launch kernels with `old` replaced by `new` in schedule, interpreted, tiles, few or parts."""
    if module == "few":
        changed = _changed(folder, kernels_few_heads, old, new)
        monkeypatch.setattr(few_heads, "attend_few_heads", changed.attend_few_heads)
        return
    if module == "parts":
        monkeypatch.setattr(launch, "combine_parts", _changed(folder, kernels_combine, old, new).combine_parts)
        return
    if module == "tiles":
        _launch_tiles(monkeypatch, _changed(folder, kernels_small_decode, old, new))
        return
    if module == "interpreted":
        changed = _changed(folder, kernels, old, new)
    else:
        name = _changed(folder, kernels_schedule, old, new).__name__
        source = inspect.getsource(kernels).replace(_SCHEDULE, name)
        changed = import_text(folder / f"interpreted_{folder.name}.py", source)
        source = inspect.getsource(kernels_small_decode).replace(_SCHEDULE, name)
        _launch_tiles(monkeypatch, import_text(folder / f"tiles_{folder.name}.py", source))
    monkeypatch.setattr(launch, "attention", changed.attention)


def _launch_tiles(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> None:
    for name in ("attend_tile", "combine_tiles"):
        monkeypatch.setattr(small_decode, name, getattr(kernels, name))


def _changed(folder: Path, module: ModuleType, old: str, new: str) -> ModuleType:
    source = inspect.getsource(module)
    assert old in source, f"{module.__name__} has no {old!r} any more: plant the bug anew"
    # a name of its own each time, as compilers remember files by their names
    return import_text(folder / f"planted_{folder.name}.py", source.replace(old, new))
