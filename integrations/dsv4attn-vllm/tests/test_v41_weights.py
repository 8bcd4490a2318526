"""Weights of the output projection of DeepSeek-V4.1's layers, as checkpoints have them; see v41.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from dsv4attn_vllm.cuda import V41CUDAAttention
from engine import world
from test_whole_layers import blocks_of_fp8
from v41 import v41_config
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.models.deepseek_v41 import DeepseekV4FP8Config
from whole import projected

from dsv4attn.core.model.quantized_weight import dense_weight

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [32, 32],
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
}
"""Of the released model."""


@pytest.fixture
def config() -> Iterator[VllmConfig]:
    vllm_config = v41_config()
    with world(vllm_config):
        yield vllm_config


def groups_of_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and an exponent for each 32 columns of a row."""
    groups = weight.float().view(len(weight), -1, 32)
    exponents = torch.ceil(torch.log2(groups.abs().amax(-1) / 448))
    codes = (groups / 2.0 ** exponents[..., None]).to(torch.float8_e4m3fn).view(weight.shape)
    return codes, (exponents + 127).to(torch.uint8)


@pytest.mark.parametrize("columns", [32, 128])
def test_an_fp8_wo_a_is_converted_and_again_at_its_address(config: VllmConfig, columns: int) -> None:
    """With a scale for each 32 columns of a row, as vLLM keeps the released 32 x 32, or for each 128 x 128."""
    layer = V41CUDAAttention(config, prefix="model.layers.0.attn")
    o, positions = torch.randn(5, 4, 512).bfloat16(), torch.arange(5) * 37
    torch.nn.init.normal_(layer.wo_b.weight, std=0.05)
    layer.wo_b.cpu_linear = torch.nn.functional.linear
    addresses = set()
    for scale in (0.05, 0.2):
        weight = torch.randn(layer.wo_a.weight.shape, dtype=torch.float32) * scale
        codes, scales = groups_of_fp8(weight) if columns == 32 else blocks_of_fp8(weight)
        factors = 2.0 ** (scales.double() - 127) if columns == 32 else scales.double().repeat_interleave(128, 0)
        wide = codes.double() * factors.repeat_interleave(columns, 1)
        if not addresses:
            layer.wo_a.weight = torch.nn.Parameter(codes, requires_grad=False)
            layer.wo_a.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
            layer.wo_a.weight_block_size = [1, 32] if columns == 32 else [128, 128]
        else:
            layer.wo_a.weight.data.copy_(codes)
            layer.wo_a.weight_scale.data.copy_(scales)

        layer.process_weights_after_loading(torch.bfloat16)

        expected = projected(layer, o, positions, wide)
        error = (layer._o_proj(o, positions).double() - expected).norm() / expected.norm()
        assert error < 0.01
        addresses.add(dense_weight(layer._weight()).data_ptr())
    assert len(addresses) == 1


def test_a_released_wo_a_is_loaded_by_vllm_and_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faked: the kernels of vLLM's MXFP8 linears, of which it has none for a CPU; they prepare nothing."""
    kernel = SimpleNamespace(process_weights_after_loading=lambda _: None)
    monkeypatch.setattr(modelopt, "select_linear_kernel", lambda *_, **__: kernel)
    monkeypatch.setattr(modelopt, "expose_input_quant_key", lambda *_: None)
    config = v41_config()
    config.quant_config = DeepseekV4FP8Config.from_config(FP8)
    with world(config):
        layer = V41CUDAAttention(config, prefix="model.layers.0.attn")
        codes = torch.randn(layer.wo_a.weight.shape, dtype=torch.float32).to(torch.float8_e4m3fn)
        exponents = torch.randint(100, 130, (codes.shape[0] // 32, codes.shape[1] // 32), dtype=torch.uint8)
        for parameter, loaded in (("weight", codes), ("weight_scale", exponents.view(torch.float8_e8m0fnu))):
            parameter_of_layer = getattr(layer.wo_a, parameter)
            parameter_of_layer.weight_loader(parameter_of_layer, loaded)

        process_weights_after_loading(torch.nn.ModuleDict({"attn": layer}), config.model_config, torch.device("cpu"))

        factors = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 0).repeat_interleave(32, 1)
        assert torch.equal(layer._weight(), (codes.float() * factors).bfloat16())
        assert torch.equal(layer.wo_a.weight.view(torch.uint8), codes.view(torch.uint8))
