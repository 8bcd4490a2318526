"""The environment of these tests: vLLM's own Python on a CPU, without anything that vLLM compiles.

Faked, for all tests:
- torch.cuda.Event does nothing. vLLM makes events in the constructors of its layers, and a CPU has no streams to order.
- The linears multiply by torch (`cpu_linear`); vLLM's are compiled.
- Compressors, insert and index kernels run in Triton's interpreter (TRITON_INTERPRET=1).
- There is no engine process, no worker and no graph. `engine.py` has a scheduler of its own in a few lines, and calls
  what vLLM's runner calls: its cache planner, its allocation of caches, its metadata builders, its layers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.update(
    # what vLLM remembers of model classes, which takes it a process of its own to find out
    VLLM_CACHE_ROOT=str(Path(sys.prefix) / "vllm-cache"),
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

import pytest  # noqa: E402 - after the environment
import torch  # noqa: E402

# the repository's own tests make the interpreter many times faster
sys.path.append(str(Path(__file__).parents[3]))
from tests.interpreter import patch_interpreter  # noqa: E402

patch_interpreter()


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
    from dsv4attn_vllm import serving

    monkeypatch.setenv("DSV4ATTN_BACKEND", request.param)
    serving._serving.cache_clear()
    return request.param
