"""The environment of these tests: vLLM's own Python on a CPU, without anything that vLLM compiles.

Faked, for all tests:
- torch.cuda.Event does nothing. vLLM makes events in the constructors of its layers, and a CPU has no streams to order.
- The linears multiply by torch (`cpu_linear`); vLLM's are compiled.
- Compressors, insert and index kernels run in Triton's interpreter (TRITON_INTERPRET=1).
- There is no engine process, no worker and no graph, but for served.py, which has an engine. `engine.py` has a
  scheduler of its own in a few lines, and calls what vLLM's runner calls: its cache planner, its allocation of
  caches, its metadata builders, its layers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(
    # what vLLM remembers of model classes, which takes it a process of its own to find out
    VLLM_CACHE_ROOT=str(Path(sys.prefix) / "vllm-cache" / version("vllm")),
    VLLM_TARGET_DEVICE="cpu",
    # set and empty: vLLM keeps Triton enabled on a machine without a driver
    CUDA_VISIBLE_DEVICES="",
    TRITON_INTERPRET="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_PLUGINS="dsv4attn",
)
for name in [name for name in os.environ if name.startswith("DSV4ATTN_")]:
    del os.environ[name]

import numpy as np
import pytest
import torch

# the repository's own tests make the interpreter many times faster
sys.path.append(str(Path(__file__).parents[3]))
from integrations.interpreter import round_as_torch
from tests.fast_interpreter.patches import patch_interpreter

patch_interpreter()


def multiply_bf16_by_value() -> None:
    """Make the interpreter's matrix product take operands in bf16 by their values. It takes their bits for integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.name != "bf16":
            return operand
        return interpreter.TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)


round_as_torch("fp8e4nv", "bf16")
multiply_bf16_by_value()


class NoEvent:
    """An event of a device without streams."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, *args: object) -> None:
        """Do nothing."""

    def wait(self, *args: object) -> None:
        """Do nothing."""


torch.cuda.Event = NoEvent


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend of dsv4attn, asked for by the variable that a user sets."""
    from whole import use_backend

    use_backend(monkeypatch, request.param)
    return request.param


@pytest.fixture
def config() -> Iterator[Any]:
    """VLLM's configuration of a small DeepSeek-V4, in its process groups."""
    from engine import config_of, world

    with world(config := config_of()):
        yield config
