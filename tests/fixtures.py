"""Fixtures that the suites of the adapters import; the suite of the package imports the first one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put what tests and engines leave in the temporary folder below that of pytest, which keeps three runs.

    Names are short, since vLLM's sockets are there: a path of a socket has 107 characters at most.
    """
    folder = str(tmp_path_factory.mktemp("t", numbered=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers are the same in every run, whatever tests run before."""
    import torch

    torch.manual_seed(0)
