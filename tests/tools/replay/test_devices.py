"""A replay may run on an accelerator: what its files move between host and device, read from their text.

Runs on an accelerator are in tests/tools/cli/test_run.py. These rules hold on machines without one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import dsv4attn.tools.replay as package
from dsv4attn.tools.replay.engine import ReplayConfig

FILES = sorted(Path(package.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_numbers_are_read_on_the_host_and_placed_on_the_device(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    read = [line for line in lines if re.search(r"\.numpy\(\)", line)]
    placed = [line for line in lines if "torch.from_numpy(" in line]

    assert [line for line in read if not re.search(r"\.cpu\(\)\.numpy\(\)|_cpu\.numpy\(\)", line)] == []
    assert [line for line in placed if ".to(self.device)" not in line] == []


def test_the_device_of_a_replay_is_one_of_torch() -> None:
    assert ReplayConfig(device="cuda:1").device == torch.device("cuda", 1)
    assert ReplayConfig().device == torch.device("cpu")
