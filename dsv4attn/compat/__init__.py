"""Interfaces of other libraries on the backends of this one: an engine switches by changing an import.

`dsv4attn.compat.flash_mla` has the names, signatures and meanings of DeepSeek's FlashMLA:

    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
    from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Served: the sparse attention of DeepSeek-V4 and V4.1 (512 dims, records of 584, 528 and 288 bytes, or bf16 rows), any
number of heads, any page size, on every backend. Not served: dense attention and the record formats of other models;
asking for them raises `UnsupportedError`, whose message has the cure. No other module of the package imports this one.

Functions that their owners wrote for one kind of device run on the backend for that device, with its default options:
`vllm_xpu`, `vllm_rocm`, `vllm_rocm_ragged` and `vllm_rocm_output` have vLLM's functions for Intel and AMD GPUs,
`flashinfer_sm120` has FlashInfer's wrapper for SM120. These backends come from the registry, by name: no module here
imports the folder of a device.
"""

from __future__ import annotations
