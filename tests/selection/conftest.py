"""`wheels`: an empty folder on the path for wheels of other vendors, on a machine without accelerators."""

from __future__ import annotations

import pytest

from dsv4attn.core.contract import device
from tests.vendor_wheel import VendorWheels


@pytest.fixture
def wheels(wheels: VendorWheels, monkeypatch: pytest.MonkeyPatch) -> VendorWheels:
    monkeypatch.chdir(wheels.folder)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    return wheels
