"""The entry point, the registry, the switches: in processes of their own, as vLLM starts them.

A process takes ten seconds to import vLLM, so each test asks one process several things.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

from engine import model_folder


def run(path: Path, code: str, **variables: str) -> tuple[Any, str]:
    """Run a file in a fresh process: the last line that it printed, read as JSON, and all that it printed."""
    path.write_text(f"import json, sys\n{code}\n")
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(path.parent), **variables}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


def test_the_distribution_has_one_entry_point() -> None:
    points = [point for point in entry_points(group="vllm.general_plugins") if point.name == "dsv4attn"]

    assert [point.value for point in points] == ["dsv4attn_vllm:register"]


def test_an_engine_finds_the_models_by_name_and_its_layers_are_replaced_once(tmp_path: Path) -> None:
    """What a start of the engine does: arguments, a process that looks at the model class, the class itself."""
    code = f"""
from vllm.plugins import load_general_plugins
load_general_plugins()
from dsv4attn_vllm import ARCHITECTURES, register
register()
register()
heavy = [name for name in ("dsv4attn.selection", "dsv4attn_vllm.model") if name in sys.modules]
from vllm.engine.arg_utils import EngineArgs
arguments = EngineArgs(model={model_folder()!r}, skip_tokenizer_init=True, load_format="dummy", max_model_len=1024)
config = arguments.create_engine_config()
from vllm import ModelRegistry
models = [ModelRegistry.models[name] for name in ARCHITECTURES]
classes = [model.load_model_cls().__module__ for model in models]
from vllm.models.deepseek_v4.cpu import model
print()
print(json.dumps([heavy, [m.module_name for m in models], classes, model.DeepseekV4CPUAttention.__module__]))
"""
    (heavy, modules, classes, attention), log = run(tmp_path / "main.py", code)

    assert heavy == []
    assert modules == ["dsv4attn_vllm.model"] * 6
    assert [module.split(".")[2] for module in classes] == ["deepseek_v4"] * 4 + ["deepseek_v41"] * 2
    assert attention == "dsv4attn_vllm.cpu"
    # the process that vLLM starts to look at the class has the plugin too
    assert [path.name for path in (tmp_path / "modelinfos").iterdir()] == [
        "dsv4attn_vllm-model-DeepseekV4ForCausalLM.json"
    ]
    assert log.count(f"DeepSeek-V4 attention of vLLM {version('vllm')} runs on dsv4attn; replaced") == 1
    assert "replaced vllm.models.deepseek_v4.cpu.model.DeepseekV4CPUAttention" in log
    assert "not used: vLLM has no DeepSeek-V4.1 layers for this platform (cpu)" in log


def test_without_the_plugin_vllm_is_as_it_was(tmp_path: Path) -> None:
    """An entry point that vLLM does not load is what an uninstalled wheel leaves; a switch does the same."""
    code = """
import os
from vllm.plugins import load_general_plugins
load_general_plugins()
ours = "dsv4attn_vllm" in sys.modules
os.environ["DSV4ATTN_VLLM"] = "0"
import dsv4attn_vllm
dsv4attn_vllm.register()
from vllm import ModelRegistry
found = ModelRegistry.models["DeepseekV4ForCausalLM"]
found.load_model_cls()
from vllm.models.deepseek_v4.cpu import model
print()
whole = "dsv4attn.selection" in sys.modules
print(json.dumps([ours, found.module_name, model.DeepseekV4CPUAttention.__module__, whole]))
"""
    said, _ = run(tmp_path / "main.py", code, VLLM_PLUGINS="")

    assert said == [False, "vllm.models.deepseek_v4", "vllm.models.deepseek_v4.cpu.cpu_sparse", False]


def test_a_spawned_worker_has_the_plugin_and_refuses_an_untested_vllm(tmp_path: Path) -> None:
    untested = f"{version('vllm')}.post9+cu130"
    code = """
UNTESTED = NAME
import multiprocessing, os
def work(queue):
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from dsv4attn.integrations import engines
    from vllm import ModelRegistry
    engines.version = lambda name: UNTESTED
    assert ModelRegistry.models["LlamaForCausalLM"].module_name.startswith("vllm.")
    model = ModelRegistry.models["DSparkDraftModel"]
    try:
        model.load_model_cls()
    except RuntimeError as error:
        queue.put(str(error))
    os.environ["DSV4ATTN_VLLM_ANY_VERSION"] = "1"
    queue.put(model.load_model_cls().__module__)
    from vllm.models.deepseek_v4.cpu import model
    queue.put(model.DeepseekV4CPUAttention.__module__)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    said = [queue.get(timeout=300) for _ in range(3)]
    process.join()
    print()
    print(json.dumps(said))
""".replace("NAME", repr(untested), 1)
    (refused, *tried), _ = run(tmp_path / "main.py", code)

    assert refused == (
        f"dsv4attn-vllm: version of vLLM: expected 0.32.0 or 0.33.0, got {untested} -> install vllm==0.33.0, set "
        "DSV4ATTN_VLLM_ANY_VERSION=1 to try this version, or set DSV4ATTN_VLLM=0 to run vLLM's own attention"
    )
    assert tried == ["vllm.models.deepseek_v4.cpu.dspark", "dsv4attn_vllm.cpu"]
