"""Padding, and steps without tokens, on layers of DeepSeek-V4.1 on the shared kernels."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from dsv4attn.backends._triton.interpreted import INTERPRETED
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.model.geometry import LayerKind, LayerSharing
from tests.harness import LayerStack, all_bytes, check_step_without_tokens, with_padding
from tests.harness_v41 import ROUNDED, SMALL_V41, Steps, v41_stack, worst_layer_error

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the network is on the CPU: needs TRITON_INTERPRET=1")
STEPS: Steps = [[(0, 5), (1, 3)], [(0, 1), (1, 2)], [(0, 1)]]


def layers(**options: Any) -> LayerStack:
    """Layers in all roles."""
    sizes: dict[str, Any] = {"head_dim": 512, "rope_dim": 64, "index_head_dim": 128, "num_heads": 2, "index_n_heads": 4}
    limits, geometry = Limits(5, 48, 64, num_speculative_tokens=1), attrs.evolve(SMALL_V41, **sizes)
    layout = KVCacheLayout.rows(dtype=torch.float32)
    return v41_stack(layout, "triton", **{"limits": limits, "geometry": geometry, **options})


@pytest.mark.matrix
def test_padding_with_tables_of_a_live_request_leaves_the_oracle_s_outputs() -> None:
    assert worst_layer_error(with_padding(layers(), None, validate=False), STEPS) <= ROUNDED


@pytest.mark.parametrize("fill", [-1, 0, 10**6])
def test_padding_writes_nothing(fill: int) -> None:
    sharing = LayerSharing(kv_source_layer_ids=(0,), index_source_layer_ids=(0,))
    geometry = attrs.evolve(SMALL_V41, layers=((LayerKind.CSA, 2),), sharing=sharing)
    layout = KVCacheLayout.rows(48, 16, dtype=torch.float32)
    alone, padded = (v41_stack(layout, "triton", geometry=geometry, limits=Limits(5, 48, 64)) for _ in range(2))
    with_padding(padded, fill, validate=False)
    outputs = []
    for whole in (alone, padded):
        sequence, parts = whole.manager.new(), []
        for count in (3, 1, 2):
            parts += whole.step([(sequence, count)], whole.hidden(1, 9)[sequence.length :][:count])
        outputs.append(torch.cat(parts))

    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for left, right in zip(all_bytes(alone), all_bytes(padded), strict=True):
        values = left.view(torch.float32), right.view(torch.float32)
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("waiting", "padding"), [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_a_step_without_tokens_gives_zeros(waiting: int, padding: int) -> None:
    check_step_without_tokens(layers(), waiting, padding)
