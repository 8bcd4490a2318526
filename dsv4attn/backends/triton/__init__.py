"""Triton on pages: any device that Triton drives and that has no backend of its own.

Hardware: NVIDIA from sm_80 on, AMD, Intel; chosen automatically there, below vendors' backends; asked for by name, also
a CPU under Triton's interpreter (TRITON_INTERPRET=1). Both phases read fp8 pages inside the attention loop, so nothing
is gathered. Status: correct in the interpreter and on an NVIDIA H200; compiled for, and untested on, everything else.
`dsv4attn conform triton` is how someone with another card reports.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4attn.backends._triton.support import notes_of_sums, support
from dsv4attn.core.contract.backend import API_VERSION, LAYER_PARTS, BackendInfo, Rank
from dsv4attn.hookspecs import hookimpl

INFO = BackendInfo(
    name="triton",
    api=API_VERSION,
    factory="dsv4attn.backends.triton.launch:GenericBackend",
    support=support,
    notes=notes_of_sums,
    layer_ops=LAYER_PARTS,
    summary="Triton, any GPU it drives; fp8 pages read inside the attention loop",
    native=("cuda", "hip", "xpu"),
    runs_on=("cuda", "hip", "xpu", "cpu"),
    rank=Rank.GENERIC,
    packages=("torch",),
    options={"tuning": "auto", "deterministic": False, "projection": "bf16", "index_sums": "fp8"},
)


@hookimpl
def dsv4attn_backends() -> Sequence[BackendInfo]:
    """The only backend of this folder."""
    return [INFO]
