"""`DeepseekV4Attention` on a network of DeepSeek-V4.1 in all roles, against float64, in any chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4attn.core.layout import KVCacheLayout
from dsv4attn.core.limits import Limits
from dsv4attn.selection import load_backend
from tests.core.network_v41 import Steps
from tests.core.whole import Whole
from tests.core.whole_v41 import SMALL_V41, worst

FP32 = KVCacheLayout.rows(48, 16, dtype=torch.float32)
LIMITS = Limits(3, 48, 64, num_speculative_tokens=1)
ROUNDED = 2.0**-9
"""Error of an output whose latents are rounded to bf16, where fp32 may round to another neighbour than float64."""
SCHEDULES: dict[str, Steps] = {
    "whole": [[(0, 30), (1, 11), (2, 1)]],
    "chunks": [[(0, 3), (1, 1)], [(0, 9), (2, 5)], [(0, 14), (1, 22)]],
    "one by one": [[(0, 1)]] * 17,
    "mixed": [[(1, 8)], [(1, 7), (0, 20)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 40)]],
}


def network(layout: KVCacheLayout = FP32, backend: str = "reference", **options: Any) -> Whole:
    """Layers whose caches, and buffers that indexers write, hold NaN and garbage at first."""
    given = {"geometry": SMALL_V41, "limits": LIMITS, "swa_block_size": 4, "compressed_block_tokens": 8, **options}
    whole = Whole(load_backend(backend), layout, shuffle_seed=3, **given)
    for caches in whole.manager.caches:
        for cache in caches.present.values():
            cache.tensor.fill_(0xFF if cache.tensor.dtype == torch.uint8 else torch.nan)
    for layer in whole.layers:
        if layer.topk_indices is not None:
            layer.topk_indices.fill_(3)
        if layer.candidates is not None:
            layer.candidates.blocks.fill_(0)
    return whole


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_role_is_right_in_any_chunks(schedule: str) -> None:
    assert worst(network(), SCHEDULES[schedule]) <= ROUNDED


def test_layers_say_their_roles_and_their_sources() -> None:
    roles = [layer.role.name for layer in network().layers]

    assert roles == ["WINDOW_ONLY", "FULL", "REUSE", "FULL", "FULL", "REUSE", "REINDEX", "REUSE"]
