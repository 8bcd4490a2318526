"""Other libraries' interfaces in front of this one: an engine switches by changing an import.

`dsv4attn.compat.flash_mla` has the names, signatures and meanings of DeepSeek's FlashMLA:

    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
    from dsv4attn.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Served: the sparse attention of DeepSeek-V4 (512 dims, 584-byte records or bf16 rows), any number of heads, any page
size, on every backend. Not served: dense attention and the record formats of other models; asking for them raises
`UnsupportedError`, which says what to do instead. Nothing in the package imports this one.
"""

from __future__ import annotations
