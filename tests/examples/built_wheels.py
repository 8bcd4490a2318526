"""Real wheels, built from examples/ and installed into folders of their own, without a network.

A clean environment is such a folder on PYTHONPATH, in an empty directory and without any variable of ours, in a fresh
interpreter or in one that has imported torch alone. torch and dsv4attn are those of the tests. setuptools builds: it
comes with torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

import dsv4attn
from tests.forked_programs import run_forked

ROOT = Path(__file__).resolve().parents[2]
ACME = ROOT / "examples" / "dsv4attn-acme"
BROKEN = ROOT / "examples" / "dsv4attn-broken"
PIP = (sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile")
"""Options of `pip install` that make it work without a network."""
NO_DEVICES = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
STRANGE = ("DSV4ATTN_", "PIP_", "PYTEST_", "PYTHON", "TRITON_")


def environment(sites: Sequence[Path] = (), **variables: str) -> dict[str, str]:
    """Variables of a clean environment with these folders on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(STRANGE)}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    packages = os.pathsep.join(map(str, [*sites, Path(dsv4attn.__file__).parents[1]]))
    added = {"PATH": path, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    return {**kept, **NO_DEVICES, **added, **variables}


def install(project: Path, site: Path, scratch: Path) -> None:
    """Build a project and install its wheel. The project is copied first, because a build leaves files in it."""
    copy = scratch / project.name
    if copy != project:
        shutil.copytree(project, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [*PIP, "install", *OFFLINE, "--target", str(site), str(copy)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def renamed(project: Path, target: Path, old: str, new: str) -> Path:
    """A copy of a project in which one word is another one, in names of files too."""
    for file in sorted(path for path in project.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        place = target / str(file.relative_to(project)).replace(old, new)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    return target


@frozen
class Place:
    """An empty directory, and what is installed."""

    folder: Path
    sites: tuple[Path, ...]

    def run(
        self, *command: str, code: int | None = 0, fresh: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ...` here and expect an exit code. fresh: in an interpreter that has imported nothing."""
        env = environment(self.sites, COLUMNS="200", **variables)
        if fresh:
            done = subprocess.run(
                [sys.executable, *command], cwd=self.folder, env=env, capture_output=True, text=True, check=False
            )
        else:
            done = run_forked(command, folder=self.folder, environ=env)
        assert code is None or done.returncode == code, f"{done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done

    def json(self, *command: str, code: int = 0, **variables: str) -> dict[str, Any]:
        """The one object that `dsv4attn ... --json` prints."""
        done = self.run("-m", "dsv4attn", *command, "--json", code=code, fresh=False, **variables)
        output: dict[str, Any] = json.loads(done.stdout)
        assert output["ok"] is (code == 0)
        return output
