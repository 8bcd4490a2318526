"""The functions of SGLang that this wheel replaces, by their dotted paths."""

from __future__ import annotations

_OPS = "sglang.kernels.ops.attention"
CUDA = {
    f"{_OPS}.flash_mla_interface.flash_mla_with_kvcache": "flash_mla_with_kvcache",
    f"{_OPS}.flash_mla_interface.flash_mla_sparse_fwd": "flash_mla_sparse_fwd",
}
"""Functions of SGLang on NVIDIA's GPUs, and the names in `attention` of those that replace them."""
SM120 = {**CUDA, f"{_OPS}.flash_mla_sm120.flash_mla_with_kvcache_sm120": "flash_mla_with_kvcache"}
"""On sm_120 SGLang has a function of its own for decode and prefill."""
XPU = {
    "sgl_kernel.flash_mla_with_kvcache": "flash_mla_with_kvcache",
    "sgl_kernel.flash_mla_sparse_fwd": "flash_mla_sparse_fwd",
}
"""On Intel's GPUs the functions have the same names and arguments."""
INDEXER = {
    "sglang.srt.layers.attention.dsv4.metadata.PagedIndexerMetadata.__post_init__": "plan_selection",
    "sglang.srt.layers.attention.dsv4.indexer.C4IndexerBackendMixin.forward_c4_indexer": "forward_c4_indexer",
}
"""Methods of SGLang's indexer, and the names in `indexer` of the functions that replace them."""
GATHER = {f"{_OPS}.dsv4.dequant_k_cache.dequantize_k_cache_paged_dsv4": "dequantize_k_cache_paged_dsv4"}
"""The function that gathers the keys of a prompt, and its name in `gather`."""
