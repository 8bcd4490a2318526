"""The caches of `dsv4attn memory --engine vllm` are those that vLLM's own planner gives released models."""

from __future__ import annotations

import pytest
import torch
from dsv4attn_vllm.cuda import CUDAAttention
from engine import BEFORE_0_33, config_of, model_folder, planned_caches, world
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

from dsv4attn import Limits, ModelGeometry
from dsv4attn.selection import load_backend
from dsv4attn.serving.memory import Deployment, ModelSizes

POOL = 2**36


@pytest.mark.skipif(BEFORE_0_33, reason="vLLM 0.32 has other groups")
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_a_request_takes_the_blocks_that_vllm_plans(model: str) -> None:
    tokens, length = 2048, 4096
    geometry = ModelGeometry.preset(model)
    kinds = tuple(kind.value for kind, _ in geometry.layers)
    sizes = {"max_model_len": length, "max_num_batched_tokens": tokens, "max_num_seqs": 8}
    config = config_of(model_folder(kinds, max_position_embeddings=length), **sizes)
    with world(config):
        topk = torch.empty(config.scheduler_config.max_num_batched_tokens, 32, dtype=torch.int32)
        for i in range(len(kinds)):
            CUDAAttention(config, prefix=f"model.layers.{i}.attn", topk_indices_buffer=topk)
        plan = planned_caches(config, pages=None, memory=POOL)
        _, requests = get_kv_cache_capacity(config, plan)
    # on a CPU one step of uncut prompts, as many as the tokens of two steps of a GPU
    assert config.max_in_flight_tokens == 2 * tokens

    deployment = Deployment(geometry, ModelSizes.of(geometry), load_backend("reference"), vllm=True)
    planned = sum(deployment.plan(Limits(1, tokens, length)).caches.values())
    assert planned == pytest.approx(POOL / requests, rel=0.01)
