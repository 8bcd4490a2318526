"""DeepSeek-V4 attention with one device-neutral core and one thin backend per accelerator.

The public names are loaded on first use: importing this package imports neither torch nor triton nor numpy.
Exceptions are in `dsv4attn.errors`; all of them are `Dsv4AttnError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4attn.core.attention.forward_mqa import forward_mqa
    from dsv4attn.core.attention.mla_attention import DeepseekV4MLAAttention
    from dsv4attn.core.attention.projection import output_projection
    from dsv4attn.core.cache.convert import check_compatible, convert_cache
    from dsv4attn.core.cache.layer_caches import DeepseekV4Caches, LayerCaches
    from dsv4attn.core.cache.layout import Fp8Format, KVCacheLayout, PagedKVCache
    from dsv4attn.core.cache.ownership import Ownership
    from dsv4attn.core.context_parallel.context import ContextParallel
    from dsv4attn.core.context_parallel.metadata import OwnedMetadataBuilder
    from dsv4attn.core.context_parallel.reshard import reshard_cache
    from dsv4attn.core.contract.backend import AttentionCall, Backend, BackendInfo
    from dsv4attn.core.contract.device import DeviceFacts
    from dsv4attn.core.contract.limits import Limits
    from dsv4attn.core.contract.problem import CacheFacts, Problem, Reason
    from dsv4attn.core.layer.attention_layer import DeepseekV4Attention
    from dsv4attn.core.layer.decoder_layer import DeepseekV4DecoderLayer, DeepseekV41DecoderLayer
    from dsv4attn.core.layer.hyper_connections import HyperConnections
    from dsv4attn.core.memory.plan import plan_workspace
    from dsv4attn.core.memory.workspace import WorkspaceManager, WorkspacePlan, current_workspace_manager, use_workspace
    from dsv4attn.core.metadata.builder import MetadataBuilder
    from dsv4attn.core.metadata.forward_context import set_forward_context
    from dsv4attn.core.metadata.metadata import AttentionMetadata, Batch, CompressedMetadata, WindowMetadata
    from dsv4attn.core.model.geometry import LayerGeometry, LayerKind, ModelGeometry
    from dsv4attn.core.model.quantized_weight import BlockScaledWeight
    from dsv4attn.core.model.rope import cos_sin_cache
    from dsv4attn.core.model.weights import AttentionWeights, HyperConnectionWeights
    from dsv4attn.core.torch_ops.arguments import EntryNorm, MixWeights, StatePages, TokenMap
    from dsv4attn.core.torch_ops.indexer import IndexQuery, fp8_mqa_logits, fp8_paged_mqa_logits
    from dsv4attn.core.torch_ops.merge import apply_sink, merge_lse
    from dsv4attn.errors import Dsv4AttnError
    from dsv4attn.selection import explain, load_backend, resolve, select_backend
    from dsv4attn.serving.allocator import BlockAllocator, BlockTable
    from dsv4attn.serving.cache_manager import CacheManager
    from dsv4attn.serving.entry_records import EntryRecords
    from dsv4attn.single_layer import SingleLayer

__version__ = "0.1.0"

__all__ = [
    "AttentionCall",
    "AttentionMetadata",
    "AttentionWeights",
    "Backend",
    "BackendInfo",
    "Batch",
    "BlockAllocator",
    "BlockScaledWeight",
    "BlockTable",
    "CacheFacts",
    "CacheManager",
    "CompressedMetadata",
    "ContextParallel",
    "DeepseekV4Attention",
    "DeepseekV4Caches",
    "DeepseekV4DecoderLayer",
    "DeepseekV4MLAAttention",
    "DeepseekV41DecoderLayer",
    "DeviceFacts",
    "Dsv4AttnError",
    "EntryNorm",
    "EntryRecords",
    "Fp8Format",
    "HyperConnectionWeights",
    "HyperConnections",
    "IndexQuery",
    "KVCacheLayout",
    "LayerCaches",
    "LayerGeometry",
    "LayerKind",
    "Limits",
    "MetadataBuilder",
    "MixWeights",
    "ModelGeometry",
    "OwnedMetadataBuilder",
    "Ownership",
    "PagedKVCache",
    "Problem",
    "Reason",
    "SingleLayer",
    "StatePages",
    "TokenMap",
    "WindowMetadata",
    "WorkspaceManager",
    "WorkspacePlan",
    "__version__",
    "apply_sink",
    "check_compatible",
    "convert_cache",
    "cos_sin_cache",
    "current_workspace_manager",
    "explain",
    "forward_mqa",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "load_backend",
    "merge_lse",
    "output_projection",
    "plan_workspace",
    "reshard_cache",
    "resolve",
    "select_backend",
    "set_forward_context",
    "use_workspace",
]

# the module of each name. `__all__` and the block above have the same names for type checkers; a test compares them.
_MODULE_OF = {
    name: module
    for module, names in {
        "serving.allocator": ("BlockAllocator", "BlockTable"),
        "core.layer.attention_layer": ("DeepseekV4Attention",),
        "serving.cache_manager": ("CacheManager",),
        "serving.entry_records": ("EntryRecords",),
        "single_layer": ("SingleLayer",),
        "core.model.weights": ("AttentionWeights", "HyperConnectionWeights"),
        "core.layer.decoder_layer": ("DeepseekV4DecoderLayer", "DeepseekV41DecoderLayer"),
        "core.layer.hyper_connections": ("HyperConnections",),
        "core.metadata.builder": ("MetadataBuilder",),
        "core.cache.layer_caches": ("DeepseekV4Caches", "LayerCaches"),
        "core.metadata.forward_context": ("set_forward_context",),
        "core.context_parallel.context": ("ContextParallel",),
        "core.context_parallel.metadata": ("OwnedMetadataBuilder",),
        "core.cache.ownership": ("Ownership",),
        "core.context_parallel.reshard": ("reshard_cache",),
        "core.contract.backend": ("AttentionCall", "Backend", "BackendInfo"),
        "core.cache.convert": ("check_compatible", "convert_cache"),
        "core.torch_ops.arguments": ("EntryNorm", "MixWeights", "StatePages", "TokenMap"),
        "core.torch_ops.indexer": ("IndexQuery", "fp8_mqa_logits", "fp8_paged_mqa_logits"),
        "core.contract.device": ("DeviceFacts",),
        "core.attention.forward_mqa": ("forward_mqa",),
        "core.model.geometry": ("LayerGeometry", "LayerKind", "ModelGeometry"),
        "core.attention.mla_attention": ("DeepseekV4MLAAttention",),
        "core.cache.layout": ("Fp8Format", "KVCacheLayout", "PagedKVCache"),
        "core.contract.limits": ("Limits",),
        "core.torch_ops.merge": ("apply_sink", "merge_lse"),
        "core.metadata.metadata": ("AttentionMetadata", "Batch", "CompressedMetadata", "WindowMetadata"),
        "core.memory.plan": ("plan_workspace",),
        "core.contract.problem": ("CacheFacts", "Problem", "Reason"),
        "core.attention.projection": ("output_projection",),
        "core.model.rope": ("cos_sin_cache",),
        "core.model.quantized_weight": ("BlockScaledWeight",),
        "core.memory.workspace": ("WorkspaceManager", "WorkspacePlan", "current_workspace_manager", "use_workspace"),
        "errors": ("Dsv4AttnError",),
        "selection": ("explain", "load_backend", "resolve", "select_backend"),
    }.items()
    for name in names
}

if not TYPE_CHECKING:
    # hidden from type checkers, for which it would mean that every name exists.
    def __getattr__(name: str) -> object:
        """Import the module of a public name, and store the value for later accesses."""
        if name not in _MODULE_OF:
            from dsv4attn.core.metadata import RENAMED

            if name not in RENAMED:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            from traceback import extract_stack

            # `from dsv4attn import` asks through this function of importlib, and hides the text of an AttributeError
            is_import = extract_stack(limit=2)[0].name == "_handle_fromlist"
            error = ImportError if is_import else AttributeError
            raise error(f"{__name__}.{name} has another name now -> write {RENAMED[name]}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not, and all other names of the module."""
    return sorted({*globals(), *__all__})
