"""A machine without accelerators, an empty working directory, and wheels of other vendors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import define
from click.testing import CliRunner

from dsv4attn.core.contract import device, devices
from dsv4attn.tools.cli import main
from tests.vendor_wheel import VendorWheels, plugin

__all__ = ["Machine", "device_of_no_backend", "machine", "plugin", "without_triton"]


@define
class Machine:
    """Where commands run."""

    wheels: VendorWheels

    def run(self, *args: str, width: int = 80, **environ: Any) -> tuple[int, list[str]]:
        """Exit code and lines of standard output, without what is behind them."""
        result = CliRunner().invoke(main, list(args), env={"COLUMNS": str(width), **environ})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, [line.rstrip() for line in (result.stdout or result.stderr).splitlines()]

    def json(self, *args: str, **environ: Any) -> tuple[int, dict[str, Any]]:
        """Exit code and the one object."""
        code, lines = self.run(*args, "--json", **environ)
        assert len(lines) == 1
        told: dict[str, Any] = json.loads(lines[0])
        assert told["ok"] is (code == 0)
        return code, told


@contextmanager
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine to run commands on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "may_have_accelerator", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET", "DSV4ATTN_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    with VendorWheels(tmp_path) as wheels:
        yield Machine(wheels)


def device_of_no_backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a device that is added to the table of devices, and to which no backend is native."""
    monkeypatch.setitem(devices._BY_NAME, "abacus", devices.KnownDevice("abacus", "abacus", "an abacus"))
    return "abacus"


def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstall Triton: no metadata, no module, and none of what was imported with it."""
    monkeypatch.setattr(device, "_triton_version", lambda: None)
    for name in [*sys.modules]:
        if name == "triton" or name.startswith(("triton.", "dsv4attn.backends.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
