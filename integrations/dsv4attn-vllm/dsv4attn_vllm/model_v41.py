"""The DeepSeek-V4.1 models in vLLM's registry; see `model`."""

from __future__ import annotations

from dsv4attn_vllm import internals
from dsv4attn_vllm.guard import GUARD, LOG
from dsv4attn_vllm.replacements import V41_PLATFORMS, platform_name, replace

_version = GUARD.check()
_wanted = V41_PLATFORMS.get(platform_name(), ())
if _wanted:
    internals.check(_version, internals.groups_of("v41", platform_name()))

from vllm.models.deepseek_v41 import (  # noqa: E402 - a vLLM that is not served may lack these names
    DeepseekV41ForCausalLM,
    DSparkDeepseekV4ForCausalLM,
)

__all__ = ["DSparkDeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"]

replace(_wanted)
if _wanted:
    _replaced = ", ".join(map(str, _wanted))
    LOG.info("DeepSeek-V4.1 attention of vLLM %s runs on dsv4attn; replaced %s", _version, _replaced)
else:
    LOG.info("not used: vLLM has no DeepSeek-V4.1 layers for this platform (%s)", platform_name())
