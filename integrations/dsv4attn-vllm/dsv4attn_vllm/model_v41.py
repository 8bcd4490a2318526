"""The DeepSeek-V4.1 models in vLLM's registry; see `model`."""

from __future__ import annotations

from vllm.logger import init_logger

from dsv4attn_vllm import guard, internals
from dsv4attn_vllm.replacements import V41_PLATFORMS, platform_name, replace

_version = guard.check()
_wanted = V41_PLATFORMS.get(platform_name(), ())
if _wanted:
    internals.check(_version, internals.groups_of("v41", platform_name()))

from vllm.models.deepseek_v41 import (  # noqa: E402 - a vLLM that is not served may lack these names
    DeepseekV41ForCausalLM,
    DSparkDeepseekV4ForCausalLM,
)

__all__ = ["DSparkDeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"]

# below "vllm", so that it is shown where and how vLLM's own log is
_log = init_logger("vllm.dsv4attn")
replace(_wanted)
if _wanted:
    _replaced = ", ".join(map(str, _wanted))
    _log.info_once(
        "dsv4attn-vllm: DeepSeek-V4.1 attention of vLLM %s runs on dsv4attn; replaced %s", _version, _replaced
    )
else:
    _log.info_once("dsv4attn-vllm: not used: vLLM has no DeepSeek-V4.1 layers for this platform (%s)", platform_name())
