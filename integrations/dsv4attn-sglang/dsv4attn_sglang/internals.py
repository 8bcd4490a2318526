"""The names of SGLang that this package hooks, calls or reads: one table, checked before attention is replaced.

SGLang's own hooks log what they do not find, and go on. So without this check a renamed function would leave SGLang's
attention in place, or fail in the first request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsv4attn.compat import flash_mla
from dsv4attn.integrations import engine_internals
from dsv4attn.integrations.engine_internals import Called, Internal, Named
from dsv4attn_sglang.guard import TESTED, RefusedError

__all__ = ["NEEDED", "OURS", "RUNNER", "TABLE", "check", "check_functions"]

TABLE: tuple[Internal, ...] = (
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
"""What every device needs. The functions that are replaced are those of `serving.targets`."""

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

OURS: Mapping[str, Callable[..., Any]] = {
    "flash_mla_with_kvcache": flash_mla.flash_mla_with_kvcache,
    "flash_mla_sparse_fwd": flash_mla.flash_mla_sparse_fwd,
}
"""Functions of dsv4attn that take what SGLang passes, by the names in `attention` of those that call them."""

NEEDED = {"flash_mla_with_kvcache": ("indices", "k_cache", "q"), "flash_mla_sparse_fwd": ("kv", "q")}
"""Arguments that functions of `attention` look at, by name."""


def check(version: str, runner: Any) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Raise RefusedError with everything that the installed SGLang, or the runner of a model, lacks.

    version: of that SGLang.
    """
    _refuse(version, [*engine_internals.lacking(TABLE, "sglang"), *_of_runner(runner)])


def check_functions(version: str, targets: Mapping[str, str]) -> None:
    """Raise RefusedError for functions that cannot be replaced. targets: see `serving.targets`."""
    _refuse(version, [*_of_functions(targets)])


def _refuse(version: str, missing: Sequence[str]) -> None:
    if missing:
        expected = "all names of SGLang that dsv4attn-sglang hooks, calls or reads"
        cure = f"install sglang=={TESTED[-1]}, or a dsv4attn-sglang that was tested with SGLang {version}"
        raise RefusedError(f"SGLang {version}", expected=expected, actual="; ".join(missing), cure=cure)


def _of_runner(runner: Any) -> Iterator[str]:  # noqa: ANN401
    for path in RUNNER:
        found = runner
        for name in path.split("."):
            if not hasattr(found, name):
                yield f"{type(runner).__name__}: the runner of the model has no {path}"
                break
            found = getattr(found, name)


def _of_functions(targets: Mapping[str, str]) -> Iterator[str]:
    """Functions that are not there, or take other arguments than dsv4attn's."""
    for target, name in targets.items():
        module, _, attribute = target.rpartition(".")
        function = Named(module, (attribute,))
        try:
            [*missing] = function.lacking()
        except engine_internals.LackingError as error:
            missing = [str(error)]
        if missing:
            yield from missing
            continue
        parameters = inspect.signature(getattr(function.find(), attribute)).parameters
        known = inspect.signature(OURS[name]).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            continue
        if unknown := [one for one in parameters if one not in known]:
            yield f"{target} takes {', '.join(unknown)}, which dsv4attn does not know"
        if absent := [one for one in NEEDED[name] if one not in parameters]:
            yield f"{target} does not take {', '.join(absent)}"
