"""The plugin that vLLM loads: attention, KV insert and output projection of DeepSeek-V4 and V4.1 run on dsv4attn.

`register` is the entry point. vLLM calls it in every process, for every model, so it imports neither
torch nor vLLM's models: it tells vLLM's registry where the model classes are, and vLLM imports them only to serve such
a model.

    arguments     whether DeepSeek-V4 runs on dsv4attn, and refusals when vLLM has resolved its arguments
    guard         which versions of vLLM are served, refusals, the log
    internals     the names of vLLM that this package relies on, and their check
    model         the classes in the registry: vLLM's own, after the replacements of this platform
    replacements  which names in vLLM's modules are replaced, on each platform
    attention     what a layer runs on dsv4attn; cuda, rocm, xpu and cpu put it into vLLM's class of the platform
    metadata      vLLM's builders, with dsv4attn's metadata next to their own
    serving       the backend, limits and layouts of a model
    entries       files with the entries that tokens selected
    records       V4.1's own records on GPUs for which vLLM widens them
    parts         which parts around attention run on dsv4attn: compressor, indexer (with index_metadata), projection
                  and hyper_connections are named after them
"""

from __future__ import annotations

from dsv4attn_vllm.arguments import prepare
from dsv4attn_vllm.guard import GUARD

__all__ = ["ARCHITECTURES", "__version__", "register"]

__version__ = "0.1.0"

ARCHITECTURES = {
    "DeepseekV4ForCausalLM": "model:DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration": "model:DeepseekV4ForConditionalGeneration",
    "DeepSeekV4MTPModel": "model:DeepSeekV4MTP",
    "DSparkDraftModel": "model:DSparkDeepseekV4ForCausalLM",
    "DeepseekV41ForCausalLM": "model:DeepseekV41ForCausalLM",
    "DSparkV41DraftModel": "model:DSparkDeepseekV41ForCausalLM",
}
"""Architectures that are registered again, and the class of each one: a module of this package, and a name in it."""


def register() -> None:
    """Register the architectures with vLLM, unless `DSV4ATTN_VLLM=0`. May be called any number of times.

    Raises nothing about versions: other models must still be served. An untested vLLM is refused when it resolves the
    arguments of a DeepSeek-V4 model, or loads its class from `dsv4attn_vllm.model`.
    """
    if GUARD.is_off():
        return
    from vllm import ModelRegistry

    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, f"dsv4attn_vllm.{name}")
    prepare()
