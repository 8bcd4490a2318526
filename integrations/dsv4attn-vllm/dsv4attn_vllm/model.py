"""The DeepSeek-V4 and V4.1 models in vLLM's registry: vLLM's own classes, whose layers are built with dsv4attn.

vLLM imports this module, and looks up a class in it, when it serves such a model, and not before. The first look-up of
a class raises RefusedError for a vLLM that is not served, and replaces the names of this platform.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vllm.config import get_current_vllm_config_or_none

from dsv4attn_vllm import internals
from dsv4attn_vllm.arguments import is_used, log_unused, share_request
from dsv4attn_vllm.entries import folder_of_entries
from dsv4attn_vllm.guard import GUARD, LOG
from dsv4attn_vllm.parts import MHC, requested_parts
from dsv4attn_vllm.replacements import PLATFORMS, V41_PLATFORMS, platform_name, replace, restore

V4_CLASSES = {
    "DeepseekV4ForCausalLM": "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration": "DeepseekV4ForConditionalGeneration",
    "DeepSeekV4MTP": "DeepSeekV4MTP",
    "DSparkDeepseekV4ForCausalLM": "DSparkDeepseekV4ForCausalLM",
}
"""Classes of this module, and their names in `vllm.models.deepseek_v4`."""

V41_CLASSES = {
    "DeepseekV41ForCausalLM": "DeepseekV41ForCausalLM",
    "DSparkDeepseekV41ForCausalLM": "DSparkDeepseekV4ForCausalLM",
}
"""Classes of this module, and their names in `vllm.models.deepseek_v41`."""


def __getattr__(name: str) -> object:
    """Return vLLM's class, after the replacements for its model."""
    for model, package, classes in (("v4", "deepseek_v4", V4_CLASSES), ("v41", "deepseek_v41", V41_CLASSES)):
        if name in classes:
            _looked_up.add(model)
            activate(model, get_current_vllm_config_or_none())
            # a vLLM that is not served may lack the class
            return getattr(import_module(f"vllm.models.{package}"), classes[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_looked_up: set[str] = set()
"""Models whose classes were looked up in this process."""
_active: set[str] = set()
"""Models whose names are replaced."""


def follow(model: str, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's VllmConfig
    """Activate again for another configuration, if this process has looked up a class: vLLM remembers the class."""
    if model in _looked_up:
        activate(model, vllm_config)


def activate(model: str, vllm_config: Any = None) -> None:  # noqa: ANN401 - as above
    """Check the installed vLLM and replace its names for the layers of a model, "v4" or "v41".

    vllm_config: None if it is not known.
    A second call changes nothing, unless dsv4attn is not used for this configuration: then vLLM gets its names back.
    Raises RefusedError, with nothing replaced, for a vLLM that is not served and for a variable with a wrong value.
    """
    platform, is_v41 = platform_name(), model == "v41"
    title = "DeepSeek-V4.1" if is_v41 else "DeepSeek-V4"
    replacements = (V41_PLATFORMS if is_v41 else PLATFORMS).get(platform, ())
    if not replacements:
        LOG.info("not used: vLLM has no %s layers for this platform (%s)", title, platform)
        return
    if not is_used(vllm_config):
        log_unused()
        if model in _active:
            restore(replacements)
            _active.discard(model)
        return
    # drafts do not inherit the argument, and this process may have been started without the variable
    share_request(vllm_config)
    if model in _active:
        return
    version = GUARD.check()
    runs_mhc = not is_v41 and MHC in (requested_parts() or ())
    options = {"mhc": runs_mhc, "entries": bool(folder_of_entries())}
    internals.check(version, internals.groups_of(model, platform, version=version, **options))
    names = [*map(str, replacements)]
    if runs_mhc:
        from dsv4attn_vllm.hyper_connections import install

        # everything that may be refused comes before the first name that is replaced
        for replacement in replacements:
            replacement.resolve()
        names += install(platform)
    replace(replacements)
    _active.add(model)
    LOG.info("%s attention of vLLM %s runs on dsv4attn; replaced %s", title, version, ", ".join(names))
