"""Plain torch on any device: the definition every other room is compared with.

Hardware: whatever torch runs on; chosen automatically on CPU only. Status: complete, and proven against a float64
oracle and Hugging Face transformers on CPU. It allocates temporaries and, on accelerators, synchronises with the host:
it is there to be right and to be read.
"""

from __future__ import annotations

from dsv4attn.core.contract import BackendInfo

INFO = BackendInfo(
    name="reference",
    factory="dsv4attn.backends.reference.launch:ReferenceBackend",
    summary="plain torch, any device; the definition of every step",
    options={"decode_indices": "dense", "prefill_indices": "dense", "prefill_keys": "gathered"},
)
