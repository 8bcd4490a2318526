"""Environments of tests in which the wheel of an adapter is installed, and taken away again, by pip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ADAPTERS = "dsv4attn_vllm", "dsv4attn_sglang", "dsv4attn_flash_mla", "dsv4attn_tokenspeed"


class Environment:
    """A virtual environment with all packages of this interpreter except the adapters, which are installed editable.

    The packages are links to those of this interpreter, and to those of folders in PYTHONPATH, which come first.

    python: its interpreter.
    packages: its folder of packages.
    """

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
        self.python, self.packages = Path(paths["scripts"]) / "python", Path(paths["purelib"])
        sources = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sources = [folder for folder in sources if [*Path(folder).glob("*.dist-info")]]
        seen = {"__pycache__"}
        for source in dict.fromkeys([*sources, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
            for path in Path(source).iterdir():
                # of two versions of a distribution the first one counts
                name = path.name.partition("-")[0] + ".dist-info" if path.suffix == ".dist-info" else path.name
                if name not in seen and not any(adapter in name for adapter in ADAPTERS):
                    seen.add(name)
                    (self.packages / path.name).symlink_to(path)

    def pip(self, *arguments: str) -> None:
        """Run pip in this environment, without an index."""
        command = [self.python, "-m", "pip", "--disable-pip-version-check", *arguments]
        _run(command, env=_without("PYTHONPATH"), cwd=self.packages)

    def run(self, code: str, *paths: Path) -> str:
        """What a fresh process prints. paths: folders on its path, next to the repository, which has dsv4attn.

        Variables of dsv4attn are not passed on.
        """
        mine = [name for name in os.environ if name.startswith("DSV4ATTN_")]
        env = {**_without(*mine), "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
        # the current folder is on the path too, and must not have an adapter in it
        return _run([self.python, "-c", code], env=env, cwd=self.packages.parent)


def check_wheel(
    adapter: str, folder: Path, code: str, *paths: Path, used: Sequence[object], unused: Sequence[object]
) -> None:
    """Build a wheel, install it, and uninstall it, and look at a fresh process of the engine before and after.

    Linked, not installed: the engine and all other packages. dsv4attn is that of this repository.
    adapter: "dsv4attn-vllm". code, paths: what such a process runs, which then has a list `result`: `used` where the
    wheel is installed, `unused` where it is not.
    """
    wheel, environment, package = build_wheel(adapter, folder), Environment(folder / "venv"), adapter.replace("-", "_")
    own = f"getattr(sys.modules.get({package!r}), '__file__', None)"
    code = f"import json, sys\n{code}\nprint('RESULT' + json.dumps([{own}, *result]))"

    def observed() -> list[object]:
        return list(json.loads(environment.run(code, *paths).rpartition("RESULT")[2]))

    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    assert observed() == [str(environment.packages / package / "__init__.py"), *used]

    environment.pip("uninstall", "-y", adapter)
    assert [path.name for path in environment.packages.iterdir() if package in path.name] == []
    assert observed() == [None, *unused]


def build_wheel(adapter: str, folder: Path) -> Path:
    """Build the wheel of an adapter, "dsv4attn-vllm". Skips a test where the build backend is not installed."""
    for backend in ("hatchling", "pip"):
        if find_spec(backend) is None:
            pytest.skip(f"{backend}, which builds the wheel, is not installed: see requirements-test.txt")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder)]
    _run([*pip, *options, str(ROOT / "integrations" / adapter)], env=dict(os.environ), cwd=folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def _without(*names: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in names}


def _run(command: list[Path | str] | list[str], env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
