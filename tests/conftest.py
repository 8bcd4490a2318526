"""Property tests draw the same examples in every run, on a machine of any speed; kernels run wherever they can."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures import own_temporary_folder
from tests.marks import pytest_collection_modifyitems

if TYPE_CHECKING:
    from tests.vendor_wheel import VendorWheels

__all__ = [
    "few_objects", "own_temporary_folder", "pytest_collection_finish", "pytest_collection_modifyitems",
    "pytest_configure", "pytest_unconfigure", "wheels",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that collects tests; the one that only hands tests out to workers imports no torch."""
    hands_out = config.getoption("numprocesses", None) and not config.option.collectonly
    if hasattr(config, "workerinput"):
        # a worker has sent all that it says. To give back the objects of all tests would take seconds.
        atexit.register(os._exit, 0)
    if not hands_out:
        _prepare()


def _prepare() -> None:
    """Let kernels run wherever they can, make examples of property tests repeatable, and look for few cycles."""
    # tests leave few cycles, in addition to all that stays to the end: to look for them as often as Python does by
    # itself takes 5 to 9 % of a run. One look at all that stays takes 4 s.
    gc.set_threshold(50_000, 20, 100)

    import torch
    from hypothesis import settings

    # read by Triton when a kernel is defined, so it must stand before any test imports one.
    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from tests.fast_interpreter.history import quick_history
        from tests.fast_interpreter.patches import patch_interpreter

        patch_interpreter()
        quick_history()

    # the package that the sm120 backend can call stands next to the environment: see the Makefile.
    sys.path.append(str(Path(sys.prefix) / "flashinfer"))

    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Look for cycles among the objects of tests alone, and no more among those of all modules and tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let Python give back all objects at its end, unless it is a worker's, which gives back none.

    Extension modules complain of objects that are left.
    """
    if not hasattr(config, "workerinput"):
        gc.unfreeze()


@pytest.fixture
def wheels(tmp_path: Path) -> Iterator[VendorWheels]:
    """A folder for wheels of other vendors, on the path until the test ends."""
    from tests.vendor_wheel import VendorWheels

    with VendorWheels(tmp_path) as folder:
        yield folder


@pytest.fixture
def few_objects() -> None:
    """For a test that calls `gc.collect`: it looks at the objects of this test alone, which takes 0.5 s less."""
    gc.freeze()
