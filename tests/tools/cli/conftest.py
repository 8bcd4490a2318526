"""The machine that tests of commands run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4attn.core.contract import device
from tests.tools.cli.machine import Machine
from tests.vendor_wheel import VendorWheels


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine without accelerators, with an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "DSV4ATTN_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    with VendorWheels(tmp_path) as wheels:
        yield Machine(wheels)
