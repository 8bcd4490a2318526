"""vLLM's layer on Intel GPUs."""

from __future__ import annotations

from vllm.models.deepseek_v4.xpu.xpu_sparse import DeepseekV4XPUAttention

from dsv4attn_vllm.attention import Dsv4Attention


class XPUAttention(Dsv4Attention, DeepseekV4XPUAttention):
    """The layer on XPU."""
