"""`Machine`: runs commands and installs backends of other authors."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from attrs import define
from click.testing import CliRunner

from dsv4attn.core.contract import device, devices
from dsv4attn.tools.cli import main
from dsv4attn.tools.cli.installation import Attempt
from tests.reprs import reprs_in
from tests.vendor_wheel import VendorWheels, plugin


@define
class Machine:
    """Where commands run."""

    wheels: VendorWheels

    def install(self, name: str, kernels: str = "", **facts: Any) -> None:
        """Install the distribution dsv4attn-NAME with one backend. kernels: source of a module NAME_kernels."""
        self.wheels.install(f"dsv4attn-{name}", plugin(name, **facts))
        if kernels:
            (self.wheels.folder / f"{name}_kernels.py").write_text(kernels, encoding="utf-8")
            self.wheels.modules.append(f"{name}_kernels")

    def run(self, *args: str, width: int = 80, **environ: Any) -> tuple[int, list[str]]:
        """Exit code and lines of standard output, without what is behind them."""
        result = CliRunner().invoke(main, list(args), env={"COLUMNS": str(width), **environ})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert reprs_in(result.stdout + result.stderr) == []
        return result.exit_code, [line.rstrip() for line in (result.stdout or result.stderr).splitlines()]

    def json(self, *args: str, **environ: Any) -> tuple[int, dict[str, Any]]:
        """Exit code and the one object."""
        code, lines = self.run(*args, "--json", **environ)
        assert len(lines) == 1
        values: dict[str, Any] = json.loads(lines[0])
        assert values["ok"] is (code == 0)
        return code, values


def imported(package: str) -> Attempt:
    """The import of torch for the CPU, and of Triton, where both work."""
    facts = {"found": False, "memory": [], "version": "2.13.0+cpu", "cuda": None, "hip": None, "xpu": None}
    return Attempt(package, facts=facts if package == "torch" else {})


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
