"""The weight of a compressor's norm goes to the steps as it is, and in fp32 to those that take nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.backends._triton.layer.steps import TritonLayerSteps
from dsv4attn.core.contract.layer_ops import takes_bf16_norm
from dsv4attn.core.contract.torch_layer_steps import TorchLayerSteps
from dsv4attn.core.layer.compressor import Compressor
from dsv4attn.core.model.geometry import LayerKind, ModelGeometry
from dsv4attn.core.model.weights import CompressorWeights


class Older(TorchLayerSteps):
    """A class of the time when weights were fp32."""

    def compress_norm_rope_store(self, *given: Any, **options: Any) -> None:
        raise NotImplementedError


class Newer(Older):
    bf16_norm = True

    def compress_norm_rope_store(self, *given: Any, **options: Any) -> None:
        raise NotImplementedError


class Unrelated:
    """Steps that derive from nothing of ours."""


class Heir(Older):
    """Of an older class: the step is the older one's."""


@pytest.mark.parametrize(
    ("steps", "takes"),
    [
        (TorchLayerSteps, True),
        (TritonLayerSteps, True),
        (Older, False),
        (Heir, False),
        (Newer, True),
        (Unrelated, False),
    ],
)
def test_only_steps_that_say_so_take_bf16(steps: type, takes: bool) -> None:
    assert takes_bf16_norm(steps) is takes


def compressor(steps: Any, norm: Tensor) -> Any:
    layer = ModelGeometry.preset("deepseek-v4-flash").layer_of_kind(LayerKind.C128A)
    weights = CompressorWeights(torch.zeros(512, 8), torch.zeros(512, 8), torch.zeros(128, 512), norm)
    return Compressor(layer, weights, torch.zeros(1, 64), steps, lambda x, _: x)


@pytest.mark.parametrize("steps", [TorchLayerSteps, TritonLayerSteps, Older])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_converts_the_weight_only_for_older_steps(steps: Any, dtype: torch.dtype) -> None:
    norm = torch.randn(512).to(dtype)
    given = compressor(steps.__new__(steps), norm)._norm

    assert given.dtype == (torch.float32 if steps is Older else dtype)
    assert torch.equal(given, norm.to(given.dtype))
    # what is not converted is read in place, so that a weight may be written again
    assert (given.data_ptr() == norm.data_ptr()) is (given.dtype == dtype)
