"""The environment of these tests: vLLM's own Python on a CPU, without anything that vLLM compiles.

Faked, for all tests:
- torch.cuda.Event does nothing. vLLM makes events in the constructors of its layers, and a CPU has no streams to order.
- vLLM looks at a model's class in a copy of this process. Its own, as in test_plugin.py, would import it all again.
- The linears multiply by torch (`cpu_linear`); vLLM's are compiled.
- Compressors, insert and index kernels run in Triton's interpreter (TRITON_INTERPRET=1).
- There is no engine process, no worker and no graph, but for served.py, which has an engine. `engine.py` has a
  scheduler of its own in a few lines, and calls what vLLM's runner calls: its cache planner, its allocation of
  caches, its metadata builders, its layers.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.update(
    # what vLLM remembers of model classes, which takes it a process of its own to find out
    VLLM_CACHE_ROOT=str(Path(sys.prefix) / "vllm-cache" / version("vllm")),
    # the import of vLLM makes this folder, before a fixture could name another temporary folder
    TORCHINDUCTOR_CACHE_DIR=str(Path(sys.prefix) / "inductor-cache"),
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
from vllm.model_executor.models import registry

from integrations.interpreter import round_as_torch
from tests.fast_interpreter.patches import patch_interpreter
from tests.fixtures import own_temporary_folder, seeded  # noqa: F401 - fixtures

patch_interpreter()


def look_in_copy(look: Callable[[], Any]) -> Any:
    """Call a function in a copy of this process, which it may change, and return its result."""
    result, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(look()))
    process.start()
    theirs.close()
    try:
        return result.recv()
    finally:
        process.join()


registry._run_in_subprocess = look_in_copy


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


SLOW = frozenset(
    """
    test_a_prompt_in_chunks_then_drafts_and_one_rejected[triton]
    test_a_step_is_what_own_builder_and_oracle_say[deepseek_v4 triton decode]
    test_a_step_is_what_own_builder_and_oracle_say[deepseek_v4 triton prefill]
    test_index_keys_of_4_bits[triton]
    test_memory_of_every_microbatch_and_lane_is_reserved_before_vllm_locks_it[deepseek_v4 triton]
    test_outputs_are_bit_for_bit_those_of_own_layers[cuda-triton-decode]
    test_outputs_are_bit_for_bit_those_of_own_layers[cuda-triton-prefill]
    test_outputs_do_not_depend_on_whose_compressor_runs[triton]
    test_prompts_without_images_and_decodes_after_one_have_plain_windows[triton]
    test_rejected_drafts_leave_nothing_behind[triton]
    test_rows_of_one_request_share_keys_as_vllm_lists_them[triton]
    test_rows_of_padding_change_nothing[cuda-triton-padding]
    test_selected_are_the_entries_of_the_largest_scores[triton-decode]
    test_selected_are_the_entries_of_vllms_largest_scores[triton-decode]
    test_selected_are_the_entries_of_vllms_largest_scores[triton-prefill]
    test_states_and_entries_are_vllms_byte_for_byte[triton-decode]
    test_tokens_of_an_image_see_all_of_it[triton]
    test_verification_of_drafts_is_what_own_builder_and_oracle_say[triton]
    test_weights_that_are_loaded_again_are_used[triton]
    test_whole_layers_are_bit_for_bit_dsv4attns_own[none-triton]
    test_whole_layers_are_bit_for_bit_dsv4attns_own[triton]
    """.strip()
    .replace("\n    ", "\n")
    .splitlines()
)
"""Tests whose seam the same test covers on `reference`, or with a mixed step. In each file others run on `triton`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them."""
    for item in items:
        if item.name in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend of dsv4attn, asked for by the variable that a user sets."""
    from whole import use_backend

    use_backend(monkeypatch, request.param)
    return request.param


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend "reference", asked for as `backend` does."""
    from whole import use_backend

    use_backend(monkeypatch, "reference")


@pytest.fixture
def config() -> Iterator[Any]:
    """VLLM's configuration of a small DeepSeek-V4, in its process groups."""
    from engine import config_of, world

    with world(config := config_of()):
        yield config
