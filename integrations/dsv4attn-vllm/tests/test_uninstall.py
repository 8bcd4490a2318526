"""The wheel, built, installed and uninstalled by pip: what vLLM's registry and modules have before and after."""

from __future__ import annotations

from pathlib import Path

from integrations.environment import check_wheel

CODE = """
from importlib.metadata import entry_points
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
model = ModelRegistry.models["DeepseekV4ForCausalLM"]
model.load_model_cls()
from vllm.models.deepseek_v4.cpu import model as layers
points = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == "dsv4attn"]
result = [points, model.module_name, layers.DeepseekV4CPUAttention.__module__]
"""
"""In a process of vLLM: entry points, and the modules of the model and of its layers."""


def test_an_installed_wheel_is_used_and_an_uninstalled_one_leaves_nothing(tmp_path: Path) -> None:
    used = [["dsv4attn_vllm:register"], "dsv4attn_vllm.model", "dsv4attn_vllm.cpu"]
    unused = [[], "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.cpu.cpu_sparse"]

    check_wheel("dsv4attn-vllm", tmp_path, CODE, used=used, unused=unused)
