"""vLLM's layer on CUDA, and on platforms that take vLLM's modules for CUDA."""

from __future__ import annotations

from typing import Any

from vllm.models.deepseek_v4.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.attention import DeepseekV4Attention as V41Attention

from dsv4attn_vllm.arguments import backend_of_vllm, is_used, log_unused
from dsv4attn_vllm.attention import Dsv4Attention, Dsv41Attention
from dsv4attn_vllm.guard import LOG
from dsv4attn_vllm.replacements import original


class CUDAAttention(Dsv4Attention, DeepseekV4Attention):
    """The layer on CUDA."""


class V41CUDAAttention(Dsv41Attention, V41Attention):
    """The layer of DeepSeek-V4.1 on CUDA."""


def select_attention(vllm_config: Any) -> type:  # noqa: ANN401 - vLLM's VllmConfig
    """The class of the attention layers: dsv4attn's, or vLLM's own, as `chosen_class` says."""
    engine_function = "vllm.models.deepseek_v4.nvidia.model._select_dsv4_attn_cls"
    return chosen_class(vllm_config, CUDAAttention, engine_function)


def select_v41_attention(vllm_config: Any) -> type:  # noqa: ANN401 - as above
    """The same for DeepSeek-V4.1."""
    engine_function = "vllm.models.deepseek_v41.nvidia.model._select_dsv4_attn_cls"
    return chosen_class(vllm_config, V41CUDAAttention, engine_function)


def chosen_class(vllm_config: Any, adapter_class: type, engine_function: str) -> type:  # noqa: ANN401 - as above
    """The class of this package, or what vLLM's own function chooses.

    It chooses if `--attention-backend` names one of vLLM's, and where dsv4attn is not used: see `arguments`.
    engine_function: the name of vLLM's function, "module.name".
    """
    requested = backend_of_vllm(vllm_config)
    if requested is None and is_used(vllm_config):
        return adapter_class
    if requested is None:
        log_unused()
    else:
        LOG.warning("not used, because --attention-backend asks for %s", requested)
    chosen: type = original(engine_function)(vllm_config)
    return chosen
