"""AMD GPUs through Triton: gfx942 (MI300) and gfx950 (MI350), and any other that ROCm drives.

Chosen automatically there. By name it also runs on any other GPU that Triton drives, or on a CPU under Triton's
interpreter (TRITON_INTERPRET=1). Indices are ragged: one list, and the start of each row. Decode reads fp8 pages inside
the attention loop, each cache in its own dialect; prefill attends over gathered rows.

Status: correct in the interpreter and on an NVIDIA H200; compiled for gfx942 and gfx950, it has never run on AMD
hardware. `dsv4attn conform rocm` writes a certificate on such a card.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.support import index_notes, support
from dsv4attn.core.contract.backend import API_VERSION, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.hookspecs import hookimpl

INFO = BackendInfo(
    name="rocm",
    api=API_VERSION,
    factory="dsv4attn.backends.rocm.launch:RocmBackend",
    support=support,
    notes=index_notes,
    layer_ops=LAYER_PARTS,
    summary="AMD GPUs through Triton; ragged decode on fp8 pages, ragged prefill on gathered rows",
    native=("hip",),
    runs_on=("cuda", "hip", "xpu", "cpu"),
    rank=Rank.VENDOR,
    packages=("torch",),
    options={"tuning": "auto", "deterministic": False, "projection": "bf16"},
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """Return the descriptor of the `rocm` backend."""
    return [INFO]
