"""The names of SGLang that this package hooks, calls or reads: one table, checked before attention is replaced.

SGLang's own hooks log what they do not find, and go on. So without this check a renamed function would leave SGLang's
attention in place, or fail in the first request.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

from attrs import frozen

from dsv4attn.integrations import engine_internals
from dsv4attn.integrations.engine_internals import Called, Internal, Named, Overridden, Stored, Written
from dsv4attn_sglang.functions import CUDA, SM120, XPU
from dsv4attn_sglang.guard import GUARD

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
    Named("sglang.srt.plugins.hook_registry:HookType", ("AROUND", "BEFORE", "REPLACE")),
    Named(
        "sglang.srt.environ:Envs",
        "SGLANG_DSV4_FP4_DEQUANT SGLANG_FP8_PAGED_MQA_LOGITS_TORCH SGLANG_OPT_USE_AITER_INDEXER "
        "SGLANG_OPT_USE_TILELANG_INDEXER",
    ),
    Stored("sglang.srt.configs.model_config:ModelConfig", "is_fp4_experts"),
    Called("sglang.srt.layers.moe.utils", "get_moe_runner_backend"),
    Named("sglang.srt.layers.moe.utils:MoeRunnerBackend", ("is_humming",)),
    Named("sglang.srt.environ", "envs"),
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
    "hisparse_coordinator",
    "model_config.context_len",
    "model_config.head_dim",
    "model_config.hf_text_config",
    "model_config.num_attention_heads",
    "page_size",
    "prefill_attention_backend_str",
    "token_to_kv_pool._unified_kv",
    "token_to_kv_pool.compressed_kv_layout",
    "token_to_kv_pool.get_index_k_with_scale_buffer",
    "token_to_kv_pool.get_swa_key_page_size",
    "token_to_kv_pool.kv_layout",
    "token_to_kv_pool.layer_mapping",
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


_DSV4, _BACKEND = "sglang.srt.layers.attention.dsv4", "sglang.srt.layers.attention.deepseek_v4_backend"
_INDEXER: tuple[Internal, ...] = (
    Named(f"{_DSV4}.metadata:PagedIndexerMetadata", "__post_init__ max_compressed_seq_len"),
    Stored(f"{_DSV4}.metadata:PagedIndexerMetadata", "compressed_page_size compressed_seq_lens page_size page_table"),
    Written(f"{_DSV4}.metadata:PagedIndexerMetadata", "deep_gemm_metadata topk_metadata use_topk_v2"),
    Overridden(
        f"{_DSV4}.indexer:C4IndexerBackendMixin", "dsv4attn_sglang.indexer:forward_c4_indexer", "forward_c4_indexer"
    ),
    Called(
        f"{_DSV4}.indexer:C4IndexerBackendMixin",
        "_forward_prepare_multi_stream",
        keywords="x q_lora c4_indexer positions forward_batch alt_streams q_lora_ready",
    ),
    Called(
        f"{_DSV4}.indexer:C4IndexerBackendMixin",
        "_forward_prepare_normal",
        keywords="x q_lora c4_indexer positions forward_batch skip_compressor q_lora_quant",
    ),
    Stored(f"{_DSV4}.indexer:C4IndexerBackendMixin", "debug_use_external_c4_sparse_indices"),
    Stored(f"{_DSV4}.indexer:C4Indexer", "layer_id"),
    Stored(f"{_BACKEND}:DeepseekV4AttnBackend", "forward_metadata token_to_kv_pool"),
    Named(f"{_BACKEND}:DSV4Metadata", "core_metadata"),
    Stored(f"{_BACKEND}:DSV4Metadata", "indexer_metadata"),
    Named(f"{_BACKEND}:DSV4AttnMetadata", "positions"),
    Stored(f"{_BACKEND}:DSV4AttnMetadata", "c4_sparse_page_indices c4_sparse_raw_indices"),
    Called("sglang.srt.state_capturer.indexer_topk", "get_global_indexer_capturer"),
    Called("sglang.srt.state_capturer.base:BaseTopkCapturer", "capture", 2),
)

TABLE: Mapping[str, tuple[Internal, ...]] = {
    "all": _NAMES,
    "runner": (Stored("sglang.srt.model_executor.model_runner:ModelRunner", RUNNER),),
    "cuda": Hooked.of(CUDA),
    "sm120": Hooked.of({target: by for target, by in SM120.items() if target not in CUDA}),
    "xpu": Hooked.of(XPU),
    "indexer": _INDEXER,
    "gather": (
        Called(
            "sglang.kernels.ops.attention.dsv4.dequant_k_cache",
            "dequantize_k_cache_paged_dsv4",
            2,
            ("page_size", "out", "layout"),
        ),
        Named("sglang.kernels.ops.attention.dsv4.kv_layout:KVLayout", ("V4",)),
    ),
    "records": (
        Called("sglang.srt.mem_cache.deepseek_v4_memory_pool", "select_dsv4_kv_layout"),
        Named("sglang.kernels.ops.attention.dsv4.kv_layout", ("KVLayout",)),
        Named("sglang.kernels.ops.attention.dsv4.kv_layout:KVLayout", ("V41_FP4_NEW", "V41_NEW")),
        Named("sglang.srt.environ:Envs", ("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "SGLANG_DSV4_KV_LAYOUT")),
    ),
}
"""What each part of this package needs: all devices, the runner of a model, the functions replaced on a device, and
the parts of `parts`."""


def parts_of(version: str) -> tuple[str, ...]:
    """The parts of TABLE that can be looked up in a version of SGLang without a device.

    Not the runner of a model: it has attributes of attributes, which only an object has. Not the functions for Intel
    GPUs, which are those of another package.
    """
    return tuple(part for part in TABLE if part not in ("runner", "xpu"))


def check(version: str, runner: Any) -> None:  # noqa: ANN401 - SGLang's ModelRunner
    """Raise RefusedError with everything that the installed SGLang, or the runner of a model, lacks.

    version: of that SGLang.
    """
    GUARD.refuse_missing(version, [*engine_internals.lacking(TABLE["all"], "sglang"), *_of_runner(runner)])


def check_functions(version: str, targets: Mapping[str, str], parts: Iterable[str] = ()) -> None:
    """Raise RefusedError for functions that cannot be replaced. targets: see `serving.targets`. parts: of TABLE.

    Those of `parts`, and "records".
    """
    of_parts = [entry for part in sorted(parts) for entry in TABLE[part]]
    GUARD.refuse_missing(version, engine_internals.lacking([*Hooked.of(targets), *of_parts], "sglang"))


def _of_runner(runner: Any) -> Iterator[str]:  # noqa: ANN401
    for path in RUNNER:
        owner = runner
        for name in path.split("."):
            if not hasattr(owner, name):
                yield f"{type(runner).__name__}: the runner of the model has no {path}"
                break
            owner = getattr(owner, name)
