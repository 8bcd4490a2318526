"""Install the Python files of a wheel, without what it compiled: `python engine_python.py vllm==0.33.0`.

An engine's wheel is hundreds of megabytes of kernels for GPUs. The tests of an adapter need its classes only. The wheel
is downloaded, its `*.py` and its metadata are unpacked into this interpreter's site-packages, and the wheel is deleted.
With `--target FOLDER` they are unpacked there: a second version of the engine, for a process that has FOLDER in
PYTHONPATH. A folder of an earlier run is replaced.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path


def install(requirement: str, target: Path) -> int:
    """Unpack the Python files of the wheel that pip finds for `requirement`; how many there were."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "-q",
            "--no-deps",
            "--no-cache-dir",
        ]
        subprocess.run([*pip, "--only-binary", ":all:", "-d", folder, requirement], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            # RECORD lists files that are left out; without it pip does not try to remove them.
            names = [name for name in archive.namelist() if is_needed(name)]
            archive.extractall(target, names)
    return len(names)


def is_needed(name: str) -> bool:
    """Whether this file of a wheel is Python or says what the wheel is."""
    return name.endswith(".py") or (".dist-info/" in name and not name.endswith("RECORD"))


def main() -> None:
    """Install the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", help="as pip takes them")
    parser.add_argument("--target", type=Path, help="a folder of its own instead of site-packages")
    arguments = parser.parse_args()
    if arguments.target is not None:
        shutil.rmtree(arguments.target, ignore_errors=True)
    target = arguments.target or Path(sysconfig.get_paths()["purelib"])
    for requirement in arguments.requirements:
        print(f"{requirement}: {install(requirement, target)} files")


if __name__ == "__main__":
    main()
