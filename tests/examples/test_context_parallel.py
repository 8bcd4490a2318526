"""`examples/context_parallel.py` under torchrun: two ranks have the outputs of one, and half of its entries each."""

from __future__ import annotations

import re

import pytest

from tests.examples.built_wheels import ROOT
from tests.ranks import torchrun


@pytest.mark.slow
def test_two_ranks_have_half_of_the_entries_each() -> None:
    done = torchrun(ROOT, "examples/context_parallel.py")

    assert done.returncode == 0, done.stderr
    sizes = [int(size) for size in re.findall(r"'compressed': (\d+)", done.stdout)]
    assert len(sizes) == 3
    assert sizes[1] == sizes[2] <= 0.52 * sizes[0]
    assert re.findall(r"c4a entries (\[\d+, \d+\])", done.stdout) == ["[114, 126]", "[113, 126]"]
