"""vLLM's layer on ROCm: its streams and fused projections stay, its attention, insert and `wo_a` do not run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention
from vllm.models.deepseek_v41.amd.rocm import DeepseekV41ROCMAiterMLAAttention
from vllm.models.deepseek_v41.attention import DeepseekV4Attention as V41Attention

from dsv4attn_vllm.arguments import refuse_monokernel
from dsv4attn_vllm.attention import Dsv4Attention, Dsv41Attention
from dsv4attn_vllm.cuda import chosen_class


class ROCmAttention(Dsv4Attention, DeepseekV4ROCMAiterMLAAttention):
    """The layer on ROCm."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        refuse_monokernel(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _prepare_fp8_wo_a(self) -> None:
        """Prepare nothing: `wo_a` runs on dsv4attn."""

    def _wo_b(self, z: Tensor) -> Tensor:
        if self._wo_b_scale is None:
            return self.wo_b(z)
        # vLLM has shuffled the weight for this product
        return self._bpre_attn_gemm(self.wo_b.weight, self._wo_b_scale, z, reduce_tp=True)


class V41ROCmAttention(Dsv41Attention, DeepseekV41ROCMAiterMLAAttention):
    """The layer of DeepSeek-V4.1 on ROCm."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        refuse_monokernel(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)

    def _alloc_attn_out(self, num_tokens: int, hidden_states: Tensor) -> Any:  # noqa: ANN401 - a tensor
        """Rows of bf16: on gfx950 vLLM's own kernels write fp8."""
        return V41Attention._alloc_attn_out(self, num_tokens, hidden_states)  # noqa: SLF001 - of a base

    def _wo_b(self, z: Tensor) -> Tensor:
        return self._wo_b_after_wo_a(z)


def select_v41_attention(vllm_config: Any) -> type:  # noqa: ANN401 - vLLM's VllmConfig
    """The class of V4.1's layers: vLLM's own if `--attention-backend` names one of vLLM's, else dsv4attn's."""
    engine_function = "vllm.models.deepseek_v41.amd.model._select_dsv4_attn_cls"
    return chosen_class(vllm_config, V41ROCmAttention, engine_function)
