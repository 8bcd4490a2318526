"""The DeepSeek-V4 models in vLLM's registry: vLLM's own classes, whose layers are built with dsv4attn's attention.

vLLM imports this module when it serves such a model, and not before. The import raises RefusedError for a vLLM that is
not served, and replaces the names of this platform.
"""

from __future__ import annotations

from dsv4attn_vllm import internals
from dsv4attn_vllm.guard import GUARD, LOG
from dsv4attn_vllm.replacements import PLATFORMS, platform_name, replace
from dsv4attn_vllm.steps import MHC, asked

_version = GUARD.check()
_mhc = MHC in (asked() or ())
internals.check(_version, internals.groups_of("v4", platform_name(), mhc=_mhc))

from vllm.models.deepseek_v4 import (  # noqa: E402 - a vLLM that is not served may lack these names
    DeepseekV4ForCausalLM,
    DeepseekV4ForConditionalGeneration,
    DeepSeekV4MTP,
    DSparkDeepseekV4ForCausalLM,
)

__all__ = [
    "DSparkDeepseekV4ForCausalLM",
    "DeepSeekV4MTP",
    "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration",
]

_wanted = PLATFORMS[platform_name()]
_names = [*map(str, _wanted)]
if _mhc:
    from dsv4attn_vllm.hyper_connections import install

    # all or nothing: what may be refused comes before the first name that is replaced
    for _one in _wanted:
        _one.resolve()
    _names += install(platform_name())
replace(_wanted)
_replaced = ", ".join(_names)
LOG.info("DeepSeek-V4 attention of vLLM %s runs on dsv4attn; replaced %s", _version, _replaced)
