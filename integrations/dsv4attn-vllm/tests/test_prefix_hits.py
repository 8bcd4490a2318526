"""The shortest prefix that a request finds in vLLM's cache, by vLLM's own planner of caches and scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine import BEFORE_0_33, world
from models import V4, V41, Model
from scheduling import Requests
from served import configured_with_amx
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention as V4FlashMLA
from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention as V41FlashMLA
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils import deep_gemm

LONGEST = 1024
OF_V41 = {"limit_mm_per_prompt": {"image": 0}}
OWN = {V4.name: V4FlashMLA, V41.name: V41FlashMLA}
"""vLLM's layer with its own attention."""


def found_of(lengths: tuple[int, ...], model: Model, layer: type, drafts: int, **options: Any) -> list[int]:
    """What a later request finds of prefixes of these lengths."""
    with configured_with_amx():
        config = model.config(max_model_len=LONGEST + 64, max_num_batched_tokens=2048, **options)
        draft = drafts and replace(config, model_config=config.speculative_config.draft_model_config)
    if model is V41:
        # as on this GPU; for a CPU vLLM sets 16
        config.cache_config.block_size = 64
    with world(config):
        topk = torch.empty(2048, config.model_config.hf_config.index_topk, dtype=torch.int32)
        for i in range(model.layers + bool(drafts)):
            of_layer = draft if i == model.layers else config
            layer(of_layer, prefix=f"model.layers.{i}.attn", topk_indices_buffer=topk)

        requests = Requests(config, pages=4000)

        def hit(length: int) -> int:
            prompt = [length, *range(1, length)]
            requests.run({f"{length} first": prompt}, tokens=2)
            [found] = requests.run({f"{length} second": [*prompt, *range(5000, 5040)]}, tokens=2)[0].values()
            return found

        return [hit(length) for length in lengths]


@pytest.mark.skipif(BEFORE_0_33, reason="vLLM 0.32 has other groups")
@pytest.mark.parametrize(
    ("model", "drafts", "shortest", "hits"),
    [
        (V4, "", 257, [0, 256, 256, 512, 768]),
        (V4, "mtp", 257, [0, 256, 256, 512, 768]),
        (V4, "dspark", 257, [0, 256, 256, 512, 768]),
        (V41, "", 192, [0, 64, 320, 384, 896]),
        (V41, "dspark", 192, [0, 64, 320, 384, 896]),
    ],
    ids=str,
)
def test_a_prefix_hits_from_the_length_from_which_it_hits_in_vllm(
    model: Model, drafts: str, shortest: int, hits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_, **__: DeviceCapability(9, 0)))
    monkeypatch.setattr(platform, "is_device_capability_family", classmethod(lambda _, family, *__: family == 90))
    monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: True)
    number = {"": 0, "mtp": 3, "dspark": 5}[drafts]
    options = OF_V41 if model is V41 else {}
    if drafts:
        options = options | {"speculative_config": {"method": drafts, "num_speculative_tokens": number}}

    lengths = shortest - 1, shortest, 500, 513, LONGEST
    found = [found_of(lengths, model, layer, number, **options) for layer in (model.layer, OWN[model.name])]

    assert found == [hits] * 2
