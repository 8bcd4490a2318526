"""vLLM's layer on ROCm: its streams and fused projections stay, its attention, insert and `wo_a` do not run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.models.deepseek_v4.amd.rocm import DeepseekV4ROCMAiterMLAAttention

from dsv4attn_vllm.attention import Dsv4Attention
from dsv4attn_vllm.guard import RefusedError

__all__ = ["ROCmAttention", "refuse_monokernel"]


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


def refuse_monokernel(vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Raise RefusedError for `--monokernel`."""
    if vllm_config.kernel_config.monokernel:
        cure = "leave --monokernel out"
        raise RefusedError("--monokernel", expected="off: it runs whole layers itself", actual="on", cure=cure)
