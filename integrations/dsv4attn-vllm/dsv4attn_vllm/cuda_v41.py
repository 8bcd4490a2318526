"""vLLM's DeepSeek-V4.1 layer on CUDA."""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v41.attention import DeepseekV4Attention

from dsv4attn_vllm.attention_v41 import Dsv41Attention
from dsv4attn_vllm.cuda import chosen_class

__all__ = ["CUDAAttention", "select_attention"]


class CUDAAttention(Dsv41Attention, DeepseekV4Attention):
    """The layer on CUDA."""


def select_attention(vllm_config: Any) -> type[DeepseekV4Attention]:  # noqa: ANN401 - vLLM's VllmConfig
    """The class of the attention layers: vLLM's own if `--attention-backend` names one of vLLM's, else dsv4attn's."""
    theirs = "vllm.models.deepseek_v41.nvidia.model._select_dsv4_attn_cls"
    chosen: type[DeepseekV4Attention] = chosen_class(vllm_config, CUDAAttention, theirs)
    return chosen
