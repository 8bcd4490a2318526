"""Which `flash_mla` a process gets, with and without the wheel, and where FlashMLA itself is installed."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path

import dsv4attn_flash_mla
import pytest

from integrations.environment import check_wheel

CODE = """
starts = "dsv4attn_flash_mla" in sys.modules
assert "torch" not in sys.modules, "a start of Python imports torch"
try:
    import flash_mla
except ImportError as error:
    flash_mla = error
result = [starts, getattr(flash_mla, "__file__", "nothing").rpartition("/")[2]]
"""
"""In a process of Python: whether it starts with this package, and the file of `flash_mla`."""


def test_an_installed_wheel_is_flash_mla_and_an_uninstalled_one_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as on a machine without FlashMLA; the engines' environment has SGLang's
    link = Path.symlink_to
    monkeypatch.setattr(Path, "symlink_to", lambda self, to: None if self.name == "flash_mla" else link(self, to))
    check_wheel("dsv4attn-flash-mla", tmp_path, CODE, used=[True, "front.py"], unused=[False, "nothing"])


@pytest.mark.parametrize(
    ("choice", "is_package", "file"),
    [
        ("", True, "__init__.py"),
        ("0", True, "__init__.py"),
        ("1", True, "front.py"),
        # on Python's path a folder that is no package comes after every module
        ("", False, "front.py"),
        ("1", False, "front.py"),
    ],
    ids=["unset", "0", "1", "unset-folder", "1-folder"],
)
def test_a_real_one_is_shadowed_only_if_that_is_asked_for(
    choice: str,
    is_package: bool,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = tmp_path / "flash_mla" / ("__init__.py" if is_package else "csrc.cpp")
    real.parent.mkdir()
    real.write_text("")
    # the engines' environment has SGLang's
    others = [entry for entry in sys.path if not (Path(entry) / "flash_mla").exists()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    monkeypatch.setenv(dsv4attn_flash_mla.VARIABLE, choice)
    dsv4attn_flash_mla.provide()
    import flash_mla

    assert Path(str(flash_mla.__file__)).name == file
    assert (f"instead of {real}, as DSV4ATTN_FLASH_MLA=1 asks" in caplog.text) == (choice == "1" and is_package)
    assert ("(FlashMLA is not installed)" in caplog.text) == (not is_package)


def test_one_that_another_finder_knows_is_not_shadowed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Editable:
        """As pip install -e appends it."""

        @staticmethod
        def find_spec(name: str, *_: object) -> ModuleSpec | None:
            return spec_from_file_location(name, "/there/flash_mla.py") if name == "flash_mla" else None

    monkeypatch.setenv(dsv4attn_flash_mla.VARIABLE, "")
    dsv4attn_flash_mla.provide()
    assert dsv4attn_flash_mla.other_flash_mla() != "/there/flash_mla.py"
    # in front of Python's path, where the engines' environment has SGLang's
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:1], Editable, *sys.meta_path[1:]])
    found = find_spec("flash_mla")
    assert found is not None
    assert found.origin == dsv4attn_flash_mla.other_flash_mla() == "/there/flash_mla.py"


def test_a_choice_that_is_no_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dsv4attn_flash_mla.VARIABLE, "yes")
    with pytest.raises(ValueError, match="DSV4ATTN_FLASH_MLA: expected 0, 1 or nothing, got 'yes'"):
        dsv4attn_flash_mla.provide()
    assert "flash_mla" not in sys.modules
