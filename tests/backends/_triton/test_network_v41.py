"""Layers of DeepSeek-V4.1 in all roles on the shared Triton kernels, against the oracle."""

from __future__ import annotations

import pytest

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.selection import load_backend
from tests.harness_v41 import AttentionNetwork, Steps, worst_attention_error

LONG: Steps = [[(0, 12), (1, 7)], [(0, 1), (1, 2)], [(0, 1), (1, 1), (2, 9)]]
SHORT: Steps = [[(0, 1)], [(0, 1), (1, 3)], [(0, 1), (1, 1)]]


@pytest.mark.skipif(not INTERPRETED, reason="the network is on the CPU: needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("steps", [pytest.param(LONG, marks=pytest.mark.matrix), SHORT])
def test_every_role_attends_to_its_window_and_its_source_s_entries(steps: Steps) -> None:
    error, where = worst_attention_error(AttentionNetwork(load_backend("triton")).run(steps))

    assert error <= 1, where
