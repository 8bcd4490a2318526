"""DeepSeek-V4 attention with one device-neutral core and one thin backend per accelerator.

The public names are loaded on first use: importing this package imports neither torch nor triton nor numpy.
Exceptions are in `dsv4attn.errors`; all of them are `Dsv4AttnError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4attn.core.allocator import BlockAllocator, BlockTable
    from dsv4attn.core.attention import DeepseekV4Attention
    from dsv4attn.core.builder import MetadataBuilder
    from dsv4attn.core.cache_manager import CacheManager
    from dsv4attn.core.caches import DeepseekV4Caches, LayerCaches
    from dsv4attn.core.context import set_forward_context
    from dsv4attn.core.context_parallel import ContextParallel, OwnedMetadataBuilder, Ownership, reshard_cache
    from dsv4attn.core.contract import AttentionCall, Backend, BackendInfo
    from dsv4attn.core.convert import check_compatible, convert_cache
    from dsv4attn.core.decoder_layer import DeepseekV4DecoderLayer, DeepseekV41DecoderLayer
    from dsv4attn.core.definitions import IndexQuery, fp8_mqa_logits, fp8_paged_mqa_logits
    from dsv4attn.core.device import DeviceFacts
    from dsv4attn.core.forward import forward_mqa
    from dsv4attn.core.geometry import LayerGeometry, LayerKind, ModelGeometry
    from dsv4attn.core.hyper_connections import HyperConnections
    from dsv4attn.core.layer import DeepseekV4MLAAttention
    from dsv4attn.core.layer_weights import AttentionWeights, HyperConnectionWeights
    from dsv4attn.core.layout import Fp8Format, KVCacheLayout, PagedKVCache
    from dsv4attn.core.limits import Limits
    from dsv4attn.core.merge import apply_sink, merge_lse
    from dsv4attn.core.metadata import AttentionMetadata, Batch, DeepseekSparseSWAMetadata, FlashMLASparseMetadata
    from dsv4attn.core.problem import CacheFacts, Problem, Reason
    from dsv4attn.core.projection import output_projection
    from dsv4attn.core.rope import cos_sin_cache
    from dsv4attn.core.weights import BlockScaledWeight
    from dsv4attn.core.workspace import WorkspaceManager, WorkspacePlan, current_workspace_manager, use_workspace
    from dsv4attn.core.workspace_plan import plan_workspace
    from dsv4attn.errors import Dsv4AttnError
    from dsv4attn.selection import explain, load_backend, resolve, select_backend

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
    "ContextParallel",
    "DeepseekSparseSWAMetadata",
    "DeepseekV4Attention",
    "DeepseekV4Caches",
    "DeepseekV4DecoderLayer",
    "DeepseekV4MLAAttention",
    "DeepseekV41DecoderLayer",
    "DeviceFacts",
    "Dsv4AttnError",
    "FlashMLASparseMetadata",
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
    "ModelGeometry",
    "OwnedMetadataBuilder",
    "Ownership",
    "PagedKVCache",
    "Problem",
    "Reason",
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
        "core.allocator": ("BlockAllocator", "BlockTable"),
        "core.attention": ("DeepseekV4Attention",),
        "core.cache_manager": ("CacheManager",),
        "core.layer_weights": ("AttentionWeights", "HyperConnectionWeights"),
        "core.decoder_layer": ("DeepseekV4DecoderLayer", "DeepseekV41DecoderLayer"),
        "core.hyper_connections": ("HyperConnections",),
        "core.builder": ("MetadataBuilder",),
        "core.caches": ("DeepseekV4Caches", "LayerCaches"),
        "core.context": ("set_forward_context",),
        "core.context_parallel": ("ContextParallel", "OwnedMetadataBuilder", "Ownership", "reshard_cache"),
        "core.contract": ("AttentionCall", "Backend", "BackendInfo"),
        "core.convert": ("check_compatible", "convert_cache"),
        "core.definitions": ("IndexQuery", "fp8_mqa_logits", "fp8_paged_mqa_logits"),
        "core.device": ("DeviceFacts",),
        "core.forward": ("forward_mqa",),
        "core.geometry": ("LayerGeometry", "LayerKind", "ModelGeometry"),
        "core.layer": ("DeepseekV4MLAAttention",),
        "core.layout": ("Fp8Format", "KVCacheLayout", "PagedKVCache"),
        "core.limits": ("Limits",),
        "core.merge": ("apply_sink", "merge_lse"),
        "core.metadata": ("AttentionMetadata", "Batch", "DeepseekSparseSWAMetadata", "FlashMLASparseMetadata"),
        "core.workspace_plan": ("plan_workspace",),
        "core.problem": ("CacheFacts", "Problem", "Reason"),
        "core.projection": ("output_projection",),
        "core.rope": ("cos_sin_cache",),
        "core.weights": ("BlockScaledWeight",),
        "core.workspace": ("WorkspaceManager", "WorkspacePlan", "current_workspace_manager", "use_workspace"),
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
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names, loaded or not, and all other names of the module."""
    return sorted({*globals(), *__all__})
