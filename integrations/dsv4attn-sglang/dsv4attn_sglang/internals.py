"""The names of SGLang that this package hooks, calls or reads: one table, checked before attention is replaced.

SGLang's own hooks log what they do not find, and go on. So without this check a renamed function would leave SGLang's
attention in place, or fail in the first request.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from attrs import frozen

from dsv4attn.integrations import engine_internals
from dsv4attn.integrations.engine_internals import Called, Internal, Named, Stored
from dsv4attn_sglang.guard import GUARD
from dsv4attn_sglang.hooks import CUDA, SM120, XPU

__all__ = ["NEEDED", "RUNNER", "TABLE", "Hooked", "check", "check_functions"]

_NAMES: tuple[Internal, ...] = (
    Named("sglang.srt.managers.scheduler", ("Scheduler",)),
    Named("sglang.srt.model_executor.model_runner_components.attention_backend_setup", ("build_attention_backends",)),
    Called(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup",
        "build_attention_backends",
        keywords=("model_runner",),
    ),
    Called("sglang.srt.plugins.hook_registry:HookRegistry", "register", 3, ("source",)),
    Called("sglang.srt.plugins.hook_registry:HookRegistry", "apply_hooks"),
    Called("sglang.srt.plugins.hook_registry", "HookSource", 2),
    Named("sglang.srt.plugins.hook_registry:HookType", ("AROUND", "BEFORE")),
    Called("sglang.srt.layers.attention.dsv4.sparse_prefill_utils", "use_dsv4_q8kv8_sparse_prefill", 1),
    Named("sglang.srt.layers.attention.dsv4.sparse_prefill_utils", ("DSV4_Q8KV8_PREFILL_ENV",)),
    Called("sglang.srt.runtime_context", "get_exec"),
    Called("sglang.srt.runtime_context", "get_parallel"),
    Called("sglang.srt.runtime_context", "get_platform"),
    Called("sglang.srt.utils", "is_cuda"),
    Called("sglang.srt.utils", "is_hip"),
    Called("sglang.srt.utils", "is_xpu"),
)
RUNNER = (
    "decode_attention_backend_str",
    "device",
    "model_config.context_len",
    "model_config.head_dim",
    "model_config.hf_text_config",
    "model_config.num_attention_heads",
    "page_size",
    "prefill_attention_backend_str",
    "token_to_kv_pool._unified_kv",
    "token_to_kv_pool.compressed_kv_layout",
    "token_to_kv_pool.get_swa_key_page_size",
    "token_to_kv_pool.kv_layout",
    "token_to_kv_pool.present_ratios",
    "token_to_kv_pool.uniform_fp8",
)
"""Attributes of SGLang's ModelRunner that are read."""

NEEDED = {"flash_mla_with_kvcache": ("indices", "k_cache", "q"), "flash_mla_sparse_fwd": ("kv", "q")}
"""Arguments that functions of `attention` look at, by name."""


@frozen
class Hooked(Internal):
    """A function of SGLang that a function of `attention` replaces. It has no argument that dsv4attn does not know.

    function: its name. by: the name in `attention`, and in dsv4attn.compat.flash_mla, of what replaces it.
    """

    use = "replaces"

    function: str
    by: str

    @classmethod
    def of(cls, targets: Mapping[str, str]) -> tuple[Hooked, ...]:
        """An entry for each target, as `serving.targets` has them."""
        paths = [(*target.rpartition("."), by) for target, by in targets.items()]
        return tuple(cls(module, function, by) for module, _, function, by in paths)

    def lacking(self) -> Iterator[str]:
        """See `Internal`."""
        function = getattr(self.find(), self.function, None)
        target = f"{self.owner}.{self.function}"
        if function is None:
            yield f"{target} is not there"
            return
        parameters = inspect.signature(function).parameters
        known = inspect.signature(getattr(import_module("dsv4attn.compat.flash_mla"), self.by)).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        if unknown := [name for name in parameters if name not in known]:
            yield f"{target} takes {', '.join(unknown)}, which dsv4attn does not know"
        if absent := [name for name in NEEDED[self.by] if name not in parameters]:
            yield f"{target} does not take {', '.join(absent)}"

    def names(self) -> tuple[str, ...]:
        """See `Internal`."""
        return (self.function,)


TABLE: Mapping[str, tuple[Internal, ...]] = {
    "all": _NAMES,
    "runner": (Stored("sglang.srt.model_executor.model_runner:ModelRunner", RUNNER),),
    "cuda": Hooked.of(CUDA),
    "sm120": Hooked.of({target: by for target, by in SM120.items() if target not in CUDA}),
    "xpu": Hooked.of(XPU),
}
"""What each part of this package needs: all devices, the runner of a model, and the functions replaced on a device."""


def check(version: str, runner: Any) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Raise RefusedError with everything that the installed SGLang, or the runner of a model, lacks.

    version: of that SGLang.
    """
    GUARD.refuse_missing(version, [*engine_internals.lacking(TABLE["all"], "sglang"), *_of_runner(runner)])


def check_functions(version: str, targets: Mapping[str, str]) -> None:
    """Raise RefusedError for functions that cannot be replaced. targets: see `serving.targets`."""
    GUARD.refuse_missing(version, engine_internals.lacking(Hooked.of(targets), "sglang"))


def _of_runner(runner: Any) -> Iterator[str]:  # noqa: ANN401
    for path in RUNNER:
        owner = runner
        for name in path.split("."):
            if not hasattr(owner, name):
                yield f"{type(runner).__name__}: the runner of the model has no {path}"
                break
            owner = getattr(owner, name)
