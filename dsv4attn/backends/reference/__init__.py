"""Plain torch on any device: the definition every other backend is compared with.

Hardware: whatever torch runs on; chosen automatically on CPU only. Status: complete, and proven against a float64
oracle and Hugging Face transformers on CPU. It allocates temporaries and, on accelerators, synchronises with the host:
it is there to be right and to be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends.reference.support import support
from dsv4attn.core.contract.backend import API_VERSION, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.hookspecs import hookimpl

INFO = BackendInfo(
    name="reference",
    api=API_VERSION,
    factory="dsv4attn.backends.reference.launch:ReferenceBackend",
    support=support,
    summary="plain torch, any device; the definition of every step",
    native=("cpu",),
    rank=Rank.REFERENCE,
    packages=("torch",),
    options={
        "decode_indices": "dense",
        "prefill_indices": "dense",
        "prefill_keys": "gathered",
        "deterministic": False,
        "raw_q": False,
    },
    layer_ops=LAYER_PARTS,
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """The only backend of this folder."""
    return [INFO]
