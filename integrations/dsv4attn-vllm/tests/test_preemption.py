"""The scenario "preemption" of on_gpu/ does preempt, by vLLM's own planner of caches and scheduler, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dsv4attn_vllm.cuda import CUDAAttention
from engine import config_of, planned_caches, world
from on_gpu.scenarios import FEW_PAGES, GROWING, SIZES
from scheduling import Requests
from served import configured_with_amx
from small_model import LAYER_TYPES, configuration, prompt_of, write_as_released

PAGES = FEW_PAGES["num_gpu_blocks_override"]
LIMITS = {name: value for name, value in FEW_PAGES.items() if name != "num_gpu_blocks_override"}


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def config(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Any]:
    """VLLM's configuration of the scenario, with its layers. On a GPU vLLM schedules one step ahead (async)."""
    configuration(SIZES).save_pretrained(tmp_path)
    write_as_released(tmp_path)
    with configured_with_amx():
        config = config_of(str(tmp_path), **LIMITS)
    with world(config):
        topk = torch.empty(LIMITS["max_num_batched_tokens"], SIZES["index_topk"], dtype=torch.int32)
        for i in range(len(LAYER_TYPES)):
            CUDAAttention(config, prefix=f"model.layers.{i}.attn", topk_indices_buffer=topk)
        # vLLM switches it off on a CPU
        config.scheduler_config.async_scheduling = request.param
        yield config


def preemptions(config: Any, pages: int, prompts: Any, tokens: int) -> int:
    """How often vLLM's scheduler preempts a request. Every step generates a token for each request in it."""
    requests = {str(i): prompt for i, prompt in enumerate(prompts)}
    return Requests(config, pages).run(requests, tokens)[1]


def test_requests_that_grow_are_preempted(config: Any) -> None:
    """With a few pages more or less too. With many pages they are not."""
    few = [preemptions(config, pages, GROWING.prompts, GROWING.tokens) for pages in (PAGES - 15, PAGES, PAGES + 10)]

    assert min(few) >= 2
    assert preemptions(config, 2 * PAGES, GROWING.prompts, GROWING.tokens) == 0


def test_the_planner_says_of_other_pools_what_it_said_on_a_gpu(config: Any) -> None:
    """On an H100 vLLM refused 110 pages with this length, and preempted none of four requests in 250 pages."""
    prompts = [prompt_of(length) for length in (252, 253, 254, 255)]

    if config.scheduler_config.async_scheduling:
        with pytest.raises(ValueError, match="estimated maximum model length is 240"):
            planned_caches(config, 110)
    assert preemptions(config, 250, prompts, 32) == 0
