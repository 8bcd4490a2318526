"""`wheels`: an empty folder on the path for wheels of other vendors, on a machine without accelerators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4attn.core.contract import device
from tests.vendor_wheel import VendorWheels


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VendorWheels]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    with VendorWheels(tmp_path) as folder:
        yield folder
