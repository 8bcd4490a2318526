"""Intel GPUs through Triton: Arc, Battlemage, Data Center GPU Max.

Chosen automatically there; asked for by name, also any other GPU that Triton drives, or a CPU under Triton's
interpreter (TRITON_INTERPRET=1). Decode reads fp8 pages inside the attention loop, or, option `decode=gathered`,
copies what a row selects to bf16 rows first. Prefill attends over gathered rows.

Status: correct in the interpreter and, in both forms of decode, on an NVIDIA H200; it has never run on Intel hardware.
`dsv4attn conform xpu` is how someone with a card reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.support import index_notes, support
from dsv4attn.core.contract.backend import API_VERSION, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.hookspecs import hookimpl

INFO = BackendInfo(
    name="xpu",
    api=API_VERSION,
    factory="dsv4attn.backends.xpu.launch:XpuBackend",
    support=support,
    notes=index_notes,
    layer_ops=LAYER_PARTS,
    summary="Intel GPUs through Triton; decode on fp8 pages or on gathered rows, prefill on gathered rows",
    native=("xpu",),
    runs_on=("cuda", "hip", "xpu", "cpu"),
    rank=Rank.VENDOR,
    packages=("torch",),
    options={"decode": "auto", "tuning": "auto", "deterministic": False, "projection": "bf16"},
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """The Intel backend."""
    return [INFO]
