"""pytest plugin for backends, switched on with `-p dsv4attn.testing.plugin`.

The backend and the device come from the command line and are shown in pytest's header. The plugin also reads a file of
expected failures, which belongs in the backend's own repository:

    # one test a line: its id, as pytest prints it or from the class on, or the name of a case
    TestDecode::test_case[C2.C5-layout-fnuz-decode]   # no FNUZ on this chip, see ACME-17
    far-insert

A test that is expected to fail and passes is a failure: take its line away. A line that names no test gives a warning.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

if TYPE_CHECKING:
    from dsv4attn.testing.conform import Subject

__all__ = ["ExpectedFailure", "UnmatchedXfailWarning", "read_xfails"]


class UnmatchedXfailWarning(pytest.PytestWarning):
    """A line of the file of expected failures names no test."""


@attrs.frozen
class ExpectedFailure:
    """A line of the file of expected failures.

    line: its number, from 1.
    test: id or pattern of the test.
    reason: shown by pytest.
    """

    line: int
    test: str
    reason: str

    def matches(self, item: pytest.Item) -> bool:
        """Whether this line names a test.

        item: the test.
        """
        case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
        tail = item.nodeid == self.test or item.nodeid.endswith((f"::{self.test}", f"/{self.test}"))
        return tail or getattr(case, "name", None) == self.test


def read_xfails(path: Path) -> list[ExpectedFailure]:
    """The lines of a file of expected failures. The reason of a line follows ` #`.

    path: path of the file.
    """
    expected = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        test, _, reason = line.partition("#") if line.lstrip().startswith("#") else line.partition(" #")
        if test.strip():
            expected.append(ExpectedFailure(number, test.strip(), reason.strip() or f"expected, see {path.name}"))
    return expected


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("dsv4attn", "conformance of DeepSeek-V4 attention backends")
    group.addoption("--dsv4-backend", metavar="NAME[,option=value]", help="Backend under test.")
    group.addoption("--dsv4-device", metavar="DEVICE", help="Torch device to test on.")
    group.addoption("--dsv4-xfails", metavar="FILE", type=Path, help="Tests that are expected to fail, one a line.")


def pytest_configure(config: pytest.Config) -> None:
    """Fail early on an unknown backend, a device that this machine lacks, or a file that cannot be read.

    Warnings of Triton's interpreter are ignored: a vendor's settings may make warnings errors.
    """
    from dsv4attn.errors import Dsv4AttnError
    from dsv4attn.testing.kit.interpreter_warnings import MODULE

    config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:{MODULE}")
    try:
        config.stash[_SUBJECT] = _subject(config)
        path: Path | None = config.getoption("dsv4_xfails")
        config.stash[_XFAILS] = read_xfails(path) if path else []
    except (Dsv4AttnError, OSError, UnicodeDecodeError) as error:
        raise pytest.UsageError(str(error)) from error


_SUBJECT = pytest.StashKey["Subject | None"]()
_XFAILS = pytest.StashKey["list[ExpectedFailure]"]()


def _subject(config: pytest.Config) -> Subject | None:
    name: str | None = config.getoption("dsv4_backend")
    if name is None:
        return None
    from dsv4attn.testing.conform import Subject

    return Subject.of(name, device=config.getoption("dsv4_device"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Backend, device, and versions of the packages below."""
    from dsv4attn.core.contract.backend import API_VERSION
    from dsv4attn.testing.conform import environment, versions

    subject = config.stash[_SUBJECT]
    packages = "  ".join(f"{name} {version}" for name, version in versions().items())
    around = "  ".join(f"{name}={value}" for name, value in environment().items())
    lines = [f"dsv4attn: contract {API_VERSION}  {packages}"]
    if subject is not None:
        owner = f"{subject.distribution} {subject.version}".strip()
        lines = [f"dsv4attn: backend {subject.label} ({owner}) on {subject.facts.arch} {subject.facts.name}", *lines]
    return lines + ([f"dsv4attn: {around}"] if around else [])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark expected failures, before -k and -m take tests away."""
    for expected in config.stash[_XFAILS]:
        hits = [item for item in items if expected.matches(item)]
        for item in hits:
            item.add_marker(pytest.mark.xfail(reason=expected.reason, strict=True))
        if not hits:
            path: Path = config.getoption("dsv4_xfails")
            text = f"{path.name}:{expected.line}: no test is called {expected.test!r} -> take the line away"
            try:
                warnings.warn_explicit(UnmatchedXfailWarning(text), None, str(path), expected.line)
            except UnmatchedXfailWarning as error:
                raise pytest.UsageError(text) from error
