"""The attention function with the dims of DeepSeek-V4-Flash, on the device that is here, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4attn.core.contract.backend import Rank
from dsv4attn.core.contract.device import DeviceFacts
from dsv4attn.core.model.geometry import ModelGeometry
from tests.backends.built_in import but_twins, infos, runs
from tests.parity import hf

pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers >= 5.23, which needs Python >= 3.11")

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICE = torch.device("cpu") if DEVICE is None else DEVICE
HERE = [name for name, info in infos().items() if runs(info, DeviceFacts.here(DEVICE))]
N, H, D, KEYS = 2, 64, 512, 301
ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 2**-9}
"""Most that an output may be off, relative to the largest: bf16 outputs and weights; fp32 products may be in TF32."""


class Layer(torch.nn.Module):
    """What the function reads of transformers' module."""

    def __init__(self) -> None:
        super().__init__()
        self.config = hf.released(ModelGeometry.preset("flash"))[0]
        self.sinks = torch.nn.Parameter(random(H, seed=4), requires_grad=False)
        self.num_key_value_groups = H


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def attention(backend: str | None) -> Any:
    from transformers import AttentionInterface

    from dsv4attn.integrations import transformers

    transformers.register(backend)
    return AttentionInterface()["dsv4attn"]


@pytest.mark.pairwise
@pytest.mark.parametrize("queries", [1, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", but_twins(None, *HERE))
def test_released_dims_on_this_device(name: str | None, dtype: torch.dtype, queries: int) -> None:
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward

    if name is not None and infos()[name].rank is not Rank.REFERENCE:
        pytest.importorskip("triton", reason="needs Triton")
    layer = Layer()
    q, key = random(N, queries, H, D, seed=1).to(dtype).transpose(1, 2), random(N, 1, KEYS, D, seed=2).to(dtype)
    mask = torch.where(random(N, 1, queries, KEYS, seed=3) > 0.5, 0.0, torch.finfo(dtype).min).to(dtype)
    double = SimpleNamespace(sinks=layer.sinks.double(), num_key_value_groups=H, training=False)
    want = eager_attention_forward(double, q.double(), key.double(), key.double(), mask.double(), scaling=D**-0.5)[0]
    got = attention(name)(layer, q, key, key, mask, scaling=D**-0.5, s_aux=layer.sinks)[0]
    attention(None)

    off = float((got - want).abs().max() / want.abs().max())
    print(f"{name} {off:.1e}")
    assert got.dtype == dtype
    assert off < ROUNDING[dtype]
