"""The machine that tests of commands run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4attn.core.contract import device
from dsv4attn.tools.cli import installation
from tests.backends.built_in import class_of, triton_backends
from tests.tools.cli.machine import Machine, imported
from tests.vendor_wheel import VendorWheels


@pytest.fixture(scope="session")
def backends_imported() -> None:
    """Import all backends before a machine takes TRITON_INTERPRET away: some kernels would not be interpreted."""
    for name in triton_backends():
        class_of(name)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backends_imported: None) -> Iterator[Machine]:
    """A machine without accelerators, with an empty working directory, and a torch for the CPU that can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    monkeypatch.setattr(installation, "tried", imported)
    for folder in ("_DEV", "_SYS", "_PROC"):
        monkeypatch.setattr(installation, folder, tmp_path / folder)
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "DSV4ATTN_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    with VendorWheels(tmp_path) as wheels:
        yield Machine(wheels)
