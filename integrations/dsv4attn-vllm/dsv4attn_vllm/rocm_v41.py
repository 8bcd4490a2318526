"""vLLM's DeepSeek-V4.1 layer on ROCm: its streams stay, its attention, insert and `wo_a` do not run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterMLAAttention
from vllm.models.deepseek_v41.attention import DeepseekV4Attention

from dsv4attn_vllm.attention_v41 import Dsv41Attention
from dsv4attn_vllm.cuda import chosen_class
from dsv4attn_vllm.rocm import refuse_monokernel

__all__ = ["ROCmAttention", "select_attention"]


class ROCmAttention(Dsv41Attention, DeepseekV41ROCMAiterMLAAttention):
    """The layer on ROCm."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        refuse_monokernel(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _alloc_attn_out(self, num_tokens: int, hidden_states: Tensor) -> Any:  # noqa: ANN401 - a tensor
        """Rows of bf16: on gfx950 vLLM's own kernels write fp8."""
        return DeepseekV4Attention._alloc_attn_out(self, num_tokens, hidden_states)  # noqa: SLF001 - of a base

    def _wo_b(self, z: Tensor) -> Tensor:
        return self._wo_b_after_wo_a(z)


def select_attention(vllm_config: Any) -> type[DeepseekV4Attention]:  # noqa: ANN401 - vLLM's VllmConfig
    """The class of the attention layers: vLLM's own if `--attention-backend` names one of vLLM's, else dsv4attn's."""
    theirs = "vllm.models.deepseek_v41.amd.model._select_dsv4_attn_cls"
    chosen: type[DeepseekV4Attention] = chosen_class(vllm_config, ROCmAttention, theirs)
    return chosen
