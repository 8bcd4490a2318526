"""vLLM's layer on a CPU."""

from __future__ import annotations

from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention

from dsv4attn_vllm.attention import Dsv4Attention


class CPUAttention(Dsv4Attention, DeepseekV4CPUAttention):
    """The layer on a CPU."""

    def _wrap_wo_a_process_weights_after_loading(self) -> None:
        """Pack nothing: `wo_a` runs on dsv4attn."""
