"""The wheel, built, installed and uninstalled by pip: what vLLM's registry and modules have before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from integrations.environment import Environment, check_wheel

CODE = """
import json, sys
from importlib.metadata import entry_points
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import ModelRegistry
model = ModelRegistry.models["DeepseekV4ForCausalLM"]
model.load_model_cls()
from vllm.models.deepseek_v4.cpu import model as layers
own = sys.modules.get("dsv4attn_vllm")
points = [point.value for point in entry_points(group="vllm.general_plugins") if point.name == "dsv4attn"]
print()
print(json.dumps([own and own.__file__, points, model.module_name, layers.DeepseekV4CPUAttention.__module__]))
"""


def observed(environment: Environment) -> list[Any]:
    """What a fresh process of vLLM has: the file of this package, entry points, modules of the model and its layers."""
    return list(json.loads(environment.run(CODE).splitlines()[-1]))


def test_an_installed_wheel_is_used_and_an_uninstalled_one_leaves_nothing(tmp_path: Path) -> None:
    used: list[object] = [["dsv4attn_vllm:register"], "dsv4attn_vllm.model", "dsv4attn_vllm.cpu"]
    unused: list[object] = [[], "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.cpu.cpu_sparse"]

    check_wheel("dsv4attn-vllm", tmp_path, observed, used=used, unused=unused)
