"""Build all packages and check what a release would contain: `make release-check`.

Everything lands in dist/. The exit status is 1 if something is wrong, and each thing that is wrong is one line.
`--draft` accepts the placeholder of [project.urls], for a check before the project has an address.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PACKAGES = {
    "dsv4attn": ROOT,
    "dsv4attn_vllm": ROOT / "integrations" / "dsv4attn-vllm",
    "dsv4attn_sglang": ROOT / "integrations" / "dsv4attn-sglang",
    "dsv4attn_flash_mla": ROOT / "integrations" / "dsv4attn-flash-mla",
    "dsv4attn_tokenspeed": ROOT / "integrations" / "dsv4attn-tokenspeed",
}
"""Folders of the packages, by the first word of their archives' names."""
PLACEHOLDER = "repository.invalid"
"""The host of [project.urls] as long as the project has no address."""
NEEDED = {
    "dsv4attn": ("LICENSE", "py.typed", "testing/suite.py", "dsv4attn_acme/tuning.py", "tests/test_conformance.py"),
    "dsv4attn_vllm": ("LICENSE", "py.typed", "internals.py"),
    "dsv4attn_sglang": ("LICENSE", "py.typed", "internals.py"),
    "dsv4attn_flash_mla": ("LICENSE", "front.py"),
    "dsv4attn_tokenspeed": ("LICENSE", "attention.py"),
}
"""Ends of the names of files that archives must contain: among them the kit and the template of a plugin."""
UNWANTED = "*tests/*", "*certificates/*", "*.json", "*.pyc", "*.so", "*docs/*", "*constraints.txt"
"""Patterns of files that no archive may contain. The template of a plugin has a test of its own."""
TRIALS = (
    ("--version",),
    ("run", "--max-requests", "1"),
    ("conform", "reference", "--filter", "sink-none-decode,lse-decode"),
    ("new-plugin", "zephyr"),
)
"""Commands that are run with the installed wheels, in an empty folder."""


def run(*command: str | Path, folder: Path = ROOT) -> None:
    """Print a command and run it. Raises CalledProcessError."""
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=folder, check=True)


def names_of(archive: Path) -> list[str]:
    """The files of a wheel or of a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as source:
        return [member.name for member in source.getmembers() if member.isfile()]


def metadata_of(archive: Path) -> str:
    """The metadata of a wheel or of a source archive."""
    [name] = [name for name in names_of(archive) if re.fullmatch(r"[^/]+/(METADATA|PKG-INFO)", name)]
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name).decode()
    with tarfile.open(archive) as source:
        file = source.extractfile(name)
        assert file is not None
        return file.read().decode()


def wrong_contents(archive: Path) -> Iterator[str]:
    """What an archive lacks, and what it should not contain."""
    names = names_of(archive)
    for end in NEEDED[archive.name.partition("-")[0]]:
        if not any(name.endswith(f"/{end}") for name in names):
            yield f"{archive.name} lacks {end}"
    for name in names:
        template = "plugin_template/" in name or "dsv4attn-acme/" in name
        if not template and any(fnmatch(name, pattern) for pattern in UNWANTED):
            yield f"{archive.name} contains {name}"


def wrong_metadata(archives: list[Path], *, draft: bool) -> Iterator[str]:
    """Different versions, and addresses that nobody can open."""
    versions = {match[1] for archive in archives if (match := re.search(r"(?m)^Version: (.+)$", metadata_of(archive)))}
    if len(versions) != 1:
        yield f"the packages have different versions: {', '.join(sorted(versions))}"
    named = [archive.name for archive in archives if PLACEHOLDER in metadata_of(archive)]
    if named and not draft:
        yield f"[project.urls] has the placeholder {PLACEHOLDER} -> put the project's address into each pyproject.toml"


def try_installed(wheels: list[Path]) -> None:
    """Install the wheels in an empty environment, and run commands there. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        empty, bin_folder = Path(folder) / "empty", Path(folder) / "venv" / "bin"
        empty.mkdir()
        venv.create(bin_folder.parent, with_pip=True)
        pip = bin_folder / "python", "-m", "pip", "--disable-pip-version-check"
        run(*pip, "install", "-q", "-c", ROOT / "constraints.txt", *wheels, folder=empty)
        run(*pip, "check", folder=empty)
        for words in TRIALS:
            run(bin_folder / "dsv4attn", *words, folder=empty)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="accept the placeholder of [project.urls]")
    draft = parser.parse_args().draft
    shutil.rmtree(DIST, ignore_errors=True)
    python = sys.executable
    for folder in PACKAGES.values():
        # the wheel is built from the source archive, which shows that the archive is complete.
        run(python, "-m", "build", "-q", "--no-isolation", "--outdir", DIST, folder)
    archives = sorted(DIST.iterdir())
    wheels = [archive for archive in archives if archive.suffix == ".whl"]
    run(python, "-m", "twine", "check", "--strict", *archives)
    for wheel in wheels:
        # reads the settings of the package's own pyproject.toml
        run(Path(python).parent / "check-wheel-contents", wheel, folder=PACKAGES[wheel.name.partition("-")[0]])
    run(python, "-m", "towncrier", "build", "--draft", "--version", "0")
    try_installed(wheels)
    wrong = [
        *(line for archive in archives for line in wrong_contents(archive)),
        *wrong_metadata(archives, draft=draft),
    ]
    print(*wrong or [f"{len(archives)} archives in dist/ are ready"], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
