"""A process in which vLLM's engine serves the rounds of a scenario: `python worker.py SCENARIO.json RESULTS.pt`."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_DO_NOT_TRACK="1", VLLM_PLUGINS="dsv4attn")


def take_for(capability: str) -> None:
    """Let vLLM take the GPU for an older one. Its choices, and those of dsv4attn's plugin, are those of such a GPU."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    known = DeviceCapability(*map(int, capability.split(".")))
    type(current_platform).get_device_capability = classmethod(lambda *_, **__: known)


def sleep(llm: Any) -> None:
    """Give back the memory of weights, which are kept on the CPU, and of caches."""
    llm.sleep(level=1)


def wake(llm: Any) -> None:
    """Take the memory again."""
    llm.wake_up()


def reload(llm: Any) -> None:
    """Drop weights and caches, and read the weights from the checkpoint again."""
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])


ACTIONS = {"sleep": sleep, "wake": wake, "reload": reload}


def main(scenario: dict[str, Any], out: str) -> None:
    """Serve the rounds, and save answers of each, metrics, and seconds until the engine was ready.

    scenario: environment, variables. capability: of the GPU that vLLM sees, or empty. is_v41: whether the model is
    DeepSeek-V4.1, whose hyper-connections are in torch where TileLang is not installed. options: of `LLM`. rounds: each
    the name of an action, or prompts (lists of tokens), tokens to generate, of_prompts and together: whether all
    prompts are given to the engine at once.
    """
    os.environ.update(scenario["environment"])
    if scenario["capability"]:
        take_for(scenario["capability"])
    if scenario["is_v41"] and find_spec("tilelang") is None:
        import torch_mhc

        torch_mhc.install()
    import torch
    from small_model import answers
    from vllm import LLM

    begin = time.perf_counter()
    llm = LLM(**scenario["options"])
    ready, results = time.perf_counter() - begin, []
    for step in scenario["rounds"]:
        if isinstance(step, str):
            ACTIONS[step](llm)
        else:
            results.append(answers(llm, step["prompts"], step["tokens"], of_prompts=step["of_prompts"]))
    if "DSV4ATTN_VLLM_ENTRIES" in os.environ:
        from dsv4attn_vllm.entries import write_entries

        llm.collective_rpc(write_entries)
    metrics: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            metrics[metric.name] = metrics.get(metric.name, 0) + metric.value
    torch.save({"rounds": results, "metrics": metrics, "ready": ready}, out)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
