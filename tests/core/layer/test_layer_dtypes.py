"""Hidden states and weights of `DeepseekV4Attention` in different dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4attn.backends.reference.launch import ReferenceBackend
from dsv4attn.core.cache.layout import KVCacheLayout
from dsv4attn.core.contract.limits import Limits
from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
from dsv4attn.core.memory.workspace import WorkspaceManager
from dsv4attn.core.metadata.forward_context import set_forward_context
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.weights import AttentionWeights, weight_shapes
from dsv4attn.errors import ArgumentError
from dsv4attn.serving.cache_manager import CacheManager
from tests.tools.replay.small import CONFIG

GEOMETRY = ModelGeometry.from_config(CONFIG, name="small")
KINDS = list(LayerKind)
TOKENS = 40


def run(kind: LayerKind, hidden_states: Tensor, weights: torch.dtype) -> Tensor:
    """Output of a layer whose weights are the same numbers, exact in bf16, in any dtype."""
    random, backend, index = torch.Generator().manual_seed(1), ReferenceBackend(), KINDS.index(kind)
    layer, limits = GEOMETRY.layer(index), Limits(1, TOKENS, TOKENS)
    shapes = weight_shapes(GEOMETRY, layer)
    drawn = {name: torch.randn(shape, generator=random).mul_(0.2).bfloat16() for name, shape in shapes.items()}
    cast_weights = AttentionWeights.from_dict({name: w.to(weights) for name, w in drawn.items()}, GEOMETRY, layer)
    manager = CacheManager(GEOMETRY, limits, KVCacheLayout.rows(24, 8, dtype=hidden_states.dtype))
    attention = DeepseekV4Attention("0", GEOMETRY, index, limits, backend, cast_weights, workspace=WorkspaceManager())
    attention.bind_kv_cache(manager.caches[index])
    step = [(manager.new(), TOKENS)]
    with torch.no_grad(), set_forward_context(manager.metadata(manager.batch(step))):
        return attention(hidden_states, manager.positions(step))


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_hidden_states_beside_fp32_weights_give_bf16(kind: LayerKind) -> None:
    hidden = torch.randn(TOKENS, GEOMETRY.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = run(kind, hidden.float(), torch.float32)
    mixed = run(kind, hidden, torch.float32)

    assert mixed.dtype == torch.bfloat16
    error = (mixed.float() - exact).norm() / exact.norm()
    # q, keys, the attended rows and the result are rounded to bf16, products are not
    assert 1e-5 < error < 0.02
    assert torch.equal(mixed, run(kind, hidden, torch.float32))


@pytest.mark.parametrize(
    ("hidden", "weights", "expected"),
    [
        (torch.float32, torch.bfloat16, r"\[T, 64\] bfloat16 like the weights"),
        (torch.float16, torch.float32, r"\[T, 64\] float32 or bfloat16"),
    ],
)
def test_other_pairs_of_dtypes_are_refused(hidden: torch.dtype, weights: torch.dtype, expected: str) -> None:
    with pytest.raises(ArgumentError, match=f"hidden_states: expected {expected}"):
        run_with(hidden, weights)


def run_with(hidden: torch.dtype, weights: torch.dtype) -> Tensor:
    layer, limits = GEOMETRY.layer(0), Limits(1, TOKENS, TOKENS)
    drawn = {name: torch.ones(shape, dtype=weights) for name, shape in weight_shapes(GEOMETRY, layer).items()}
    cast_weights = AttentionWeights.from_dict(drawn, GEOMETRY, layer)
    attention = DeepseekV4Attention(
        "0", GEOMETRY, 0, limits, ReferenceBackend(), cast_weights, workspace=WorkspaceManager()
    )
    with set_forward_context(None):
        return attention(torch.ones(1, GEOMETRY.hidden_size, dtype=hidden), torch.zeros(1, dtype=torch.int64))
